# SPDX-License-Identifier: Apache-2.0
"""File primitives of the cache: atomic publication, exact reads, digests, JSON records.

In: paths and bytes. Out: the same, or a `CacheError`. A file is published in four steps (write under `tmp/`, fsync,
hard link into place, fsync the folder), so a name that can be seen always has complete content, and a second
publication of a name fails instead of replacing it. A JSON record has one canonical spelling and carries its own
checksum: any changed byte shows. Temporary names say whose they are, so that leftovers of dead processes can go,
without asking a clock.
"""

import json
import os
import socket
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import xxhash

from megatron_kd.cache.errors import CorruptFile

MAX_RECORD_BYTES = 1 << 20
FOLDERS = ("shards", "commits", "tmp", "quarantine")
"""Folders of a cache."""
_CHUNK_BYTES = 8 << 20


def node_name() -> str:
    """Name of this machine, for messages and for the names of temporary files."""
    return socket.gethostname()


def process_name(pid: int | None = None) -> str:
    """A process of this machine by boot, PID namespace, number and start (ticks since boot); no clock is asked.

    Without `/proc`, or for a process that is not there, the parts that cannot be known are empty.
    """
    pid = os.getpid() if pid is None else pid
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
        space = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    except OSError:
        return f"--{pid}-"
    try:
        start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        start = ""
    return f"{boot}-{space}-{pid}-{start}"


def temporary_name(name: str) -> str:
    """A name nobody else uses, which says whose it is: node, process, and a random part."""
    return f"{name}.{node_name()}.{process_name()}.{uuid.uuid4().hex}"


def is_abandoned(name: str) -> bool:
    """Whether a temporary name belongs to a process of this machine and boot that runs no more.

    What cannot be judged from here (another node, boot or container) is not abandoned. Nothing depends on the clock.
    """
    owner = name.split(".")[-2] if name.count(".") >= 2 else ""
    boot, space, pid, start = (owner.split("-") + [""] * 4)[:4]
    if not (boot and space and start and pid.isdigit() and f".{node_name()}.{owner}." in name):
        return False
    now = process_name(int(pid)).split("-")
    return now[:2] == [boot, space] and now[3] != start


def open_regular(path: Path) -> int:
    """Open a file of a cache for reading: a file descriptor.

    Raises:
        FileNotFoundError: there is none.
        CorruptFile: it cannot be opened or is no regular file; it or its folder is a symbolic link, which could lead
            anywhere.
    """
    links = [part for part in (path, path.parent) if (part is path or part.name in FOLDERS) and part.is_symlink()]
    if links:
        raise CorruptFile(
            f"{links[0]} is a symbolic link, and a cache holds its files itself. Put a copy of the file there "
            "(`cp -rL` copies a whole cache so)"
        )
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CorruptFile(f"{path} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise CorruptFile(f"{path} is not a regular file")
    return fd


def digest_bytes(data: bytes | memoryview) -> str:
    """xxh3-128 of `data`, 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_file(path: Path) -> str:
    """xxh3-128 of a whole file, read in pieces of 8 MiB."""
    state = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


def read_exact(fd: int, buffer: memoryview, offset: int, name: str) -> None:
    """Fill `buffer` from byte `offset` of `fd`; the kernel may answer in several parts (2 GiB at most each)."""
    view = buffer.cast("B")
    done = 0
    while done < len(view):
        try:
            count = os.preadv(fd, [view[done:]], offset + done)
        except OSError as error:
            raise CorruptFile(f"{name} cannot be read at byte {offset + done}: {error.strerror}") from error
        if count == 0:
            raise CorruptFile(
                f"{name} ends at byte {offset + done}; {len(view) - done} more bytes were expected there"
            )
        done += count


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_temporary(folder: Path, name: str, parts: Iterable[bytes | memoryview]) -> tuple[Path, str, int]:
    """Write `parts` to a fresh file in `folder` and fsync it.

    Returns:
        The path, the xxh3-128 digest of its content, and its size in bytes.
    """
    path = folder / temporary_name(name)
    state, size = xxhash.xxh3_128(), 0
    try:
        with open(path, "xb", buffering=0) as stream:
            for part in parts:
                view = memoryview(part).cast("B")
                state.update(view)
                size += len(view)
                while len(view):
                    view = view[stream.write(view) :]
            os.fsync(stream.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path, state.hexdigest(), size


def publish(temporary: Path, target: Path) -> bool:
    """Give a finished temporary file its name. False if the name is taken: nothing is ever replaced.

    Either way the name is durable afterwards: who gave it may have died before making it so.
    """
    try:
        os.link(temporary, target)
    except FileExistsError:
        published = False
    else:
        published = True
    fsync_folder(target.parent)
    return published


def _canonical(body: dict[str, Any]) -> bytes:
    return (json.dumps(body, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


def encode_record(body: dict[str, Any]) -> bytes:
    """JSON bytes of `body` with a `checksum` field over all the others, in the one canonical spelling."""
    return _canonical(body | {"checksum": xxhash.xxh3_64_hexdigest(_canonical(body))})


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        raise ValueError("a key occurs twice")
    return body


def parse_json(data: bytes, name: str) -> dict[str, Any]:
    """Parse a JSON object, without duplicate keys or NaN, or raise `CorruptFile` naming `name`."""
    try:
        body = json.loads(data.decode(), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{name} is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise CorruptFile(f"{name} must hold a JSON object, found {type(body).__name__}")
    return body


def read_bounded(path: Path, limit: int = MAX_RECORD_BYTES, *, follow_links: bool = False) -> bytes:
    """Content of a small file; a larger one is refused before it is read, and so is a symbolic link."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if follow_links else open_regular(path)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise CorruptFile(
                f"{path} has {size} bytes, more than the {limit} such a file can have; it is damaged or foreign"
            )
        data = bytearray(size)
        read_exact(fd, memoryview(data), 0, str(path))
    finally:
        os.close(fd)
    return bytes(data)


def decode_record(data: bytes, name: str) -> dict[str, Any]:
    """Inverse of `encode_record`, without the checksum; `CorruptFile` if any byte is not as it was written."""
    body = parse_json(data, name)
    found = body.pop("checksum", None)
    try:
        expected = encode_record(body)
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{name} holds a value that no writer writes: {error}") from error
    if data != expected:
        right = xxhash.xxh3_64_hexdigest(_canonical(body))
        raise CorruptFile(
            f"{name} was changed after it was written: it states checksum {found}, its content has {right}. Restore "
            "it from a copy, or build the cache again"
        )
    return body
