# SPDX-License-Identifier: Apache-2.0
"""The divergences as functions of bucket log-probabilities, and the teacher's rows made ready for them."""

import math

import pytest
import torch

from megatron_kd.loss import DIVERGENCES, LossArgumentError, jsd, mixture
from megatron_kd.loss.divergence import find_divergence, merge_repeated, teacher_buckets, value_and_gradient
from tests.loss.oracle import NAMES, by_definition


def buckets(rows=200, k=6, seed=0, spread=3.0):
    """Normalised log-probabilities of student and teacher, float64 [rows, k + 1]."""
    random = torch.Generator().manual_seed(seed)
    pair = spread * torch.randn(2, rows, k + 1, generator=random, dtype=torch.float64)
    return pair.log_softmax(-1).unbind()


@pytest.mark.parametrize("name", (*NAMES, "jsd(0.3)"))
def test_a_row_without_mass_in_some_buckets(name):
    """Absent entries and an empty tail as -inf: value by definition, gradient finite and as finite differences say."""
    Q, P = buckets(rows=6)
    Q[0, 2] = P[0, 2] = -math.inf
    Q[1, -1] = P[1, -1] = -math.inf
    P[2, -1] = -math.inf
    P[3, 4] = -math.inf
    Q[4, :-1] = P[4, :-1] = -math.inf
    Q, P = Q.log_softmax(-1), P.log_softmax(-1)
    function = find_divergence(name)
    value, G = value_and_gradient(function, Q, P)
    for row in range(6):
        there = (Q[row] > -math.inf) | (P[row] > -math.inf)
        entries = there[:-1].any() or "topk" not in name
        expected = by_definition(name, Q[row][there], P[row][there], bool(there[-1])) if entries else 0.0
        assert float(value[row]) == pytest.approx(float(expected), abs=1e-12)
    assert bool(torch.isfinite(G).all())
    step = 1e-6
    for column in range(Q.shape[1]):
        moved = torch.zeros_like(Q)
        moved[:, column] = step
        slope = (function(Q + moved, P) - function(Q - moved, P)) / (2 * step)
        assert torch.allclose(G[:, column], slope, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ("forward_kl", "reverse_kl", "jsd", "jsd(0.1)", "tvd"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_never_negative_but_for_rounding(name, dtype):
    """With the tail as a bucket a divergence of near and far distributions is at least 0; equal ones give 0."""
    eps = torch.finfo(dtype).eps
    function = find_divergence(name)
    for spread, noise in ((3.0, 1e-4), (3.0, 3.0), (30.0, 0.01)):
        Q, _ = buckets(spread=spread)
        P = (Q + noise * torch.randn(Q.shape, generator=torch.Generator().manual_seed(3), dtype=Q.dtype)).log_softmax(
            -1
        )
        assert float(function(Q.to(dtype), P.to(dtype)).min()) >= -4 * eps * 30
        assert float(function(P.to(dtype), P.to(dtype)).abs().max()) <= 4 * eps


def test_jsd_of_a_rounded_teacher_is_not_negative_and_near_the_truth():
    """The teacher's log-probabilities come in bfloat16, the student's in float32."""
    Q, _ = buckets()
    P = (Q + 0.02 * torch.randn(Q.shape, generator=torch.Generator().manual_seed(3), dtype=Q.dtype)).log_softmax(-1)
    stored = P.bfloat16()
    found = DIVERGENCES["jsd"](Q.float(), stored.float())
    truth = torch.stack([by_definition("jsd", q, p, True) for q, p in zip(Q, stored.double(), strict=True)])
    assert float(found.min()) >= -1e-7
    assert torch.allclose(found.double(), truth, atol=5e-7)


def test_jsd_is_bounded_by_log_two():
    Q = torch.tensor([[0.0, -2000.0]])
    assert float(DIVERGENCES["jsd"](Q, Q.flip(1))) == pytest.approx(math.log(2), rel=1e-6)


def test_a_truncated_kl_may_be_negative_and_keeps_its_gradient():
    """Others clamp it at 0 and lose the gradient; with the tail bucket it is not negative to begin with."""
    Q = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    P = torch.tensor([[0.4, 0.2, 0.4]], dtype=torch.float64).log()
    value, G = value_and_gradient(DIVERGENCES["forward_kl_truncated"], Q, P)
    assert float(value) < 0
    assert torch.allclose(G, torch.tensor([[-0.4, -0.2, 0.0]], dtype=torch.float64), atol=1e-15)
    assert float(DIVERGENCES["forward_kl"](Q, P)) > 0


@pytest.mark.parametrize("beta", (0.0, 1.0, -0.5, 2.0))
def test_jsd_refuses_a_beta_outside_its_range(beta):
    with pytest.raises(LossArgumentError, match="0 < beta < 1"):
        jsd(beta)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(LossArgumentError, match="'forwad_kl'. Did you mean 'forward_kl'"):
        find_divergence("forwad_kl")
    with pytest.raises(LossArgumentError, match="at least one"):
        mixture()


def test_a_function_must_give_one_value_per_row():
    Q, P = buckets(rows=4)
    with pytest.raises(LossArgumentError, match=r"\[4\], found shape \[\]"):
        value_and_gradient(lambda Q, P: (Q - P).sum(), Q, P)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_repeated_ids_add_up(dtype):
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(-1, 7, (300, 9), generator=random)
    logprobs = (5 * torch.randn(300, 9, generator=random, dtype=dtype)).masked_fill(ids < 0, -math.inf)
    merged_ids, merged = merge_repeated(ids, logprobs)
    for row in range(len(ids)):
        truth = {}
        for i, lp in zip(ids[row].tolist(), logprobs[row].double(), strict=True):
            if i >= 0:
                truth[i] = torch.logaddexp(truth.get(i, torch.tensor(-math.inf, dtype=torch.float64)), lp)
        found = {i: lp for i, lp in zip(merged_ids[row].tolist(), merged[row], strict=True) if i >= 0}
        assert list(truth) != [] and sorted(found) == sorted(truth)
        assert all(abs(float(found[i]) - float(truth[i])) < 10 * torch.finfo(dtype).eps * 20 for i in truth)
        assert bool((merged[row][merged_ids[row] < 0] == -math.inf).all())


@pytest.mark.parametrize("others_repeat", (True, False))
def test_rows_without_repeats_keep_order_and_bits(others_repeat):
    ids = torch.stack([torch.randperm(50, generator=torch.Generator().manual_seed(i))[:9] for i in range(40)])
    logprobs = torch.randn(40, 9, generator=torch.Generator().manual_seed(1))
    if others_repeat:
        ids[-1, 3] = ids[-1, 5]
    merged_ids, merged = merge_repeated(ids, logprobs)
    assert torch.equal(merged_ids[:-1], ids[:-1])
    assert torch.equal(merged[:-1], logprobs[:-1])
    assert torch.equal(merged_ids, ids) == (not others_repeat)


def test_a_masked_row_is_replaced_before_anything_is_computed_from_it():
    nan = torch.full((2, 3), math.nan)
    ids, P = teacher_buckets(
        torch.tensor([[0, 1, 2]] * 2), nan, nan[:, 0], torch.tensor([False, False]), torch.float32
    )
    assert bool((ids == -1).all())
    assert torch.equal(P.exp(), torch.tensor([[0.0, 0.0, 0.0, 1.0]] * 2))
