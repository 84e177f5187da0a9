# SPDX-License-Identifier: Apache-2.0
"""Where a cache lies: the few file operations it needs, on a file system or on an object store.

In: a folder, or `msc://PROFILE/PATH` for an object store that multi-storage-client knows. Out: a `Store`. All of the
cache's own rules (what counts, what is checked, who wins) are built on these operations alone. What they promise:

- a name that can be seen has complete content, and no name is ever given twice (`Draft.publish`);
- a file is moved to `quarantine/` only if it is the one that was judged (`set_aside`);
- a read gives every byte asked for, or raises. Whether they are the right ones is for checksums to say.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from megatron_kd.cache.errors import BadSetting
from megatron_kd.cache.files import MAX_RECORD_BYTES, node_name

logger = logging.getLogger(__name__)

_PIECE_BYTES = 8 << 20
_T, _R = TypeVar("_T"), TypeVar("_R")


class State(NamedTuple):
    """Which file has a name now."""

    size: int
    """Bytes."""
    stamp: Any
    """Differs between two files that had the same name one after the other."""


class OpenFile(Protocol):
    """A file opened for reading. Threads may share one."""

    name: str
    """In full, for messages."""
    size: int
    """Bytes."""
    chunk: int
    """Bytes to ask for at once when the whole file is read."""
    far: bool
    """Whether each `fill` takes a while, so that `ahead` pays."""

    def fill(self, parts: Sequence[memoryview], offset: int, size: int) -> None:
        """Fill `parts`, `size` bytes together, from consecutive bytes of the file.

        Raises:
            CorruptFile: the file ends before, or cannot be read.
            StoreError: the object store does not answer.
        """

    def ahead(self, ranges: Sequence[tuple[int, int]]) -> "OpenFile":
        """The file for reads within these ranges (offset, size), which are fetched now, at once; the others of a far
        file are not to be had from it.
        """

    def close(self) -> None:
        """Let go of it; safe to call twice."""


class Draft(Protocol):
    """A whole file that has no name yet."""

    digest: str
    """xxh3-128 of its content."""
    size: int
    """Bytes."""

    def publish(self) -> bool:
        """Give it its name, durably. False if the name is taken.

        Raises:
            FileNotFoundError: another process took the draft for a leftover and removed it; write it again.
        """


class Store(Protocol):
    """The place of one cache. Names are relative to it: `manifest.json`, `shards/shard-000000.safetensors`."""

    path: Path | str
    """The place itself, as a user writes it."""
    far: bool
    """Whether each operation takes a while."""
    largest: int | None
    """Bytes that one file can have; None if nobody says."""

    def where(self, name: str) -> str:
        """A file's name in full, for messages."""

    def exists(self, name: str) -> bool:
        """Whether there is a file of that name."""

    def state(self, name: str) -> State:
        """Size and stamp of a file; FileNotFoundError if there is none."""

    def names(self, folder: str = "") -> dict[str, int | None]:
        """What a folder holds, files with their sizes in bytes, other things with None. A folder may be missing."""

    def read(self, name: str, limit: int = MAX_RECORD_BYTES) -> bytes:
        """Content of a small file.

        Raises:
            FileNotFoundError: there is none.
            CorruptFile: it has more than `limit` bytes; they are not read.
        """

    def open(self, name: str) -> OpenFile:
        """Open a file; FileNotFoundError if there is none."""

    def create(self, files: dict[str, bytes]) -> None:
        """Make the place and its first files, in that order; nothing is done if the first one is there.

        Raises:
            NotACache: something else is there.
        """

    def check(self) -> None:
        """Raise CorruptFile if the place lacks what every cache has besides its files."""

    def draft(self, name: str, parts: Iterable[bytes | memoryview]) -> AbstractContextManager[Draft]:
        """Write a file that has no name yet; a name gets it from `publish`. Each part is used before the next one."""

    def set_aside(self, name: str, stamp: Any) -> str | None:
        """Move a file to `quarantine/` if it still is the one with that stamp; its new name in full, else None."""

    def sync(self, folder: str) -> None:
        """Make the names in a folder durable."""

    def sweep(self, *, all: bool = False) -> None:
        """Remove what dead writers of this node left behind, or every draft. What cannot be removed stays."""

    def twice(self, work: Callable[[], _T]) -> _T:
        """Do `work`; where the way from the store to here can change bytes, once more if it met a damaged file."""

    def map(self, work: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[_R]:
        """Results of `work` in the order of `items`, several at once where that saves time."""


def open_store(path: "str | Path | Store") -> Store:
    """The store that a path names. Nothing is read or written.

    Raises:
        BadSetting: a URL of another kind, or one whose profile or package is missing.
    """
    if not isinstance(path, str | Path):
        return path
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", str(path))
    if scheme is None:
        from megatron_kd.cache.store_local import LocalStore

        return LocalStore(Path(path))
    if scheme[1] != "msc":
        raise BadSetting(
            f"{path}: object stores are reached through multi-storage-client, as msc://PROFILE/PATH; name the bucket "
            "in a profile of its configuration"
        )
    from megatron_kd.cache.store_remote import RemoteStore

    return RemoteStore(str(path))


def pieces(file: OpenFile) -> Iterator[memoryview]:
    """The bytes of a file in pieces of 8 MiB; the same buffer is used again for each."""
    buffer = memoryview(bytearray(min(file.size, _PIECE_BYTES)))
    for start in range(0, file.size, _PIECE_BYTES):
        piece = buffer[: min(_PIECE_BYTES, file.size - start)]
        file.fill([piece], start, len(piece))
        yield piece


def cache_path(text: str) -> Path | str:
    """A cache's place from a command line: a Path, or the URL of an object store."""
    return re.sub("^msc:/+", "msc://", text) if text.startswith("msc:/") else Path(text)


def when_visible(store: Store, name: str, wait_s: float, work: Callable[[], _T]) -> _T:
    """What `work` returns; it is tried for `wait_s` seconds while a file is missing: another node's can show late.

    Raises:
        FileNotFoundError: the file is still missing.
    """
    deadline, pause = time.monotonic() + wait_s, 0.05
    while True:
        try:
            return work()
        except FileNotFoundError:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
        if pause == 0.05:
            where, node = store.where(name), node_name()
            logger.warning("%s is not visible on node %s yet; waiting up to %.0f s", where, node, wait_s)
        time.sleep(min(pause, left))
        pause = min(2 * pause, 2.0)
