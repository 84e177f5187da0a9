# SPDX-License-Identifier: Apache-2.0
"""The one-pass form on CPU: exponentials that are the gradient but for a factor of each row, against the formula."""

import pytest
import torch

from megatron_kd.loss.row_kernels import RowGradient, exponentials_gradient_, row_exponentials

N, V, K = 6, 300, 4
TAIL = torch.tensor([1.0, -1e-3, 1e-25, -1e-40, 0.0, 0.0])
"""Coefficients of the tail: ordinary, small, too small to divide an entry by, none; in the last row nothing at all."""


def rows(seed):
    random = torch.Generator().manual_seed(seed)
    z = 4 * torch.randn(N, V, generator=random)
    columns = torch.stack([torch.randperm(V, generator=random)[:K] for _ in range(N)])
    columns[0, 2] = -1  # another rank has it
    label = torch.tensor([7, int(columns[1, 0]), -1, 9, 11, 13])  # the second is an entry, the third another rank's
    entries, label_coefficient = torch.randn(N, K, generator=random), -torch.rand(N, generator=random)
    entries[-1], label_coefficient[-1] = 0, 0
    return z, columns, label, entries, label_coefficient


def formula(z, columns, label, entries, label_coefficient, log_tail, T):
    """In float64, element by element."""
    grad = TAIL.double()[:, None] * (z.double() / T - log_tail.double()[:, None]).exp()
    for n in range(N):
        if label_coefficient is not None and label[n] >= 0:
            grad[n, label[n]] += label_coefficient[n].double()
        for k in range(K):
            if columns[n, k] >= 0:
                grad[n, columns[n, k]] = entries[n, k].double()
    return grad


@pytest.mark.parametrize("T", (1.0, 2.0))
@pytest.mark.parametrize("labels", (True, False))
def test_the_factor_of_a_row_times_what_is_left_is_its_gradient(labels, T):
    z, columns, label, entries, coefficient = rows(3)
    left = z.clone()
    _, tails, shift = row_exponentials(left, columns, label, T)
    gradient = RowGradient(TAIL, tails[:, 0], entries, coefficient if labels else None)
    factor = exponentials_gradient_(left, columns, label, gradient, shift)
    exact = formula(z, columns, label, entries, coefficient if labels else None, tails[:, 0], T)
    error = (factor.double() * left.double() - exact).abs().amax(1)
    assert left.isfinite().all() and factor.isfinite().all()
    assert (error <= 1e-6 * exact.abs().amax(1)).all(), error


def test_a_row_without_gradient_has_the_factor_zero():
    z, columns, label, entries, coefficient = rows(4)
    _, tails, shift = row_exponentials(z, columns, label, 1.0)
    factor = exponentials_gradient_(z, columns, label, RowGradient(TAIL, tails[:, 0], entries, coefficient), shift)
    assert z[-1].isfinite().all() and factor[-1] == 0
