# SPDX-License-Identifier: Apache-2.0
"""Methods for the tests of the bench: one that is wrong, one without its library, one too large for any machine."""

import torch

from megatron_kd.loss.bench_methods import BenchInputs, BenchShape, Method, sparse_kl


def wrong(shape: BenchShape) -> Method:
    """Gradients one per cent too large, at the right value."""

    def loss(inputs: BenchInputs) -> torch.Tensor:
        kl = sparse_kl(inputs)
        return 1.01 * kl - 0.01 * kl.detach()

    return Method(loss, note="wrong on purpose")


def absent(shape: BenchShape) -> Method:
    import a_library_that_is_nowhere

    return a_library_that_is_nowhere


def too_large(shape: BenchShape) -> Method:
    return Method(lambda inputs: torch.empty(1 << 50).sum())
