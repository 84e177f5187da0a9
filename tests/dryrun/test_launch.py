# SPDX-License-Identifier: Apache-2.0
"""Ranks start, report, fail loudly and leave nothing behind; importing the package patches nothing."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_kd.dryrun import RankFailed, run_ranks, start_ranks


def rank_and(value):
    return int(os.environ["RANK"]), os.environ["WORLD_SIZE"], os.environ.get("GREETING"), value


def fail_on_rank_one():
    if os.environ["RANK"] == "1":
        print("just before")
        raise ValueError("broken on purpose")
    time.sleep(600)


def die():
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def start_a_child_and_sleep():
    subprocess.run(["sleep", "600"])


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def all_gone(pids) -> bool:
    deadline = time.monotonic() + 20
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(alive(pid) for pid in pids)


def test_results_come_in_rank_order():
    results = run_ranks(rank_and, 3, args=("x",), env={"GREETING": "hello"})
    assert results == [(rank, "3", "hello", "x") for rank in range(3)]


def test_environment_of_the_caller_reaches_the_ranks(monkeypatch):
    monkeypatch.setenv("GREETING", "from the caller")
    assert run_ranks(rank_and, 1, kwargs={"value": 1})[0][2] == "from the caller"


def test_first_failure_is_reported_and_ends_the_others(tmp_path):
    ranks = start_ranks(fail_on_rank_one, 2, log_dir=tmp_path)
    with pytest.raises(
        RankFailed, match="(?s)rank 1: raised.*fail_on_rank_one.*ValueError: broken on purpose"
    ) as caught:
        ranks.wait(60)
    assert caught.value.rank == 1
    assert all_gone(ranks.pids)
    assert "just before" in ranks.log_path(1).read_text()


def test_a_killed_rank_is_reported_with_its_last_words():
    with pytest.raises(RankFailed, match="(?s)rank 0: died with exit code -9.*last words"):
        run_ranks(die, 1)


def test_time_limit():
    ranks = start_ranks(time.sleep, 2, args=(600,))
    with pytest.raises(RankFailed, match="not finished after 1 s"):
        ranks.wait(1)
    assert all_gone(ranks.pids)


def test_kill_reaches_what_the_ranks_started():
    with start_ranks(start_a_child_and_sleep, 1) as ranks:
        children: list[int] = []
        deadline = time.monotonic() + 20
        while not children and time.monotonic() < deadline:
            rank = ranks.pids[0]
            children = [int(pid) for pid in Path(f"/proc/{rank}/task/{rank}/children").read_text().split()]
    assert children and all_gone([*ranks.pids, *children])


ABANDON = """
import time
from megatron_kd.dryrun import launch
launch._PRELOAD = []  # ranks that are about to be killed need no Megatron
if __name__ == "__main__":
    print(*launch.start_ranks(time.sleep, 2, args=(600,)).pids, flush=True)
    time.sleep(600)
"""


def test_ranks_die_with_the_process_that_asked_for_them(tmp_path):
    script = tmp_path / "abandon.py"
    script.write_text(ABANDON)
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    parent.kill()
    parent.wait()
    assert all_gone(pids)


UNTOUCHED = """
import sys, torch
before = {name: id(value) for name, value in vars(torch.cuda).items()}
import megatron_kd.dryrun, megatron_kd.dryrun.device
assert before == {name: id(value) for name, value in vars(torch.cuda).items()}
assert not megatron_kd.dryrun.device.is_enabled()
assert not torch.cuda.is_available() or torch.version.cuda
assert not any(name.startswith("megatron.") for name in sys.modules)
"""


def test_importing_patches_nothing():
    subprocess.run([sys.executable, "-c", UNTOUCHED], check=True, timeout=120)


def enable_twice() -> bool:
    import torch

    from megatron_kd import dryrun

    before = torch.cuda.is_available, torch.Tensor.type
    dryrun.enable()
    return before == (torch.cuda.is_available, torch.Tensor.type) and torch.cuda.is_available()


def test_enabling_again_changes_nothing():
    assert run_ranks(enable_twice, 1) == [True]
