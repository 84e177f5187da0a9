# SPDX-License-Identifier: Apache-2.0
"""The format of a shard, byte by byte: planes, safetensors header, id packing, block checksums.

In: decoded teacher rows of one tile. Out: the bytes of `shards/shard-NNNNNN.safetensors`. At K=100, 18-bit ids and f16
values a row costs 433 bytes and 1/64 byte of checksum.

A shard is a safetensors file: u64 little-endian header length, JSON header, planes. R = rows, all numbers
little-endian, planes follow one another without gaps in this order (8-byte items first, so every plane is aligned):

| plane    | type       | shape               | content |
|----------|------------|---------------------|---------|
| checksum | u64        | [ceil(R/512)]       | xxh3-64 of the block's rows in all planes below, in this order |
| log_tail | f32        | [R]                 | natural log of the mass outside the K; -inf if none |
| tail_T   | f32        | [R, n]              | with extra temperatures: log-sum-exp over the tail of (log p) / T |
| tokens   | u32        | [R]                 | echo of the input token |
| logprobs | f16 or f32 | [R, K]              | log p, largest first before rounding, equal values by id |
| ids_lo   | u16        | [R, K]              | low 16 bits of the ids |
| ids_hi   | u8         | [R, ceil(K*bits/8)] | high bits, `bits` each, entry 0 in the lowest bits of byte 0 |

A checksum is seeded with the axis row of its block's first row, so a block in the wrong place is found.

The header depends on nothing but the manifest and the tile's number, so the reader knows every byte of it in advance.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash

BLOCK_ROWS = 512
FORMAT_VERSION = 1
VALUE_DTYPES = {"f16": np.dtype("<f2"), "f32": np.dtype("<f4")}
_ID_HI_BITS = (2, 4, 8, 16)
_SAFETENSORS_NAMES = {"<u8": "U64", "<u4": "U32", "<u2": "U16", "|u1": "U8", "<f4": "F32", "<f2": "F16"}


@dataclass(frozen=True)
class Plane:
    """One array of a shard."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size in bytes, as a Python integer (never wraps)."""
        count = self.dtype.itemsize
        for extent in self.shape:
            count *= extent
        return count

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (one block, for the checksum plane)."""
        count = self.dtype.itemsize
        for extent in self.shape[1:]:
            count *= extent
        return count


@dataclass(frozen=True)
class RowFormat:
    """What decides the planes of every shard of a cache."""

    top_k: int
    values: str = "f16"
    """`f16` or `f32`: how the log-probabilities are stored."""
    id_hi_bits: int = 2
    """Bits of an id above the low 16: 2, 4, 8 or 16."""
    temperatures: tuple[float, ...] = ()
    """Extra temperatures, one column of `tail_T` each."""

    def data_planes(self, rows: int) -> list[Plane]:
        """The planes that hold one entry a row, in file order."""
        hi_bytes = -(-self.top_k * self.id_hi_bits // 8)
        planes = [Plane("log_tail", np.dtype("<f4"), (rows,))]
        if self.temperatures:
            planes.append(Plane("tail_T", np.dtype("<f4"), (rows, len(self.temperatures))))
        return planes + [
            Plane("tokens", np.dtype("<u4"), (rows,)),
            Plane("logprobs", VALUE_DTYPES[self.values], (rows, self.top_k)),
            Plane("ids_lo", np.dtype("<u2"), (rows, self.top_k)),
            Plane("ids_hi", np.dtype("|u1"), (rows, hi_bytes)),
        ]

    def planes(self, rows: int) -> list[Plane]:
        """All planes of a shard of `rows` rows, in file order."""
        return [Plane("checksum", np.dtype("<u8"), (block_count(rows),)), *self.data_planes(rows)]

    @property
    def bytes_per_row(self) -> int:
        """Payload bytes of a row, without its share of the checksum plane and the header."""
        return sum(plane.row_bytes for plane in self.data_planes(1))


def block_count(rows: int) -> int:
    """Number of checksum blocks of `rows` rows."""
    return -(-rows // BLOCK_ROWS)


def id_hi_bits(vocab: int) -> int:
    """Smallest supported width of the high id plane for ids below `vocab` (2 bits serve 262,144)."""
    for bits in _ID_HI_BITS:
        if vocab <= 1 << (16 + bits):
            return bits
    raise ValueError(f"a vocabulary of {vocab} does not fit into 32-bit ids")


def shard_name(tile: int) -> str:
    """File name of a tile's shard and commit record, without the suffix."""
    return f"shard-{tile:06d}"


def shard_header(row_format: RowFormat, *, tile: int, first_row: int, rows: int, manifest_digest: str) -> bytes:
    """The safetensors header of a shard: length prefix and JSON, padded with blanks to a multiple of 8 bytes."""
    metadata = {
        "format": "megatron-kd-shard",
        "version": str(FORMAT_VERSION),
        "manifest": manifest_digest,
        "tile": str(tile),
        "first_row": str(first_row),
        "rows": str(rows),
        "block_rows": str(BLOCK_ROWS),
        "id_hi_bits": str(row_format.id_hi_bits),
        "temperatures": json.dumps(list(row_format.temperatures)),
    }
    header: dict = {"__metadata__": metadata}
    offset = 0
    for plane in row_format.planes(rows):
        header[plane.name] = {
            "dtype": _SAFETENSORS_NAMES[plane.dtype.str],
            "shape": list(plane.shape),
            "data_offsets": [offset, offset + plane.nbytes],
        }
        offset += plane.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def plane_offsets(row_format: RowFormat, rows: int, header_bytes: int) -> tuple[dict[str, int], int]:
    """Byte at which each plane starts in the file, and the size of the file."""
    offsets, offset = {}, header_bytes
    for plane in row_format.planes(rows):
        offsets[plane.name] = offset
        offset += plane.nbytes
    return offsets, offset


def split_ids(ids: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Split ids [n, K] into the planes `ids_lo` u16 [n, K] and `ids_hi` u8 [n, ceil(K*bits/8)]."""
    n, top_k = ids.shape
    low = (ids & 0xFFFF).astype("<u2")
    high = ids >> 16
    if bits >= 8:
        return low, high.astype(f"<u{bits // 8}").view(np.uint8).reshape(n, -1)
    per_byte = 8 // bits
    padded = np.zeros((n, -(-top_k // per_byte) * per_byte), np.uint8)
    padded[:, :top_k] = high
    shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(bits)
    packed = np.bitwise_or.reduce(padded.reshape(n, -1, per_byte) << shifts, axis=-1)
    return low, np.ascontiguousarray(packed, np.uint8)


def join_ids(low: np.ndarray, high: np.ndarray, bits: int, out: np.ndarray) -> None:
    """Inverse of `split_ids` for the first `out.shape[1]` entries of each row; `out` is int32 [n, k]."""
    n, top_k = out.shape
    out[...] = low[:, :top_k]
    if bits >= 8:
        wide = np.ascontiguousarray(high).view(f"<u{bits // 8}")
        out |= wide[:, :top_k].astype(np.int32) << 16
        return
    high = np.take(_high_bits_of_byte(bits), high[:, : -(-top_k * bits // 8)], axis=0)
    np.bitwise_or(high.reshape(n, -1)[:, :top_k], out, out=out)


@lru_cache
def _high_bits_of_byte(bits: int) -> np.ndarray:
    """Table int32 [256, 8 / bits]: the entries packed in each byte, moved to their place above bit 16."""
    shifts = np.arange(0, 8, bits)
    return ((np.arange(256)[:, None] >> shifts & ((1 << bits) - 1)) << 16).astype(np.int32)


def block_checksums(planes: Sequence[np.ndarray], first_row: int) -> np.ndarray:
    """Checksums u64 of consecutive blocks.

    Args:
        planes: the data planes in file order, each [n, ...] and contiguous, starting at a block boundary of the tile.
        first_row: row of the whole axis that the first one is; it seeds the hash, so a block in the wrong place is
            found.
    """
    rows = len(planes[0])
    sums = np.empty(block_count(rows), "<u8")
    for block, start in enumerate(range(0, rows, BLOCK_ROWS)):
        state = xxhash.xxh3_64(seed=first_row + start)
        for plane in planes:
            state.update(plane[start : start + BLOCK_ROWS])
        sums[block] = state.intdigest()
    return sums
