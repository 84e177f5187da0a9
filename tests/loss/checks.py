# SPDX-License-Identifier: Apache-2.0
"""Run a loss on a case and compare with the oracle."""

import torch

from megatron_kd.loss import VocabShard
from tests.loss.oracle import Truth


def run(function, case, name, *, scale=1.0, **options):
    """The sums and gradients of one call, as a Truth."""
    hidden, weight = case.leaves()
    sums = function(
        hidden,
        weight,
        case.teacher,
        case.token_weight,
        divergence=name,
        labels=case.labels,
        temperature=case.temperature,
        shard=VocabShard(0, len(case.weight), case.total),
        **options,
    )
    (scale * sums.total).backward()
    return Truth(*(part.detach() for part in sums), hidden.grad / scale, weight.grad / scale)


def worst_difference(found: Truth, truth: Truth) -> float:
    """Largest absolute difference over the sums and both gradients; NaN counts as infinite."""
    pairs = zip(vars(found).values(), vars(truth).values(), strict=True)
    worst = max((float((a.double() - b).abs().max()) if a.numel() else 0.0) for a, b in pairs)
    return worst if worst == worst else float("inf")


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Relative L2 error."""
    return float((found.double() - truth).norm() / truth.norm())
