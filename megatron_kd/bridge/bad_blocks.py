# SPDX-License-Identifier: Apache-2.0
"""What a run does about teacher rows that cannot be read: stop, or go on without them up to a limit.

Flows in: the caches of a run and, as they are met, errors that name rows of one. Flows out: a log line for each bad
block, which positions of a batch lost their teacher, or an error where too much is lost. Costs nothing until a block
is bad.
"""

import logging
import threading
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed

from megatron_kd.cache import CacheReader, CorruptBlock
from megatron_kd.errors import UserError

logger = logging.getLogger(__name__)


class TooManyBadBlocks(UserError):
    """More of the caches is damaged than the run was told to do without."""


class BadBlocks:
    """Counts the damaged blocks of a run's caches. Threads may share one.

    Args:
        policy: ``raise`` stops at the first bad block; ``mask`` goes on without its rows.
        limit: With ``mask``, the largest fraction of the caches' rows that may lie in bad blocks.
        readers: The caches.
    """

    def __init__(self, policy: Literal["raise", "mask"], limit: float, readers: Sequence[CacheReader]):
        self.policy, self.limit = policy, limit
        self.total_rows = sum(reader.n_rows for reader in readers)
        self.rows = 0
        """Rows in the bad blocks met so far, each block counted once."""
        self._known: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def note(self, reader: CacheReader, error: CorruptBlock) -> tuple[int, int]:
        """Take note of a bad block.

        Returns:
            (first, end) of its rows, to do without.

        Raises:
            CorruptBlock: ``error`` itself, under the policy ``raise``.
            TooManyBadBlocks: With this block more than ``limit`` of all rows is bad.
        """
        if self.policy == "raise" or error.rows is None:
            raise error
        first, end = error.rows
        with self._lock:
            if (str(reader.path), first) not in self._known:
                self._known.add((str(reader.path), first))
                self.rows += end - first
                logger.warning(
                    "kd.bad_blocks=mask: rows [%d, %d) of %s take no part in the loss (%d of %d rows so far): %s",
                    *(first, end, reader.path, self.rows, self.total_rows, error),
                )
            if self.rows > self.limit * self.total_rows:
                raise TooManyBadBlocks(
                    f"kd.bad_blocks=mask: {self.rows} of {self.total_rows} rows lie in bad blocks, which is more than "
                    f"kd.bad_blocks_limit={self.limit:g} of them; the last was {error} Repair the cache with "
                    "`megatron-kd cache repair`, or raise the limit"
                ) from error
        return first, end


def agree(masked: torch.Tensor, group: torch.distributed.ProcessGroup, device: torch.device) -> torch.Tensor:
    """Positions that any tensor-parallel rank has to mask, on the host.

    A disk or page cache can be bad on one node alone, and the ranks of a group must leave out the same positions.
    One all-reduce of 4 bytes a position, whose result the host waits for.

    Args:
        masked: bool [n, B], on the host.
        group: The tensor-parallel group.
        device: Where its collectives run.
    """
    if group.size() == 1:
        return masked
    shared = masked.to(device, torch.int32)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX, group=group)
    return shared.bool().cpu()
