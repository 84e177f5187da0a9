# SPDX-License-Identifier: Apache-2.0
"""Building a cache with a Hugging Face model, on one process or many.

In: a teacher and a unit source. Out: a sealed cache folder. Costs one forward pass of the backbone over the corpus,
one output projection and selection per token, memory for the weights, the hidden states of one batch, one strip of
logits and one tile. Interrupted at any moment and started again, it does only the tiles that are missing.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from megatron_kd.cache.corpus import FirstUnits, UnitSource
from megatron_kd.cache.errors import BadSetting, IdentityMismatch
from megatron_kd.cache.manifest import Manifest, make_manifest
from megatron_kd.cache.writer import CacheWriter
from megatron_kd.loss import TeacherRows
from megatron_kd.teacher.errors import TeacherError
from megatron_kd.teacher.gate import check_teacher
from megatron_kd.teacher.model import HuggingFaceTeacher
from megatron_kd.teacher.protocol import Teacher

logger = logging.getLogger(__name__)


class Piece(NamedTuple):
    """One forward pass over a part of a unit: tokens [start, stop), of which the first `skip` are context only."""

    unit: int
    start: int
    stop: int
    skip: int
    row: int
    """Row, counted from the first unit of the range, that the first position after `skip` belongs to."""

    @property
    def length(self) -> int:
        """Tokens of the forward pass."""
        return self.stop - self.start


def build_cache(
    teacher: str | Path | Teacher,
    units: UnitSource,
    out: str | Path,
    *,
    top_k: int = 100,
    temperatures: Sequence[float] = (),
    tile_tokens: int = 1 << 20,
    batch_tokens: int = 8192,
    strip_tokens: int | None = None,
    dtype: str = "float32",
    device: str | None = None,
    values: str = "f16",
    max_context: int | None = None,
    window: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    tokenizer: Any = None,
    vocab_size: int | None = None,
    gguf_file: str | None = None,
    revision: str | None = None,
    accept_teacher_loss: bool = False,
    writer: tuple[int, int] = (0, 1),
    progress: bool = True,
) -> Path:
    """Run the teacher over all units and store its rows; continue where an earlier run with equal settings stopped.

    Args:
        teacher: folder, hub name, or a loaded teacher (then the loading options below are not used).
        units: what to annotate.
        out: the cache folder.
        top_k: entries a row; at most the real vocabulary.
        temperatures: temperatures besides 1 that the cache shall serve.
        tile_tokens: target size of a tile; a killed build loses at most one.
        batch_tokens: tokens of a forward pass, padding included; a longer unit goes alone.
        strip_tokens: tokens projected to the vocabulary at once.
        dtype, device, tokenizer, vocab_size, gguf_file, revision: see `HuggingFaceTeacher.load`.
        values: `f16` or `f32` log-probabilities in the cache.
        max_context: longest unit the teacher may see at once; default its config's.
        window, stride: allow longer units; each is read in windows of `window` tokens that advance by `stride`, which
            is half a window unless given.
        limit: only the first `limit` units.
        accept_teacher_loss: build although the teacher predicts the corpus no better than chance.
        writer: (i, n): this process does the tiles whose number is i modulo n; the last one to finish seals.
        progress: show a progress bar.

    Returns:
        `out`.

    Raises:
        TeacherError, ImplausibleTeacher, IdentityMismatch, CacheError: nothing is written if they concern the input.
    """
    if not 0 <= writer[0] < writer[1]:
        raise BadSetting(f"writer must be (i, n) with 0 <= i < n, found {writer}")
    if limit is not None:
        units = FirstUnits(units, limit)
    if isinstance(teacher, str | Path):
        teacher = HuggingFaceTeacher.load(
            teacher,
            gguf_file=gguf_file,
            revision=revision,
            dtype=dtype,
            device=device,
            tokenizer=tokenizer,
            vocab_size=vocab_size,
        )
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
        temperatures=tuple(temperatures),
        tile_tokens=tile_tokens,
        context=context,
    )
    replica, replicas = teacher.replica
    share = (writer[0] * replicas + replica, writer[1] * replicas)
    cache = CacheWriter(out, manifest, tiles) if teacher.writes else None
    todo = teacher.agree(None if cache is None else cache.todo())
    _write_tiles(
        cache,
        teacher,
        units,
        manifest,
        _Tiles(tiles, todo, share),
        batch_tokens=batch_tokens,
        strip_tokens=strip_tokens,
        progress=progress,
    )
    return Path(out)


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


def _write_tiles(
    cache: CacheWriter | None,
    teacher: Teacher,
    units: UnitSource,
    manifest: Manifest,
    tiles: _Tiles,
    *,
    batch_tokens: int,
    strip_tokens: int | None,
    progress: bool,
) -> None:
    """Fill and commit this share's tiles. Without a cache this process computes only."""
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
    jobs = _jobs(units, tiles, manifest, batch_tokens, done)
    buffer = None
    with bar:
        while teacher.anyone((job := next(jobs, None)) is not None):
            tile, batch, last = job or (None, [], False)
            rows = _batch_rows(teacher, units, batch, manifest, strip_tokens)
            if cache is None or tile is None:
                continue
            buffer = buffer or cache.open_tile(tile)
            for row, planes in rows:
                buffer.put(row, **planes)
                bar.update(len(planes["tokens"]))
            if last:
                cache.commit(buffer)
                buffer = None
    if cache is None:
        return
    left = [tile for tile in cache.todo() if tile % count != index]
    if left:
        logger.info("%d tiles are left to other writers; the last one seals the cache", len(left))
    else:
        cache.seal()


def _jobs(
    units: UnitSource, tiles: _Tiles, manifest: Manifest, batch_tokens: int, done: Callable[[int], bool]
) -> Iterator[tuple[int, list[Piece], bool]]:
    """(tile, forward pass, whether it is the tile's last) of all tiles of this share."""
    for tile in tiles.own:
        if done(tile):  # another writer's, meanwhile
            continue
        *first, last = batches(cut_pieces(units.lengths, tiles.span(tile), manifest.context), batch_tokens) or [[]]
        for batch in first:
            yield tile, batch, False
        yield tile, last, True


def context_policy(units: UnitSource, longest: int | None, window: int | None, stride: int | None) -> dict[str, Any]:
    """Decide what context the teacher sees; recorded in the manifest.

    Raises:
        TeacherError: a unit is longer than the teacher's context and no window was given, or the window makes no
            sense.
    """
    if window is None:
        if stride is not None:
            raise TeacherError(f"stride {stride} was given without a window; give both")
        if longest is not None and units.lengths.max(initial=0) > longest:
            unit = int(np.argmax(units.lengths))
            raise TeacherError(
                f"{units.kind} {unit} has {units.lengths[unit]} tokens, the teacher's context is {longest}. Give a "
                f"window and a stride (--window {longest} --stride {longest // 2}): later tokens then see the last "
                f"{longest - longest // 2} to all of the window, and the manifest says so"
            )
        return {"kind": "unit"}
    stride = max(1, window // 2) if stride is None else stride
    if not 1 <= stride <= window or (longest is not None and window > longest):
        raise TeacherError(
            f"window {window} and stride {stride} need 1 <= stride <= window <= {longest}, the teacher's context"
        )
    return {"kind": "window", "window": window, "stride": stride}


def cut_pieces(lengths: np.ndarray, span: range, context: dict[str, Any]) -> list[Piece]:
    """The forward passes that cover the units of `span`, each position exactly once."""
    pieces, row = [], 0
    for unit in span:
        length = int(lengths[unit])
        window, stride = context.get("window", length), context.get("stride", length)
        covered = 0
        while covered < length:
            stop = min(covered + stride, length) if covered else min(window, length)
            start = max(0, stop - window)
            pieces.append(Piece(unit, start, stop, covered - start, row + covered))
            covered = stop
        row += length
    return pieces


def batches(pieces: list[Piece], batch_tokens: int) -> list[list[Piece]]:
    """Group pieces of similar length; a padded batch has at most `batch_tokens` tokens unless it is a single piece."""
    grouped: list[list[Piece]] = []
    for piece in sorted(pieces, key=lambda piece: (-piece.length, piece.row)):
        if not grouped or (len(grouped[-1]) + 1) * grouped[-1][0].length > batch_tokens:
            grouped.append([])
        grouped[-1].append(piece)
    return grouped


def _batch_rows(
    teacher: Teacher, units: UnitSource, batch: list[Piece], manifest: Manifest, strip_tokens: int | None = None
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Rows of one forward pass: (row counted from the first unit, arguments of `TileBuffer.put`).

    A replica without work takes part with a token of its own, as experts may lie on other replicas.
    """
    tokens = [_piece_tokens(teacher, units, piece) for piece in batch]
    rows = teacher.rows(
        tokens or [np.zeros(1, np.int64)],
        skip=[piece.skip for piece in batch] or None,
        top_k=manifest.top_k,
        temperatures=manifest.temperatures,
        strip_tokens=strip_tokens,
    )
    return _split(rows, batch, tokens, manifest)


def teacher_rows(
    teacher: Teacher,
    units: UnitSource,
    span: range,
    manifest: Manifest,
    *,
    batch_tokens: int = 8192,
    strip_tokens: int | None = None,
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Rows of the units in `span`, in any order: (row counted from the first unit, arguments of `TileBuffer.put`)."""
    for batch in batches(cut_pieces(units.lengths, span, manifest.context), batch_tokens):
        yield from _batch_rows(teacher, units, batch, manifest, strip_tokens)


def unit_rows(teacher: Teacher, units: UnitSource, unit: int, manifest: Manifest) -> dict[str, np.ndarray]:
    """All rows of one unit, as the arguments of `TileBuffer.put`."""
    parts = sorted(teacher_rows(teacher, units, range(unit, unit + 1), manifest), key=lambda part: part[0])
    return {name: np.concatenate([planes[name] for _, planes in parts]) for name in parts[0][1]}


def _piece_tokens(teacher: Teacher, units: UnitSource, piece: Piece) -> np.ndarray:
    tokens = units.tokens(piece.unit)[piece.start : piece.stop].astype(np.int64)
    if len(tokens) != piece.length:
        raise IdentityMismatch(
            f"{units.kind} {piece.unit} is shorter than its stated {units.lengths[piece.unit]} tokens"
        )
    if tokens.min() < 0 or tokens.max() >= teacher.vocab_real:
        raise IdentityMismatch(
            f"{units.kind} {piece.unit} has token ids in [{tokens.min()}, {tokens.max()}], {teacher.name} knows [0, "
            f"{teacher.vocab_real}): the corpus was made with another tokenizer"
        )
    return tokens


def _split(
    rows: TeacherRows, batch: list[Piece], tokens: list[np.ndarray], manifest: Manifest
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    ids, logprobs, log_tail, tail_T = (x.cpu().numpy() for x in rows[:4])
    at = 0
    for piece, own in zip(batch, tokens, strict=True):
        part = slice(at, at + piece.length - piece.skip)
        planes = {
            "tokens": own[piece.skip :],
            "ids": ids[part],
            "logprobs": logprobs[part],
            "log_tail": log_tail[part],
        }
        if manifest.temperatures:
            planes["tail_T"] = tail_T[part]
        yield piece.row, planes
        at = part.stop
