# SPDX-License-Identifier: Apache-2.0
"""Distillation losses of other libraries, made ready for the bench of megatron_kd.loss and for `compare`.

They must be installed. For the bench a function takes a BenchShape and returns a Method, or raises ImportError; see
megatron_kd/loss/bench_methods.py. For a run it has the arguments of the losses in megatron_kd.loss.
"""

from typing import Any

import torch
import torch.distributed as dist

from megatron_kd.errors import ConfigError
from megatron_kd.loss import LossSums, TopK, VocabShard
from megatron_kd.loss.bench_methods import BenchInputs, BenchShape, Method, full_kl
from megatron_kd.loss.vocab_parallel import CopyToRanks, GatherSequence


def megatron_topk_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: TopK,
    token_weight: torch.Tensor,
    *,
    divergence: Any,
    labels: torch.Tensor,
    kd_weight: float,
    ce_weight: float,
    temperature: float,
    shard: VocabShard,
    sequence_parallel: bool,
    **_: Any,
) -> LossSums:
    """Megatron's topk_kl_div, with its ghost token, behind an output layer as Megatron has it: whole logits.

    Arguments and result as fused_linear_divergence, for hidden [S, B, H]. Padded columns take part, as they do there.

    Raises:
        ConfigError: Another divergence or temperature than it has.
    """
    if divergence != "forward_kl" or temperature != 1:
        raise ConfigError(
            f"kd.loss=megatron_topk: expected kd.divergence=forward_kl and kd.temperature=1, found {divergence} and "
            f"{temperature}. Use kd.loss=fused."
        )
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.training.distillation.cached_logits_loss import topk_kl_div

    rows = hidden.flatten(0, 1)
    rows = GatherSequence.apply(rows, shard) if sequence_parallel else CopyToRanks.apply(rows, shard)
    logits = torch.nn.functional.linear(rows.unflatten(0, (-1, hidden.shape[1])), weight)
    group, ranks = shard.group, shard.world_size
    own = topk_kl_div(logits, teacher.logprobs, teacher.ids.long(), ranks, shard.rank, group, add_ghost_token=True)
    kd = (own.T * token_weight).sum()  # of this rank's columns
    ce = (vocab_parallel_cross_entropy(logits.float(), labels) * token_weight).sum()
    whole = kd.detach().clone()
    if ranks > 1:
        dist.all_reduce(whole, group=group)
    # Each rank's gradient is that of its own part; the value is that of all.
    total = kd_weight * (kd + (whole - kd).detach()) + ce_weight * ce
    return LossSums(total, whole, ce.detach(), token_weight.sum())


def megatron_topk(shape: BenchShape) -> Method:
    """Megatron's own offline distillation: topk_kl_div behind an ordinary output layer, with its ghost token.

    Source: megatron-core 0.19, megatron/training/distillation/cached_logits_loss.py.
    """
    try:
        from megatron.training.distillation.cached_logits_loss import topk_kl_div
    except ImportError as error:
        raise ImportError(f"needs megatron-core 0.19 with megatron.training.distillation: {error}") from error

    def loss(inputs: BenchInputs) -> torch.Tensor:
        logits = torch.nn.functional.linear(inputs.hidden[:, None], inputs.weight)  # [S, B = 1, V]
        ids, logprobs, _ = inputs.teacher
        kl = topk_kl_div(logits, logprobs[:, None], ids[:, None], 1, 0, None, add_ghost_token=True)
        return (kl[0] * inputs.token_weight).sum()

    half = shape.torch_dtype.itemsize < 4
    return Method(loss, note=f"logits in {shape.dtype}, as its output layer makes them" if half else "")


def liger(shape: BenchShape) -> Method:
    """Liger's chunked fused linear distillation loss at beta = 0, forward KL; another problem, with a dense teacher.

    It needs the teacher's hidden states and head, projects both models (a fourth product), and keeps the weight
    gradient in the dtype of the weight. Its defaults otherwise: chunks of 1,024 tokens, torch.compile.
    """
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    except ImportError as error:
        raise ImportError(f"needs liger-kernel: {error}") from error

    function = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0)
    labels = torch.zeros(shape.tokens, dtype=torch.int64, device=shape.device)  # it counts them

    def loss(inputs: BenchInputs) -> torch.Tensor:
        teacher = inputs.teacher_hidden, inputs.weight.detach()
        return function(inputs.hidden, inputs.weight, *teacher, labels[: len(inputs.hidden)])

    return Method(loss, full_kl, "full-vocabulary KL from a dense teacher, which it projects as well")
