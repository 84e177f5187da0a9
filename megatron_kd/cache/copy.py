# SPDX-License-Identifier: Apache-2.0
"""Copying a cache, for instance to a node's own disk, or from and to an object store: resumable, every byte checked.

In: a sealed cache. Out: the same cache elsewhere, sealed. Costs one read and one write of the tiles that are missing
there. Any number of processes may copy to one place; killed and started again, only what is missing is copied.
"""

import contextlib
from pathlib import Path

from tqdm import tqdm

from megatron_kd.cache.commits import SEAL, read_commit, shard_file
from megatron_kd.cache.errors import BadSetting, CorruptFile, MissingShard
from megatron_kd.cache.examples import publish_table, read_table
from megatron_kd.cache.reader import check_seal, load_cache
from megatron_kd.cache.store import Store, open_store
from megatron_kd.cache.writer import CacheWriter


def copy_cache(source: str | Path, target: str | Path, *, progress: bool = False) -> int:
    """Copy a sealed cache; a copy that was begun is finished.

    Args:
        source: the cache; a folder or `msc://PROFILE/PATH`, as the target.
        target: where to; absent, empty, or an unfinished copy of the same cache.
        progress: show a progress bar.

    Returns:
        Tiles that were copied; the others were there.

    Raises:
        Unsealed: the source is not complete.
        CorruptFile: a shard of the source is damaged; nothing of it arrives.
        IdentityMismatch, NotACache: the target holds something else.
        CannotWrite: no room, or no permission.
    """
    there, here = open_store(source), open_store(target)
    if _same_place(there, here):
        raise BadSetting(f"{here.path} is the cache itself; name another place for the copy")
    manifest, tiles = load_cache(there.path)
    check_seal(there.path, manifest)
    writer = CacheWriter(here, manifest, tiles)
    if (table := read_table(there, manifest)) is not None:
        publish_table(here, table)
    todo, sizes = writer.todo(), tiles[1:, 0] - tiles[:-1, 0]
    with tqdm(total=int(sizes.sum()), unit="rows", unit_scale=True, desc="copy", disable=not progress) as bar:
        bar.update(int(sizes.sum() - sizes[todo].sum()))
        for tile in todo:
            try:
                digest = read_commit(there, tile, manifest.digest())["digest"]
                with contextlib.closing(there.open(shard_file(tile))) as shard:
                    writer.take(tile, shard, digest)
            except FileNotFoundError as error:
                raise MissingShard(f"tile {tile} cannot be copied: there is no {error.filename}") from error
            bar.update(int(sizes[tile]))
    writer.seal()
    if there.read(SEAL) != here.read(SEAL):
        raise CorruptFile(f"{there.where(SEAL)} does not describe its shards; run `megatron-kd cache verify`")
    return len(todo)


def _same_place(a: Store, b: Store) -> bool:
    paths = [store.path.resolve() if isinstance(store.path, Path) else store.path for store in (a, b)]
    return paths[0] == paths[1]
