# SPDX-License-Identifier: Apache-2.0
"""Which positions of a row a context-parallel rank computes, and which of them belong together.

A row is one sequence, or several packed after one another ("thd"), told apart by `cu_seqlens`: the cumulated lengths,
beginning with 0. Where sequences are padded there are two of them, of the tokens alone and with the padding.

Legend: T positions of a row, on all ranks together.
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from megatron_kd.errors import UserError


class BadPacking(UserError, ValueError):
    """The lengths of packed sequences do not fit the row or the context-parallel ranks."""


def positions(length: int, rank: int, size: int) -> torch.Tensor:
    """Positions in a sequence of those `length` of it that a context-parallel rank has, int64 [length].

    Megatron cuts a sequence into 2 * size chunks and gives rank r chunks r and 2 * size - 1 - r, so that causal
    attention costs every rank the same.
    """
    if size == 1:
        return torch.arange(length)
    chunk = torch.arange(length // 2)
    return torch.cat([chunk + rank * len(chunk), chunk + (2 * size - 1 - rank) * len(chunk)])


def packed_positions(cu_seqlens: torch.Tensor, total_tokens: int, world_size: int, rank: int) -> torch.Tensor:
    """Positions in a row of packed sequences that a rank has, int64 [T / world_size]: of each sequence its two chunks.

    Has the signature of Transformer Engine's `thd_get_partitioned_indices`, which Megatron calls.

    Args:
        cu_seqlens: cumulated lengths, padding included; each a multiple of 2 * world_size.
        total_tokens: T.
        world_size: context-parallel ranks.
        rank: of these the one asked for.

    Raises:
        BadPacking: the lengths do not add up to the row, or cannot be cut.
    """
    if world_size == 1:
        return torch.arange(total_tokens)
    lengths = cu_seqlens.diff().tolist()
    if sum(lengths) != total_tokens or any(length % (2 * world_size) for length in lengths):
        raise BadPacking(
            f"packed sequences of {lengths} tokens in a row of {total_tokens}: on {world_size} context-parallel ranks "
            f"each must be padded to a multiple of {2 * world_size}, and together they must fill the row"
        )
    starts = cu_seqlens.tolist()
    parts = [
        start + positions(length // world_size, rank, world_size)
        for start, length in zip(starts, lengths, strict=False)
    ]
    return torch.cat(parts)


def padded_boundaries(packed: PackedSeqParams) -> torch.Tensor:
    """The cumulated lengths with the padding, where the sequences lie in the row."""
    return packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded


def sequence_numbers(packed: PackedSeqParams, total_tokens: int) -> torch.Tensor:
    """Which sequence each position of the row belongs to, int64 [T]; padding has a negative number of its own each."""
    numbers = -1 - torch.arange(total_tokens)
    starts, lengths = padded_boundaries(packed)[:-1].tolist(), packed.cu_seqlens_q.diff().tolist()
    for number, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        numbers[start : start + length] = number
    return numbers
