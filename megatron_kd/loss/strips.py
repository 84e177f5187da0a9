# SPDX-License-Identifier: Apache-2.0
"""A call cut along its tokens: each strip with its logits, its teacher rows, and the columns they have on this rank.

Strip i is rows [i * c, (i + 1) * c) of *every* rank's hidden. So under sequence parallelism a strip is one all-gather,
its gradient one reduce-scatter, neither needs a permutation, and the gathered hidden never exists whole.

Legend: N tokens of the call, R rows of hidden on this rank, n tokens of a strip, H hidden size, K teacher entries,
V real columns of this rank. Memory: one buffer of logits [n, shard.size] in `compute_dtype` for all strips.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_kd.loss.arguments import LossCall
from megatron_kd.loss.divergence import teacher_buckets
from megatron_kd.loss.matmul import logits_into
from megatron_kd.loss.vocab_parallel import gather_rows

NO_LABEL = -2
"""Label of a masked token: neither a column nor the -1 of an absent entry."""


@dataclass
class Strip:
    """n tokens. A masked token has hidden 0, no entries and no label, so that nothing of it reaches a sum."""

    rows: slice
    """Which rows of this rank's hidden."""
    hidden: torch.Tensor
    """[n, H]: of all ranks."""
    logits: torch.Tensor
    """[n, V]: z; later their gradient, in the same memory."""
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


def strips(hidden: torch.Tensor, weight: torch.Tensor, call: LossCall) -> Iterator[Strip]:
    """The strips of a call, one alive at a time: the next one overwrites the logits of the last.

    Args:
        hidden: [R, H].
        weight: [shard.size, H].
        call: The rest.
    """
    height = min(call.strip_rows, len(hidden))
    buffer = hidden.new_empty(height * call.row_ranks, call.shard.size, dtype=call.compute_dtype)
    for start in range(0, len(hidden), max(height, 1)):
        yield load_strip(hidden, weight, slice(start, min(start + height, len(hidden))), buffer, call)


def load_strip(hidden: torch.Tensor, weight: torch.Tensor, rows: slice, buffer: torch.Tensor, call: LossCall) -> Strip:
    """Gather the rows' hidden states, project them, and select what is not masked. One all-gather."""

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        """The strip's rows out of a tensor that has those of all ranks, in the order of gather_rows."""
        return tensor.unflatten(0, (call.row_ranks, len(hidden)))[:, rows].flatten(0, 1)

    token_weight = whole(call.token_weight)
    keep = token_weight != 0
    gathered = gather_rows(hidden[rows], call.shard) if call.sequence_parallel else hidden[rows]
    gathered = torch.where(keep[:, None], gathered, 0)
    logits = buffer[: len(gathered), : call.shard.real]
    logits_into(logits, gathered, weight[: call.shard.real], call.logits_dtype)
    ids, P = teacher_buckets(*(whole(part) for part in call.teacher), keep, call.compute_dtype)
    labels = None if call.labels is None else torch.where(keep, whole(call.labels), NO_LABEL)
    return Strip(
        rows=rows,
        hidden=gathered,
        logits=logits,
        ids=ids,
        P=P,
        token_weight=token_weight.to(call.compute_dtype),
        columns=call.shard.local(ids),
        label_column=None if labels is None else call.shard.local(labels),
        label_entry=None if labels is None else ids == labels[:, None],
    )
