# SPDX-License-Identifier: Apache-2.0
"""A rank's share of the vocabulary, and the collectives of the losses over the tensor-parallel group.

Every collective has a shape that follows from the arguments all ranks share; none depends on data or on a rank's own
columns. With one rank nothing is sent. Those with many bytes can be started and awaited later: on CUDA they run on a
stream of their own beside whatever is computed in between, and to await one makes the stream wait, not the host.

Legend: N tokens, n tokens of a strip, R rows of this rank, H hidden size, M numbers per token, V columns of this rank.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

# torch 2.13 renamed both and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class VocabShard:
    """Columns [start, start + size) of the vocabulary: the rows of `weight` that this rank holds.

    The shards of a group lie end to end without a gap. Columns from `total` on are padding: they take no part, and
    their gradient is exactly 0. A shard may be all padding.
    """

    start: int
    size: int
    total: int
    """Size of the real vocabulary, without padding."""
    group: dist.ProcessGroup | None = None
    """The tensor-parallel group; None for a single rank."""

    @property
    def real(self) -> int:
        """How many of this rank's columns are no padding; they come first."""
        return min(max(self.total - self.start, 0), self.size)

    @property
    def world_size(self) -> int:
        """Ranks that share the vocabulary."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return 0 if self.group is None else dist.get_rank(self.group)

    def local(self, ids: torch.Tensor) -> torch.Tensor:
        """Columns on this rank, int64, of vocabulary ids of any shape; -1 for an id that is not here or absent."""
        columns = ids.long() - self.start
        return torch.where((columns >= 0) & (columns < self.real), columns, -1)


class OnItsWay:
    """The result of a collective that was started."""

    def __init__(self, result: torch.Tensor, work: dist.Work | None = None, sent: torch.Tensor | None = None):
        self._result, self._work, self._sent = result, work, sent

    def arrived(self) -> torch.Tensor:
        """The result, to be used by what is computed from now on. Call it once: nothing is held afterwards."""
        if self._work is not None:
            self._work.wait()
        result, self._result, self._work, self._sent = self._result, None, None, None
        return result


def start_all_reduce(tensor: torch.Tensor, shard: VocabShard) -> OnItsWay:
    """Sum a tensor over the group, in place. One all-reduce of its size."""
    if shard.world_size == 1:
        return OnItsWay(tensor)
    return OnItsWay(tensor, dist.all_reduce(tensor, group=shard.group, async_op=True))


def all_reduce(tensor: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """As start_all_reduce, awaited."""
    return start_all_reduce(tensor, shard).arrived()


def share_statistics(
    owned: torch.Tensor, log_sums: torch.Tensor, shard: VocabShard
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make every rank know the logits that single ranks own, and the log-sum-exp over all ranks' columns.

    One all-reduce of n * (K + TP * M) numbers. Every number comes from one rank and zeros from the others, so the sum
    is exact and all ranks get the same bits.

    Args:
        owned: [n, K]; 0 where another rank is the owner.
        log_sums: [n, M]: log-sum-exp over this rank's columns, -inf without any.

    Returns:
        [n, K] and [n, M].
    """
    ranks = shard.world_size
    if ranks == 1:
        return owned, log_sums
    slots = log_sums.new_zeros(len(log_sums), ranks, log_sums.shape[1])
    slots[:, shard.rank] = log_sums
    packed = all_reduce(torch.cat([owned, slots.flatten(1)], dim=1), shard)
    owned, slots = packed.split([owned.shape[1], packed.shape[1] - owned.shape[1]], dim=1)
    return owned, slots.unflatten(1, (ranks, -1)).logsumexp(1)


def start_gather_rows(rows: torch.Tensor, shard: VocabShard) -> OnItsWay:
    """[r, H] of every rank, end to end in rank order: [TP * r, H]. One all-gather."""
    if shard.world_size == 1:
        return OnItsWay(rows)
    gathered = rows.new_empty(shard.world_size * len(rows), *rows.shape[1:])
    sent = rows.contiguous()
    return OnItsWay(gathered, _all_gather(gathered, sent, group=shard.group, async_op=True), sent)


def gather_rows(rows: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """As start_gather_rows, awaited."""
    return start_gather_rows(rows, shard).arrived()


def start_reduce_scatter_rows(rows: torch.Tensor, own: torch.Tensor, shard: VocabShard) -> OnItsWay:
    """Sum [TP * r, H] over the ranks; each gets its [r, H] in the contiguous `own`. One reduce-scatter."""
    if shard.world_size == 1:
        return OnItsWay(own.copy_(rows))
    sent = rows.contiguous()
    return OnItsWay(own, _reduce_scatter(own, sent, group=shard.group, async_op=True), sent)


def reduce_scatter_rows(rows: torch.Tensor, shard: VocabShard) -> torch.Tensor:
    """As start_reduce_scatter_rows, awaited, into new memory."""
    own = rows.new_empty(len(rows) // shard.world_size, *rows.shape[1:])
    return start_reduce_scatter_rows(rows, own, shard).arrived()


class GatherSequence(torch.autograd.Function):
    """gather_rows for ordinary autograd: the gradient is summed over the ranks and scattered."""

    @staticmethod
    def forward(ctx, rows: torch.Tensor, shard: VocabShard) -> torch.Tensor:  # noqa: D102
        ctx.shard = shard
        return gather_rows(rows, shard).clone()

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:  # noqa: D102
        return reduce_scatter_rows(grad, ctx.shard).clone(), None


class CopyToRanks(torch.autograd.Function):
    """The identity on a tensor that all ranks hold alike; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, shard: VocabShard) -> torch.Tensor:  # noqa: D102
        ctx.shard = shard
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:  # noqa: D102
        return all_reduce(grad.clone(), ctx.shard), None


class SumOverRanks(torch.autograd.Function):
    """The sum over the ranks; each rank's part gets the gradient of the sum, which all ranks hold alike."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, shard: VocabShard) -> torch.Tensor:  # noqa: D102
        return all_reduce(tensor.clone(), shard)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:  # noqa: D102
        return grad, None


class GatherVocabulary(torch.autograd.Function):
    """This rank's logits [N, V] to the grid [N, total] on every rank; the gradient of the own columns comes back."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, shard: VocabShard) -> torch.Tensor:  # noqa: D102
        ctx.own = slice(shard.start, shard.start + shard.real)
        grid = logits.new_zeros(len(logits), shard.total)
        grid[:, ctx.own] = logits
        return all_reduce(grid, shard)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:  # noqa: D102
        return grad[:, ctx.own].clone(), None
