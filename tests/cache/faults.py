# SPDX-License-Identifier: Apache-2.0
"""Faults made at the kernel's own boundary: a process stopped, or refused, at its n-th call that changes files.

Linux on x86-64: ptrace for the calls, a mount namespace for a full or a read-only file system.
"""

import ctypes
import os
import platform
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_kd.cache import CannotWrite

REFUSED, FAILED = 2, 1
"""Exit statuses of a child: its work raised `CannotWrite`, or anything else."""

_TRACEME, _PEEKUSER, _POKEUSER, _SYSCALL, _SETOPTIONS = 0, 3, 6, 24, 0x4200
_SYSGOOD, _EXITKILL = 1, 1 << 20
_RAX, _RDX, _RSI, _RDI, _NUMBER = 80, 96, 104, 112, 120  # offsets in the user area
_WRITES = {1: "write", 18: "write", 20: "write", 77: "write"}
_NAMES = {86: "link", 265: "link", 87: "unlink", 263: "unlink", 82: "rename", 264: "rename", 316: "rename"}
_FOLDERS = {83: "mkdir", 258: "mkdir", 84: "rmdir"}
_OTHERS = {74: "fsync", 75: "fsync", **_NAMES, **_FOLDERS}
_CREATES = {2: _RSI, 257: _RDX}  # open and openat: where their flags are

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long
_libc.mount.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p]

needs_ptrace = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64", reason="system calls are counted on Linux x86-64"
)


def child(work: Callable[[], None]) -> int:
    """Run `work` in a forked process; its pid. It leaves with 0, `REFUSED` or `FAILED`."""
    pid = os.fork()
    if pid == 0:
        code = FAILED
        try:
            work()
            code = 0
        except CannotWrite:
            code = REFUSED
        except BaseException:  # noqa: B036
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def wait(pid: int) -> int:
    """Exit status of a child, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def at_call(work: Callable[[], None], number: int | None = None, error: int = 0) -> tuple[int, list[str]]:
    """Run `work` in a child; kill it before its call `number` that changes files, or let that call fail.

    Args:
        work: what the child does.
        number: which call, counted from 0; None disturbs nothing.
        error: the errno to fail with; 0 kills with SIGKILL.

    Returns:
        Exit status as `wait` gives it, and the calls made (the one that was struck is not among them).
    """

    def traced():
        _libc.ptrace(_TRACEME, 0, None, None)
        os.kill(os.getpid(), signal.SIGSTOP)
        work()

    pid = child(traced)
    os.waitpid(pid, 0)
    _libc.ptrace(_SETOPTIONS, pid, None, _SYSGOOD | _EXITKILL)
    calls, entering, struck, forward = [], True, False, None
    while True:
        _libc.ptrace(_SYSCALL, pid, None, forward)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSTOPPED(status):
            return os.waitstatus_to_exitcode(status), calls
        forward = None
        if os.WSTOPSIG(status) != signal.SIGTRAP | 0x80:
            forward = os.WSTOPSIG(status)
            continue
        if entering and (name := _changes_files(pid)):
            if len(calls) == number and not error:
                os.kill(pid, signal.SIGKILL)
            elif len(calls) == number and not struck:
                struck = True
                _libc.ptrace(_POKEUSER, pid, _NUMBER, -1)
            else:
                calls.append(name)
        elif struck and not entering:
            _libc.ptrace(_POKEUSER, pid, _RAX, -error)
            struck, number = False, None
        entering = not entering


def _changes_files(pid: int) -> str:
    """Name of the call the process is about to make, if it is one that changes files; else empty."""
    number = _peek(pid, _NUMBER)
    if number in _CREATES:
        return "create" if _peek(pid, _CREATES[number]) & os.O_CREAT else ""
    if number in _WRITES:
        return "write" if _peek(pid, _RDI) > 2 else ""
    return _OTHERS.get(number, "")


def _peek(pid: int, offset: int) -> int:
    return _libc.ptrace(_PEEKUSER, pid, offset, None) & 0xFFFFFFFF


def own_mounts() -> bool:
    """Give the calling child a mount namespace of its own. False where that is not allowed."""
    for flags in (os.CLONE_NEWNS, os.CLONE_NEWNS | os.CLONE_NEWUSER):
        try:
            os.unshare(flags)
        except OSError:
            continue
        return _libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None) == 0  # private, and all below
    return False


def mount_small(folder: Path, size: int) -> bool:
    """A file system of `size` bytes in memory on `folder`, seen by this process alone."""
    return _libc.mount(b"none", bytes(folder), b"tmpfs", 0, f"size={size}".encode()) == 0


def mount_read_only(folder: Path) -> bool:
    """Make `folder` read-only for this process, root or not."""
    path, bind = bytes(folder), 0x1000
    return _libc.mount(path, path, None, bind, None) == 0 and _libc.mount(b"", path, None, bind | 0x20 | 1, None) == 0
