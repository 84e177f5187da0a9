# SPDX-License-Identifier: Apache-2.0
"""How units become forward passes: windows of long ones, batches of short ones, and their rows put back in place.

In: a teacher and some units. Out: rows of each unit, in any order, every position once. Costs what the passes cost;
padding is kept low by putting units of similar length together.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from megatron_kd.cache.corpus import UnitSource
from megatron_kd.cache.errors import IdentityMismatch
from megatron_kd.cache.manifest import Manifest
from megatron_kd.loss import TeacherRows
from megatron_kd.teacher.errors import TeacherError
from megatron_kd.teacher.protocol import Teacher


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


def batch_rows(
    teacher: Teacher, units: UnitSource, batch: list[Piece], manifest: Manifest, strip_tokens: int | None = None
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Rows of one forward pass: (row counted from the first unit, arguments of `TileBuffer.put`).

    Positions that are not stored are not projected to the vocabulary. A replica without work takes part with a token
    of its own, as experts may lie on other replicas.
    """
    tokens = [_piece_tokens(teacher, units, piece) for piece in batch]
    wanted = [_wanted(units, piece) for piece in batch]
    rows = teacher.rows(
        tokens or [np.zeros(1, np.int64)],
        wanted=wanted or None,
        top_k=manifest.top_k,
        temperatures=manifest.temperatures,
        strip_tokens=strip_tokens,
    )
    return _split(rows, batch, tokens, wanted, manifest)


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
        yield from batch_rows(teacher, units, batch, manifest, strip_tokens)


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


def _wanted(units: UnitSource, piece: Piece) -> np.ndarray:
    """Positions of a piece that have a row to be stored, bool [length]."""
    wanted = np.arange(piece.length) >= piece.skip
    return wanted & units.stored(piece.unit)[piece.start : piece.stop] if hasattr(units, "stored") else wanted


def _split(
    rows: TeacherRows, batch: list[Piece], tokens: list[np.ndarray], wanted: list[np.ndarray], manifest: Manifest
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    names = ["ids", "logprobs", "log_tail", *(["tail_T"] if manifest.temperatures else [])]
    found = {name: getattr(rows, name).cpu().numpy() for name in names}
    at = 0
    for piece, own, mask in zip(batch, tokens, wanted, strict=True):
        stored = mask[piece.skip :]
        part = {name: plane[at : at + np.count_nonzero(stored)] for name, plane in found.items()}
        at += np.count_nonzero(stored)
        if not stored.all():
            part = {name: _spread(plane, stored, -np.inf if name == "logprobs" else 0) for name, plane in part.items()}
            part["stored"] = stored
        yield piece.row, {"tokens": own[piece.skip :], **part}


def _spread(plane: np.ndarray, stored: np.ndarray, filler: float) -> np.ndarray:
    """The stored rows of a plane at their places, the filler at the others."""
    out = np.full((len(stored), *plane.shape[1:]), filler, plane.dtype)
    out[stored] = plane
    return out
