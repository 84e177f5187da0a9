# SPDX-License-Identifier: Apache-2.0
"""The format of a shard, byte by byte: this text is the specification, and enough to write a reader in any language.

In: what the manifest says (`RowFormat`) and a tile's rows. Out: planes, headers, offsets, checksums. At K=100, 18-bit
ids and f16 values a row costs 433 bytes and 1/64 byte of checksum; `codecs` and `blocks` hold the encodings below.

Legend: R rows of the shard; n rows of a block (512, the last one of a shard fewer); K entries a row (`top_k`); `bits`
of an id above its low 16 (`id_hi_bits`); B = ceil(R / 512) blocks. All numbers are little-endian.

**File.** A shard is a safetensors file:

| bytes       | content |
|-------------|---------|
| 0..8        | u64 H, length of the header |
| 8..8+H      | JSON header, filled up with blanks to a multiple of 8 bytes |
| 8+H..end    | the planes in the order of the header, without gaps |

The header names each plane's type, shape and place (`data_offsets`, counted from byte 8+H); `__metadata__` repeats
what a reader needs: manifest, tile, first_row, rows, block_rows, top_k, values, id_hi_bits, temperatures, codec,
ragged. It depends on nothing but the manifest, the tile's number and, in a blocked shard, the file's size, so a reader
knows every byte of it in advance and parses nothing.

**Planes of rows.** What is kept of R rows, in this order (equal sizes keep it; larger items come first, so every plane
is aligned):

| plane    | type         | shape               | when          | content |
|----------|--------------|---------------------|---------------|---------|
| log_tail | f32          | [R]                 |               | log of the mass outside the entries; -inf if none |
| tail_T   | f32          | [R, temperatures]   | if there are  | log-sum-exp over the same mass of (log p) / T |
| first    | f32          | [R]                 | values u8     | log p of entry 0 |
| tokens   | u32          | [R]                 |               | echo of the input token |
| count    | u8, u16, u32 | [R]                 | ragged        | entries of the row; the first type that holds K |
| span     | f16          | [R]                 | values u8     | first - (log p of the last entry > -inf) or more |
| logprobs | f16, f32, u8 | [R, K]              |               | log p, not increasing; u8: see below |
| ids_lo   | u16          | [R, K]              |               | low 16 bits of the ids |
| ids_hi   | u8           | [R, ceil(K*bits/8)] |               | high bits, entry 0 in the lowest bits of byte 0 |

The ids of a row's entries (log p > -inf) are distinct. `logprobs` f32 stands before `tokens`; u8 stands after
`ids_lo`. With values `u8` code c means `first - span * (c / 254)**2`, in f32; 255 means -inf.

**Dense shards** (codec `raw`, not ragged) hold the plane `checksum`, u64 [B], and then the planes above, whole: row r
of a plane of w bytes a row is at (start of the plane) + r * w. The checksum of a block is xxh3-64 over its rows of
`log_tail`, then its rows of the next plane, and so on.

**Blocked shards** (codec `zstd`, or ragged) hold three planes: `checksum`, u64 [B]; `index`, u64 [B+1]; `blocks`, u8
[N]. Block b is the bytes index[b]..index[b+1] of `blocks`; index[0] = 0, index[B] = N. Its checksum is xxh3-64 over
these bytes, as stored. Codec `raw`: they are the block's payload. Codec `zstd`: u32 M, the number of ids; M bytes, the
lowest byte of each id; then one zstd frame that states its content size, of the payload rearranged. The payload is the
block's rows of each plane above, one plane after the other, without gaps. In a ragged cache `count` comes first of
all, and `logprobs`, `ids_lo` and `ids_hi` hold the entries that exist alone, M = sum of the counts, as one row of K =
M. An entry beyond its row's count has no mass; a row with count 0 was not stored (log_tail 0: all its mass is
outside).

Rearranged means, for each plane by itself, before compression: (1) `logprobs`, seen as unsigned integers, holds the
difference of each item from the one before it, across rows, modulo 2^8, 2^16 or 2^32; the first item is kept; (2) a
plane whose items have s > 1 bytes is stored as s runs: byte 0 of all its items, then byte 1, ...; of `ids_lo` there is
run 1 alone, since run 0, which no compressor shortens, stands before the frame.

**Bounds.** A block takes at most p + p // 128 + 512 bytes (zstd) or p bytes (raw), p its payload with all K entries.
Whoever reads checks that, and the frame's stated size, before memory is taken.

**Checksums** are seeded: the seed is the axis row of the block's first row, so a block in the wrong place is found.
Logarithms are natural.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash

BLOCK_ROWS = 512
FORMAT_VERSION = 1
VALUE_DTYPES = {"f16": np.dtype("<f2"), "f32": np.dtype("<f4"), "u8": np.dtype("|u1")}
CODECS = ("raw", "zstd")
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
    """`f16`, `f32` or `u8`: how the log-probabilities are stored."""
    id_hi_bits: int = 2
    """Bits of an id above the low 16: 2, 4, 8 or 16."""
    temperatures: tuple[float, ...] = ()
    """Extra temperatures, one column of `tail_T` each."""
    codec: str = "raw"
    """`raw` or `zstd`."""
    ragged: bool = False
    """Whether a row may have fewer than K entries, or none."""

    @property
    def blocked(self) -> bool:
        """Whether a shard is a sequence of blocks of their own sizes."""
        return self.ragged or self.codec != "raw"

    @lru_cache(maxsize=64)  # noqa: B019 (one object a cache; asked for at every block)
    def data_planes(self, rows: int) -> list[Plane]:
        """The planes that hold one entry a row, in the order of the specification."""
        word = np.dtype("<f4")
        planes = [Plane("log_tail", word, (rows,))]
        if self.temperatures:
            planes.append(Plane("tail_T", word, (rows, len(self.temperatures))))
        if self.values == "u8":
            planes.append(Plane("first", word, (rows,)))
        planes.append(Plane("tokens", np.dtype("<u4"), (rows,)))
        if self.values == "u8":
            planes.append(Plane("span", np.dtype("<f2"), (rows,)))
        planes += [
            Plane("logprobs", VALUE_DTYPES[self.values], (rows, self.top_k)),
            Plane("ids_lo", np.dtype("<u2"), (rows, self.top_k)),
            Plane("ids_hi", np.dtype("|u1"), (rows, self.id_hi_bytes(self.top_k))),
        ]
        planes.sort(key=lambda plane: -plane.dtype.itemsize)
        return [Plane("count", self.count_dtype, (rows,)), *planes] if self.ragged else planes

    def planes(self, rows: int, blocks_bytes: int = 0) -> list[Plane]:
        """All planes of the shard file, in file order; `blocks_bytes` is the size of `blocks` in a blocked shard."""
        planes = [Plane("checksum", np.dtype("<u8"), (block_count(rows),))]
        if not self.blocked:
            return planes + self.data_planes(rows)
        planes.append(Plane("index", np.dtype("<u8"), (block_count(rows) + 1,)))
        return [*planes, Plane("blocks", np.dtype("|u1"), (blocks_bytes,))]

    @property
    def count_dtype(self) -> np.dtype:
        """Type of the number of entries of a ragged row."""
        return np.dtype("|u1" if self.top_k < 1 << 8 else "<u2" if self.top_k < 1 << 16 else "<u4")

    def id_hi_bytes(self, entries: int) -> int:
        """Bytes of the high id bits of a row of that many entries."""
        return -(-entries * self.id_hi_bits // 8)

    @property
    def bytes_per_row(self) -> int:
        """Payload bytes of a row with all K entries, without its share of the checksums and the header."""
        return sum(plane.row_bytes for plane in self.data_planes(1))

    def block_bound(self, rows: int) -> int:
        """Largest size of a stored block of `rows` rows."""
        payload = rows * self.bytes_per_row
        return payload + payload // 128 + 512 if self.codec == "zstd" else payload

    def blocks_bound(self, rows: int) -> int:
        """Largest size of the plane `blocks`."""
        whole, rest = divmod(rows, BLOCK_ROWS)
        return whole * self.block_bound(BLOCK_ROWS) + (self.block_bound(rest) if rest else 0)


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


def shard_header(
    row_format: RowFormat, *, tile: int, first_row: int, rows: int, manifest_digest: str, blocks_bytes: int = 0
) -> bytes:
    """The safetensors header of a shard: length prefix and JSON, padded with blanks to a multiple of 8 bytes.

    The length does not depend on `blocks_bytes`: it is that of the largest shard.
    """
    metadata = {
        "format": "megatron-kd-shard",
        "version": str(FORMAT_VERSION),
        "manifest": manifest_digest,
        "tile": str(tile),
        "first_row": str(first_row),
        "rows": str(rows),
        "block_rows": str(BLOCK_ROWS),
        "top_k": str(row_format.top_k),
        "values": row_format.values,
        "id_hi_bits": str(row_format.id_hi_bits),
        "temperatures": json.dumps(list(row_format.temperatures)),
        "codec": row_format.codec,
        "ragged": json.dumps(row_format.ragged),
    }
    text = _header_text(metadata, row_format.planes(rows, blocks_bytes))
    longest = _header_text(metadata, row_format.planes(rows, row_format.blocks_bound(rows)))
    text = text.ljust(-(-len(longest) // 8) * 8)
    return len(text).to_bytes(8, "little") + text


def _header_text(metadata: dict[str, str], planes: Sequence[Plane]) -> bytes:
    header: dict = {"__metadata__": metadata}
    offset = 0
    for plane in planes:
        header[plane.name] = {
            "dtype": _SAFETENSORS_NAMES[plane.dtype.str],
            "shape": list(plane.shape),
            "data_offsets": [offset, offset + plane.nbytes],
        }
        offset += plane.nbytes
    return json.dumps(header, separators=(",", ":")).encode()


def plane_offsets(
    row_format: RowFormat, rows: int, header_bytes: int, blocks_bytes: int = 0
) -> tuple[dict[str, int], int]:
    """Byte at which each plane starts in the file, and the size of the file."""
    offsets, offset = {}, header_bytes
    for plane in row_format.planes(rows, blocks_bytes):
        offsets[plane.name] = offset
        offset += plane.nbytes
    return offsets, offset


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
