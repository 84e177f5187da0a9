# SPDX-License-Identifier: Apache-2.0
"""A cache on an object store, through multi-storage-client.

In: `msc://PROFILE/PATH`, the profile being in multi-storage-client's configuration. Out: the operations of
`store.Store` as requests. Costs the latency of a request each, which `map` and `ahead` hide by asking for several
things at once; writing costs memory for one whole shard more.

What takes the place of the file system's promises:

- A PUT is atomic, and under `If-None-Match: *` it never replaces an object. So there are no drafts on the store, and a
  writer killed at any point leaves whole objects only. An answer that was lost makes the repeated PUT find the name
  taken; whoever publishes then compares what is there with what it has.
- Moving to `quarantine/` is a copy, then a DELETE under `If-Match` with the ETag of the object that was judged. Killed
  between the two, the object is judged again.
- A store may ignore either condition without saying so. Before the first use each is tried on an object of no other
  purpose under `tmp/`, and a store that does not keep it is refused.
"""

import contextlib
import functools
import itertools
import logging
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import xxhash

from megatron_kd.cache.errors import BadSetting, CorruptFile, NotACache, StoreError
from megatron_kd.cache.files import MAX_RECORD_BYTES, is_abandoned, temporary_name
from megatron_kd.cache.store import State
from megatron_kd.cache.store_client import Client, status

logger = logging.getLogger(__name__)

_T, _R = TypeVar("_T"), TypeVar("_R")

_RANGE_BYTES = 16 << 20
_AT_ONCE = 16


class RemoteFile:
    """An object, read in ranges. Their bytes are not checked by anyone but the reader's checksums."""

    chunk, far = _RANGE_BYTES, True

    def __init__(self, store: "RemoteStore", name: str, size: int):
        self.name, self.size = store.where(name), size
        self._store, self._key = store, name

    def close(self) -> None:
        """See `store.OpenFile`; nothing is held."""

    def fill(self, parts: Sequence[memoryview], offset: int, size: int) -> None:
        """See `store.OpenFile`; one request for each 16 MiB."""
        if offset + size > self.size:
            raise CorruptFile(f"{self.name} ends at byte {self.size}; bytes [{offset}, {offset + size}) were expected")
        if size > _RANGE_BYTES:
            for part in parts:
                for start in range(0, len(part), _RANGE_BYTES):
                    piece = part[start : start + _RANGE_BYTES]
                    self.fill([piece], offset + start, len(piece))
                offset += len(part)
        elif size:
            _scatter(memoryview(self._store.read_range(self._key, offset, size)), parts)

    def ahead(self, ranges: Sequence[tuple[int, int]]) -> "Fetched":
        """See `store.OpenFile`."""
        buffers = [memoryview(bytearray(size)) for _, size in ranges]
        fill = [([buffer], offset, size) for buffer, (offset, size) in zip(buffers, ranges, strict=True)]
        list(_threads(os.getpid()).map(lambda arguments: self.fill(*arguments), fill))
        return Fetched(self, [(offset, buffer) for buffer, (offset, _) in zip(buffers, ranges, strict=True)])


class Fetched:
    """Ranges of an object that are here already."""

    chunk, far = _RANGE_BYTES, False

    def __init__(self, file: RemoteFile, ranges: list[tuple[int, memoryview]]):
        self.name, self.size, self._ranges = file.name, file.size, ranges

    def close(self) -> None:
        """See `store.OpenFile`; nothing is held."""

    def fill(self, parts: Sequence[memoryview], offset: int, size: int) -> None:
        """See `store.OpenFile`."""
        for start, data in self._ranges:
            if start <= offset and offset + size <= start + len(data):
                return _scatter(data[offset - start : offset - start + size], parts)
        raise ValueError(f"{self.name}: bytes [{offset}, {offset + size}) were not fetched")

    def ahead(self, ranges: Sequence[tuple[int, int]]) -> "Fetched":
        """See `store.OpenFile`."""
        return self


def _scatter(data: memoryview, parts: Sequence[memoryview]) -> None:
    for part in parts:
        part[:], data = data[: len(part)], data[len(part) :]


class RemoteDraft:
    """A whole file in memory."""

    def __init__(self, store: "RemoteStore", name: str, body: bytearray, digest: str):
        self._store, self._name, self._body = store, name, body
        self.digest, self.size = digest, len(body)

    def publish(self) -> bool:
        """See `store.Draft`."""
        return self._store.put(self._name, self._body)


class RemoteStore:
    """A place on an object store; see `store.Store` for the methods.

    Args:
        url: `msc://PROFILE/PATH`.

    Raises:
        BadSetting: multi-storage-client or the profile is missing.
    """

    far, largest = True, 5 << 30  # of one PUT

    def __init__(self, url: str):
        parts = re.fullmatch(r"msc:/+([^/]+)/+(.*?)/*", url)
        if parts is None or not parts[2]:
            raise BadSetting(f"{url} does not name a place on an object store; write msc://PROFILE/PATH")
        self._profile, self._root = parts[1], re.sub("/+", "/", parts[2])
        self.path = f"msc://{self._profile}/{self._root}"
        self._client = Client(self._profile)
        self._proved: set[str] = set()

    def where(self, name: str) -> str:
        """See `store.Store`."""
        return f"{self.path}/{name}"

    def _ask(self, name: str, what: str, request: Callable[[Any, str], _T]) -> _T:
        """The answer to a request, a function of multi-storage-client's provider and the object's key there."""
        key = f"{self._root}/{name}"
        return self._client.ask(self.where(name), what, lambda provider: request(provider, key))

    def exists(self, name: str) -> bool:
        """See `store.Store`."""
        try:
            self.state(name)
        except FileNotFoundError:
            return False
        return True

    def state(self, name: str) -> State:
        """See `store.Store`; the stamp is the ETag."""
        found = self._ask(name, "cannot be looked up", lambda store, key: store.get_object_metadata(key, strict=False))
        return State(found.content_length, found.etag)

    def names(self, folder: str = "") -> dict[str, int | None]:
        """See `store.Store`."""
        place = f"{folder}/" if folder else ""
        found = self._ask(
            place, "cannot be listed", lambda store, key: list(store.list_objects(key, include_directories=True))
        )
        names = {item.key.rpartition(f"{self._root}/{place}")[2]: item for item in found}
        return {name: item.content_length if item.type == "file" else None for name, item in names.items() if name}

    def read(self, name: str, limit: int = MAX_RECORD_BYTES) -> bytes:
        """See `store.Store`."""
        from multistorageclient.types import Range

        def get(store: Any, key: str) -> bytes:
            try:
                return bytes(store.get_object(key, Range(0, limit + 1)))
            except Exception as error:
                if status(error)[0] == 416:  # an empty object has no first byte
                    return b""
                raise

        data = self._ask(name, "cannot be read", get)
        if len(data) > limit:
            raise CorruptFile(
                f"{self.where(name)} has more than the {limit} bytes that such a file can have; it is damaged or "
                "foreign"
            )
        return data

    def open(self, name: str) -> RemoteFile:
        """See `store.Store`."""
        return RemoteFile(self, name, self.state(name).size)

    def read_range(self, name: str, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size) of an object; right in number only."""
        from multistorageclient.types import Range

        def get(store: Any, key: str) -> bytes:
            data = store.get_object(key, Range(offset, size))
            if len(data) != size:
                raise RuntimeError(f"the answer has {len(data)} bytes, {size} were asked for")
            return data

        return self._ask(name, f"cannot be read in [{offset}, {offset + size})", get)

    def create(self, files: dict[str, bytes]) -> None:
        """See `store.Store`. The first file decides whose the place is; its owner adds the others, now or later."""
        first = next(iter(files))
        if not self.exists(first):
            if self.names().keys() - {"tmp"} and not self.exists(first):
                raise NotACache(f"{self.path} exists and is not a teacher cache; choose another place")
            self.put(first, files[first])
        if self.read(first) == files[first]:
            for name, data in files.items():
                if not self.exists(name):
                    self.put(name, data)

    def check(self) -> None:
        """See `store.Store`; there are no folders on a store."""

    @contextlib.contextmanager
    def draft(self, name: str, parts: Iterable[bytes | memoryview]) -> Iterator[RemoteDraft]:
        """See `store.Store`."""
        state, body = xxhash.xxh3_128(), bytearray()
        for part in parts:
            state.update(part)
            body += memoryview(part).cast("B")
        yield RemoteDraft(self, name, body, state.hexdigest())

    def put(self, name: str, body: bytes | bytearray) -> bool:
        """Make an object. False if there is one of that name, which stays as it is."""
        self._prove("If-None-Match", lambda name: self._put(name, b"another"))
        return self._put(name, body)

    def _put(self, name: str, body: bytes | bytearray) -> bool:
        from multistorageclient.types import PreconditionFailedError

        try:
            self._ask(name, "cannot be written", lambda store, key: store.put_object(key, body, if_none_match="*"))
        except PreconditionFailedError:
            return False
        return True

    def set_aside(self, name: str, stamp: str) -> str | None:
        """See `store.Store`."""
        self._prove("If-Match", lambda name: self._delete(name, "0" * 32))
        if not stamp:
            raise StoreError(
                f"{self.where(name)} has no ETag by which it could be told from another; move it yourself"
            )
        target = f"quarantine/{name.rpartition('/')[2]}.{uuid.uuid4().hex}"
        copy = f"{self._root}/{target}"
        try:
            self._ask(name, "cannot be copied to quarantine", lambda store, key: store.copy_object(key, copy))
        except FileNotFoundError:
            return None
        if self._delete(name, stamp):
            return self.where(target)
        self._delete(target)
        return None

    def _delete(self, name: str, stamp: str | None = None) -> bool:
        """Delete an object. False if it is another one than the one with that stamp."""
        from multistorageclient.types import PreconditionFailedError

        try:
            self._ask(name, "cannot be deleted", lambda store, key: store.delete_object(key, if_match=stamp))
        except PreconditionFailedError:
            return False
        except FileNotFoundError:  # gone before, or with an answer that was lost
            pass
        return True

    def _prove(self, condition: str, break_it: Callable[[str], bool]) -> None:
        """Raise StoreError unless the store refuses a request that does not meet its condition."""
        if condition in self._proved:
            return
        probe = f"tmp/{temporary_name('probe')}"
        self._put(probe, b"one")
        try:
            ignored = break_it(probe)
        finally:
            self._delete(probe)
        if ignored:
            raise StoreError(
                f"{self.path}: the object store ignores the condition {condition}, without which one writer could "
                "destroy what another has committed. Use a store that keeps conditional requests, or write to a file "
                "system and upload the sealed cache with the store's own tool; it can be read here all the same"
            )
        self._proved.add(condition)

    def sync(self, folder: str) -> None:
        """See `store.Store`; whatever the store has answered is durable."""

    def sweep(self, *, all: bool = False) -> None:
        """See `store.Store`. Only objects of `_prove` can be there."""
        with contextlib.suppress(StoreError):
            for name in self.names("tmp"):
                if all or is_abandoned(name):
                    self._delete(f"tmp/{name}")

    def twice(self, work: Callable[[], _T]) -> _T:
        """See `store.Store`."""
        try:
            return work()
        except CorruptFile as error:
            logger.warning("%s; reading it once more", error)
            return work()

    def map(self, work: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[_R]:
        """See `store.Store`; 16 at once."""
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            for some in itertools.batched(items, 64 * _AT_ONCE):
                yield from threads.map(work, some)


@functools.lru_cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Threads that fetch ranges. A forked process has none of its parent's."""
    return ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="cache-range")
