# SPDX-License-Identifier: Apache-2.0
"""Peak memory of the three ways to compute the same distillation loss, counted on meta tensors.

In: a shape. Out: bytes for `dense` (student's and teacher's grid), `forward_chunked` (sparse teacher, student's grid
kept) and `fused` (no grid), forward and backward, with hidden states, head weight and both their gradients included.
Costs a few seconds and no memory at any size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_kd.loss import LossSums, TopK, dense_divergence, forward_chunked_divergence, fused_linear_divergence
from megatron_kd.report.memory import peak_bytes

LOSSES = {
    "dense": dense_divergence,
    "forward_chunked": forward_chunked_divergence,
    "fused": fused_linear_divergence,
}


@dataclass(frozen=True)
class LossShape:
    """Size of one call of the loss on one rank that holds the whole vocabulary."""

    tokens: int
    vocabulary: int
    hidden: int
    top_k: int = 100
    dtype: torch.dtype = torch.bfloat16
    strip_tokens: int | None = None
    """Tokens projected at a time; None: chosen by the loss."""

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.tokens:,} tokens x {self.vocabulary:,}, hidden {self.hidden:,}, {dtype}"


def loss_memory(shape: LossShape) -> dict[str, int]:
    """Peak bytes of forward and backward KL, by the name of the loss."""
    return {name: _peak(loss, shape) for name, loss in LOSSES.items()}


def _peak(loss: Callable[..., LossSums], shape: LossShape) -> int:
    with torch.device("meta"):  # sizes without content, on the path of CUDA
        hidden = torch.empty(shape.tokens, shape.hidden, dtype=shape.dtype, requires_grad=True)
        weight = torch.empty(shape.vocabulary, shape.hidden, dtype=shape.dtype, requires_grad=True)
        teacher = TopK(
            torch.empty(shape.tokens, shape.top_k, dtype=torch.int32),
            torch.empty(shape.tokens, shape.top_k),
            torch.empty(shape.tokens),
        )
        token_weight = torch.ones(shape.tokens)

    def run(hidden: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *teacher, token_weight = rest
        return loss(hidden, weight, TopK(*teacher), token_weight, strip_tokens=shape.strip_tokens).total

    return peak_bytes(run, hidden, weight, *teacher, token_weight)
