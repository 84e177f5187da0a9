# SPDX-License-Identifier: Apache-2.0
"""The hook between Megatron's last layer and the loss: hidden states and the head's weight in, the summed loss out.

``GPTModel.forward(output_processor=...)`` hands over the hidden states (still sharded along the sequence under
sequence parallelism) instead of calling the output layer, so Megatron never makes the logits [tokens, vocabulary].

Legend: S positions of this context-parallel rank, B samples, H hidden size, K teacher entries, T tensor-parallel size.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule

from megatron_kd.bridge.bad_blocks import agree
from megatron_kd.bridge.config import KDConfig, resolve_divergence
from megatron_kd.bridge.other_losses import megatron_topk_divergence
from megatron_kd.bridge.teacher_feed import TeacherBatch
from megatron_kd.bridge.watch import HELD_OUT_TOKENS, WATCHED_TOKENS, Figures, LossMeter, watch
from megatron_kd.errors import UserError
from megatron_kd.loss import (
    LossSums,
    VocabShard,
    dense_divergence,
    forward_chunked_divergence,
    fused_linear_divergence,
)

LOSSES = {
    "fused": fused_linear_divergence,
    "dense": dense_divergence,
    "forward_chunked": forward_chunked_divergence,
    "megatron_topk": megatron_topk_divergence,
}
"""Implementations by the name they have in ``kd.loss``. Ours give the same sums and gradients."""


class UnsupportedHead(UserError):
    """The model's output layer does something that the divergence does not know."""


@dataclass
class DivergenceOutput:
    """An output processor for one micro-batch.

    Attributes:
        kd: The settings of the loss.
        vocab_size: The real vocabulary, without padding.
        teacher: Rows of this micro-batch on the host; set before the model runs.
        meter: What times the loss.
        classes: Of tokens, by which agreement is told while nothing is learned; see `watch`.
        sums: What the loss returned; set by the call.
        watched: Further figures, float32 [2] each: sum and count; set by the call.
    """

    kd: KDConfig
    vocab_size: int
    teacher: TeacherBatch | None = None
    meter: LossMeter = field(default_factory=LossMeter)
    classes: torch.Tensor | None = None
    sums: LossSums | None = field(default=None, init=False)
    watched: Figures = field(default_factory=dict, init=False)

    def __call__(
        self,
        *,
        hidden_states: torch.Tensor,
        output_layer: MegatronModule,
        output_weight: torch.Tensor | None,
        labels: torch.Tensor,
        config: Any,
        **_: Any,
    ) -> torch.Tensor:
        """Compute the loss of one micro-batch.

        Args:
            hidden_states: [S, B, H], or [S/T, B, H] under sequence parallelism.
            output_layer: Megatron's ``ColumnParallelLinear``; not called, but its forward pre-hooks are.
            output_weight: The shared embedding for a tied head, else None.
            labels: [B, S] next tokens.
            config: The model's ``TransformerConfig``.

        Returns:
            0-dim float32: the loss summed over this rank's weighted tokens.
        """
        weight, shard = head_of(output_layer, output_weight, config, self.vocab_size)
        if config.mtp_num_layers and not config.gradient_accumulation_fusion:
            weight.zero_out_wgrad = True  # Megatron's losses of later tokens go by autograd: DDP's hook is to add both
        if self.teacher.masked is not None:
            self.teacher = self.teacher.without(agree(self.teacher.masked, shard.group, hidden_states.device))
        batch = self.teacher.to(hidden_states.device)
        keep = self.teacher.token_weight != 0  # on the host, and the same on all tensor-parallel ranks
        with self.meter.call(hidden_states.device):
            self.sums = LOSSES[self.kd.loss](
                hidden_states,
                weight,
                batch.teacher,
                batch.token_weight,
                divergence=resolve_divergence(self.kd.divergence),
                labels=labels.transpose(0, 1),
                kd_weight=self.kd.kd_weight,
                ce_weight=self.kd.ce_weight,
                temperature=self.kd.temperature,
                shard=shard,
                sequence_parallel=config.sequence_parallel,
                gradient=self.kd.gradient,
                strip_tokens=self.kd.strip_tokens,
                logits_dtype=getattr(torch, self.kd.logits_dtype),
                keep=keep,
                distinct=batch.distinct,
            )
        self.watched = watch(
            hidden_states,
            weight,
            batch,
            keep,
            shard,
            sequence_parallel=config.sequence_parallel,
            temperature=self.kd.temperature,
            tokens=WATCHED_TOKENS if torch.is_grad_enabled() else HELD_OUT_TOKENS,
            classes=None if torch.is_grad_enabled() else self.classes,
        )
        return self.sums.total


def head_of(
    output_layer: MegatronModule, output_weight: torch.Tensor | None, config: Any, vocab_size: int
) -> tuple[torch.Tensor, VocabShard]:
    """This rank's rows of the head's weight, ready to be multiplied with, and which columns they are.

    Raises:
        UnsupportedHead: See refuse_head.
    """
    refuse_head(output_layer, config)
    run_forward_pre_hooks(output_layer)
    weight = output_layer.weight if output_weight is None else output_weight
    group = output_layer.tp_group
    return weight, VocabShard(group.rank() * weight.shape[0], weight.shape[0], vocab_size, group)


def run_forward_pre_hooks(module: torch.nn.Module) -> None:
    """Run what ``module.__call__`` would run first: with ``overlap_param_gather``, DDP's wait for the parameters."""
    for hook_id, hook in module._forward_pre_hooks.items():
        if hook_id in module._forward_pre_hooks_with_kwargs:
            hook(module, (), {})
        else:
            hook(module, ())


def refuse_head(output_layer: MegatronModule, config: Any) -> None:
    """Raise for an output layer whose logits are not ``hidden @ weight.T``.

    Raises:
        UnsupportedHead: For a bias, logits scaled by muP, or a layer of another kind, such as one that caps them.
    """
    if type(output_layer).forward is not ColumnParallelLinear.forward:
        raise UnsupportedHead(
            f"output_layer: expected Megatron's ColumnParallelLinear, found {type(output_layer).__name__}, which may "
            "do something to the logits that the divergence does not know."
        )
    if getattr(output_layer, "bias", None) is not None:
        raise UnsupportedHead(
            "output_layer.bias: the divergence expects a head without bias; set model.add_bias_output=false."
        )
    if getattr(config, "use_mup", False):
        raise UnsupportedHead("model.use_mup: expected false, found true; the divergence does not scale logits.")
