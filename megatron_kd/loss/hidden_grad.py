# SPDX-License-Identifier: Apache-2.0
"""Where the gradient of the hidden states goes: its rows of this rank, strip by strip.

In: a strip's logit gradient on this rank's columns. Out: [R, H], summed over the ranks. One reduce-scatter (sequence
parallel) or all-reduce a strip, in the dtype of hidden; it travels while the strip's weight gradient and the next
strip are computed. Costs the result, and a strip's rows of all ranks while they travel.

Legend: R rows of this rank, n tokens of a strip, H hidden size, V real columns of this rank.
"""

import torch

from megatron_kd.loss.arguments import LossCall
from megatron_kd.loss.matmul import hidden_gradient
from megatron_kd.loss.strips import Strip
from megatron_kd.loss.vocab_parallel import OnItsWay, all_reduce, start_all_reduce, start_reduce_scatter_rows


class HiddenGradient:
    """The gradient of hidden [R, H] while it is made."""

    def __init__(self, hidden: torch.Tensor, call: LossCall):
        # Strips may leave out whole stretches of rows.
        self._total = torch.empty_like(hidden) if call.keep is None else torch.zeros_like(hidden)
        self._call = call
        self._travels: OnItsWay | None = None

    def add(self, strip: Strip, grad: torch.Tensor, weight: torch.Tensor, factor: torch.Tensor | None) -> None:
        """Multiply grad [n, V], which lacks the factor [n, 1], with weight [V, H]; send the product on its way."""
        self.finished()
        own, shard = self._total[strip.rows], self._call.shard
        if self._call.sequence_parallel:
            partial = strip.with_left_out(hidden_gradient(grad, weight, factor))
            self._travels = start_reduce_scatter_rows(partial, own, shard)
        elif strip.kept is None:
            self._travels = start_all_reduce(hidden_gradient(grad, weight, factor, out=own), shard)
        else:
            own.copy_(strip.with_left_out(all_reduce(hidden_gradient(grad, weight, factor), shard)))

    def finished(self) -> torch.Tensor:
        """The gradient [R, H], once what travels has arrived."""
        if self._travels is not None:
            self._travels.arrived()
            self._travels = None
        return self._total
