# SPDX-License-Identifier: Apache-2.0
"""A call cut along its tokens: each strip with its logits, its teacher rows, and the columns they have on this rank.

Strip i is rows [i * c, (i + 1) * c) of *every* rank's hidden. So under sequence parallelism a strip is one all-gather,
its gradient one reduce-scatter, neither needs a permutation, and the gathered hidden never exists whole. The next
strip's all-gather is started before this one's products, which hide it.
Where the host knows which tokens to keep, a strip is as many rows as hold that many kept tokens, at most MAX_STRETCH
times the usual, and all but the kept are dropped after the gather.

Legend: N tokens of the call, R rows of hidden on this rank, n tokens of a strip, H hidden size, K teacher entries,
V real columns of this rank. Memory: one buffer of logits [n, shard.size] in `compute_dtype` for all strips.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

import torch

from megatron_kd.loss.arguments import LossCall
from megatron_kd.loss.divergence import teacher_buckets
from megatron_kd.loss.matmul import logits_into
from megatron_kd.loss.vocab_parallel import OnItsWay, start_gather_rows

MAX_STRETCH = 8
"""Bounds a strip's gathered hidden states where few tokens are kept."""

NO_LABEL = -2
"""Label of a masked token: neither a column nor the -1 of an absent entry."""


@dataclass
class Strip:
    """n tokens. A masked token has hidden 0, no entries and no label, so that nothing of it reaches a sum."""

    rows: slice
    """Which rows of this rank's hidden."""
    kept: torch.Tensor | None
    """[n] int64: which of the rows of all ranks these tokens are. None: all of them."""
    gathered_rows: int
    """Rows of all ranks, kept or not."""
    hidden: torch.Tensor
    """[n, H]: of all ranks."""
    logits: torch.Tensor
    """[n, V]: z; later what row_exponentials leaves, and their gradient, in the same memory."""
    ids: torch.Tensor
    """[n, K] int64: distinct, -1 for absent."""
    P: torch.Tensor
    """[n, K + 1]: the teacher's bucket log-probabilities."""
    token_weight: torch.Tensor
    """[n] in `compute_dtype`."""
    columns: torch.Tensor
    """[n, K]: the ids' columns on this rank, else -1."""
    label_column: torch.Tensor | None
    """[n]: the label's column if on this rank, else -1. None without labels."""
    label_entry: torch.Tensor | None
    """[n, K] bool: the entry that is the label. None without labels."""
    shift: torch.Tensor | None = None
    """[n]: the logits are no longer z, but exp(z / T - shift), as row_exponentials left them; None: they are z."""

    def with_left_out(self, values: torch.Tensor) -> torch.Tensor:
        """[n, H] of the kept tokens among zeros for the others: all rows of all ranks."""
        if self.kept is None:
            return values
        return values.new_zeros(self.gathered_rows, values.shape[1]).index_copy_(0, self.kept, values)


def strips(hidden: torch.Tensor, weight: torch.Tensor, call: LossCall) -> Iterator[Strip]:
    """The strips of a call, one alive at a time: the next one overwrites the logits of the last.

    Args:
        hidden: [R, H].
        weight: [shard.size, H].
        call: The rest.
    """
    height = min(call.strip_rows, len(hidden))
    buffer = hidden.new_empty(height * call.row_ranks, call.shard.size, dtype=call.compute_dtype)

    def gather(rows: slice) -> OnItsWay:
        return start_gather_rows(hidden[rows], call.shard) if call.sequence_parallel else OnItsWay(hidden[rows])

    cuts = ((rows, kept, gather(rows)) for rows, kept in stretches(len(hidden), call))
    for (rows, kept, gathered), _ in pairwise(chain(cuts, [None])):  # so each is cut before the last is used
        yield load_strip(gathered, len(hidden), weight, rows, kept, buffer, call)


def stretches(count: int, call: LossCall) -> Iterator[tuple[slice, torch.Tensor | None]]:
    """The rows of each strip among this rank's `count`, and on the host which of all ranks' rows are kept, or None."""
    height = max(min(call.strip_rows, count), 1)
    if call.keep is None:
        yield from ((slice(start, min(start + height, count)), None) for start in range(0, count, height))
        return
    keep = call.keep.unflatten(0, (call.row_ranks, count))
    kept_until = keep.sum(0).cumsum(0).tolist()
    start = before = 0
    while start < count:
        fits = bisect_right(kept_until, before + height * call.row_ranks)
        rows = slice(start, min(fits, start + MAX_STRETCH * height))
        kept = keep[:, rows].flatten().nonzero()[:, 0]
        if len(kept):
            yield rows, kept
        start, before = rows.stop, kept_until[rows.stop - 1]


def load_strip(
    gathered: OnItsWay,
    count: int,
    weight: torch.Tensor,
    rows: slice,
    kept: torch.Tensor | None,
    buffer: torch.Tensor,
    call: LossCall,
) -> Strip:
    """Project the rows' hidden states, of all ranks, and select what is not masked. A rank has `count` rows."""
    if kept is not None:
        kept = kept.to(weight.device, non_blocking=True)

    def pick(tensor: torch.Tensor) -> torch.Tensor:
        """The strip's tokens out of all ranks' rows of this stretch."""
        return tensor if kept is None else tensor.index_select(0, kept)

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        """The strip's tokens out of a tensor that has those of all ranks, in the order of gather_rows."""
        return pick(tensor.unflatten(0, (call.row_ranks, count))[:, rows].flatten(0, 1))

    token_weight = whole(call.token_weight)
    keep = token_weight != 0
    rows_of_all = gathered.arrived()
    gathered_rows = len(rows_of_all)
    hidden = torch.where(keep[:, None], pick(rows_of_all), 0)
    del rows_of_all
    logits = buffer[: len(hidden), : call.shard.real]
    logits_into(logits, hidden, weight[: call.shard.real], call.logits_dtype)
    teacher = (whole(part) for part in call.teacher)
    ids, P = teacher_buckets(*teacher, keep, call.compute_dtype, distinct=call.distinct)
    labels = None if call.labels is None else torch.where(keep, whole(call.labels), NO_LABEL)
    return Strip(
        rows=rows,
        kept=kept,
        gathered_rows=gathered_rows,
        hidden=hidden,
        logits=logits,
        ids=ids,
        P=P,
        token_weight=token_weight.to(call.compute_dtype),
        columns=call.shard.local(ids),
        label_column=None if labels is None else call.shard.local(labels),
        label_entry=None if labels is None else ids == labels[:, None],
    )
