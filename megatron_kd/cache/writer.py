# SPDX-License-Identifier: Apache-2.0
"""Writing a cache: any number of writers, on any number of hosts, killed at any moment.

In: a manifest, a tile table, and rows of teacher output in any order within a tile. Out: immutable shards, each with a
commit record; at the end a seal. Costs memory for one encoded tile (433 MB for a million tokens at K=100). A tile
counts only when its commit record is valid; a killed writer loses at most the tile it was filling.

    writer = CacheWriter("cache", manifest, tiles)
    for tile in writer.todo():
        buffer = writer.open_tile(tile)
        buffer.put(0, tokens, ids, logprobs, log_tail)     # [n], [n, K], [n, K], [n]; any order, every row once
        writer.commit(buffer)
    writer.seal()
"""

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

from megatron_kd.cache.commits import SEAL, Commits, commit_file, shard_file
from megatron_kd.cache.errors import BadSetting, CannotWrite, CorruptFile, IdentityMismatch, Incomplete, StoreError
from megatron_kd.cache.files import node_name
from megatron_kd.cache.manifest import Manifest, decode_tiles, differences, encode_tiles
from megatron_kd.cache.store import OpenFile, Store, open_store, pieces
from megatron_kd.cache.tile import TileBuffer


class CacheWriter:
    """Writes tiles into a cache, which it creates, or joins if the manifest is the same.

    Args:
        path: the cache folder, or `msc://PROFILE/PATH`; absent, empty, or a cache with an equal manifest.
        manifest: from `make_manifest`.
        tiles: the tile table that belongs to it.

    Every method raises `CannotWrite` where the file system or the object store refuses (full, read-only); what was
    committed is kept.

    Raises:
        IdentityMismatch: the folder holds a cache with another manifest; names the fields.
        NotACache: the folder holds something else.
    """

    def __init__(self, path: str | Path | Store, manifest: Manifest, tiles: np.ndarray):
        self.store, self.manifest, self.tiles = open_store(path), manifest, tiles
        self.path = self.store.path
        self._commits = Commits(self.store, manifest, tiles)
        first_files = {"manifest.json": manifest.to_json(), "tiles.npy": encode_tiles(tiles)}
        decode_tiles(first_files["tiles.npy"], manifest, "the tile table")
        shard = int(np.diff(tiles[:, 0]).max()) * manifest.row_format.bytes_per_row
        if self.store.largest is not None and shard > self.store.largest:
            raise BadSetting(
                f"{self.path}: a tile can have {shard} bytes, and one object takes {self.store.largest}; build with "
                "smaller tiles (--tile-tokens)"
            )
        with self._writing("cannot be made or joined"):
            self.store.create(first_files)
            self._join()
        self.store.sweep()

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except (OSError, StoreError) as error:
            reason = error if isinstance(error, StoreError) else f"{error.strerror} ({error.filename or self.path})"
            raise CannotWrite(
                f"{self.path} {what} on node {node_name()}: {reason}. What is committed is kept. Make room, or get "
                "permission to write there, and run the same `megatron-kd cache build` again"
            ) from error

    def _join(self) -> None:
        store, ours = self.store, self.manifest.to_json()

        def compare() -> None:
            if (data := store.read("manifest.json")) == ours:
                return
            there = Manifest.from_json(data, store.where("manifest.json"))
            wrong = differences(asdict(there), asdict(self.manifest))
            lines = [f"  {name}: the cache has {found!r}, this build {wanted!r}" for name, found, wanted in wrong]
            raise IdentityMismatch(
                f"{self.path} is a cache with other settings:\n"
                + "\n".join(lines)
                + "\nUse the same settings, or another folder"
            )

        store.twice(compare)
        limit, name = len(encode_tiles(self.tiles)), store.where("tiles.npy")
        store.twice(lambda: decode_tiles(store.read("tiles.npy", limit), self.manifest, name))
        store.check()

    def todo(self) -> list[int]:
        """Tiles without a valid commit; a complete shard whose writer died before committing it is committed here."""
        with self._writing("cannot be continued"):
            todo = self._commits.missing()
            if todo:
                self._commits.set_aside(SEAL, "the cache is sealed but tiles are missing")
        return todo

    def is_committed(self, tile: int) -> bool:
        """Whether the tile has a valid commit record and its shard has the size that record states."""
        return self._commits.is_committed(tile)

    def shard_path(self, tile: int) -> Path:
        """Where a tile's shard is or will be, in a folder."""
        return Path(self.path, shard_file(tile))

    def commit_path(self, tile: int) -> Path:
        """Where a tile's commit record is or will be, in a folder."""
        return Path(self.path, commit_file(tile))

    def open_tile(self, tile: int) -> TileBuffer:
        """A buffer for one tile's rows."""
        return TileBuffer(self.manifest, tile, *self._commits.extent(tile))

    def write_tile(self, tile: int, planes: dict[str, np.ndarray]) -> None:
        """Write a whole tile at once: `planes` holds the arguments of `TileBuffer.put` for all its rows."""
        buffer = self.open_tile(tile)
        buffer.put(0, **planes)
        self.commit(buffer)

    def commit(self, buffer: TileBuffer) -> None:
        """Make a filled tile permanent. Doing so twice with the same content is fine.

        Raises:
            Incomplete: some of its rows were never stored.
            TileConflict: the tile was committed before with other content.
        """
        if buffer.missing:
            raise Incomplete(f"tile {buffer.tile}: {buffer.missing} of {buffer.rows} rows were not stored")
        with self._writing(f"cannot take tile {buffer.tile}"):
            parts = buffer.parts()
            self._commits.commit(buffer.tile, lambda: parts)

    def take(self, tile: int, shard: OpenFile, wanted: str) -> None:
        """Copy a tile's shard from another place and commit it.

        Args:
            tile: number of the tile.
            shard: the file there.
            wanted: its digest; a copy that differs is made once more, then refused.

        Raises:
            CorruptFile: the file there is not what its commit record says.
        """

        def check(digest: str) -> None:
            if digest != wanted:
                raise CorruptFile(
                    f"{shard.name} has digest {digest}, its commit record says {wanted}: it is damaged there"
                )

        with self._writing(f"cannot take tile {tile}"):
            try:
                self._commits.commit(tile, lambda: pieces(shard), check)
            except CorruptFile:
                self._commits.commit(tile, lambda: pieces(shard), check)

    def set_aside(self, tile: int, *, shard: bool) -> None:
        """Move a tile's commit record to `quarantine/`, and its shard too if that is the bad part.

        The record goes first: a tile without one is read by nobody, and its shard is checked whole before it counts
        again.
        """
        with self._writing(f"cannot set tile {tile} aside"):
            for name in (commit_file(tile), *([shard_file(tile)] if shard else [])):
                self._commits.set_aside(name, "verification failed")

    def seal(self) -> None:
        """Declare the cache complete, after checking that every tile is. Sealing twice is fine.

        Raises:
            Incomplete: names the tiles that are missing.
        """
        missing = self.todo()
        if missing:
            some = ", ".join(map(str, missing[:10])) + (", ..." if len(missing) > 10 else "")
            raise Incomplete(
                f"{self.path} cannot be sealed: {len(missing)} tiles are not committed: {some}. Run the build again"
            )
        with self._writing("cannot be sealed"):
            for folder in ("shards", "commits"):  # another writer may have died before it made a name durable
                self.store.sync(folder)
            self._commits.seal()
        self.store.sweep(all=True)  # every tile is there, so whatever is left in tmp/ is of no use to anyone
