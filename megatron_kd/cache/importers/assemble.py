# SPDX-License-Identifier: Apache-2.0
"""From the records of a source to a cache of a corpus.

In: a source and the units of a corpus. Out: a sealed cache. The source is read twice: once to find which unit each
record belongs to, by its tokens, and once tile by tile, so memory is one tile and some 100 bytes a unit, in whatever
order the source is. Started again, only missing tiles are written.
"""

import logging
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_kd.cache.corpus import UnitSource
from megatron_kd.cache.errors import ImportRefused
from megatron_kd.cache.files import digest_bytes
from megatron_kd.cache.importers.records import RESOLUTION, Record, Source, with_tail
from megatron_kd.cache.manifest import make_manifest
from megatron_kd.cache.tile import TileBuffer
from megatron_kd.cache.writer import CacheWriter

logger = logging.getLogger(__name__)


@dataclass
class Imported:
    """What `import_cache` did."""

    path: Path
    units: int = 0
    """Units with rows of the source."""
    missing: int = 0
    """Units the source does not have; their rows say that there is no teacher."""
    foreign: int = 0
    """Records that belong to no unit."""
    unknown_rows: int = 0
    """Rows without a teacher: of missing units, and last positions that the source does not describe."""


def import_cache(
    source: Source,
    units: UnitSource,
    out: str | Path,
    *,
    teacher: dict[str, Any],
    vocab_real: int,
    vocab_padded: int | None = None,
    tokenizer: dict[str, Any] | None = None,
    top_k: int | None = None,
    values: str = "f16",
    codec: str = "raw",
    top_p: float = 1.0,
    tile_tokens: int = 1 << 20,
    accept_derived_tail: bool = False,
    partial: bool = False,
    progress: bool = False,
) -> Imported:
    """Make a cache of what another program computed.

    Args:
        source: where the rows come from.
        units: the corpus, as it will be trained on.
        out: the cache folder; made, or continued.
        teacher: what is known of the teacher; `repo`, `revision`, `weights`, `dtype`, `engine`, `version` and settings
            of the engine. What the source says of itself and how the tail was made is added.
        vocab_real: ids that can occur.
        vocab_padded: rows of the teacher's output projection; default the same.
        tokenizer: see `tokenizer_identity`; None if unknown.
        top_k: entries a row; default as many as the first record has.
        values, codec, top_p, tile_tokens: as for `make_manifest`.
        accept_derived_tail: take a source whose values are less exact than fp32, where 1 - sum(p) is coarse.
        partial: go on where units have no record or records no unit.
        progress: show progress bars.

    Raises:
        ImportRefused: the source lacks something, contradicts itself, or is not of this corpus.
    """
    if source.precision != "f32" and not accept_derived_tail:
        raise ImportRefused(
            f"the source's values are {source.precision}: the mass outside its top K is known only to "
            f"{RESOLUTION[source.precision]:g}, and nothing below that can be distilled. Accept it with "
            "--accept-derived-tail (the manifest says so), or compute the rows again with `megatron-kd cache build`"
        )
    place, result = _place(source, units, Path(out), vocab_real, partial, progress)
    if top_k is None:
        top_k = next((record.ids.shape[1] for _, record in source if len(record.ids)), 1)
    tail = f"derived from {source.precision} values, at least {RESOLUTION[source.precision]:g}"
    manifest, tiles = make_manifest(
        units,
        teacher={**teacher, "source": source.settings, "tail": tail},
        tokenizer=tokenizer,
        vocab_real=vocab_real,
        vocab_padded=vocab_real if vocab_padded is None else vocab_padded,
        top_k=top_k,
        values=values,
        codec=codec,
        top_p=top_p,
        tile_tokens=tile_tokens,
    )
    writer = CacheWriter(out, manifest, tiles)
    for tile in tqdm(writer.todo(), unit="tile", desc="import", disable=not progress):
        buffer, row = writer.open_tile(tile), 0
        for unit in range(*tiles[tile : tile + 2, 1].tolist()):
            record = source.load(place[unit]) if unit in place else None
            _put(buffer, row, units.tokens(unit), record, source.precision, top_k)
            row += int(units.lengths[unit])
        writer.commit(buffer)
    writer.seal()
    return result


def _place(
    source: Source, units: UnitSource, out: Path, vocab_real: int, partial: bool, progress: bool
) -> tuple[dict[int, Any], Imported]:
    """Which record each unit's rows come from, and what is missing."""
    of_tokens: dict[str, list[int]] = defaultdict(list)
    for unit in np.flatnonzero(units.lengths).tolist():
        of_tokens[_token_digest(units.tokens(unit))].append(unit)
    result, place, seen = Imported(out), {}, {}
    for handle, record in tqdm(source, unit="record", desc="match", disable=not progress):
        _check_ids(record, vocab_real)
        found = _units_of(record, of_tokens, handle)
        if not found:
            result.foreign += 1
            if not partial:
                raise ImportRefused(
                    f"{record.where}: no unit of the corpus has these {len(record.tokens)} tokens. It was made from "
                    "another corpus or tokenizer, cut at a length limit, or has special tokens around it; --partial "
                    "goes on without it"
                )
            continue
        digest, length = record.digest(), len(record.ids)
        for unit in found:
            where, other, rows = seen.setdefault(unit, (record.where, digest, length))
            if other != digest:
                raise ImportRefused(
                    f"{where} and {record.where} have the same tokens and other rows (digests {other} and {digest}): "
                    "the engine's answers depended on something else, as under prefix caching"
                )
            place[unit] = handle
    _count(result, units, seen)
    if result.missing and not partial:
        first = min(set(np.flatnonzero(units.lengths).tolist()) - seen.keys())
        raise ImportRefused(
            f"{result.missing} of {len(units.lengths)} units have no record in the source, the first is {units.kind} "
            f"{first}; --partial goes on, without a teacher for these"
        )
    return place, result


def _units_of(record: Record, of_tokens: dict[str, list[int]], handle: Any) -> list[int]:
    """Units with a record's tokens; a source may have added one token, to be told the last row."""
    if record.tokens is None:  # the source is in the units' own order, and its handle begins with the unit
        return [handle[0]]
    if whole := of_tokens.get(_token_digest(record.tokens)):
        return whole
    return of_tokens.get(_token_digest(record.tokens[:-1]), []) if len(record.tokens) > 1 else []


def _token_digest(tokens: np.ndarray) -> str:
    return digest_bytes(np.ascontiguousarray(tokens, "<i8").tobytes())


def _check_ids(record: Record, vocab_real: int) -> None:
    there = np.isfinite(record.logprobs)
    bad = there & ((record.ids < 0) | (record.ids >= vocab_real))
    if bad.any():
        row, entry = np.argwhere(bad)[0].tolist()
        raise ImportRefused(
            f"{record.where}, row {row}: id {record.ids[row, entry]} lies outside [0, {vocab_real}), the real "
            "vocabulary: the source took padding for tokens, or has another vocabulary"
        )


def _count(result: Imported, units: UnitSource, seen: dict[int, tuple[str, str, int]]) -> None:
    for unit, length in enumerate(units.lengths.tolist()):
        rows = min(seen[unit][2], length) if unit in seen else 0
        result.units += unit in seen
        result.missing += bool(length) and unit not in seen
        result.unknown_rows += length - rows


def _put(buffer: TileBuffer, row: int, tokens: np.ndarray, record: Record | None, precision: str, top_k: int) -> None:
    """Store a unit's rows; those that the source lacks as rows without a teacher: no entry, all mass in the tail."""
    n = len(tokens)
    ids, logprobs = np.zeros((n, top_k), np.int64), np.full((n, top_k), -np.inf)
    log_tail = np.zeros(n)
    if record is not None:
        m, k = min(n, len(record.ids)), record.ids.shape[1]
        if m and k < top_k:
            raise ImportRefused(f"{record.where}: rows have {k} entries, {top_k} are wanted; use --top-k {k}")
        values, tail = (x[:m] for x in with_tail(record, precision))
        if m:
            ids[:m], logprobs[:m] = record.ids[:m, :top_k], values[:, :top_k]
            log_tail[:m] = np.logaddexp(tail, np.logaddexp.reduce(values[:, top_k:], axis=-1)) if k > top_k else tail
    if n:
        buffer.put(row, np.asarray(tokens, np.int64), ids, logprobs, log_tail)
