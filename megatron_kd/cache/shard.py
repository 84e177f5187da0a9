# SPDX-License-Identifier: Apache-2.0
"""One open shard: its header checked, its rows read by position.

In: a path and what the manifest says must be there. Out: planes of any range of rows, verified against the block
checksums. Costs one file descriptor and, per read, the bytes of the 512-row blocks the range touches.
"""

import os
from pathlib import Path

import numpy as np

from megatron_kd.cache.errors import CorruptBlock, CorruptFile
from megatron_kd.cache.files import open_regular, parse_json, read_exact
from megatron_kd.cache.layout import BLOCK_ROWS, RowFormat, block_checksums, plane_offsets, shard_header

_VERIFY_ROWS = 16 * BLOCK_ROWS


class Shard:
    """A shard file opened for reading.

    Args:
        path: the file.
        row_format: of the cache.
        first_row: axis row of the tile's first row.
        rows: rows of the tile.
        tile: number of the tile.
        manifest_digest: of the cache.

    Raises:
        FileNotFoundError: no such file.
        CorruptFile: header or size are not what the manifest implies.
    """

    def __init__(
        self, path: Path, row_format: RowFormat, first_row: int, rows: int, *, tile: int, manifest_digest: str
    ):
        self.path, self.row_format, self.first_row, self.rows, self.tile = path, row_format, first_row, rows, tile
        self._planes = row_format.planes(rows)
        header = shard_header(row_format, tile=tile, first_row=first_row, rows=rows, manifest_digest=manifest_digest)
        self._offsets, size = plane_offsets(row_format, rows, len(header))
        self.fd = open_regular(path)
        self._check_header(header)
        found = os.fstat(self.fd).st_size
        if found != size:
            raise CorruptFile(f"{path} has {found} bytes; {rows} rows make {size}: it is truncated or not ours")

    def __enter__(self) -> "Shard":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def __del__(self):
        self.close()

    def close(self) -> None:
        """Close the file; safe to call twice."""
        fd, self.fd = getattr(self, "fd", None), None
        if fd is not None:
            os.close(fd)

    def _check_header(self, expected: bytes) -> None:
        found = bytearray(min(len(expected), os.fstat(self.fd).st_size))
        read_exact(self.fd, memoryview(found), 0, str(self.path))
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

    def read(self, row: int, count: int, *, check: bool) -> dict[str, np.ndarray]:
        """Planes of rows [row, row + count), by name, without the checksum plane.

        Args:
            row: first row, counted from the shard's start.
            count: number of rows.
            check: read whole blocks and compare their checksums; a bad block is read once more before it is reported.

        Raises:
            CorruptBlock: names the file and the rows.
        """
        if not check:
            return self._read_planes(row, count)
        first = row // BLOCK_ROWS * BLOCK_ROWS
        end = min(-(-(row + count) // BLOCK_ROWS) * BLOCK_ROWS, self.rows)
        planes = self._read_planes(first, end - first)
        bad = self._bad_blocks(planes, first, end)
        if bad.size:
            planes = self._read_planes(first, end - first)
            bad = self._bad_blocks(planes, first, end)
        if bad.size:
            self._report(first // BLOCK_ROWS + int(bad[0]))
        return {name: plane[row - first : row - first + count] for name, plane in planes.items()}

    def _read_planes(self, row: int, count: int) -> dict[str, np.ndarray]:
        planes = {}
        for plane in self._planes[1:]:
            data = np.empty((count, *plane.shape[1:]), plane.dtype)
            read_exact(
                self.fd,
                memoryview(data.reshape(-1)),
                self._offsets[plane.name] + row * plane.row_bytes,
                str(self.path),
            )
            planes[plane.name] = data
        return planes

    def _bad_blocks(self, planes: dict[str, np.ndarray], first: int, end: int) -> np.ndarray:
        sums = block_checksums(list(planes.values()), self.first_row + first)
        stored = np.empty_like(sums)
        read_exact(self.fd, memoryview(stored), self._offsets["checksum"] + first // BLOCK_ROWS * 8, str(self.path))
        return np.flatnonzero(stored != sums)

    def _report(self, block: int) -> None:
        start, end = block * BLOCK_ROWS, min((block + 1) * BLOCK_ROWS, self.rows)
        raise CorruptBlock(
            f"{self.path}: block {block} (rows [{start}, {end}) of the shard, [{self.first_row + start}, "
            f"{self.first_row + end}) of the cache) does not match its checksum, twice. Run `megatron-kd cache "
            f"verify`; to rebuild the tile delete commits/{self.path.stem}.json and run the same `megatron-kd cache "
            "build` again",
            rows=(self.first_row + start, self.first_row + end),
        )

    def verify_blocks(self) -> None:
        """Check every block; memory for 8,192 rows."""
        for start in range(0, self.rows, _VERIFY_ROWS):
            self.read(start, min(_VERIFY_ROWS, self.rows - start), check=True)
