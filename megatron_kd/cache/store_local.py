# SPDX-License-Identifier: Apache-2.0
"""A cache on a file system, local or shared.

In: a folder. Out: the operations of `store.Store`, as system calls: `preadv` reads, and a file is published in four
steps (write under `tmp/`, fsync, hard link into place, fsync the folder). Costs nothing besides.
"""

import contextlib
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from megatron_kd.cache.errors import CorruptFile, NotACache
from megatron_kd.cache.files import (
    FOLDERS,
    MAX_RECORD_BYTES,
    fsync_folder,
    is_abandoned,
    open_regular,
    publish,
    read_bounded,
    read_exact,
    temporary_name,
    write_temporary,
)
from megatron_kd.cache.store import State

_T, _R = TypeVar("_T"), TypeVar("_R")


class LocalFile:
    """A file descriptor."""

    chunk, far = 1 << 20, False

    def __init__(self, path: Path):
        self.name = str(path)
        self.fd = open_regular(path)
        self.size = os.fstat(self.fd).st_size

    def __del__(self):
        self.close()

    def close(self) -> None:
        """See `store.OpenFile`."""
        fd, self.fd = getattr(self, "fd", None), None
        if fd is not None:
            os.close(fd)

    def fill(self, parts: Sequence[memoryview], offset: int, size: int) -> None:
        """See `store.OpenFile`; one system call if the kernel gives all bytes at once."""
        try:
            if os.preadv(self.fd, parts, offset) == size:
                return
        except OSError:
            pass  # said by the attempt that follows
        for part in filter(len, parts):
            read_exact(self.fd, part, offset, self.name)
            offset += len(part)

    def ahead(self, ranges: Sequence[tuple[int, int]]) -> "LocalFile":
        """See `store.OpenFile`; the kernel reads ahead by itself."""
        return self


class LocalDraft:
    """A finished file under `tmp/`."""

    def __init__(self, temporary: Path, target: Path, digest: str, size: int):
        self.temporary, self.target, self.digest, self.size = temporary, target, digest, size

    def publish(self) -> bool:
        """See `store.Draft`."""
        try:
            return publish(self.temporary, self.target)
        except FileNotFoundError as error:
            if self.temporary.exists():  # it is the folder that is not there
                raise NotADirectoryError(error.errno, error.strerror, str(self.target.parent)) from error
            raise


class LocalStore:
    """A folder; see `store.Store` for the methods."""

    far, largest = False, None

    def __init__(self, path: Path):
        self.path = path

    def where(self, name: str) -> str:
        """See `store.Store`."""
        return str(self.path / name)

    def exists(self, name: str) -> bool:
        """See `store.Store`."""
        return os.path.exists(self.path / name)

    def state(self, name: str) -> State:
        """See `store.Store`; the stamp is the inode."""
        found = (self.path / name).lstat()
        return State(found.st_size, found.st_ino)

    def names(self, folder: str = "") -> dict[str, int | None]:
        """See `store.Store`; sizes are not looked up."""
        return {entry.name: None for entry in os.scandir(self.path / folder)}

    def read(self, name: str, limit: int = MAX_RECORD_BYTES) -> bytes:
        """See `store.Store`."""
        return read_bounded(self.path / name, limit)

    def open(self, name: str) -> LocalFile:
        """See `store.Store`."""
        return LocalFile(self.path / name)

    def create(self, files: dict[str, bytes]) -> None:
        """See `store.Store`. The folder is made whole under another name first: one that can be seen is whole."""
        first = next(iter(files))
        if (self.path / first).exists():
            return
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            if (self.path / first).exists():  # another writer made it just now
                return
            raise NotACache(f"{self.path} exists and is not a teacher cache; choose another folder")
        home = self.path.resolve()  # the path may be a link to an empty folder elsewhere
        home.parent.mkdir(parents=True, exist_ok=True)
        fresh = home.with_name(temporary_name(f".{home.name}"))
        for folder in FOLDERS:
            (fresh / folder).mkdir(parents=True)
        for name, data in files.items():
            temporary, _, _ = write_temporary(fresh / "tmp", name, [data])
            publish(temporary, fresh / name)
            temporary.unlink()
        try:
            fresh.rename(home)
        except OSError:
            _remove(fresh)
            if not (home / first).exists():
                raise
        fsync_folder(home.parent)

    def check(self) -> None:
        """See `store.Store`."""
        for folder in FOLDERS:
            if (self.path / folder).is_symlink() or not (self.path / folder).is_dir():
                raise CorruptFile(f"{self.path / folder} must be a folder of the cache itself; nothing was written")

    @contextlib.contextmanager
    def draft(self, name: str, parts: Iterable[bytes | memoryview]) -> Iterator[LocalDraft]:
        """See `store.Store`."""
        target = self.path / name
        temporary, digest, size = write_temporary(self.path / "tmp", target.name, parts)
        try:
            yield LocalDraft(temporary, target, digest, size)
        finally:
            temporary.unlink(missing_ok=True)

    def set_aside(self, name: str, stamp: int) -> str | None:
        """See `store.Store`; a file that took the name meanwhile keeps it."""
        path = self.path / name
        target = self.path / "quarantine" / f"{path.name}.{uuid.uuid4().hex}"
        try:
            path.rename(target)
        except FileNotFoundError:
            return None
        if target.lstat().st_ino == stamp:
            return str(target)
        with contextlib.suppress(FileExistsError):
            os.link(target, path)
        target.unlink()
        return None

    def sync(self, folder: str) -> None:
        """See `store.Store`."""
        fsync_folder(self.path / folder)

    def sweep(self, *, all: bool = False) -> None:
        """See `store.Store`. Nothing ever reads what stays, for instance in a read-only folder."""
        home = self.path.resolve()
        with contextlib.suppress(OSError):
            for entry in os.scandir(home / "tmp"):
                if all or is_abandoned(entry.name):
                    os.unlink(entry)
            for entry in [] if all else os.scandir(home.parent):
                if entry.name.startswith(f".{home.name}.") and is_abandoned(entry.name):
                    _remove(Path(entry))

    def twice(self, work: Callable[[], _T]) -> _T:
        """See `store.Store`; the kernel's answer is final."""
        return work()

    def map(self, work: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[_R]:
        """See `store.Store`; one after the other."""
        return map(work, items)


def _remove(folder: Path) -> None:
    """Remove a folder that never became a cache."""
    for entry in sorted(folder.rglob("*"), reverse=True):
        entry.rmdir() if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    folder.rmdir()
