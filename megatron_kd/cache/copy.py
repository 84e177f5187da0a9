# SPDX-License-Identifier: Apache-2.0
"""Copying a cache, for instance to a node's own disk: resumable, and every byte checked.

In: a sealed cache. Out: the same cache elsewhere, sealed. Costs one read and one write of the tiles that are missing
there. Any number of processes may copy to one place; killed and started again, only what is missing is copied.
"""

import logging
from pathlib import Path

from tqdm import tqdm

from megatron_kd.cache.errors import BadSetting, CorruptFile, MissingShard
from megatron_kd.cache.files import read_bounded
from megatron_kd.cache.reader import check_seal, load_cache
from megatron_kd.cache.writer import CacheWriter, read_commit

logger = logging.getLogger(__name__)


def copy_cache(source: str | Path, target: str | Path, *, progress: bool = False) -> int:
    """Copy a sealed cache; a copy that was begun is finished.

    Args:
        source: the cache.
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
    source, target = Path(source), Path(target)
    if target.resolve() == source.resolve():
        raise BadSetting(f"{target} is the cache itself; name another place for the copy")
    manifest, tiles = load_cache(source)
    check_seal(source, manifest)
    writer = CacheWriter(target, manifest, tiles)
    todo, sizes = writer.todo(), tiles[1:, 0] - tiles[:-1, 0]
    with tqdm(total=int(sizes.sum()), unit="rows", unit_scale=True, desc="copy", disable=not progress) as bar:
        bar.update(int(sizes.sum() - sizes[todo].sum()))
        for tile in todo:
            try:
                commit = read_commit(source, tile, manifest.digest())
                writer.take(tile, source / "shards" / writer.shard_path(tile).name, commit["digest"])
            except FileNotFoundError as error:
                raise MissingShard(f"tile {tile} cannot be copied: there is no {error.filename}") from error
            bar.update(int(sizes[tile]))
    writer.seal()
    seals = [read_bounded(path / "SEALED.json") for path in (source, target)]
    if seals[0] != seals[1]:
        raise CorruptFile(f"{source / 'SEALED.json'} does not describe its shards; run `megatron-kd cache verify`")
    return len(todo)
