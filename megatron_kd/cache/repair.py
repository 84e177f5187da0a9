# SPDX-License-Identifier: Apache-2.0
"""Setting bad tiles aside and computing them again, and nothing else.

In: a cache, and for tiles whose rows are lost the units and something that computes rows. Out: the cache,
complete and sealed again; what was bad lies in its `quarantine/`. Costs one verification, and the teacher's work on
the bad tiles alone. Killed at any moment and started again it goes on: a tile that was set aside is simply missing.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from megatron_kd.cache.corpus import UnitSource, cut_tiles
from megatron_kd.cache.errors import CorruptFile, Incomplete
from megatron_kd.cache.files import digest_bytes
from megatron_kd.cache.manifest import Manifest, decode_tiles, encode_tiles, load_manifest
from megatron_kd.cache.reader import load_cache
from megatron_kd.cache.store import Store, open_store
from megatron_kd.cache.verify import Report, expect_units, verify
from megatron_kd.cache.writer import CacheWriter

logger = logging.getLogger(__name__)


def quarantine(report: Report) -> list[int]:
    """Move what `verify` found to be bad into `quarantine/`, so that nobody reads it.

    A commit record that is bad while its shard is whole is written again at once.

    Returns:
        Tiles that have to be computed again; if there are any, the cache is not sealed any more.

    Raises:
        CacheError: manifest or tile table are bad themselves, or the folder cannot be written to.
    """
    writer = CacheWriter(report.path, *load_cache(report.path))
    for tile in sorted(report.bad_shards | report.bad_records):
        writer.set_aside(tile, shard=tile in report.bad_shards)
    return writer.todo()


def repair(
    path: str | Path,
    *,
    level: str = "checksums",
    units: UnitSource | None = None,
    compute: Callable[[CacheWriter, list[int]], None] | None = None,
    progress: bool = False,
) -> tuple[Report, list[int]]:
    """Verify a cache, set aside what is bad, compute that again and seal.

    Args:
        path: the cache folder, or `msc://PROFILE/PATH`.
        level: how deep to verify first; `commits` trusts shards that nobody has set aside.
        units: what the cache was built from; needed where rows are lost, and for level `tokens`.
        compute: fills and commits the given tiles; needed where rows are lost.
        progress: show a progress bar.

    Returns:
        What verification found before, and the tiles that were computed.

    Raises:
        Incomplete: rows are lost and `compute` was not given; names the tiles, which are set aside.
        IdentityMismatch: `units` are not those of the cache.
        CacheError: the manifest is damaged: only a copy, or the same `cache build` in an empty folder, can help.
    """
    store = open_store(path)
    path = store.path
    if units is not None:
        manifest = load_manifest(path)
        expect_units(manifest, path, units)
        _restore_tiles(store, manifest, units)
    report = verify(path, level, units=units if level == "tokens" else None, progress=progress)
    todo = quarantine(report)
    writer = CacheWriter(path, *load_cache(path))
    if todo and compute is None:
        some = ", ".join(map(str, todo[:10])) + (", ..." if len(todo) > 10 else "")
        raise Incomplete(
            f"{path}: {len(todo)} tiles have to be computed again: {some}. Name the corpus and the teacher (--corpus, "
            "--teacher) to do so"
        )
    if todo:
        logger.info("computing %d of %d tiles again", len(todo), len(writer.tiles) - 1)
        compute(writer, todo)
    writer.seal()
    return report, todo


def _restore_tiles(cache: Path | str | Store, manifest: Manifest, units: UnitSource) -> None:
    """Make a damaged or missing tile table again from the units; the manifest says whether it is the same."""
    store, name, stamp = open_store(cache), "tiles.npy", None
    where, limit = store.where(name), 16 * (manifest.tiles["count"] + 1) + 4096
    try:
        stamp = store.state(name).stamp
        store.twice(lambda: decode_tiles(store.read(name, limit), manifest, where))
        return
    except (CorruptFile, FileNotFoundError) as error:
        logger.warning("%s is made again: %s", where, error)
    data = encode_tiles(cut_tiles(units.lengths, manifest.tiles["tokens"]))
    if digest_bytes(data) != manifest.tiles["digest"]:
        raise CorruptFile(f"{where} is damaged and the tiles were cut in some other way; restore it from a copy")
    with store.draft(name, [data]) as draft:
        if stamp is not None:
            store.set_aside(name, stamp)
        draft.publish()
