# SPDX-License-Identifier: Apache-2.0
"""Proving that a cache is what it says, at five depths.

In: a cache, sealed or not; for the deeper levels the units and the teacher. Out: a `Report` that lists every
problem found, not only the first. Levels include those before them and cost:

- `commits`: manifest, tile table, seal, one commit record a tile, stray files; kilobytes a tile;
- `header`: every shard's header and size;
- `checksums`: every byte of every shard against its commit's digest and its blocks' checksums; reads the cache once;
- `tokens`: the echo of the input against the units; reads the corpus too;
- `teacher`: some units computed again.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from megatron_kd.cache import codecs
from megatron_kd.cache.commits import SEAL, commit_file, read_commit, shard_file
from megatron_kd.cache.corpus import UnitSource, unit_table_digest
from megatron_kd.cache.errors import CacheError, StoreError
from megatron_kd.cache.examples import NAME as EXAMPLES
from megatron_kd.cache.files import FOLDERS, digest_bytes
from megatron_kd.cache.layout import RowFormat
from megatron_kd.cache.manifest import Manifest, expect
from megatron_kd.cache.reader import Rows, check_echo, check_seal, decode, load_cache, open_shard
from megatron_kd.cache.store import Store, open_store

LEVELS = ("commits", "header", "checksums", "tokens", "teacher")
_ROOT_FILES = ("manifest.json", "tiles.npy", EXAMPLES, SEAL)
_TOKEN_ROWS = 1 << 16
_TEACHER_TOLERANCE = 5e-3


@dataclass
class Report:
    """What `verify` found."""

    path: Path | str
    level: str
    tiles: int = 0
    """Tiles that were checked."""
    rows: int = 0
    """Rows of these tiles."""
    problems: list[str] = field(default_factory=list)
    """One message each; empty if all is well."""
    bad_records: set[int] = field(default_factory=set)
    """Tiles without a valid commit record."""
    bad_shards: set[int] = field(default_factory=set)
    """Tiles whose rows are missing, damaged, or not what they should be."""


def verify(
    path: str | Path,
    level: str = "checksums",
    *,
    units: UnitSource | None = None,
    recompute: Callable[[int], dict[str, np.ndarray]] | None = None,
    sample_units: int = 8,
    progress: bool = False,
) -> Report:
    """Check a cache.

    Args:
        path: the cache folder, or `msc://PROFILE/PATH`.
        level: one of `LEVELS`.
        units: what the cache was built from; needed from level `tokens` on.
        recompute: gives the rows of one unit as the arguments of `TileBuffer.put`; needed for level `teacher`.
        sample_units: units computed again, spread over the corpus.
        progress: show a progress bar.

    Returns:
        A report with every problem found.

    Raises:
        ValueError: an unknown level, or one that lacks its input.
        StoreError: the object store does not answer, so nothing can be said.
    """
    depth = _depth(level, units, recompute)
    store = open_store(path)
    report = Report(store.path, level)
    try:
        manifest, tiles = load_cache(store)
    except StoreError:
        raise
    except (CacheError, OSError) as error:
        report.problems.append(str(error))
        return report
    if units is not None and not _attempt(report, lambda: expect_units(manifest, report.path, units)):
        return report
    committed = _check_commits(report, store, manifest)
    sound = []
    for tile in tqdm(committed, unit="tile", desc=f"verify {level}", disable=not progress):
        if depth == 0 or _attempt(
            report, lambda tile=tile: _check_tile(report.path, manifest, tiles, tile, depth, units)
        ):
            sound.append(tile)
            report.rows += int(tiles[tile + 1, 0] - tiles[tile, 0])
        else:
            report.bad_shards.add(tile)
    report.tiles = len(committed)
    if depth >= 4:
        for unit in _spread(units, tiles, sound, sample_units):
            if not _attempt(
                report, lambda unit=unit: _check_unit(report.path, manifest, tiles, unit, units, recompute)
            ):
                report.bad_shards.add(tile_of_unit(tiles, unit))
    return report


def tile_of_unit(tiles: np.ndarray, unit: int) -> int:
    """The tile that holds a unit."""
    return int(np.searchsorted(tiles[:, 1], unit, side="right")) - 1


def _depth(level: str, units: Any, recompute: Any) -> int:
    if level not in LEVELS:
        raise ValueError(f"level must be one of {LEVELS}, found {level!r}")
    depth = LEVELS.index(level)
    if (depth >= 3 and units is None) or (depth >= 4 and recompute is None):
        raise ValueError(f"level {level!r} needs units" + (" and recompute" if depth >= 4 else ""))
    return depth


def _attempt(report: Report, check: Callable[[], None]) -> bool:
    """Run a check; note what it raises."""
    try:
        check()
    except StoreError:
        raise
    except (CacheError, OSError) as error:
        report.problems.append(str(error))
        return False
    return True


def expect_units(manifest: Manifest, path: Path | str, units: UnitSource) -> None:
    """Raise `IdentityMismatch` unless the cache was built from these units."""
    identity = units.identity()
    table = {"kind": units.kind, "count": len(units.lengths), "digest": unit_table_digest(units.lengths)}
    expect(manifest, path, {"corpus": identity.get("corpus", {}), "units": table | identity.get("units", {})})


def _check_commits(report: Report, store: Store, manifest: Manifest) -> list[int]:
    """Check seal, commit records and file names; returns the tiles that have a valid commit record."""
    digest, committed, shards = manifest.digest(), [], []
    for tile, found in enumerate(store.map(lambda tile: _record(store, tile, digest), range(manifest.tiles["count"]))):
        if isinstance(found, dict):
            shards.append(found["digest"])
            committed.append(tile)
            continue
        missing = f"tile {tile} is not committed: {Path(commit_file(tile)).name} is missing in commits/"
        report.problems.append(missing if isinstance(found, FileNotFoundError) else str(found))
        report.bad_records.add(tile)
    seals: list[dict[str, Any]] = []
    sealed = _attempt(report, lambda: seals.append(check_seal(report.path, manifest)))
    if sealed and len(committed) == manifest.tiles["count"]:
        found = digest_bytes("".join(shards).encode())
        if seals[0].get("shards") != found:
            report.problems.append(f"{SEAL} says shards = {seals[0].get('shards')}, the commit records make {found}")
    tiles = range(manifest.tiles["count"])
    for folder, file in (("commits", commit_file), ("shards", shard_file)):
        names = {Path(file(tile)).name for tile in tiles}
        _attempt(report, lambda folder=folder, names=names: _check_names(report, store, folder, names))
    _attempt(report, lambda: _check_names(report, store, "", {*_ROOT_FILES, *FOLDERS}))
    return committed


def _record(store: Store, tile: int, digest: str) -> dict[str, Any] | Exception:
    """A tile's commit record, or why there is none."""
    try:
        return read_commit(store, tile, digest)
    except StoreError:
        raise
    except (CacheError, OSError) as error:
        return error


def _check_names(report: Report, store: Store, folder: str, names: set[str]) -> None:
    for stray in sorted(store.names(folder).keys() - names):
        report.problems.append(f"{store.where(f'{folder}/{stray}'.lstrip('/'))!r} does not belong to the cache")


def _check_tile(
    path: Path | str, manifest: Manifest, tiles: np.ndarray, tile: int, depth: int, units: UnitSource | None
) -> None:
    with open_shard(path, manifest, tiles, tile) as shard:
        if depth >= 2:
            _check_digest(str(shard.path), shard.verify_blocks(), read_commit(path, tile, manifest.digest()))
        if depth >= 3:
            for start, tokens in _unit_stretches(units, tiles, tile):
                stored = shard.read(start, len(tokens), check=False)["tokens"]
                check_echo(stored, tokens, where=f"{shard.path}, rows from {start}")


def _check_digest(path: str, found: str, commit: dict[str, Any]) -> None:
    if found != commit["digest"]:
        raise CacheError(
            f"{path} has digest {found}, its commit record says {commit['digest']}, though all blocks match their "
            "checksums: a checksum or the record itself was changed"
        )


def _unit_stretches(units: UnitSource, tiles: np.ndarray, tile: int) -> Iterator[tuple[int, np.ndarray]]:
    """Tokens of a tile's units, joined into stretches of some ten thousand: (row in tile, tokens)."""
    start, parts, size = 0, [], 0
    for unit in range(int(tiles[tile, 1]), int(tiles[tile + 1, 1])):
        parts.append(units.tokens(unit))
        size += len(parts[-1])
        if size >= _TOKEN_ROWS:
            yield start, np.concatenate(parts)
            start, parts, size = start + size, [], 0
    if size:
        yield start, np.concatenate(parts)


def _spread(units: UnitSource, tiles: np.ndarray, sound: list[int], count: int) -> list[int]:
    """Up to `count` non-empty units, evenly spread over the tiles that passed so far."""
    if not sound:
        return []
    candidates = np.concatenate([np.arange(tiles[tile, 1], tiles[tile + 1, 1]) for tile in sound])
    candidates = candidates[units.lengths[candidates] > 0]
    chosen = np.linspace(0, len(candidates) - 1, min(count, len(candidates))).astype(int)
    return candidates[chosen].tolist()


def _check_unit(
    path: Path | str,
    manifest: Manifest,
    tiles: np.ndarray,
    unit: int,
    units: UnitSource,
    recompute: Callable[[int], dict[str, np.ndarray]],
) -> None:
    tile = tile_of_unit(tiles, unit)
    row = int(units.lengths[int(tiles[tile, 1]) : unit].sum())
    with open_shard(path, manifest, tiles, tile) as shard:
        planes = shard.read(row, int(units.lengths[unit]), check=True)
    stored = decode(planes, manifest.row_format)
    fresh, slack = _as_stored(recompute(unit), stored, manifest.row_format)
    compare_rows(stored, fresh, where=f"{units.kind} {unit}", slack=slack)


def _as_stored(
    fresh: dict[str, np.ndarray], stored: Rows, row_format: RowFormat
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Recomputed rows with the entries that are stored, the others in the tail; and the codec's rounding [n, 1]."""
    lowest = np.where(stored.logprobs > -np.inf, stored.logprobs, 0).min(1, keepdims=True)
    slack = -lowest / 100 if row_format.values == "u8" else np.zeros_like(lowest)
    if not row_format.ragged:
        return fresh, slack
    count = (stored.logprobs > -np.inf).sum(1)
    kept = codecs.first_entries(count, row_format.top_k)
    return fresh | {
        "ids": np.where(kept, fresh["ids"], codecs.ABSENT),
        "logprobs": np.where(kept, fresh["logprobs"], -np.inf),
        "log_tail": np.where(count > 0, codecs.fold(fresh["log_tail"], fresh["logprobs"], count), stored.log_tail),
    }, slack


def compare_rows(stored: Rows, fresh: dict[str, np.ndarray], *, where: str, slack: np.ndarray | float = 0.0) -> None:
    """Compare stored rows with recomputed ones; `slack` [n, 1] is allowed on top.

    Log-probabilities are compared rank by rank, within 0.005 plus the rounding of f16, so that near ties may change
    places; an id must agree wherever both neighbours in rank are further away than that.

    Raises:
        CacheError: names the first position that differs, with both values.
    """
    check_echo(stored.tokens, fresh["tokens"], where=where)
    values = np.concatenate([stored.logprobs, stored.log_tail[:, None]], 1)
    again = np.concatenate([fresh["logprobs"], fresh["log_tail"][:, None]], 1).astype(np.float32)
    with np.errstate(invalid="ignore"):
        error = np.where(values == again, 0, np.abs(values - again))
        allowed = slack + _TEACHER_TOLERANCE + np.abs(np.where(np.isfinite(again), again, 0)) * 2.0**-10
    wrong = ~(error <= allowed)
    with np.errstate(invalid="ignore"):  # two entries without mass
        gaps = np.pad(-np.diff(stored.logprobs, axis=1), ((0, 0), (1, 0)), constant_values=np.inf)
    after = np.append(gaps[:, 1:], np.zeros((len(gaps), 1), np.float32), 1)  # the last one may tie with the tail
    clear = np.minimum(gaps, after) > 2 * allowed[:, :-1]
    wrong[:, :-1] |= clear & (stored.ids != fresh["ids"])
    if wrong.any():
        position, rank = np.argwhere(wrong)[0].tolist()
        name = f"entry {rank}" if rank < stored.ids.shape[1] else "the tail"
        ids = f" (id {stored.ids[position, rank]} and {fresh['ids'][position, rank]})" if name != "the tail" else ""
        raise CacheError(
            f"{where}, position {position}: {name} is {values[position, rank]:.4f} in the cache, "
            f"{again[position, rank]:.4f} recomputed{ids}; {int(wrong.any(1).sum())} of {len(wrong)} positions "
            "differ. The teacher or its dtype is not the one that built the cache, or the rows are not its own"
        )
