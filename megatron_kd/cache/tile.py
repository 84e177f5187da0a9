# SPDX-License-Identifier: Apache-2.0
"""One tile on its way into a cache: rows are checked and encoded as they come, in any order.

In: rows of teacher output. Out: the parts of a shard file. Costs memory for the tile with all K entries a row (433 MB
for a million tokens at K=100), one more byte a row and, in a blocked cache, the encoded blocks.
"""

from typing import Any

import numpy as np
import xxhash

from megatron_kd.cache import blocks, codecs, layout
from megatron_kd.cache.manifest import Manifest


def rows_with_repeats(ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
    """Rows, bool [n], that hold an id twice among their entries with mass.

    Args:
        ids: [n, K] integers, 0 to 2^31 - 1.
        logprobs: [n, K], not increasing along K; -inf without mass.
    """
    ordered = ids.astype(np.int32)
    if logprobs[:, -1:].min(initial=0) == -np.inf:  # what has no mass is like nothing else
        ordered = np.where(logprobs > -np.inf, ordered, np.arange(-ids.shape[1], 0, dtype=np.int32))
    ordered.sort(axis=1)
    return (ordered[:, 1:] == ordered[:, :-1]).any(1)


class TileBuffer:
    """One tile, encoded as it is filled. `CacheWriter.open_tile` makes it."""

    def __init__(self, manifest: Manifest, tile: int, first_row: int, rows: int):
        self.tile, self.first_row, self.rows = tile, first_row, rows
        self._manifest, self._format = manifest, manifest.row_format
        self.planes = {name: np.empty(shape, dtype) for name, shape, dtype in blocks.row_planes(self._format, rows)}
        self._filled = np.zeros(rows, bool)

    def put(
        self,
        row: int,
        tokens: np.ndarray,
        ids: np.ndarray,
        logprobs: np.ndarray,
        log_tail: np.ndarray,
        tail_T: np.ndarray | None = None,
        stored: np.ndarray | None = None,
    ) -> None:
        """Store rows [row, row + n) of the tile.

        Args:
            row: first row, counted from the tile's start.
            tokens: [n] integers, the input tokens at these positions.
            ids: [n, K] integers below `vocab_real`, most likely first, distinct but where the mass is 0.
            logprobs: [n, K] natural logarithms, not increasing along K.
            log_tail: [n] log of the mass outside the K, -inf if none.
            tail_T: [n, temperatures] log-sum-exp over the tail of (log p) / T; required if the manifest lists
                temperatures.
            stored: bool [n]; of rows where it is false only the tokens are kept, and all mass is said to be outside.
                This saves space in a ragged cache.

        Raises:
            ValueError: shapes or values that no cache can hold; nothing is stored then.
        """
        n = len(tokens)
        where = self._check_place(row, n)
        given = {"tokens": tokens, "ids": ids, "logprobs": logprobs, "log_tail": log_tail, "tail_T": tail_T}
        self._check_shapes(where, n, given)
        if n:
            self._check_values(where, given)
        if stored is not None:
            given["logprobs"] = np.where(stored[:, None], logprobs, -np.inf)
            given["log_tail"] = np.where(stored, log_tail, 0)
            given["tail_T"] = None if tail_T is None else np.where(stored[:, None], tail_T, 0)
        for name, values in self._encode(given).items():
            self.planes[name][row : row + n] = values
        self._filled[row : row + n] = True

    def _encode(self, given: dict[str, Any]) -> dict[str, np.ndarray]:
        """Planes of checked rows."""
        row_format, planes = self._format, {"tokens": given["tokens"]}
        log_tail, tail_T, logprobs = (given[name] for name in ("log_tail", "tail_T", "logprobs"))
        if row_format.ragged:
            count = planes["count"] = codecs.nucleus(logprobs, self._manifest.top_p)
            log_tail = codecs.fold(log_tail, logprobs, count)
            for column, temperature in enumerate(row_format.temperatures):
                tail_T = tail_T.copy() if column == 0 else tail_T
                tail_T[:, column] = codecs.fold(tail_T[:, column], logprobs, count, temperature)
            logprobs = np.where(codecs.first_entries(count, row_format.top_k), logprobs, -np.inf)
            planes["ids"] = given["ids"]
        else:
            planes["ids_lo"], planes["ids_hi"] = codecs.split_ids(given["ids"], row_format.id_hi_bits)
        planes["log_tail"] = log_tail
        if row_format.temperatures:
            planes["tail_T"] = tail_T
        return planes | codecs.encode_values(logprobs, row_format.values)

    def _check_place(self, row: int, n: int) -> str:
        where = f"tile {self.tile}, rows [{row}, {row + n})"
        if not 0 <= row <= row + n <= self.rows:
            raise ValueError(f"{where}: the tile has {self.rows} rows")
        if self._filled[row : row + n].any():
            raise ValueError(f"{where}: some of these rows are already stored")
        return where

    def _check_shapes(self, where: str, n: int, given: dict[str, np.ndarray | None]) -> None:
        top_k, temperatures = self._format.top_k, self._format.temperatures
        shapes = {"ids": (n, top_k), "logprobs": (n, top_k), "log_tail": (n,)}
        if temperatures:
            shapes["tail_T"] = (n, len(temperatures))
        for name, shape in shapes.items():
            found = None if given[name] is None else given[name].shape
            if found != shape:
                raise ValueError(f"{where}: {name} must have shape {shape}, found {found}")

    def _check_values(self, where: str, given: dict[str, np.ndarray | None]) -> None:
        for name in ("logprobs", "log_tail"):
            if not given[name].max() <= 1e-3:  # NaN fails too
                raise ValueError(f"{where}: {name} must be log-probabilities, found NaN or positive values")
        if self._format.temperatures and np.isnan(given["tail_T"]).any():
            raise ValueError(f"{where}: tail_T has NaN")
        if given["ids"].min() < 0 or given["ids"].max() >= self._manifest.vocab_real:
            raise ValueError(f"{where}: ids must lie in [0, {self._manifest.vocab_real}), the real vocabulary")
        if (given["logprobs"][:, 1:] > given["logprobs"][:, :-1]).any():
            raise ValueError(f"{where}: logprobs must not increase along K (entry 0 is the most likely id)")
        repeated = rows_with_repeats(given["ids"], given["logprobs"])
        if repeated.any():
            raise ValueError(f"{where}: an id occurs twice among the entries of row {int(repeated.argmax())} of these")

    @property
    def missing(self) -> int:
        """Rows not stored yet."""
        return int(self.rows - np.count_nonzero(self._filled))

    def parts(self) -> list[bytes | memoryview]:
        """The shard file, in pieces."""
        row_format = self._format
        pieces, sums = [], []
        if row_format.blocked:
            compressor = blocks.compressor(row_format)
            for start in range(0, self.rows, layout.BLOCK_ROWS):
                rows = {name: plane[start : start + layout.BLOCK_ROWS] for name, plane in self.planes.items()}
                pieces.append(blocks.pack(rows, row_format, compressor))
                sums.append(xxhash.xxh3_64_intdigest(pieces[-1], seed=self.first_row + start))
            pieces.insert(0, np.cumsum([0, *map(len, pieces)], dtype="<u8").tobytes())
        else:
            data = [self.planes[plane.name] for plane in row_format.data_planes(self.rows)]
            sums = layout.block_checksums(data, self.first_row)
            pieces = [memoryview(plane).cast("B") for plane in data if plane.size]
        header = layout.shard_header(
            row_format,
            tile=self.tile,
            first_row=self.first_row,
            rows=self.rows,
            manifest_digest=self._manifest.digest(),
            blocks_bytes=sum(map(len, pieces[1:])) if row_format.blocked else 0,
        )
        return [header, np.array(sums, "<u8").tobytes(), *pieces]
