# SPDX-License-Identifier: Apache-2.0
"""The same losses by ordinary autograd: the oracle that holds the grid [N, total], and the middle baseline.

In and out as fused_linear_divergence; none of its formulas is used here. The gradient of the weight is an ordinary one
(Megatron's hooks add it to `main_grad`).

Legend: N tokens, n tokens of a chunk, H hidden size, K teacher entries, V real columns of this rank.
Memory: dense 6 to 7 grids [N, total] in `compute_dtype`; forward_chunked 2 grids [N, V] (logits and their gradient).
"""

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable

from megatron_kd.loss.arguments import LossCall, LossSums, TopK, check_arguments
from megatron_kd.loss.divergence import EMPTY, is_empty, teacher_buckets
from megatron_kd.loss.matmul import without_autocast
from megatron_kd.loss.vocab_parallel import CopyToRanks, GatherSequence, GatherVocabulary, SumOverRanks, VocabShard


def dense_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: TopK,
    token_weight: torch.Tensor,
    *,
    divergence: str | Callable = "forward_kl",
    labels: torch.Tensor | None = None,
    kd_weight: float = 1.0,
    ce_weight: float = 0.0,
    temperature: float = 1.0,
    shard: VocabShard | None = None,
    sequence_parallel: bool = False,
    gradient: str = "forward",
    strip_tokens: int | None = None,
    logits_dtype: torch.dtype = torch.float32,
    keep: torch.Tensor | None = None,
    distinct: bool = False,
) -> LossSums:
    """fused_linear_divergence by autograd on the whole grid: the oracle, in float64 with logits_dtype=torch.float64.

    Arguments, result and errors are those of fused_linear_divergence; `gradient`, `strip_tokens` and `keep` change
    nothing.
    Collectives, TP > 1: one all-reduce of the grid; all-gather and reduce-scatter of hidden (sequence parallel) or one
    all-reduce of its gradient.
    """
    call = check_arguments(
        hidden,
        weight,
        teacher,
        token_weight,
        divergence=divergence,
        labels=labels,
        kd_weight=kd_weight,
        ce_weight=ce_weight,
        temperature=temperature,
        shard=shard,
        sequence_parallel=sequence_parallel,
        gradient=gradient,
        strip_tokens=strip_tokens,
        logits_dtype=logits_dtype,
        keep=keep,
        distinct=distinct,
    )
    keep = call.token_weight != 0
    z = GatherVocabulary.apply(own_logits(hidden, weight, keep, call), call.shard)
    ids, P = teacher_buckets(*call.teacher, keep, call.compute_dtype, distinct=call.distinct)
    absent = ids < 0
    logq = (z / call.temperature).log_softmax(-1)
    in_entries = torch.zeros(len(z), z.shape[1] + 1, dtype=torch.bool, device=z.device)
    in_entries = in_entries.scatter(1, ids.masked_fill(absent, z.shape[1]), True)[:, :-1]
    log_tail = logq.masked_fill(in_entries, EMPTY).logsumexp(1, keepdim=True)
    Q = torch.cat([logq.gather(1, ids.clamp(min=0)).masked_fill(absent, EMPTY), log_tail], dim=1)
    kd = call.divergence(Q, P.masked_fill(is_empty(Q), EMPTY))
    ce = torch.zeros_like(kd)
    if call.labels is not None:
        ce = -z.log_softmax(-1).gather(1, call.labels.long().masked_fill(~keep, 0)[:, None])[:, 0]
    total, kd, ce = weighted_sums(kd, ce, call.token_weight, call)
    return LossSums(total, kd.detach(), ce.detach(), call.token_weight.to(call.compute_dtype).sum())


def forward_chunked_divergence(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    teacher: TopK,
    token_weight: torch.Tensor,
    *,
    divergence: str | Callable = "forward_kl",
    labels: torch.Tensor | None = None,
    kd_weight: float = 1.0,
    ce_weight: float = 0.0,
    temperature: float = 1.0,
    shard: VocabShard | None = None,
    sequence_parallel: bool = False,
    gradient: str = "forward",
    strip_tokens: int | None = None,
    logits_dtype: torch.dtype = torch.float32,
    keep: torch.Tensor | None = None,
    distinct: bool = False,
) -> LossSums:
    """fused_linear_divergence with the student's logits kept whole, [N, V], and compared with the teacher by chunks.

    Arguments, result and errors are those of fused_linear_divergence; `gradient` and `keep` change
    nothing. Autograd runs over a
    chunk of `strip_tokens` tokens at once. Collectives, TP > 1: per chunk one all-reduce of about K + 2 TP numbers a
    token; hidden as in dense_divergence.
    """
    call = check_arguments(
        hidden,
        weight,
        teacher,
        token_weight,
        divergence=divergence,
        labels=labels,
        kd_weight=kd_weight,
        ce_weight=ce_weight,
        temperature=temperature,
        shard=shard,
        sequence_parallel=sequence_parallel,
        gradient=gradient,
        strip_tokens=strip_tokens,
        logits_dtype=logits_dtype,
        keep=keep,
        distinct=distinct,
    )
    z = own_logits(hidden, weight, call.token_weight != 0, call)
    return LossSums(*ForwardChunked.apply(z, call), call.token_weight.to(call.compute_dtype).sum())


class ForwardChunked(torch.autograd.Function):
    """total, kd and ce from this rank's logits z [N, V]; their gradient is made chunk by chunk in forward."""

    @staticmethod
    def forward(ctx, z: torch.Tensor, call: LossCall) -> tuple:  # noqa: D102
        grad = torch.empty_like(z) if ctx.needs_input_grad[0] else None
        sums = z.new_zeros(3)
        height = call.strip_rows * call.row_ranks
        for rows in (slice(start, start + height) for start in range(0, len(z), height)):
            chunk = z[rows].detach().requires_grad_(grad is not None)
            with torch.set_grad_enabled(grad is not None):
                losses = weighted_sums(*chunk_losses(chunk, rows, call), call.token_weight[rows], call)
            if grad is not None:
                (grad[rows],) = torch.autograd.grad(losses[0], chunk)
            sums += torch.stack(losses).detach()
        ctx.save_for_backward(grad)
        results = sums.unbind()
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx, scale: torch.Tensor, *_: torch.Tensor) -> tuple:  # noqa: D102
        (grad,) = ctx.saved_tensors
        return grad * scale, None


def own_logits(hidden: torch.Tensor, weight: torch.Tensor, keep: torch.Tensor, call: LossCall) -> torch.Tensor:
    """z [N, V] in `compute_dtype`, with hidden 0 for masked tokens."""
    rows = hidden.flatten(0, -2)
    rows = GatherSequence.apply(rows, call.shard) if call.sequence_parallel else CopyToRanks.apply(rows, call.shard)
    rows = torch.where(keep[:, None], rows, 0)
    weight = weight[: call.shard.real]
    with without_autocast(hidden):
        if call.logits_dtype == hidden.dtype:
            return (rows @ weight.T).to(call.compute_dtype)
        return rows.to(call.compute_dtype) @ weight.to(call.compute_dtype).T


def chunk_losses(z: torch.Tensor, rows: slice, call: LossCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Divergence and cross entropy [n] of the tokens `rows`, from this rank's logits z [n, V]. One all-reduce."""
    keep = call.token_weight[rows] != 0
    teacher = (part[rows] for part in call.teacher)
    ids, P = teacher_buckets(*teacher, keep, call.compute_dtype, distinct=call.distinct)
    # A last column without mass stands for all that is elsewhere; it keeps a shard of padding in the autograd graph.
    elsewhere = z.shape[1]
    z = torch.nn.functional.pad(z, (0, 1), value=EMPTY)
    columns = call.shard.local(ids)
    in_entries = torch.zeros_like(z, dtype=torch.bool).scatter(1, columns.masked_fill(columns < 0, elsewhere), True)
    s = z / call.temperature
    parts = [
        read_columns(s, columns),
        torch.zeros_like(z[:, :1]),
        in_own_slot(s.masked_fill(in_entries, EMPTY).logsumexp(1), call),
        in_own_slot(z.logsumexp(1), call),
    ]
    if call.labels is not None:
        parts[1] = read_columns(z, call.shard.local(call.labels[rows])[:, None])
    widths = [part.shape[1] for part in parts]
    entries, label, tails, totals = SumOverRanks.apply(torch.cat(parts, dim=1), call.shard).split(widths, dim=1)
    entries = entries.masked_fill(ids < 0, EMPTY)
    Q = torch.cat([entries, tails.logsumexp(1, keepdim=True)], dim=1).log_softmax(1)
    kd = call.divergence(Q, P.masked_fill(is_empty(Q), EMPTY))
    return kd, totals.logsumexp(1) - label[:, 0] if call.labels is not None else torch.zeros_like(kd)


def read_columns(logits: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Logits [n, M] at `columns` [n, M], 0 where that is -1."""
    return logits.gather(1, columns.clamp(min=0)).masked_fill(columns < 0, 0)


def in_own_slot(values: torch.Tensor, call: LossCall) -> torch.Tensor:
    """[n] to [n, TP] with 0 in the other ranks' places, so that the sum over the ranks has everyone's values."""
    own = torch.arange(call.shard.world_size, device=values.device) == call.shard.rank
    return torch.where(own, values[:, None], 0)


def weighted_sums(
    kd: torch.Tensor, ce: torch.Tensor, token_weight: torch.Tensor, call: LossCall
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """total, kd and ce from the losses [n] of single tokens; a masked token is selected away."""
    token_weight = token_weight.to(call.compute_dtype)
    kd, ce = ((token_weight * torch.where(token_weight != 0, loss, 0)).sum() for loss in (kd, ce))
    kd = kd * call.temperature**2
    return call.kd_weight * kd + call.ce_weight * ce, kd, ce
