# SPDX-License-Identifier: Apache-2.0
"""How a tile becomes permanent: what is published, what settles a name that is taken, what is set aside.

In: whole shards, as bytes, and what is there already. Out: immutable shards with one commit record each, and a seal.
Nothing that counts is ever replaced. Where a name is taken, the file there is judged: ours, another's, or damaged;
only a damaged one is moved to `quarantine/`, and only if it still is the file that was judged. So any number of
writers may do the same work, and each may die between any two steps.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron_kd.cache import layout
from megatron_kd.cache.errors import CacheError, CorruptFile, StoreError, TileConflict
from megatron_kd.cache.files import decode_record, digest_bytes, encode_record, node_name
from megatron_kd.cache.manifest import Manifest
from megatron_kd.cache.shard import Shard
from megatron_kd.cache.store import Store, open_store, pieces

logger = logging.getLogger(__name__)

_COMMIT_FIELDS = {"tile": int, "rows": int, "bytes": int, "digest": str, "manifest": str, "writer": dict}
SEAL = "SEALED.json"


def shard_file(tile: int) -> str:
    """Name of a tile's shard within the cache."""
    return f"shards/{layout.shard_name(tile)}.safetensors"


def commit_file(tile: int) -> str:
    """Name of a tile's commit record within the cache."""
    return f"commits/{layout.shard_name(tile)}.json"


def read_commit(cache: Path | str | Store, tile: int, manifest_digest: str) -> dict[str, Any]:
    """Read and check a tile's commit record: `tile`, `rows`, `bytes`, `digest`, `manifest`, `writer`.

    Raises:
        FileNotFoundError: there is none.
        CorruptFile: it is damaged, or belongs to another cache or tile.
    """
    store, name = open_store(cache), commit_file(tile)
    record = store.twice(lambda: decode_record(store.read(name), store.where(name)))
    types = {key: type(value) for key, value in record.items()}
    if types != _COMMIT_FIELDS or record["tile"] != tile or record["manifest"] != manifest_digest:
        raise CorruptFile(
            f"{store.where(name)} is not the commit record of tile {tile} of this cache; it was copied from elsewhere"
        )
    return record


def seal_record(cache: Path | str | Store, manifest: Manifest) -> dict[str, Any]:
    """What SEALED.json must say: the manifest, the extent, and one digest over the digests of all shards."""
    store, digest = open_store(cache), manifest.digest()
    commits = store.map(lambda tile: read_commit(store, tile, digest), range(manifest.tiles["count"]))
    return {
        "manifest": digest,
        "rows": manifest.rows,
        "tiles": manifest.tiles["count"],
        "shards": digest_bytes("".join(commit["digest"] for commit in commits).encode()),
    }


class Commits:
    """The tiles of one cache that count, and how they come to.

    Args:
        store: where the cache lies.
        manifest: of the cache.
        tiles: its tile table.
    """

    def __init__(self, store: Store, manifest: Manifest, tiles: np.ndarray):
        self.store, self.manifest, self.tiles = store, manifest, tiles
        self._digest = manifest.digest()

    def extent(self, tile: int) -> tuple[int, int]:
        """First row of the axis, and number of rows."""
        first, end = int(self.tiles[tile, 0]), int(self.tiles[tile + 1, 0])
        return first, end - first

    def missing(self) -> list[int]:
        """Tiles that do not count; a complete shard whose writer died before committing it is committed here."""
        committed, shards = self.store.names("commits"), self.store.names("shards")

        def counts(tile: int) -> bool:
            shard = Path(shard_file(tile)).name
            record = Path(commit_file(tile)).name in committed
            return (record and self.is_committed(tile, shards.get(shard))) or (shard in shards and self.adopt(tile))

        tiles = range(self.manifest.tiles["count"])
        return [tile for tile, fine in zip(tiles, self.store.map(counts, tiles), strict=True) if not fine]

    def is_committed(self, tile: int, size: int | None = None) -> bool:
        """Whether the tile has a valid commit record and its shard has the size that record states.

        Args:
            tile: number of the tile.
            size: the shard's size if it is known.
        """
        try:
            commit = read_commit(self.store, tile, self._digest)
            return (self.store.state(shard_file(tile)).size if size is None else size) == commit["bytes"]
        except (CorruptFile, FileNotFoundError):
            return False

    def commit(
        self,
        tile: int,
        parts: Callable[[], Iterable[bytes | memoryview]],
        check: Callable[[str], None] | None = None,
    ) -> None:
        """Publish a tile's shard and its commit record. Doing so twice with the same content is fine.

        Args:
            tile: number of the tile.
            parts: gives the shard's content, as often as it is asked.
            check: raises if it is given a digest that the shard must not have; nothing is published then.

        Raises:
            TileConflict: the tile was committed before with other content.
        """
        digest, size = self._publish(shard_file(tile), parts, lambda digest: self._settle(tile, digest), check)
        self._write_record(tile, digest, size)

    def _publish(
        self,
        name: str,
        parts: Callable[[], Iterable[bytes | memoryview]],
        settle: Callable[[str], bool],
        check: Callable[[str], None] | None = None,
    ) -> tuple[str, int]:
        """Write a file and give it its name; its digest and size.

        Where the name is taken, `settle(digest)` says True if what is there will do, False to try again, or raises.
        """
        while True:
            with self.store.draft(name, parts()) as draft:
                if check is not None:
                    check(draft.digest)
                with contextlib.suppress(FileNotFoundError):
                    while not draft.publish() and not settle(draft.digest):
                        pass
                    return draft.digest, draft.size
            # Whoever sealed the cache took our draft for a leftover: once more.

    def _settle(self, tile: int, digest: str) -> bool:
        """A shard of that name exists. True if it is ours, False if it was damaged and is out of the way now."""
        name = shard_file(tile)

        def compare() -> None:
            if (found := self._digest_of(name)) != digest:
                raise CorruptFile(f"{self.store.where(name)} has digest {found}, this writer made {digest}")

        try:
            self.store.twice(compare)
            return True
        except FileNotFoundError:  # another writer has just moved it to quarantine
            return False
        except CorruptFile as error:
            if self.adopt(tile):
                raise TileConflict(
                    f"{error}: the teacher is not deterministic or the writers differ (device, thread count, "
                    "library). Keep the one there, or remove the cache and build it again"
                ) from error
            return False

    def _digest_of(self, name: str) -> str:
        """xxh3-128 of a whole file; memory for 8 MiB."""
        state = xxhash.xxh3_128()
        with contextlib.closing(self.store.open(name)) as file:
            for piece in pieces(file):
                state.update(piece)
        return state.hexdigest()

    def adopt(self, tile: int) -> bool:
        """Commit a shard that lacks a commit record, if every byte of it checks; else move it to quarantine."""
        if self.is_committed(tile):  # its writer was quicker
            return True
        name, (first, rows) = shard_file(tile), self.extent(tile)
        try:
            size, judged = self.store.state(name)
            with Shard(
                self.store.open(name), self.manifest.row_format, first, rows, tile=tile, manifest_digest=self._digest
            ) as opened:
                digest = opened.verify_blocks()
            self.store.sync("shards")  # its writer may have died before it did
            self._write_record(tile, digest, size)
        except FileNotFoundError:
            return False
        except (TileConflict, StoreError):
            raise
        except CacheError as error:
            self._set_aside(name, judged, str(error))
            return False
        logger.info("%s was complete but not committed; committed it", self.store.where(name))
        return True

    def _write_record(self, tile: int, digest: str, size: int) -> None:
        record: dict[str, Any] = {
            "tile": tile,
            "rows": self.extent(tile)[1],
            "bytes": size,
            "digest": digest,
            "manifest": self._digest,
            "writer": {
                "node": node_name(),
                "pid": os.getpid(),
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            },
        }
        self._publish(
            commit_file(tile), lambda: [encode_record(record)], lambda _: self._settle_record(tile, digest, size)
        )

    def _settle_record(self, tile: int, digest: str, size: int) -> bool:
        """A commit record exists. True if it is of this shard, False if it is of none and is out of the way now."""
        name = commit_file(tile)
        try:
            judged = self.store.state(name).stamp
            there = read_commit(self.store, tile, self._digest)
            if (there["digest"], there["bytes"]) == (digest, size):
                return True
            if self._digest_of(shard_file(tile)) == there["digest"]:
                where = self.store.where(name)
                raise TileConflict(f"{where} records digest {there['digest']}, this writer made {digest}")
            reason = "it records a shard that is not there"
        except FileNotFoundError:
            return False
        except CorruptFile as error:
            reason = str(error)
        self._set_aside(name, judged, reason)
        return False

    def _set_aside(self, name: str, stamp: Any, reason: str) -> None:
        """Move the file that was judged out of the way; one that took its name meanwhile keeps it."""
        target = self.store.set_aside(name, stamp)
        if target is not None:
            logger.warning("moved %s to %s: %s", self.store.where(name), target, reason)

    def set_aside(self, name: str, reason: str) -> None:
        """Move a file that is known to be bad, if it is there, to `quarantine/`."""
        with contextlib.suppress(FileNotFoundError):
            self._set_aside(name, self.store.state(name).stamp, reason)

    def seal(self) -> None:
        """Publish the seal. One that does not describe the commit records is set aside."""
        data = encode_record(seal_record(self.store, self.manifest))

        def settle(_: str) -> bool:
            try:
                judged = self.store.state(SEAL).stamp
                if self.store.read(SEAL) == data:
                    return True
            except FileNotFoundError:
                return False
            except CorruptFile:
                pass
            self._set_aside(SEAL, judged, "it does not describe the commits")
            return False

        if not (self.store.exists(SEAL) and settle("")):
            self._publish(SEAL, lambda: [data], settle)
