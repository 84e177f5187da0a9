# SPDX-License-Identifier: Apache-2.0
"""Starts CPU ranks: forked from one preloaded server, watched, and never left behind.

In: a function of a module, its arguments, a world size. Out: what each rank returned, in rank order, or `RankFailed`
with the traceback of the rank that failed first. The first call in a process costs the imports (about 25 s); each
later one a second. Ranks find RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in their
environment; torch.distributed is left to what they run.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_kd.errors import UserError

_PRELOAD = ["megatron_kd.dryrun.preload"]
_LOG_LINES_SHOWN = 30
_SECONDS_TO_LEAVE = 10
_SET_BY_PRELOAD = ("OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS")


class RankFailed(RuntimeError):
    """A rank raised, died or did not finish in time. `rank` says which; the message has its traceback and last log.

    `refusal` is the message of a `UserError`, if that is what it raised.
    """

    def __init__(self, rank: int, reason: str, refusal: str | None = None) -> None:
        super().__init__(f"rank {rank}: {reason}")
        self.rank, self.refusal = rank, refusal


@contextlib.contextmanager
def refusals_raised() -> Iterator[None]:
    """Raise here the `UserError` that a rank raised, without the traceback of `RankFailed`."""
    try:
        yield
    except RankFailed as error:
        if error.refusal is None:
            raise
        raise UserError(error.refusal) from error


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout_s: float = 600,
    env: Mapping[str, str] | None = None,
    log_dir: str | Path | None = None,
) -> list[Any]:
    """Run `fn(*args, **kwargs)` on `world_size` CPU ranks and wait.

    Args:
        fn: a function that a fresh process can import by module and name.
        world_size: number of ranks, all on this machine.
        args: positional arguments, picklable.
        kwargs: keyword arguments, picklable.
        timeout_s: after it the ranks are killed.
        env: environment variables on top of this process's own.
        log_dir: folder that receives rank-0.log and so on; None keeps logs of ranks that fail only.

    Returns:
        The ranks' return values, in rank order: plain values or arrays. Tensors pass too, but Megatron has taught
        them to need megatron.core where they arrive, a matter of seconds.

    Raises:
        RankFailed: the first failure; the other ranks have been killed.
    """
    ranks = start_ranks(fn, world_size, args=args, kwargs=kwargs, env=env, log_dir=log_dir)
    return ranks.wait(timeout_s)


def start_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    log_dir: str | Path | None = None,
) -> "Ranks":
    """Like `run_ranks`, without waiting."""
    return Ranks(fn, world_size, tuple(args), dict(kwargs or {}), dict(env or {}), log_dir)


class Ranks:
    """Running ranks. As a context manager it kills what still runs on leaving."""

    def __init__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: tuple,
        kwargs: dict[str, Any],
        env: dict[str, str],
        log_dir: str | Path | None,
    ) -> None:
        self._gone = False
        self._keeps_logs = log_dir is not None
        self.log_dir = Path(log_dir or tempfile.mkdtemp(prefix="megatron-kd-ranks-"))
        self.log_dir.mkdir(parents=True, exist_ok=True)
        self._processes: list[multiprocessing.Process] = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        context = _fork_server()
        shared_env = {**os.environ, **_rendezvous(world_size), **env}
        work = pickle.dumps((fn, args, kwargs))  # here, so that the ranks can report a failing import of fn's module
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                rank_env = {**shared_env, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                process = context.Process(
                    target=_rank_main,
                    args=(theirs, work, rank_env, self.log_path(rank)),
                    name=f"rank-{rank}",
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids in rank order."""
        return [process.pid for process in self._processes]

    def log_path(self, rank: int) -> Path:
        """Where standard output and error of a rank go."""
        return self.log_dir / f"rank-{rank}.log"

    def wait(self, timeout_s: float = 600) -> list[Any]:
        """Return values in rank order; see `run_ranks`."""
        try:
            results = self._collect(time.monotonic() + timeout_s, timeout_s)
            for process in self._processes:
                process.join(_SECONDS_TO_LEAVE)
        finally:
            self.kill()
        self._drop_logs()
        return results

    def kill(self) -> None:
        """SIGKILL to all ranks and the processes they started; returns when they are gone."""
        if self._gone:
            return  # their numbers may belong to others by now
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # it may not have made itself the leader of a group yet
        for process in self._processes:
            process.join()
        self._gone = True

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, error_type: type | None, *error: object) -> None:
        self.kill()
        if error_type is None:
            self._drop_logs()

    def _drop_logs(self) -> None:
        if not self._keeps_logs:
            shutil.rmtree(self.log_dir, ignore_errors=True)

    def _collect(self, deadline: float, timeout_s: float) -> list[Any]:
        results: dict[int, Any] = {}
        open_pipes = dict(enumerate(self._pipes))
        while open_pipes:
            ready = multiprocessing.connection.wait(open_pipes.values(), max(0.0, deadline - time.monotonic()))
            if not ready:
                rank = min(open_pipes)
                raise RankFailed(rank, f"not finished after {timeout_s:g} s; all ranks killed.{self._log_tail(rank)}")
            failures = []
            for rank in [rank for rank, pipe in open_pipes.items() if pipe in ready]:
                try:
                    results[rank] = self._receive(rank, open_pipes.pop(rank))
                except RankFailed as error:
                    failures.append(error)
            if failures:  # a refusal says why the others lost their peer
                raise next((error for error in failures if error.refusal), failures[0])
        return [results[rank] for rank in range(len(self._processes))]

    def _receive(self, rank: int, pipe: multiprocessing.connection.Connection) -> Any:
        try:
            succeeded, payload = pickle.loads(pipe.recv_bytes())
        except EOFError:
            self._processes[rank].join()
            code = self._processes[rank].exitcode
            raise RankFailed(rank, f"died with exit code {code}.{self._log_tail(rank)}") from None
        if not succeeded:
            text, refusal = payload
            raise RankFailed(rank, f"raised\n{text}Its log: {self.log_path(rank)}", refusal)
        return payload

    def _log_tail(self, rank: int) -> str:
        lines = self.log_path(rank).read_text(errors="replace").splitlines() if self.log_path(rank).exists() else []
        return "\n".join([f"\nLast lines of {self.log_path(rank)}:", *lines[-_LOG_LINES_SHOWN:]])


def _fork_server() -> multiprocessing.context.BaseContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _rendezvous(world_size: int) -> dict[str, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _rank_main(pipe: multiprocessing.connection.Connection, work: bytes, env: dict[str, str], log_path: Path) -> None:
    os.setpgid(0, 0)  # so that one signal reaches what this rank starts
    threading.Thread(target=_die_with_parent, daemon=True).start()
    multiprocessing.set_start_method("fork", force=True)  # for data workers, as in a rank that torchrun starts
    _redirect_output(log_path)
    try:
        from megatron_kd.dryrun import device, preload  # noqa: F401  (there already, unless the server failed to)

        print(device.describe())
        preloaded = {name: os.environ[name] for name in _SET_BY_PRELOAD}
        os.environ.clear()
        os.environ.update({**env, **preloaded})
        fn, args, kwargs = pickle.loads(work)
        # By value: torch teaches multiprocessing to send handles of tensors, which die with the rank.
        message = pickle.dumps((True, _call(fn, args, kwargs)))
    except BaseException as error:
        print(traceback.format_exc(), file=sys.stderr)
        refusal = str(error) if isinstance(error, UserError) else None
        message = pickle.dumps((False, (traceback.format_exc(), refusal)))
    with contextlib.suppress(BrokenPipeError):
        pipe.send_bytes(message)


def _call(fn: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    try:
        return fn(*args, **kwargs)
    except SystemExit as leaving:
        if leaving.code:
            raise
        return None  # Bridge leaves so where train.exit_interval or exit_signal_handler ends a run


def _die_with_parent() -> None:
    """The ranks' parent is the fork server; whoever asked for them is known by a pipe that closes when it dies."""
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os.killpg(0, signal.SIGKILL)


def _redirect_output(log_path: Path) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
