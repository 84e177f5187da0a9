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
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.cache import layout
from megatron_kd.cache.errors import (
    CacheError,
    CannotWrite,
    CorruptFile,
    IdentityMismatch,
    Incomplete,
    NotACache,
    TileConflict,
)
from megatron_kd.cache.files import (
    FOLDERS,
    decode_record,
    digest_bytes,
    digest_file,
    encode_record,
    fsync_folder,
    is_abandoned,
    iter_file,
    node_name,
    open_regular,
    publish,
    read_bounded,
    temporary_name,
    write_temporary,
)
from megatron_kd.cache.manifest import Manifest, decode_tiles, differences, encode_tiles
from megatron_kd.cache.shard import Shard
from megatron_kd.cache.tile import TileBuffer

logger = logging.getLogger(__name__)

_COMMIT_FIELDS = {"tile": int, "rows": int, "bytes": int, "digest": str, "manifest": str, "writer": dict}


class CacheWriter:
    """Writes tiles into a cache folder, which it creates, or joins if the manifest is the same.

    Args:
        path: the cache folder; absent, empty, or a cache with an equal manifest.
        manifest: from `make_manifest`.
        tiles: the tile table that belongs to it.

    Every method raises `CannotWrite` where the file system refuses (full, read-only); what was committed is kept.

    Raises:
        IdentityMismatch: the folder holds a cache with another manifest; names the fields.
        NotACache: the folder holds something else.
    """

    def __init__(self, path: str | Path, manifest: Manifest, tiles: np.ndarray):
        self.path, self.manifest, self.tiles = Path(path), manifest, tiles
        self._digest = manifest.digest()
        decode_tiles(encode_tiles(tiles), manifest, "the tile table")
        with self._writing("cannot be made or joined"):
            self._create()
            self._join()
        self._sweep()

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CannotWrite(
                f"{self.path} {what} on node {node_name()}: {error.strerror} ({error.filename or self.path}). What is "
                "committed is kept. Make room, or get permission to write there, and run the same `megatron-kd cache "
                "build` again"
            ) from error

    def _create(self) -> None:
        """Make the folder whole under another name first: a folder that can be seen has a manifest."""
        if (self.path / "manifest.json").exists():
            return
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise NotACache(f"{self.path} exists and is not a teacher cache; choose another folder")
        home = self.path.resolve()  # the path may be a link to an empty folder elsewhere
        home.parent.mkdir(parents=True, exist_ok=True)
        fresh = home.with_name(temporary_name(f".{home.name}"))
        for folder in FOLDERS:
            (fresh / folder).mkdir(parents=True)
        for name, data in (("manifest.json", self.manifest.to_json()), ("tiles.npy", encode_tiles(self.tiles))):
            temporary, _, _ = write_temporary(fresh / "tmp", name, [data])
            publish(temporary, fresh / name)
            temporary.unlink()
        try:
            fresh.rename(home)
        except OSError:
            _remove(fresh)
            if not (home / "manifest.json").exists():
                raise
        fsync_folder(home.parent)

    def _join(self) -> None:
        data = read_bounded(self.path / "manifest.json")
        if data != self.manifest.to_json():
            there = Manifest.from_json(data, str(self.path / "manifest.json"))
            wrong = differences(asdict(there), asdict(self.manifest))
            lines = [f"  {name}: the cache has {found!r}, this build {wanted!r}" for name, found, wanted in wrong]
            raise IdentityMismatch(
                f"{self.path} is a cache with other settings:\n"
                + "\n".join(lines)
                + "\nUse the same settings, or another folder"
            )
        data = read_bounded(self.path / "tiles.npy", len(encode_tiles(self.tiles)))
        decode_tiles(data, self.manifest, str(self.path / "tiles.npy"))
        for folder in FOLDERS:
            if (self.path / folder).is_symlink() or not (self.path / folder).is_dir():
                raise CorruptFile(f"{self.path / folder} must be a folder of the cache itself; nothing was written")

    def _sweep(self) -> None:
        """Remove what dead writers of this node left behind: temporary files, and folders that never became a cache.

        Where that cannot be done (a read-only folder) they stay; nothing ever reads them.
        """
        home = self.path.resolve()
        with contextlib.suppress(OSError):
            for entry in os.scandir(home / "tmp"):
                if is_abandoned(entry.name):
                    os.unlink(entry)
            for entry in os.scandir(home.parent):
                if entry.name.startswith(f".{home.name}.") and is_abandoned(entry.name):
                    _remove(Path(entry))

    def todo(self) -> list[int]:
        """Tiles without a valid commit; a complete shard whose writer died before committing it is committed here."""
        with self._writing("cannot be continued"):
            return self._todo()

    def _todo(self) -> list[int]:
        committed = {entry.name for entry in os.scandir(self.path / "commits")}
        shards = {entry.name for entry in os.scandir(self.path / "shards")}
        todo = []
        for tile in range(self.manifest.tiles["count"]):
            name = layout.shard_name(tile)
            if f"{name}.json" in committed and self.is_committed(tile):
                continue
            if f"{name}.safetensors" in shards and self._adopt(tile):
                continue
            todo.append(tile)
        seal = self.path / "SEALED.json"
        if todo and seal.exists():
            self._quarantine(seal, "the cache is sealed but tiles are missing", seal.lstat().st_ino)
        return todo

    def is_committed(self, tile: int) -> bool:
        """Whether the tile has a valid commit record and its shard has the size that record states."""
        try:
            commit = read_commit(self.path, tile, self._digest)
            return self.shard_path(tile).lstat().st_size == commit["bytes"]
        except (CorruptFile, FileNotFoundError):
            return False

    def shard_path(self, tile: int) -> Path:
        """Where a tile's shard is or will be."""
        return self.path / "shards" / f"{layout.shard_name(tile)}.safetensors"

    def commit_path(self, tile: int) -> Path:
        """Where a tile's commit record is or will be."""
        return self.path / "commits" / f"{layout.shard_name(tile)}.json"

    def open_tile(self, tile: int) -> TileBuffer:
        """A buffer for one tile's rows."""
        return TileBuffer(self.manifest, tile, *self._extent(tile))

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
        shard = self.shard_path(buffer.tile)
        with self._writing(f"cannot take tile {buffer.tile}"):
            parts = list(buffer.parts())
            digest, size = self._publish(shard, lambda: parts, lambda digest: self._settle(buffer.tile, digest))
            self._write_commit(buffer.tile, digest, size)

    def take(self, tile: int, shard: Path, wanted: str) -> None:
        """Copy a tile's shard from another place and commit it.

        Args:
            tile: number of the tile.
            shard: the file.
            wanted: its digest; a copy that differs is made once more, then refused.

        Raises:
            CorruptFile: the file there is not what its commit record says.
        """

        def check(digest: str) -> None:
            if digest != wanted:
                raise CorruptFile(f"{shard} has digest {digest}, its commit record says {wanted}: it is damaged there")

        fd = open_regular(shard)
        try:
            size = os.fstat(fd).st_size
            with self._writing(f"cannot take tile {tile}"):
                for last in (False, True):
                    try:
                        self._publish(
                            self.shard_path(tile),
                            lambda: iter_file(fd, size, str(shard)),
                            lambda digest: self._settle(tile, digest),
                            check,
                        )
                        break
                    except CorruptFile:
                        if last:
                            raise
                self._write_commit(tile, wanted, size)
        finally:
            os.close(fd)

    def _publish(
        self,
        target: Path,
        parts: Callable[[], Iterable[bytes | memoryview]],
        settle: Callable[[str], bool],
        check: Callable[[str], None] | None = None,
    ) -> tuple[str, int]:
        """Write a file and give it its name; its digest and size.

        Where the name is taken, `settle(digest)` says True if what is there will do, False to try again, or raises.
        `check(digest)` may raise before the name is given.
        """
        while True:
            temporary, digest, size = write_temporary(self.path / "tmp", target.name, parts())
            try:
                if check is not None:
                    check(digest)
                while not publish(temporary, target) and not settle(digest):
                    pass
                return digest, size
            except FileNotFoundError:
                if temporary.exists():
                    raise
            finally:
                temporary.unlink(missing_ok=True)
            # Whoever sealed the cache took our temporary file for a leftover: once more.

    def _settle(self, tile: int, digest: str) -> bool:
        """A shard of that name exists. True if it is ours, False if it was damaged and is out of the way now."""
        shard = self.shard_path(tile)
        try:
            found = digest_file(shard)
        except FileNotFoundError:  # another writer has just moved it to quarantine
            return False
        if found == digest:
            return True
        if self._adopt(tile):
            raise TileConflict(
                f"{shard} was written with digest {found}, this writer made {digest}: the teacher is not "
                "deterministic or the writers differ (device, thread count, library). Keep the one there, or remove "
                "the cache and build it again"
            )
        return False

    def _adopt(self, tile: int) -> bool:
        """Commit a shard that lacks a commit record, if every byte of it checks; else move it to quarantine."""
        if self.is_committed(tile):  # its writer was quicker
            return True
        shard = self.shard_path(tile)
        try:
            judged = shard.lstat().st_ino
            with Shard(
                shard, self.manifest.row_format, *self._extent(tile), tile=tile, manifest_digest=self._digest
            ) as opened:
                opened.verify_blocks()
            fsync_folder(shard.parent)  # its writer may have died before it did
            self._write_commit(tile, digest_file(shard), shard.stat().st_size)
        except FileNotFoundError:
            return False
        except TileConflict:
            raise
        except CacheError as error:
            self._quarantine(shard, str(error), judged)
            return False
        logger.info("%s was complete but not committed; committed it", shard)
        return True

    def _extent(self, tile: int) -> tuple[int, int]:
        """First row of the axis, and number of rows."""
        first, end = int(self.tiles[tile, 0]), int(self.tiles[tile + 1, 0])
        return first, end - first

    def _write_commit(self, tile: int, digest: str, size: int) -> None:
        record: dict[str, Any] = {
            "tile": tile,
            "rows": self._extent(tile)[1],
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
            self.commit_path(tile), lambda: [encode_record(record)], lambda _: self._settle_commit(tile, digest, size)
        )

    def _settle_commit(self, tile: int, digest: str, size: int) -> bool:
        """A commit record exists. True if it is of this shard, False if it is of none and is out of the way now."""
        path = self.commit_path(tile)
        try:
            judged = path.lstat().st_ino
            there = read_commit(self.path, tile, self._digest)
            if (there["digest"], there["bytes"]) == (digest, size):
                return True
            if digest_file(self.shard_path(tile)) == there["digest"]:
                raise TileConflict(f"{path} records digest {there['digest']}, this writer made {digest}")
            reason = "it records a shard that is not there"
        except FileNotFoundError:
            return False
        except CorruptFile as error:
            reason = str(error)
        self._quarantine(path, reason, judged)
        return False

    def _quarantine(self, path: Path, reason: str, inode: int) -> None:
        """Move the file that was judged out of the way; one that took its name meanwhile keeps it."""
        target = self.path / "quarantine" / f"{path.name}.{uuid.uuid4().hex}"
        try:
            path.rename(target)
        except FileNotFoundError:
            return
        if target.lstat().st_ino != inode:
            with contextlib.suppress(FileExistsError):
                os.link(target, path)
            target.unlink()
            return
        logger.warning("moved %s to %s: %s", path, target, reason)

    def set_aside(self, tile: int, *, shard: bool) -> None:
        """Move a tile's commit record to `quarantine/`, and its shard too if that is the bad part.

        The record goes first: a tile without one is read by nobody, and its shard is checked whole before it counts
        again.
        """
        with self._writing(f"cannot set tile {tile} aside"):
            for path in (self.commit_path(tile), *([self.shard_path(tile)] if shard else [])):
                with contextlib.suppress(FileNotFoundError):
                    self._quarantine(path, "verification failed", path.lstat().st_ino)

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
                fsync_folder(self.path / folder)
            self._publish_seal(encode_record(seal_record(self.path, self.manifest)))
        with contextlib.suppress(OSError):  # every tile is there, so whatever is left in tmp/ is of no use to anyone
            for entry in os.scandir(self.path / "tmp"):
                os.unlink(entry)

    def _publish_seal(self, data: bytes) -> None:
        path = self.path / "SEALED.json"

        def settle(_: str) -> bool:
            try:
                judged = path.lstat().st_ino
                if read_bounded(path) == data:
                    return True
            except FileNotFoundError:
                return False
            except CorruptFile:
                pass
            self._quarantine(path, "it does not describe the commits", judged)
            return False

        if not (path.exists() and settle("")):
            self._publish(path, lambda: [data], settle)


def _remove(folder: Path) -> None:
    """Remove a folder that never became a cache."""
    for entry in sorted(folder.rglob("*"), reverse=True):
        entry.rmdir() if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    folder.rmdir()


def read_commit(cache: Path, tile: int, manifest_digest: str) -> dict[str, Any]:
    """Read and check a tile's commit record: `tile`, `rows`, `bytes`, `digest`, `manifest`, `writer`.

    Raises:
        FileNotFoundError: there is none.
        CorruptFile: it is damaged, or belongs to another cache or tile.
    """
    path = cache / "commits" / f"{layout.shard_name(tile)}.json"
    record = decode_record(read_bounded(path), str(path))
    types = {name: type(value) for name, value in record.items()}
    if types != _COMMIT_FIELDS or record["tile"] != tile or record["manifest"] != manifest_digest:
        raise CorruptFile(
            f"{path} is not the commit record of tile {tile} of this cache; it was copied from elsewhere"
        )
    return record


def seal_record(cache: Path, manifest: Manifest) -> dict[str, Any]:
    """What SEALED.json must say: the manifest, the extent, and one digest over the digests of all shards."""
    digest = manifest.digest()
    shards = "".join(read_commit(cache, tile, digest)["digest"] for tile in range(manifest.tiles["count"]))
    return {
        "manifest": digest,
        "rows": manifest.rows,
        "tiles": manifest.tiles["count"],
        "shards": digest_bytes(shards.encode()),
    }
