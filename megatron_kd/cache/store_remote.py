# SPDX-License-Identifier: Apache-2.0
"""A cache on an object store, through multi-storage-client.

In: `msc://PROFILE/PATH`, the profile being in multi-storage-client's configuration. Out: the operations of
`store.Store` as requests. A request that fails is repeated for a minute. Costs the latency of a request each, which
`map` and `ahead` hide by asking for several things at once; writing costs memory for one whole shard more.

What takes the place of the file system's promises:

- A PUT is atomic, and under `If-None-Match: *` it never replaces an object. So there are no drafts on the store, and a
  writer killed at any point leaves whole objects only. An answer that was lost makes the repeated PUT find the name
  taken; whoever publishes then compares what is there with what it has.
- Moving to `quarantine/` is a copy, then a DELETE under `If-Match` with the ETag of the object that was judged. Killed
  between the two, the object is judged again.
- A store may ignore either condition without saying so. Before the first use each is tried on an object of no other
  purpose under `tmp/`, and a store that does not keep it is refused.

The profile's own cache is not used: it would keep wrong bytes. `megatron-kd cache copy` stages a cache.
"""

import contextlib
import errno
import functools
import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import xxhash

from megatron_kd.cache.errors import BadSetting, CorruptFile, NotACache, StoreError
from megatron_kd.cache.files import MAX_RECORD_BYTES, is_abandoned, node_name, temporary_name
from megatron_kd.cache.store import State

logger = logging.getLogger(__name__)

_T, _R = TypeVar("_T"), TypeVar("_R")

PATIENCE_S = 60.0
"""How long a request that fails is repeated."""
_RANGE_BYTES = 16 << 20
_PUT_BYTES = 5 << 30
_AT_ONCE = 16
_PASSING = (408, 409, 429)
"""Statuses below 500 after which asking again can help."""
_SETTINGS = ("NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "InvalidRegionError")
"""Errors of boto3 after which it cannot."""
_WRONG_BYTES = "FlexibleChecksumError"


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

    far = True

    def __init__(self, url: str):
        parts = re.fullmatch(r"msc:/+([^/]+)/+(.*?)/*", url)
        if parts is None or not parts[2]:
            raise BadSetting(f"{url} does not name a place on an object store; write msc://PROFILE/PATH")
        self._profile, self._root = parts[1], re.sub("/+", "/", parts[2])
        self.path = f"msc://{self._profile}/{self._root}"
        self._proved: set[str] = set()
        self._client  # noqa: B018  what is missing shows here

    @property
    def _client(self) -> Any:
        """multi-storage-client's provider of the profile; each process has its own."""
        return _provider(self._profile, os.environ.get("MSC_CONFIG"), os.getpid())

    def _key(self, name: str) -> str:
        return f"{self._root}/{name}"

    def where(self, name: str) -> str:
        """See `store.Store`."""
        return f"{self.path}/{name}"

    def _ask(self, name: str, what: str, request: Callable[[], _T]) -> _T:
        """The answer to a request, which is repeated for `PATIENCE_S` where that can help.

        Raises:
            FileNotFoundError, PreconditionFailedError: that is the answer.
            CorruptFile: its bytes were wrong twice, which boto3 can see where whole objects are read.
            StoreError: there was none, or a refusal.
        """
        from multistorageclient.types import PreconditionFailedError

        deadline, pause, attempts = None, 0.1, 0
        while True:
            attempts += 1
            try:
                return request()
            except PreconditionFailedError:
                raise
            except Exception as error:  # of whichever store's own library
                if _status(error) == (404, "NoSuchBucket"):
                    raise StoreError(f"{self.path}: there is no such bucket: {error}") from error
                if isinstance(error, FileNotFoundError):
                    raise FileNotFoundError(errno.ENOENT, "not in the store", self.where(name)) from error
                if attempts > 1 and type(error.__cause__).__name__ == _WRONG_BYTES:
                    raise CorruptFile(f"{self.where(name)} does not match the store's own checksum, twice") from error
                now = time.monotonic()
                deadline = deadline or now + PATIENCE_S
                if now + pause > deadline or _is_final(error):
                    raise StoreError(
                        f"{self.where(name)} {what} on node {node_name()}: asked {attempts} times, the object store "
                        f"refused or did not answer: {error}. Check the store, and profile {self._profile!r} of "
                        "multi-storage-client (endpoint, credentials, permissions)"
                    ) from error
                if attempts == 1:
                    logger.warning("%s %s: %s; asking again for %.0f s", self.where(name), what, error, PATIENCE_S)
            time.sleep(pause)
            pause = min(2 * pause, 5.0)

    def exists(self, name: str) -> bool:
        """See `store.Store`."""
        try:
            self.state(name)
        except FileNotFoundError:
            return False
        return True

    def state(self, name: str) -> State:
        """See `store.Store`; the stamp is the ETag."""
        client, key = self._client, self._key(name)
        found = self._ask(name, "cannot be looked up", lambda: client.get_object_metadata(key, strict=False))
        return State(found.content_length, found.etag)

    def names(self, folder: str = "") -> dict[str, int | None]:
        """See `store.Store`."""
        client, key = self._client, self._key(f"{folder}/" if folder else "")
        found = self._ask(folder, "cannot be listed", lambda: list(client.list_objects(key, include_directories=True)))
        sizes = {item.key.rpartition("/")[2]: item.content_length if item.type == "file" else None for item in found}
        return {name: size for name, size in sizes.items() if f"/{name}/" != f"/{key.split('/')[-2]}/" or size}

    def read(self, name: str, limit: int = MAX_RECORD_BYTES) -> bytes:
        """See `store.Store`."""
        from multistorageclient.types import Range

        client, key = self._client, self._key(name)

        def get() -> bytes:
            try:
                return bytes(client.get_object(key, Range(0, limit + 1)))
            except Exception as error:
                if _status(error)[0] == 416:  # an empty object has no first byte
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

        client, key = self._client, self._key(name)

        def get() -> bytes:
            data = client.get_object(key, Range(offset, size))
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
        if len(body) > _PUT_BYTES:
            raise StoreError(
                f"{self.where(name)} has {len(body)} bytes; one PUT takes {_PUT_BYTES}: use smaller tiles"
            )
        self._prove("If-None-Match", lambda name: self._put(name, b"another"))
        return self._put(name, body)

    def _put(self, name: str, body: bytes | bytearray) -> bool:
        from multistorageclient.types import PreconditionFailedError

        client, key = self._client, self._key(name)
        try:
            self._ask(name, "cannot be written", lambda: client.put_object(key, body, if_none_match="*"))
        except PreconditionFailedError:
            return False
        return True

    def set_aside(self, name: str, stamp: str) -> str | None:
        """See `store.Store`."""
        self._prove("If-Match", lambda name: self._delete(name, "0" * 32))
        target = f"quarantine/{name.rpartition('/')[2]}.{uuid.uuid4().hex}"
        client, source, copy = self._client, self._key(name), self._key(target)
        try:
            self._ask(name, "cannot be copied to quarantine", lambda: client.copy_object(source, copy))
        except FileNotFoundError:
            return None
        if self._delete(name, stamp):
            return self.where(target)
        self._delete(target)
        return None

    def _delete(self, name: str, stamp: str | None = None) -> bool:
        """Delete an object. False if it is another one than the one with that stamp."""
        from multistorageclient.types import PreconditionFailedError

        client, key = self._client, self._key(name)
        try:
            self._ask(name, "cannot be deleted", lambda: client.delete_object(key, if_match=stamp))
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
            yield from threads.map(work, items)


@functools.lru_cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Threads that fetch ranges. A forked process has none of its parent's."""
    return ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="cache-range")


@functools.lru_cache
def _provider(profile: str, configuration: str | None, process: int) -> Any:
    """multi-storage-client's storage provider of a profile."""
    try:
        from multistorageclient import StorageClientConfig

        provider = StorageClientConfig.from_file(profile=profile).storage_provider
    except ImportError as error:
        raise BadSetting(
            f"msc://{profile} needs multi-storage-client, and for an S3 store boto3 ({error}): "
            "pip install 'megatron-kd[store]'"
        ) from error
    except Exception as error:
        raise BadSetting(
            f"msc://{profile}: {error}. Describe the profile in the file that MSC_CONFIG names, or in "
            "~/.config/msc/config.yaml"
        ) from error
    if provider is None:
        raise BadSetting(f"msc://{profile} is a profile of several stores; name one of a single store")
    return provider


def _status(error: Exception) -> tuple[int | None, str | None]:
    """HTTP status and code of the store's answer, as boto3 notes them on the error or on what caused it."""
    for cause in (error, error.__cause__, error.__context__):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            return status, response.get("Error", {}).get("Code")
    return None, None


def _is_final(error: Exception) -> bool:
    """Whether asking again cannot help."""
    status = _status(error)[0]
    if status is not None:
        return status == 501 or (400 <= status < 500 and status not in _PASSING)
    kinds = (NotImplementedError, PermissionError, TypeError, ValueError)
    return isinstance(error, kinds) or type(error.__cause__).__name__ in _SETTINGS
