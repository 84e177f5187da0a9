# SPDX-License-Identifier: Apache-2.0
"""Building a cache, on one process or many.

In: a teacher and a unit source. Out: a sealed cache folder. Costs one forward pass of the backbone over the corpus,
one output projection and selection per token, memory for the weights, the hidden states of one batch, one strip of
logits, the rows of three batches and one tile. Rows are encoded and written while the next batch is computed.
Interrupted at any moment and started again, it does only the tiles that are missing.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from megatron_kd.cache.corpus import FirstUnits, UnitSource
from megatron_kd.cache.errors import BadSetting
from megatron_kd.cache.examples import encode, publish_table
from megatron_kd.cache.manifest import Manifest, make_manifest
from megatron_kd.cache.writer import CacheWriter
from megatron_kd.teacher.errors import TeacherError
from megatron_kd.teacher.gate import check_teacher
from megatron_kd.teacher.huggingface import HuggingFaceTeacher
from megatron_kd.teacher.passes import Piece, batch_rows, batches, context_policy, cut_pieces
from megatron_kd.teacher.protocol import Teacher

logger = logging.getLogger(__name__)

_WAITING_PASSES = 2
"""Forward passes whose rows may wait to be written."""


class Plan(NamedTuple):
    """What a build would do."""

    rows: int
    """Tokens of the cache."""
    tiles: int
    bytes: int
    """Of all shards, before compression."""
    loss: float
    """The teacher's on a sample of the corpus, in nats."""
    tokens_per_s: float
    """Of this process or replica, measured on one forward pass."""


@dataclass(frozen=True)
class Build:
    """A build that was checked and has written nothing. `prepare_build` makes it."""

    teacher: Teacher
    units: UnitSource
    out: Path
    manifest: Manifest
    tiles: np.ndarray
    loss: float
    batch_tokens: int
    strip_tokens: int | None

    def plan(self) -> Plan:
        """Size and speed, from one forward pass. Writes nothing."""
        pieces = cut_pieces(self.units.lengths, range(len(self.units.lengths)), self.manifest.context)
        first = batches(pieces, self.batch_tokens)[:1]
        started = time.perf_counter()
        for batch in first:
            list(batch_rows(self.teacher, self.units, batch, self.manifest, self.strip_tokens))
        seconds = time.perf_counter() - started
        rows = self.manifest.rows
        return Plan(
            rows=rows,
            tiles=len(self.tiles) - 1,
            bytes=rows * self.manifest.row_format.bytes_per_row,
            loss=self.loss,
            tokens_per_s=sum(piece.length - piece.skip for batch in first for piece in batch) / seconds,
        )

    def run(self, *, writer: tuple[int, int] = (0, 1), progress: bool = True) -> Path:
        """Compute and commit what is missing; continue where an earlier run with equal settings stopped.

        Args:
            writer: (i, n): this process, or these ranks, do the tiles whose number is i modulo n; the last one to
                finish seals.
            progress: show a progress bar.

        Returns:
            The cache folder.
        """
        if not 0 <= writer[0] < writer[1]:
            raise BadSetting(f"writer must be (i, n) with 0 <= i < n, found {writer}")
        replica, replicas = self.teacher.replica
        share = (writer[0] * replicas + replica, writer[1] * replicas)
        cache = CacheWriter(self.out, self.manifest, self.tiles) if self.teacher.writes else None
        if cache is not None and hasattr(self.units, "table"):
            publish_table(cache.store, encode(self.units.table))
        todo = self.teacher.agree(None if cache is None else cache.todo())
        _write_tiles(self, cache, _Tiles(self.tiles, todo, share), progress=progress)
        return self.out


def build_cache(
    teacher: str | Path | Teacher,
    units: UnitSource,
    out: str | Path,
    *,
    writer: tuple[int, int] = (0, 1),
    progress: bool = True,
    **settings: Any,
) -> Path:
    """Run the teacher over all units and store its rows: `prepare_build`, then `Build.run`."""
    if not 0 <= writer[0] < writer[1]:
        raise BadSetting(f"writer must be (i, n) with 0 <= i < n, found {writer}")
    return prepare_build(teacher, units, out, **settings).run(writer=writer, progress=progress)


def prepare_build(
    teacher: str | Path | Teacher,
    units: UnitSource,
    out: str | Path,
    *,
    top_k: int = 100,
    temperatures: Sequence[float] = (),
    tile_tokens: int = 1 << 20,
    batch_tokens: int = 8192,
    strip_tokens: int | None = None,
    values: str = "f16",
    codec: str = "raw",
    top_p: float = 1.0,
    max_context: int | None = None,
    window: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    accept_teacher_loss: bool = False,
    **loading: Any,
) -> Build:
    """Load the teacher and check that it, the corpus and the settings fit together. Writes nothing.

    Args:
        teacher: folder, hub name, or a loaded teacher, on all its ranks.
        units: what to annotate.
        out: the cache folder.
        top_k: entries a row; at most the real vocabulary.
        temperatures: temperatures besides 1 that the cache shall serve.
        tile_tokens: target size of a tile; a killed build loses at most one per writer.
        batch_tokens: tokens of a forward pass, padding included; a longer unit goes alone.
        strip_tokens: tokens projected to the vocabulary at once.
        values: `f16`, `f32` or `u8` log-probabilities in the cache.
        codec: `raw` or `zstd`.
        top_p: a row keeps no more entries than hold this mass; 1 keeps all K.
        max_context: longest unit the teacher may see at once; default its config's.
        window, stride: allow longer units; each is read in windows of `window` tokens that advance by `stride`, which
            is half a window unless given.
        limit: only the first `limit` units.
        accept_teacher_loss: build although the teacher predicts the corpus no better than chance.
        loading: of a folder or name, see `HuggingFaceTeacher.load`.

    Raises:
        TeacherError, ImplausibleTeacher, IdentityMismatch, CacheError: something does not fit.
    """
    if limit is not None:
        units = FirstUnits(units, limit)
    if isinstance(teacher, str | Path):
        teacher = HuggingFaceTeacher.load(teacher, **loading)
    context = context_policy(units, max_context or teacher.max_context, window, stride)
    if top_k > teacher.vocab_real:
        raise TeacherError(
            f"top_k={top_k} exceeds the {teacher.vocab_real} ids of {teacher.name}; use at most that many"
        )
    loss = check_teacher(teacher, units, accept_loss=accept_teacher_loss)
    logger.info("teacher %s: loss %.3f nats on a sample of the corpus", teacher.name, loss)
    manifest, tiles = make_manifest(
        units,
        teacher=teacher.identity,
        tokenizer=teacher.tokenizer,
        vocab_real=teacher.vocab_real,
        vocab_padded=teacher.vocab_padded,
        top_k=top_k,
        values=values,
        codec=codec,
        top_p=top_p,
        temperatures=tuple(temperatures),
        tile_tokens=tile_tokens,
        context=context,
    )
    return Build(teacher, units, Path(out), manifest, tiles, loss, batch_tokens, strip_tokens)


class _Tiles(NamedTuple):
    """Which tiles there are, are missing, and are this process's share (i, n) of the missing ones."""

    table: np.ndarray
    todo: list[int]
    share: tuple[int, int]

    @property
    def own(self) -> list[int]:
        """Missing tiles of this share."""
        return [tile for tile in self.todo if tile % self.share[1] == self.share[0]]

    def span(self, tile: int) -> range:
        """The tile's units."""
        return range(int(self.table[tile, 1]), int(self.table[tile + 1, 1]))

    def rows(self, tiles: slice | list[int]) -> int:
        """How many rows some tiles have together."""
        return int(np.diff(self.table[:, 0])[tiles].sum())


def _write_tiles(build: Build, cache: CacheWriter | None, tiles: _Tiles, *, progress: bool) -> None:
    """Fill and commit this share's tiles. Without a cache this process computes only."""
    teacher = build.teacher
    index, count = tiles.share
    total = tiles.rows(slice(index, None, count))
    bar = tqdm(
        total=total,
        initial=total - tiles.rows(tiles.own),
        unit="tok",
        unit_scale=True,
        desc="cache",
        disable=not progress or cache is None,
    )
    done = cache.is_committed if cache is not None and teacher.alone else lambda tile: False
    jobs = _jobs(build, tiles, done)
    buffer = None

    def store(tile: int, rows: Iterator[tuple[int, dict[str, np.ndarray]]], last: bool) -> None:
        nonlocal buffer
        buffer = buffer or cache.open_tile(tile)
        for row, planes in rows:
            buffer.put(row, **planes)
            bar.update(len(planes["tokens"]))
        if last:
            cache.commit(buffer)
            buffer = None

    waiting: deque[Future] = deque()
    with bar, ThreadPoolExecutor(1, "writer") as writer:  # encodes and writes while the next pass is computed
        while teacher.anyone((job := next(jobs, None)) is not None):
            tile, batch, last = job or (None, [], False)
            rows = batch_rows(teacher, build.units, batch, build.manifest, build.strip_tokens)
            if cache is not None and tile is not None:
                waiting.append(writer.submit(store, tile, rows, last))
            if len(waiting) > _WAITING_PASSES:
                waiting.popleft().result()
        for future in waiting:
            future.result()
    if cache is None:
        return
    left = [tile for tile in cache.todo() if tile % count != index]
    if left:
        logger.info("%d tiles are left to other writers; the last one seals the cache", len(left))
    else:
        cache.seal()


def _jobs(build: Build, tiles: _Tiles, done: Callable[[int], bool]) -> Iterator[tuple[int, list[Piece], bool]]:
    """(tile, forward pass, whether it is the tile's last) of all tiles of this share."""
    for tile in tiles.own:
        if done(tile):  # another writer's, meanwhile
            continue
        pieces = cut_pieces(build.units.lengths, tiles.span(tile), build.manifest.context)
        *first, last = batches(pieces, build.batch_tokens) or [[]]
        for batch in first:
            yield tile, batch, False
        yield tile, last, True
