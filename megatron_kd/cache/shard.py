# SPDX-License-Identifier: Apache-2.0
"""One open shard: its header checked, its rows read by position.

In: an open file and what the manifest says must be there. Out: planes of any range of rows, verified against the block
checksums. Costs, per read, the bytes of the 512-row blocks the range touches.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from megatron_kd.cache.blocks import BadBlock, Scratch, unpack
from megatron_kd.cache.errors import CorruptBlock, CorruptFile
from megatron_kd.cache.files import parse_json
from megatron_kd.cache.layout import BLOCK_ROWS, RowFormat, block_count, plane_offsets, shard_header
from megatron_kd.cache.store import OpenFile, pieces

PIECE_ROWS = 4 * BLOCK_ROWS
"""Rows read at once before they are hashed and decoded; their 0.9 MB stay in a core's second-level cache."""
_OPEN_HASHES = 1 << 16
"""Blocks of a shard whose hashes may be open at once: 33 million rows, 60 MB."""


class Shard:
    """A shard file opened for reading.

    Args:
        file: where its bytes are; the shard closes it.
        row_format: of the cache.
        first_row: axis row of the tile's first row.
        rows: rows of the tile.
        tile: number of the tile.
        manifest_digest: of the cache.

    Raises:
        CorruptFile: header or size are not what the manifest implies.
    """

    def __init__(
        self, file: OpenFile, row_format: RowFormat, first_row: int, rows: int, *, tile: int, manifest_digest: str
    ):
        self.file, self.path, self.size = file, file.name, file.size
        self.row_format, self.first_row, self.rows, self.tile = row_format, first_row, rows, tile
        identity = {"tile": tile, "first_row": first_row, "rows": rows, "manifest_digest": manifest_digest}
        header = shard_header(row_format, **identity)
        blocks = 0
        if row_format.blocked:
            bound = row_format.blocks_bound(rows)
            blocks = self.size - plane_offsets(row_format, rows, len(header))[1]
            if not 0 <= blocks <= bound:
                raise CorruptFile(
                    f"{self.path} has {self.size} bytes; {rows} rows make {self.size - blocks} to "
                    f"{self.size - blocks + bound}: it is truncated or not ours"
                )
            header = shard_header(row_format, **identity, blocks_bytes=blocks)
        self._header = header
        self._check_header()
        self._planes = row_format.planes(rows, blocks)
        self._offsets, size = plane_offsets(row_format, rows, len(header), blocks)
        self._row_bytes, self._block_bound = row_format.bytes_per_row, row_format.block_bound(min(rows, BLOCK_ROWS))
        self._row_planes = [(plane.name, plane.row_bytes, self._offsets[plane.name]) for plane in self._planes[1:]]
        if self.size != size:
            raise CorruptFile(
                f"{self.path} has {self.size} bytes; {rows} rows make {size}: it is truncated or not ours"
            )

    def __enter__(self) -> "Shard":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self.file.close()

    def _check_header(self) -> None:
        expected = self._header
        found = bytearray(min(len(expected), self.size))
        self.file.fill([memoryview(found)], 0, len(found))
        if found == expected:
            return
        if found[:8] != expected[:8]:
            length = int.from_bytes(found[:8], "little")
            raise CorruptFile(
                f"{self.path}: header length {length}, expected {len(expected) - 8}; not a shard of this cache"
            )
        there, wanted = parse_json(bytes(found[8:]), f"{self.path} (header)"), parse_json(expected[8:], "header")
        for section in ("__metadata__", *there.keys(), *wanted.keys()):
            if there.get(section) != wanted.get(section):
                raise CorruptFile(
                    f"{self.path}: header {section} is {there.get(section)}, expected {wanted.get(section)}"
                )
        raise CorruptFile(f"{self.path}: the header's spelling was changed after it was written")

    def read(
        self,
        row: int,
        count: int,
        *,
        check: bool,
        out: dict[str, np.ndarray] | None = None,
        scratch: Scratch | None = None,
    ) -> dict[str, np.ndarray]:
        """Planes of rows [row, row + count), by name, without checksums and index; see `blocks.row_planes`.

        Args:
            row: first row, counted from the shard's start.
            count: number of rows, at least 1.
            check: read whole blocks and compare their checksums; a bad block is read once more before it is reported.
            out: planes [count, ...] to fill, contiguous.
            scratch: where planes are put if there is no `out`; the next read with it overwrites them.

        Raises:
            CorruptBlock: names the file and the rows.
        """
        scratch = scratch or Scratch()
        read = self._read_blocked if self.row_format.blocked else self._read_dense
        try:
            return read(row, count, check, out, scratch)
        except CorruptBlock:
            return read(row, count, check, out, scratch)

    def _read_dense(
        self, row: int, count: int, check: bool, out: dict[str, np.ndarray] | None, scratch: Scratch
    ) -> dict[str, np.ndarray]:
        """Wanted rows go straight to where they are wanted."""
        if out is None:
            out = scratch.rows(self.row_format, count)
        planes = [(width, offset, memoryview(out[name]).cast("B")) for name, width, offset in self._row_planes]
        first, end = self._extent_of_blocks(row, count) if check else (row, row + count)
        file = self.file
        if file.far:
            sums = (self._offsets["checksum"] + 8 * (first // BLOCK_ROWS), 8 * block_count(end - first))
            ranges = [(offset + first * width, (end - first) * width) for width, offset, _ in planes]
            file = file.ahead([sums, *ranges] if check else ranges)
        if not check:
            for width, offset, body in planes:
                file.fill([body], offset + row * width, len(body))
            return out
        stored = self._stored("checksum", first // BLOCK_ROWS, block_count(end - first), file)
        for start in range(first, end, PIECE_ROWS):
            stop = min(start + PIECE_ROWS, end)
            sums = self._read_and_hash(file, planes, row, count, start, stop, scratch)
            for block, found in enumerate(sums, (start - first) // BLOCK_ROWS):
                if found != stored[block]:
                    raise self._corrupt(first // BLOCK_ROWS + block)
        return out

    def _read_and_hash(
        self, file: OpenFile, planes: list[tuple], row: int, count: int, start: int, stop: int, scratch: Scratch
    ) -> list[int]:
        """Read the blocks of rows [start, stop), of which rows [row, row + count) are wanted; their checksums.

        Each plane is hashed as soon as it is read, while it is in the core's cache; what is not wanted is read beside.
        """
        low, high = max(start, row), min(stop, row + count)
        before, after = low - start, stop - high
        states = [xxhash.xxh3_64(seed=self.first_row + first) for first in range(start, stop, BLOCK_ROWS)]
        for width, offset, body in planes:
            wanted = body[(low - row) * width : (high - row) * width]
            parts, head, tail = [wanted], before * width, after * width
            if head or tail:
                spare = scratch.spare(head + tail)
                parts = [spare[:head], wanted, spare[head : head + tail]]
            file.fill(parts, offset + start * width, (stop - start) * width)
            if head:
                states[0].update(parts[0])
            at, end, block = 0, BLOCK_ROWS * width - head, BLOCK_ROWS * width
            for state in states:
                state.update(wanted[at:end])
                at, end = end, end + block
            if tail:
                states[-1].update(parts[2])
        return [state.intdigest() for state in states]

    def _read_blocked(
        self, row: int, count: int, check: bool, out: dict[str, np.ndarray] | None, scratch: Scratch
    ) -> dict[str, np.ndarray]:
        first, end = self._extent_of_blocks(row, count)
        block, blocks = first // BLOCK_ROWS, block_count(end - first)
        file = self.file
        if file.far:
            file = file.ahead(
                [(self._offsets[name], 8 * block_count(self.rows) + 8) for name in ("checksum", "index")]
            )
        bounds, stored = self._index(block, blocks, file), self._stored("checksum", block, blocks, file)
        data = scratch.take("blocks", (bounds[-1] - bounds[0],), np.uint8)
        self.file.fill([memoryview(data)], self._offsets["blocks"] + bounds[0], len(data))
        in_place = out is not None and (first, end) == (row, row + count)
        planes = out if in_place else scratch.rows(self.row_format, end - first)
        for i in range(blocks):
            piece = memoryview(data)[bounds[i] - bounds[0] : bounds[i + 1] - bounds[0]]
            rows = slice(i * BLOCK_ROWS, (i + 1) * BLOCK_ROWS)
            if check and xxhash.xxh3_64_intdigest(piece, seed=self.first_row + first + rows.start) != stored[i]:
                raise self._corrupt(block + i)
            try:
                unpack(piece, self.row_format, {name: plane[rows] for name, plane in planes.items()}, scratch)
            except BadBlock as error:
                raise self._corrupt(block + i, f"cannot be decoded, {error}") from error
        if in_place:
            return out
        planes = {name: plane[row - first : row - first + count] for name, plane in planes.items()}
        for name in out or ():
            np.copyto(out[name], planes[name])
        return out or planes

    def _extent_of_blocks(self, row: int, count: int) -> tuple[int, int]:
        """First row, and row after the last, of the blocks that hold the rows."""
        end = -(-(row + count) // BLOCK_ROWS) * BLOCK_ROWS
        return row // BLOCK_ROWS * BLOCK_ROWS, min(end, self.rows)

    def _stored(self, name: str, first: int, count: int, file: OpenFile | None = None) -> list[int]:
        """Items [first, first + count) of the plane `checksum` or `index`."""
        items = np.empty(count, "<u8")
        (file or self.file).fill([memoryview(items).cast("B")], self._offsets[name] + 8 * first, 8 * count)
        return items.tolist()

    def _index(self, block: int, blocks: int, file: OpenFile | None = None) -> list[int]:
        """Bounds in `blocks` of that many blocks; none is larger than a block can be."""
        bounds = self._stored("index", block, blocks + 1, file)
        total, bound = self._planes[-1].nbytes, self._block_bound
        ends = {0: 0, block_count(self.rows): total}
        for i, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            right = start <= end <= min(start + bound, total)
            if not right or ends.get(block + i, start) != start or ends.get(block + i + 1, end) != end:
                raise self._corrupt(block + i, f"is said to be bytes [{start}, {end}) of {total}")
        return bounds

    def _corrupt(self, block: int, what: str = "does not match its checksum, twice") -> CorruptBlock:
        start, end = block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, self.rows)
        return CorruptBlock(
            f"{self.path}: block {block} (rows [{start}, {end}) of the shard, [{self.first_row + start}, "
            f"{self.first_row + end}) of the cache) {what}. `megatron-kd cache verify` "
            "says what else is bad, `megatron-kd cache repair` computes it again",
            rows=(self.first_row + start, self.first_row + end),
        )

    def verify_blocks(self) -> str:
        """Check every byte against the blocks' checksums, reading the file once; memory for a chunk and the hashes.

        Returns:
            xxh3-128 of the whole file.

        Raises:
            CorruptBlock: the first block found that does not match.
        """
        digest = xxhash.xxh3_128(self._header)
        if block_count(self.rows) > _OPEN_HASHES:
            bad = range(block_count(self.rows))
        else:
            bad = self._scan_blocked(digest) if self.row_format.blocked else self._scan_dense(digest)
        if not bad:
            return digest.hexdigest()
        scratch = Scratch()
        for block in bad:  # once more; this raises
            self.read(block * BLOCK_ROWS, 1, check=True, scratch=scratch)
        digest = xxhash.xxh3_128()
        for piece in pieces(self.file):
            digest.update(piece)
        return digest.hexdigest()

    def _scan_dense(self, digest: Any) -> Sequence[int]:
        """Blocks that do not match. The file is read from start to end with one hash open for each block."""
        seeds = range(self.first_row, self.first_row + self.rows, BLOCK_ROWS)
        states = [xxhash.xxh3_64(seed=seed) for seed in seeds]
        stored = self._stored("checksum", 0, len(states))
        digest.update(np.array(stored, "<u8"))
        for plane in self._planes[1:]:
            width = plane.row_bytes * BLOCK_ROWS
            chunk = max(1, self.file.chunk // width)
            buffer = memoryview(bytearray(min(chunk * width, plane.nbytes)))
            for block in range(0, len(states), chunk):
                piece = buffer[: plane.nbytes - block * width]
                self.file.fill([piece], self._offsets[plane.name] + block * width, len(piece))
                digest.update(piece)
                for i, start in enumerate(range(0, len(piece), width), block):
                    states[i].update(piece[start : start + width])
        return [i for i, state in enumerate(states) if state.intdigest() != stored[i]]

    def _scan_blocked(self, digest: Any) -> Sequence[int]:
        blocks = block_count(self.rows)
        stored, bounds = self._stored("checksum", 0, blocks), self._index(0, blocks)
        digest.update(np.array(stored, "<u8"))
        digest.update(np.array(bounds, "<u8"))
        bad, first, scratch = [], 0, Scratch()
        while first < blocks:
            end = first + 1
            while end < blocks and bounds[end + 1] - bounds[first] <= self.file.chunk:
                end += 1
            data = memoryview(scratch.take("blocks", (bounds[end] - bounds[first],), np.uint8))
            self.file.fill([data], self._offsets["blocks"] + bounds[first], len(data))
            digest.update(data)
            for block in range(first, end):
                piece = data[bounds[block] - bounds[first] : bounds[block + 1] - bounds[first]]
                seed = self.first_row + block * BLOCK_ROWS
                if xxhash.xxh3_64_intdigest(piece, seed=seed) != stored[block]:
                    bad.append(block)
            first = end
        return bad
