# SPDX-License-Identifier: Apache-2.0
"""What a Megatron teacher does with hidden states instead of calling its output layer.

In: what `GPTModel.forward` hands to an output processor, on the last pipeline stage. Out: teacher rows, or the proof
that the rows would be right. See output.py for the student's counterpart.

Legend: S positions of this context-parallel rank, B sequences, H hidden size, T tensor-parallel size.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule

from megatron_kd.bridge.output import head_of
from megatron_kd.loss import TeacherRows, fused_linear_topk
from megatron_kd.loss.matmul import logits_into
from megatron_kd.loss.vocab_parallel import gather_rows
from megatron_kd.teacher.errors import TeacherError


class Selector:
    """An output processor's work: hidden states to teacher rows."""

    def __init__(self, vocab_real: int, options: dict[str, Any]):
        self.vocab_real, self.options = vocab_real, options

    def __call__(
        self,
        next_ids: torch.Tensor | None,
        *,
        hidden_states: torch.Tensor,
        output_layer: MegatronModule,
        output_weight: torch.Tensor | None,
        config: Any,
        **_: Any,
    ) -> TeacherRows:
        """Rows [S / CP, B, ...] of hidden states [S / CP / TP or S / CP, B, H]."""
        weight, shard = head_of(output_layer, output_weight, config, self.vocab_real)
        rows = fused_linear_topk(
            hidden_states,
            weight,
            shard=shard,
            sequence_parallel=config.sequence_parallel,
            labels=None if next_ids is None else next_ids.T.contiguous(),
            **self.options,
        )
        batch = hidden_states.shape[1]
        return TeacherRows(*(None if part is None else part.unflatten(0, (-1, batch)) for part in rows))

    def empty(self, shape: list[int], device: torch.device, with_labels: bool) -> TeacherRows:
        """Rows of that shape, to be received."""
        make = lambda *more, dtype=torch.float32: torch.empty(*shape, *more, dtype=dtype, device=device)  # noqa: E731
        k, temperatures = self.options["top_k"], len(self.options["temperatures"])
        return TeacherRows(
            make(k, dtype=torch.int64), make(k), make(), make(temperatures), make() if with_labels else None
        )


class Probe:
    """Compares hidden states times weight with what the output layer itself returns, so that no cap is overlooked."""

    def __init__(self, name: str, vocab_real: int):
        self.name, self.vocab_real = name, vocab_real

    def __call__(
        self,
        next_ids: None,
        *,
        hidden_states: torch.Tensor,
        output_layer: MegatronModule,
        output_weight: torch.Tensor | None,
        scale_logits: Callable,
        config: Any,
        **_: Any,
    ) -> None:
        """Raise TeacherError if they differ by more than rounding."""
        weight, shard = head_of(output_layer, output_weight, config, self.vocab_real)
        theirs = scale_logits(output_layer(hidden_states, weight=output_weight)[0]).flatten(0, 1).float()
        hidden = gather_rows(hidden_states, shard) if config.sequence_parallel else hidden_states
        ours = torch.empty_like(theirs)
        logits_into(ours, hidden.flatten(0, 1), weight, torch.float32)
        error, size = float((ours - theirs).abs().max()), float(theirs.abs().max())
        allowed = max(1e-4, 4 * torch.finfo(hidden.dtype).eps) * size
        if not error <= allowed:
            raise TeacherError(
                f"{self.name}: its logits are not output weight x hidden state (largest difference {error:.3g} of "
                f"{size:.3g}); this architecture does something to them that is not supported yet"
            )
