# SPDX-License-Identifier: Apache-2.0
"""Reading a sealed cache: any spans of the token axis, at the temperature and K of the loss.

In: spans (start, length). Out: `Rows`, the teacher's distribution after each of those tokens, in the spans' order.
Memory is the result plus 2,048 rows of scratch a thread, whatever the size of the cache; at most 64 files are open. Of
an object store 16 MiB are read at once, and as many more held. Every byte that is used was compared with a checksum
(`check_blocks="always"`).
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from megatron_kd.cache import codecs, layout
from megatron_kd.cache.blocks import Scratch, row_planes
from megatron_kd.cache.commits import SEAL, commit_file, read_commit, shard_file
from megatron_kd.cache.errors import (
    CorruptFile,
    EchoMismatch,
    MissingShard,
    ServeError,
    SpanError,
    Unsealed,
)
from megatron_kd.cache.files import decode_record, node_name
from megatron_kd.cache.layout import RowFormat
from megatron_kd.cache.manifest import Manifest, decode_tiles, expect, load_manifest, not_a_cache
from megatron_kd.cache.shard import PIECE_ROWS, Shard
from megatron_kd.cache.store import Store, open_store, when_visible

logger = logging.getLogger(__name__)

_RUN_ROWS = 64 * layout.BLOCK_ROWS
"""Rows asked of a dense shard at once where nothing is decoded."""
_FAR_BYTES = 16 << 20
"""Bytes asked of an object store at once, as far as whole blocks allow."""
_OPEN_SHARDS, _OPEN_FAR_SHARDS = 64, 4096
_SAMPLE_EVERY = 16


class Rows(NamedTuple):
    """Teacher rows; row i belongs to input token `tokens[i]` and describes the token after it."""

    tokens: np.ndarray
    """uint32 [n], the input tokens as the teacher saw them."""
    ids: np.ndarray
    """int32 [n, K], most likely first; -1 where a ragged row has no further entry (log-probability -inf)."""
    logprobs: np.ndarray
    """float32 [n, K], natural log, at the temperature asked for."""
    log_tail: np.ndarray
    """float32 [n], log of the mass outside the K; -inf if none."""

    @property
    def stored(self) -> np.ndarray:
        """bool [n]: whether the row says anything of the teacher; one without an entry keeps the token alone."""
        return self.logprobs[:, 0] > -np.inf


class CacheReader:
    """Random access to a sealed cache. Threads may share one reader.

    Args:
        path: the cache folder, or `msc://PROFILE/PATH`.
        check_blocks: `always` compares every block read with its checksum; `sample` one read in 16.
        wait_s: how long to wait for a file that is not visible on this node yet (each file).

    Raises:
        NotACache, FutureVersion, CorruptFile, Unsealed: the folder cannot be read.
    """

    def __init__(
        self, path: str | Path | Store, *, check_blocks: Literal["always", "sample"] = "always", wait_s: float = 10.0
    ):
        if check_blocks not in ("always", "sample"):
            raise ValueError(f"check_blocks must be 'always' or 'sample', found {check_blocks!r}")
        self.store, self.check_blocks, self.wait_s = open_store(path), check_blocks, wait_s
        self.path = self.store.path
        self.manifest, self.tiles = load_cache(self.store, wait_s=wait_s)
        self.n_rows = self.manifest.rows
        self._digest = self.manifest.digest()
        check_seal(self.store, self.manifest, wait_s=wait_s)
        self._shards: OrderedDict[int, Shard] = OrderedDict()
        self._lock = threading.Lock()
        self._local = threading.local()
        self._reads = 0

    def expect(self, **fields: Any) -> None:
        """Check identity: fields of `Manifest`, dicts by the keys given.

        Example:
            `reader.expect(corpus={"index_digest": corpus.index_digest()}, vocab_real=201088)`

        Raises:
            IdentityMismatch: names each field that differs and both values.
        """
        expect(self.manifest, self.path, fields)

    def check_serves(self, *, top_k: int | None = None, temperature: float = 1.0) -> None:
        """Raise `ServeError` if rows with this K at this temperature cannot be had from the cache."""
        if top_k is not None and not 1 <= top_k <= self.manifest.top_k:
            raise ServeError(
                f"top_k={top_k} was asked of {self.path}, which stores {self.manifest.top_k} entries a row; use at "
                "most that many, or build the cache with a larger --top-k"
            )
        if temperature != 1.0 and temperature not in self.manifest.temperatures:
            served = [1.0, *self.manifest.temperatures]
            raise ServeError(
                f"temperature {temperature} was asked of {self.path}, which serves {served}; use one of these, or "
                f"build the cache with --temperature {temperature}"
            )

    def read(
        self, spans: np.ndarray, *, top_k: int | None = None, temperature: float = 1.0, out: Rows | None = None
    ) -> Rows:
        """Read the rows of `spans`, one after the other.

        Args:
            spans: int64 [m, 2], (start, length) on the token axis.
            top_k: entries a row; default as stored. Entries beyond it are added to the tail.
            temperature: T; the result is the teacher's distribution with logits divided by T.
            out: arrays to fill, of the right shapes and types; memory used again is a third faster than fresh memory.

        Raises:
            ServeError, SpanError: the request cannot be met.
            MissingShard, CorruptFile, CorruptBlock: the cache is damaged there.
        """
        self.check_serves(top_k=top_k, temperature=temperature)
        spans = self._check_spans(spans)
        n, k = int(spans[:, 1].sum()), self.manifest.top_k if top_k is None else top_k
        wanted = {"tokens": (np.uint32, n), "ids": (np.int32, n, k), "logprobs": (np.float32, n, k)}
        out = self._outputs(wanted | {"log_tail": (np.float32, n)}, None if out is None else out._asdict())
        out, scratch, at = Rows(**out), self._scratch, 0
        for tile, row, count in self._pieces(spans, self._longest(PIECE_ROWS)):
            planes = self._shard(tile).read(row, count, check=self._should_check(), scratch=scratch)
            self._decode(planes, Rows(*(plane[at : at + count] for plane in out)), temperature)
            at += count
        return out

    def read_planes(self, spans: np.ndarray, *, out: dict[str, np.ndarray] | None = None) -> dict[str, np.ndarray]:
        """The rows of `spans` as they are stored, verified like `read` but not decoded; see `blocks.row_planes`.

        Args:
            spans: int64 [m, 2], (start, length) on the token axis.
            out: planes to fill, as an earlier call returned them for as many rows.

        Raises:
            SpanError, MissingShard, CorruptFile, CorruptBlock.
        """
        spans = self._check_spans(spans)
        planes = row_planes(self.manifest.row_format, int(spans[:, 1].sum()))
        out = self._outputs({name: (dtype, *shape) for name, shape, dtype in planes}, out)
        at, longest = 0, PIECE_ROWS if self.manifest.row_format.blocked else _RUN_ROWS
        for tile, row, count in self._pieces(spans, self._longest(longest)):
            part = {name: plane[at : at + count] for name, plane in out.items()}
            self._shard(tile).read(row, count, check=self._should_check(), out=part, scratch=self._scratch)
            at += count
        return out

    @staticmethod
    def _outputs(wanted: dict[str, tuple], given: dict[str, np.ndarray] | None) -> dict[str, np.ndarray]:
        if given is None:
            return {name: np.empty(shape, dtype) for name, (dtype, *shape) in wanted.items()}
        found = {name: (array.dtype, *array.shape) for name, array in given.items()}
        if found != wanted or not all(array.flags.c_contiguous for array in given.values()):
            raise ValueError(f"out must be contiguous arrays {wanted}, found {found}")
        return given

    @property
    def _scratch(self) -> Scratch:
        """Buffers of the calling thread."""
        if not hasattr(self._local, "scratch"):
            self._local.scratch = Scratch()
        return self._local.scratch

    def _check_spans(self, spans: np.ndarray) -> np.ndarray:
        spans = np.asarray(spans)
        if spans.ndim != 2 or spans.shape[1] != 2 or not np.issubdtype(spans.dtype, np.integer):
            raise SpanError(f"spans must be integers [m, 2] (start, length), found {spans.dtype} {spans.shape}")
        spans = spans.astype(np.int64)
        bad = (
            (spans[:, 0] < 0)
            | (spans[:, 1] < 0)
            | (spans[:, 1] > self.n_rows)
            | (spans[:, 0] > self.n_rows - spans[:, 1])
        )
        if bad.any():
            start, length = spans[np.flatnonzero(bad)[0]].tolist()
            raise SpanError(
                f"rows [{start}, {start + length}) were asked of {self.path}, which has [0, {self.n_rows})"
            )
        return spans[spans[:, 1] > 0]

    def _pieces(self, spans: np.ndarray, longest: int) -> Iterator[tuple[int, int, int]]:
        """Cut spans at tile borders and to `longest` rows, whole blocks of them: (tile, row in tile, count)."""
        if not len(spans):
            return
        starts, ends = spans[:, 0], spans.sum(1)
        opens = np.append(True, starts[1:] != ends[:-1])  # adjacent spans are read as one
        borders = self.tiles[:, 0]
        for start, end in zip(starts[opens].tolist(), ends[np.append(opens[1:], True)].tolist(), strict=True):
            while start < end:
                tile = int(np.searchsorted(borders, start, side="right")) - 1
                row = start - int(borders[tile])
                stop = row // layout.BLOCK_ROWS * layout.BLOCK_ROWS + longest
                count = min(end - start, int(borders[tile + 1]) - start, stop - row)
                yield tile, row, count
                start += count

    def _longest(self, rows: int) -> int:
        """Rows to read at once: `rows` of a file, more or fewer of an object, for which each request takes a while."""
        if self.store.far:
            blocks = _FAR_BYTES // (layout.BLOCK_ROWS * self.manifest.row_format.bytes_per_row)
            rows = max(1, blocks) * layout.BLOCK_ROWS
        return rows

    def _should_check(self) -> bool:
        self._reads += 1
        return self.check_blocks == "always" or self._reads % _SAMPLE_EVERY == 1

    def _shard(self, tile: int) -> Shard:
        with self._lock:
            shard = self._shards.get(tile)
            if shard is None:
                shard = open_shard(self.store, self.manifest, self.tiles, tile, wait_s=self.wait_s)
                self._shards[tile] = shard
            self._shards.move_to_end(tile)
            if len(self._shards) > (_OPEN_FAR_SHARDS if self.store.far else _OPEN_SHARDS):
                self._shards.popitem(last=False)  # closed when the last thread that uses it lets go
            return shard

    def shard_size(self, tile: int) -> int:
        """Bytes of a tile's shard."""
        return self._shard(tile).size

    def _decode(self, planes: dict[str, np.ndarray], out: Rows, temperature: float) -> None:
        """Fill `out` from stored planes."""
        row_format = self.manifest.row_format
        k, stored_k = out.ids.shape[1], row_format.top_k
        if temperature == 1.0 and k == stored_k:
            decode(planes, row_format, out)
            return
        out.tokens[:] = planes["tokens"]
        codecs.decode_ids(planes, row_format, out.ids)
        values = self._scratch.take("values", (len(out.ids), stored_k), np.float32)
        codecs.decode_values(planes, values)
        tail = planes["log_tail"]
        if temperature != 1.0:
            tail = planes["tail_T"][:, row_format.temperatures.index(temperature)]
            values /= np.float32(temperature)
            values -= (total := np.logaddexp(_log_sum_exp(values), tail))[:, None]
            tail = tail - total
        out.logprobs[:], out.log_tail[:] = values[:, :k], tail
        if k < stored_k:
            np.logaddexp(_log_sum_exp(values[:, k:]), out.log_tail, out=out.log_tail)


def decode(planes: dict[str, np.ndarray], row_format: RowFormat, out: Rows | None = None) -> Rows:
    """Rows with all their entries, at temperature 1, from stored planes; into `out` if given."""
    n, k = len(planes["tokens"]), row_format.top_k
    if out is None:
        out = Rows(
            np.empty(n, np.uint32), np.empty((n, k), np.int32), np.empty((n, k), np.float32), np.empty(n, np.float32)
        )
    out.tokens[:], out.log_tail[:] = planes["tokens"], planes["log_tail"]
    codecs.decode_ids(planes, row_format, out.ids)
    codecs.decode_values(planes, out.logprobs)
    return out


def _log_sum_exp(values: np.ndarray) -> np.ndarray:
    """Log-sum-exp of [n, k] along k; -inf where all are. The largest entry comes first."""
    top = np.maximum(values[:, :1], np.float32(-3e38))
    with np.errstate(divide="ignore"):
        return np.log(np.exp(values - top).sum(-1)) + top[:, 0]


def load_cache(cache: Path | str | Store, *, wait_s: float = 0.0) -> tuple[Manifest, np.ndarray]:
    """Manifest and tile table of a cache, sealed or not.

    Raises:
        NotACache, FutureVersion, CorruptFile.
    """
    store, name = open_store(cache), "tiles.npy"
    manifest = load_manifest(store, wait_s=wait_s)
    size = 16 * (manifest.tiles["count"] + 1) + 4096

    def load() -> np.ndarray:
        return decode_tiles(store.read(name, size), manifest, store.where(name))

    try:
        return manifest, when_visible(store, name, wait_s, lambda: store.twice(load))
    except FileNotFoundError as error:
        raise not_a_cache(store, name, wait_s) from error


def check_seal(cache: Path | str | Store, manifest: Manifest, *, wait_s: float = 0.0) -> dict[str, Any]:
    """Read SEALED.json.

    Raises:
        Unsealed: there is none.
        CorruptFile: it is damaged or seals another cache.
    """
    store = open_store(cache)
    seal = store.where(SEAL)
    try:
        record = when_visible(store, SEAL, wait_s, lambda: store.twice(lambda: decode_record(store.read(SEAL), seal)))
    except FileNotFoundError as error:
        raise Unsealed(
            f"{store.path} is not complete: node {node_name()} sees no {seal} (waited {wait_s:g} s). Finish it by "
            "running the same `megatron-kd cache build` again; what is missing shows `megatron-kd cache info`"
        ) from error
    wanted = {"manifest": manifest.digest(), "rows": manifest.rows, "tiles": manifest.tiles["count"]}
    for field, value in wanted.items():
        if record.get(field) != value:
            raise CorruptFile(
                f"{seal} says {field} = {record.get(field)!r}, the cache has {value!r}: it seals another cache"
            )
    return record


def open_shard(
    cache: Path | str | Store, manifest: Manifest, tiles: np.ndarray, tile: int, *, wait_s: float = 0.0
) -> Shard:
    """Open a committed tile.

    Raises:
        MissingShard: the shard or its commit record is not there.
        CorruptFile: one of them is not what the manifest implies.
    """
    store, digest = open_store(cache), manifest.digest()
    first, rows = int(tiles[tile, 0]), int(tiles[tile + 1, 0] - tiles[tile, 0])

    def open_it() -> Shard:
        file = store.open(shard_file(tile))
        return Shard(file, manifest.row_format, first, rows, tile=tile, manifest_digest=digest)

    name = commit_file(tile)
    try:
        commit = when_visible(store, name, wait_s, lambda: read_commit(store, tile, digest))
        name = shard_file(tile)
        opened = when_visible(store, name, wait_s, lambda: store.twice(open_it))
    except FileNotFoundError as error:
        raise MissingShard(
            f"tile {tile} (rows [{first}, {first + rows})): node {node_name()} sees no {store.where(name)} (waited "
            f"{wait_s:g} s). Restore it from a copy, or run the same `megatron-kd cache build` again"
        ) from error
    if (commit["rows"], commit["bytes"]) != (rows, opened.size):
        raise CorruptFile(
            f"{opened.path}: the commit record says {commit['rows']} rows, {commit['bytes']} bytes; found {rows} "
            f"rows, {opened.size} bytes"
        )
    return opened


def check_echo(rows_tokens: np.ndarray, batch_tokens: np.ndarray, *, where: str) -> None:
    """Compare the tokens stored beside the teacher's rows with the tokens of the batch.

    Args:
        rows_tokens: `Rows.tokens`, [n].
        batch_tokens: the model's input at the same positions, [n].
        where: what is being compared, for the message (batch, dataset, sample).

    Raises:
        EchoMismatch: says where, and whether it looks like a shift by one.
    """
    ours, theirs = np.asarray(rows_tokens).astype(np.int64), np.asarray(batch_tokens).astype(np.int64)
    if ours.shape != theirs.shape or ours.ndim != 1:
        raise EchoMismatch(f"{where}: the cache has tokens of shape {ours.shape}, the batch {theirs.shape}")
    wrong = np.flatnonzero(ours != theirs)
    if not wrong.size:
        return
    first = int(wrong[0])
    hint = "this is another corpus, tokenizer, seed or order than the cache was built from"
    for shift, matches in ((1, ours[1:] == theirs[:-1]), (-1, ours[:-1] == theirs[1:])):
        if len(matches) >= 2 and matches.mean() > 0.9:
            hint = f"the teacher's rows look shifted by {shift:+d} against the batch"
    raise EchoMismatch(
        f"{where}: {wrong.size} of {len(ours)} tokens differ, first at position {first}: the cache has {ours[first]}, "
        f"the batch {theirs[first]}; {hint}"
    )
