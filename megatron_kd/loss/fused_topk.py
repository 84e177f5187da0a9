# SPDX-License-Identifier: Apache-2.0
"""The teacher's half of the fused projection: hidden states to top K and tail mass, a strip of tokens at a time.

In: hidden states, this rank's rows of the head's weight. Out: what a cache stores of each token's distribution, the
same on all ranks. The largest tensor is one strip of logits in float32 (256 MiB unless told otherwise), whatever the
number of tokens; no rank ever holds the grid or another rank's logits.

    logits = hidden.float() @ weight[:total].float().T          # the two-line oracle
    logprobs, ids = logits.log_softmax(-1).topk(K)

Each rank takes the K largest of its own columns and the log-sum-exp of its others; the K largest of the K * TP are the
K largest of all, and the rest of them goes to the tail. The tail is always a sum over logits, never 1 - sum.

Collectives per strip, TP > 1: all-gather of hidden (sequence parallel), and two of n * K ids and n * (K + 2 +
temperatures) numbers.

Legend: N tokens of the call, n tokens of a strip, H hidden size, K entries, V real columns of this rank.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from megatron_kd.loss.errors import require
from megatron_kd.loss.matmul import logits_into
from megatron_kd.loss.row_kernels import row_blocks
from megatron_kd.loss.vocab_parallel import VocabShard, gather_rows

STRIP_ELEMENTS = 1 << 26
"""Logits of a strip on this rank by default: 256 MiB."""
BLOCK_COLUMNS = 32
"""Columns of which only the largest is looked at first."""


class TeacherRows(NamedTuple):
    """What a cache stores of the teacher's distribution. float32; float64 if hidden is."""

    ids: torch.Tensor
    """int64 [N, K], most likely first, equal logits by ascending id."""
    logprobs: torch.Tensor
    """[N, K] natural log, normalised over the real vocabulary."""
    log_tail: torch.Tensor
    """[N] log-sum-exp of the log-probabilities outside the K; -inf if there is nothing there."""
    tail_T: torch.Tensor
    """[N, temperatures] log-sum-exp of the same entries, each divided by T."""
    label_logprobs: torch.Tensor | None
    """[N] log-probability of `labels`, if they were given; 0 where the label is negative."""


@torch.no_grad()
def fused_linear_topk(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    top_k: int,
    temperatures: Sequence[float] = (),
    shard: VocabShard | None = None,
    sequence_parallel: bool = False,
    strip_tokens: int | None = None,
    bias: torch.Tensor | None = None,
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None,
    labels: torch.Tensor | None = None,
) -> TeacherRows:
    """Teacher rows of hidden states. All ranks of the shard's group make the same call and get the same rows.

    Args:
        hidden: [N, H] or [S, B, H] after the final norm; under sequence_parallel this rank's [N / TP, H] or
            [S / TP, B, H]. [S, B, H] gives rows [S * B], B innermost.
        weight: [shard.size, H], same dtype; padded columns take no part.
        top_k: K, at most the real vocabulary.
        temperatures: T of each column of `tail_T`.
        shard: This rank's columns; None for a weight with the whole vocabulary and no padding.
        sequence_parallel: Whether hidden is split over the shard's group along its first axis.
        strip_tokens: Tokens projected at once, over all ranks; None fits STRIP_ELEMENTS.
        bias: [shard.size], added to the logits.
        transform: Applied to each strip of logits, elementwise (soft-capping, scaling).
        labels: int64 [N] or [S, B] of the whole sequence; negative means none.

    Raises:
        LossArgumentError: Sizes that do not fit.
        FloatingPointError: The teacher produced NaN or +inf.
    """
    shard = shard or VocabShard(0, len(weight), len(weight))
    _check(hidden, weight, top_k, shard, strip_tokens)
    ranks = shard.world_size if sequence_parallel else 1
    hidden = hidden.flatten(0, -2)
    count, real = len(hidden), shard.real
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    height = max(1, (strip_tokens or STRIP_ELEMENTS // max(1, shard.size)) // ranks)
    make = lambda *shape, dtype=dtype: hidden.new_empty(ranks, count, *shape, dtype=dtype)  # noqa: E731
    out = TeacherRows(
        make(top_k, dtype=torch.int64),
        make(top_k),
        make(),
        make(len(temperatures)),
        None if labels is None else make(),
    )
    if labels is not None:
        labels = labels.reshape(ranks, count)
    for start in range(0, count, height):
        rows = slice(start, start + height)
        own = hidden[rows]
        gathered = gather_rows(own, shard) if ranks > 1 else own
        logits = hidden.new_empty(len(gathered), real, dtype=dtype)
        logits_into(logits, gathered, weight[:real], dtype)
        if bias is not None:
            logits += bias[:real].to(dtype)
        if transform is not None:
            logits = transform(logits)
        found = _rows_of_strip(
            logits, top_k, temperatures, shard, None if labels is None else labels[:, rows].flatten()
        )
        for whole, part in zip(out, found, strict=True):
            if whole is not None:
                whole[:, rows] = part.unflatten(0, (ranks, -1))
    return TeacherRows(*(None if part is None else part.flatten(0, 1) for part in out))


def _check(
    hidden: torch.Tensor, weight: torch.Tensor, top_k: int, shard: VocabShard, strip_tokens: int | None
) -> None:
    require(1 <= top_k <= shard.total, f"top_k: expected 1 to {shard.total}, the real vocabulary, found {top_k}.")
    require(
        weight.ndim == 2 and len(weight) == shard.size,
        f"weight: expected [{shard.size}, H], as many rows as the shard has, found {list(weight.shape)}.",
    )
    require(
        hidden.ndim in (2, 3) and hidden.shape[-1] == weight.shape[1] and hidden.dtype == weight.dtype,
        f"hidden: expected [N, {weight.shape[1]}] or [S, B, {weight.shape[1]}] in {weight.dtype} like weight, found "
        f"{list(hidden.shape)} in {hidden.dtype}.",
    )
    require(
        strip_tokens is None or strip_tokens >= 1, f"strip_tokens: expected at least 1 or None, found {strip_tokens}."
    )


def _rows_of_strip(
    logits: torch.Tensor,
    top_k: int,
    temperatures: Sequence[float],
    shard: VocabShard,
    labels: torch.Tensor | None,
) -> TeacherRows:
    """Rows of one strip; `logits` [n, V] is used up."""
    values, ids, others = _share_candidates(*_candidates(logits, top_k, temperatures, shard, labels), shard)
    # Ranks follow each other in the order of their ids, so a stable sort leaves equal values in that order.
    values, order = values.sort(dim=-1, descending=True, stable=True)
    kept, rest = values[:, :top_k], values[:, top_k:]
    tails = others[:, :, : 1 + len(temperatures)]
    tail = torch.cat([rest, tails[:, :, 0]], dim=1).logsumexp(1)
    total = torch.logaddexp(kept.logsumexp(1), tail)
    _check_finite(total)
    tail_T = [
        torch.cat([rest / temperature, tails[:, :, column]], dim=1).logsumexp(1) - total / temperature
        for column, temperature in enumerate(temperatures, start=1)
    ]
    return TeacherRows(
        ids.gather(1, order[:, :top_k]),
        kept - total[:, None],
        tail - total,
        torch.stack(tail_T, dim=1) if tail_T else total.new_empty(len(total), 0),
        None if labels is None else (others[:, :, -1].sum(1) - total).where(labels >= 0, 0),
    )


def _candidates(
    logits: torch.Tensor,
    top_k: int,
    temperatures: Sequence[float],
    shard: VocabShard,
    labels: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's part of a strip: its K largest logits, their ids, and of its other columns the sums.

    Returns:
        Values [n, K] (-inf where it has fewer columns), ids [n, K], and [n, 1 + temperatures, and one more with
        labels]: log-sum-exps of the others at each temperature, 1 first, and the label's logit, 0 if not here.
    """
    n = len(logits)
    values = logits.new_full((n, top_k), -torch.inf)
    ids = torch.full((n, top_k), shard.total, device=logits.device)
    own = min(top_k, logits.shape[1])
    label = []
    if labels is not None:
        column = shard.local(labels)
        found = logits.gather(1, column.clamp(min=0)[:, None])[:, 0] if own else logits.new_zeros(n)
        label = [found.where(column >= 0, 0)]
    if own:
        values[:, :own], columns = ranked_top_k(logits, own)
        ids[:, :own] = columns + shard.start
        logits.scatter_(-1, columns, -torch.inf)
    tails = logits.new_empty(1 + len(temperatures), n)
    for rows in row_blocks(logits):
        for tail, T in zip(tails, (1, *temperatures), strict=True):
            tail[rows] = (logits[rows] if T == 1 else logits[rows] / T).logsumexp(1)
    return values, ids, torch.stack([*tails, *label], dim=1)


def _share_candidates(
    values: torch.Tensor, ids: torch.Tensor, others: torch.Tensor, shard: VocabShard
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All ranks' candidates side by side: values and ids [n, TP * K], and [n, TP, M]. Two all-gathers."""
    ranks, n = shard.world_size, len(values)
    if ranks == 1:
        return values, ids, others[:, None]
    numbers = gather_rows(torch.cat([values, others], dim=1), shard).unflatten(0, (ranks, n)).transpose(0, 1)
    values, others = numbers.split([values.shape[1], others.shape[1]], dim=2)
    ids = gather_rows(ids, shard).unflatten(0, (ranks, n)).transpose(0, 1)
    return values.flatten(1), ids.flatten(1), others


def _check_finite(total: torch.Tensor) -> None:
    if _some(~total.isfinite()):
        row = int((~total.isfinite()).nonzero()[0])
        raise FloatingPointError(
            f"the teacher's logits are NaN or infinite (row {row} of a strip); its weights or dtype fail"
        )


def _some(flags: torch.Tensor) -> bool:
    """Whether any flag is set; the host waits for the device to know."""
    return bool(flags.any())


def ranked_top_k(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `top_k` largest entries of each row, by value and, where equal, by ascending id; at the cut too.

    `torch.topk` takes any of the entries that tie with the last one, so one more is asked for, and rows where it ties
    are chosen again.

    Returns:
        Values and ids, [n, K].
    """
    values, ids = _largest(logits, min(top_k + 1, logits.shape[-1]))
    cut, ids = values[:, top_k - 1 : top_k], ids[:, :top_k].contiguous()
    tied = (values[:, top_k:] == cut).any(-1)
    if _some(tied):
        ids[tied] = _lowest_ids_at_the_cut(logits[tied], cut[tied], top_k)
    ids = ids.sort(-1).values
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _largest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `torch.topk`, which of a long row on CPU takes several times as long.

    The blocks with the `count` largest maxima hold the `count` largest values; so only they are looked at again.
    """
    blocks = logits.shape[-1] // BLOCK_COLUMNS
    if logits.device.type != "cpu" or blocks < 4 * count:
        return logits.topk(count, dim=-1)
    split = blocks * BLOCK_COLUMNS
    best = logits[..., :split].unflatten(-1, (blocks, BLOCK_COLUMNS)).amax(-1).topk(count, dim=-1).indices
    columns = (best[..., None] * BLOCK_COLUMNS + torch.arange(BLOCK_COLUMNS)).flatten(-2)
    others = torch.arange(split, logits.shape[-1]).expand(*columns.shape[:-1], -1)
    columns = torch.cat([columns, others], dim=-1)
    values, places = logits.gather(-1, columns).topk(count, dim=-1)
    return values, columns.gather(-1, places)


def _lowest_ids_at_the_cut(logits: torch.Tensor, cut: torch.Tensor, top_k: int) -> torch.Tensor:
    above, tied = logits > cut, logits == cut
    places = top_k - above.sum(-1, keepdim=True)
    keep = above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= places))
    return keep.nonzero()[:, 1].view(-1, top_k)
