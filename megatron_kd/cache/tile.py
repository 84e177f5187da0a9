# SPDX-License-Identifier: Apache-2.0
"""One tile on its way into a cache: rows are checked and encoded as they come, in any order.

In: rows of teacher output. Out: the parts of a shard file. Costs memory for the encoded tile (433 MB for a million
tokens at K=100) and one more byte a row.
"""

import numpy as np

from megatron_kd.cache import layout
from megatron_kd.cache.manifest import Manifest


class TileBuffer:
    """One tile, encoded as it is filled. `CacheWriter.open_tile` makes it."""

    def __init__(self, manifest: Manifest, tile: int, first_row: int, rows: int):
        self.tile, self.first_row, self.rows = tile, first_row, rows
        self._manifest, self._format = manifest, manifest.row_format
        self.planes = {plane.name: np.empty(plane.shape, plane.dtype) for plane in self._format.data_planes(rows)}
        self._filled = np.zeros(rows, bool)

    def put(
        self,
        row: int,
        tokens: np.ndarray,
        ids: np.ndarray,
        logprobs: np.ndarray,
        log_tail: np.ndarray,
        tail_T: np.ndarray | None = None,
    ) -> None:
        """Store rows [row, row + n) of the tile.

        Args:
            row: first row, counted from the tile's start.
            tokens: [n] integers, the input tokens at these positions.
            ids: [n, K] integers below `vocab_real`, most likely first.
            logprobs: [n, K] natural logarithms, not increasing along K.
            log_tail: [n] log of the mass outside the K, -inf if none.
            tail_T: [n, temperatures] log-sum-exp over the tail of (log p) / T; required if the manifest lists
                temperatures.

        Raises:
            ValueError: shapes or values that no cache can hold; nothing is stored then.
        """
        n = len(tokens)
        where = f"tile {self.tile}, rows [{row}, {row + n})"
        if not 0 <= row <= row + n <= self.rows:
            raise ValueError(f"{where}: the tile has {self.rows} rows")
        if self._filled[row : row + n].any():
            raise ValueError(f"{where}: some of these rows are already stored")
        given = {"tokens": tokens, "ids": ids, "logprobs": logprobs, "log_tail": log_tail, "tail_T": tail_T}
        self._check_shapes(where, n, given)
        if n:
            self._check_values(where, given)
        low, high = layout.split_ids(ids, self._format.id_hi_bits)
        with np.errstate(over="ignore"):  # below the range of f16 a log-probability becomes -inf, as it should
            for name, values in {**given, "ids_lo": low, "ids_hi": high}.items():
                if name in self.planes:
                    self.planes[name][row : row + n] = values
        self._filled[row : row + n] = True

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

    @property
    def missing(self) -> int:
        """Rows not stored yet."""
        return int(self.rows - np.count_nonzero(self._filled))

    def parts(self) -> list[bytes | memoryview]:
        """The shard file, in pieces."""
        data = [self.planes[plane.name] for plane in self._format.data_planes(self.rows)]
        header = layout.shard_header(
            self._format,
            tile=self.tile,
            first_row=self.first_row,
            rows=self.rows,
            manifest_digest=self._manifest.digest(),
        )
        sums = layout.block_checksums(data, self.first_row)
        return [header, *(memoryview(plane).cast("B") for plane in (sums, *data) if plane.size)]
