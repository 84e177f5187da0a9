# SPDX-License-Identifier: Apache-2.0
"""Writing survives anything: killed or refused at every call that changes files, full and read-only file systems."""

import errno
import os
import random
import resource
import signal
import time

import numpy as np
import pytest

from megatron_kd.cache import CacheReader, CacheWriter, CannotWrite, DocumentUnits, NotACache, Unsealed
from megatron_kd.cache.files import node_name, process_name, temporary_name
from megatron_kd.cache.verify import verify
from tests.cache.conftest import build, fill, random_documents, write_corpus
from tests.cache.faults import REFUSED, at_call, child, mount_read_only, mount_small, needs_ptrace, own_mounts, wait

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # children of fork only write files


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Units, manifest, tile table and, by name, the shards that an undisturbed build of two tiles makes."""
    folder = tmp_path_factory.mktemp("plan")
    units = DocumentUnits(write_corpus(folder / "corpus", random_documents(6, count=4, longest=60)))
    writer = build(folder / "undisturbed", units.corpus, top_k=3, tile_tokens=60)
    assert len(writer.tiles) == 3
    return units, writer.manifest, writer.tiles, shards(writer.path)


def shards(path):
    return {p.name: p.read_bytes() for p in sorted((path / "shards").iterdir())}


def make(path, plan):
    units, manifest, tiles, _ = plan
    writer = CacheWriter(path, manifest, tiles)
    fill(writer, units, writer.todo())
    writer.seal()


def check_and_finish(path, plan):
    """What a disturbed build left is valid, and readable only if sealed; the next one makes what is missing."""
    units, manifest, tiles, expected = plan
    there = shards(path) if path.exists() else {}
    assert all(expected[name] == data for name, data in there.items())
    if not (path / "SEALED.json").exists():
        with pytest.raises((Unsealed, NotACache)):
            CacheReader(path, wait_s=0)
    else:
        assert verify(path).problems == []
    before = {p.name: p.stat().st_ino for p in (path / "shards").iterdir()} if there else {}
    writer = CacheWriter(path, manifest, tiles)
    todo = writer.todo()
    assert todo == [tile for tile in range(len(tiles) - 1) if writer.shard_path(tile).name not in there]
    fill(writer, units, todo)
    writer.seal()
    assert shards(path) == expected and verify(path).problems == []
    assert all(writer.path.joinpath("shards", name).stat().st_ino == inode for name, inode in before.items())
    assert not any((path / "tmp").iterdir()) and not any((path / "quarantine").iterdir())
    assert not [p.name for p in path.parent.iterdir() if p.name.startswith(f".{path.name}.")]
    return len(todo)


@needs_ptrace
def test_killed_before_every_call_that_changes_a_file(tmp_path, plan):
    """SIGKILL at each of some seventy system calls: create, write, fsync, link, unlink, rename, mkdir."""
    code, calls = at_call(lambda: make(tmp_path / "whole", plan))
    assert code == 0 and len(calls) > 60
    left = []
    for number in range(len(calls)):
        path = tmp_path / f"killed-{number}"
        code, made = at_call(lambda path=path: make(path, plan), number)
        assert code == -signal.SIGKILL and made == calls[:number]
        left.append(check_and_finish(path, plan))
    assert left == sorted(left, reverse=True) and set(left) == {0, 1, 2}  # later kills leave less to do


@needs_ptrace
def test_refused_at_every_call_that_changes_a_file(tmp_path, plan):
    """A full disk: one message that names the cache, never a traceback or a half-written file."""
    _, calls = at_call(lambda: make(tmp_path / "whole", plan))
    outcomes = set()
    for number in range(len(calls)):
        path = tmp_path / f"refused-{number}"
        code, _ = at_call(lambda path=path: make(path, plan), number, errno.ENOSPC)
        outcomes.add(code)
        check_and_finish(path, plan)
    assert outcomes <= {0, REFUSED} and REFUSED in outcomes


@needs_ptrace
def test_nothing_is_named_before_it_is_on_disk(tmp_path, plan):
    """For a loss of power: content is synced before it gets a name, and a name is synced before the next is given."""
    _, calls = at_call(lambda: make(tmp_path / "c", plan))
    unsynced = named = False
    for call in calls:
        if call in ("link", "rename"):
            assert not unsynced and not named
        unsynced = call == "write" or (unsynced and call != "fsync")
        named = call in ("link", "rename") or (named and call != "fsync")
    assert not named and calls.count("link") == 7 and calls.count("rename") == 1


def test_a_file_size_limit_is_reported_and_harmless(tmp_path, plan):
    """RLIMIT_FSIZE: the kernel itself refuses the last byte of the larger shard."""
    limit = max(map(len, plan[3].values())) - 1

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        make(tmp_path / "c", plan)

    assert wait(child(work)) == REFUSED
    assert check_and_finish(tmp_path / "c", plan) == 1


def test_a_full_file_system(tmp_path, plan):
    """A file system with room for one tile and a half; with room again the build goes on."""
    units, manifest, tiles, expected = plan
    (tmp_path / "small").mkdir()
    room = 4096 * 12

    def work():
        if not (own_mounts() and mount_small(tmp_path / "small", room)):
            os._exit(77)
        filler = tmp_path / "small" / "filler"
        writer = CacheWriter(tmp_path / "small" / "c", manifest, tiles)
        fill(writer, units, [0])
        with pytest.raises(OSError, match="No space"), open(filler, "wb", buffering=0) as stream:
            while True:
                stream.write(b"x" * 4096)
        with pytest.raises(CannotWrite, match="cannot take tile 1 on node .*No space left.*is kept"):
            fill(writer, units, [1])
        filler.unlink()
        assert check_and_finish(writer.path, plan) == 1

    code = wait(child(work))
    if code == 77:
        pytest.skip("no mount namespaces here")
    assert code == 0


def test_a_read_only_cache_can_be_read_verified_and_found_complete(tmp_path, plan):
    units, manifest, tiles, _ = plan
    make(tmp_path / "done", plan)
    CacheWriter(tmp_path / "begun", manifest, tiles)

    def work():
        if not (own_mounts() and mount_read_only(tmp_path)):
            os._exit(77)
        CacheReader(tmp_path / "done").read(np.array([[0, manifest.rows]]))
        assert verify(tmp_path / "done").problems == []
        make(tmp_path / "done", plan)  # nothing is to do, so nothing is written
        for name, message in (("begun", "cannot take tile 0"), ("new", "cannot be made")):
            with pytest.raises(CannotWrite, match=f"{name} {message}.*Read-only file system"):
                make(tmp_path / name, plan)

    code = wait(child(work))
    if code == 77:
        pytest.skip("no mount namespaces here")
    assert code == 0


def test_without_permission_to_write(tmp_path, plan):
    """Another user's cache: readable, and a build says what it lacks."""
    make(tmp_path / "done", plan)
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.name.startswith("pytest-"):
            parent.chmod(0o755)

    def work():
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
        else:
            tmp_path.chmod(0o555)
        make(tmp_path / "done", plan)
        with pytest.raises(CannotWrite, match="new cannot be made.*Permission denied"):
            make(tmp_path / "new", plan)

    assert wait(child(work)) == 0
    tmp_path.chmod(0o755)


def test_writers_killed_at_random_while_others_write(tmp_path, plan):
    """Five rounds of three writers, each killed after a moment; no round undoes what an earlier one finished."""
    units, manifest, tiles, expected = plan
    rng, path, done = random.Random(3), tmp_path / "c", set()

    def work():
        writer = CacheWriter(path, manifest, tiles)
        for tile in writer.todo():
            time.sleep(0.02)
            fill(writer, units, [tile])

    for _ in range(5):
        pids = [child(work) for _ in range(3)]
        for pid in pids:
            time.sleep(rng.uniform(0, 0.04))
            os.kill(pid, signal.SIGKILL)
        assert {wait(pid) for pid in pids} <= {0, -signal.SIGKILL}
        now = {p.name for p in (path / "commits").iterdir()} if path.exists() else set()
        assert now >= done
        done = now
    make(path, plan)
    assert shards(path) == expected and verify(path).problems == []


@pytest.mark.parametrize("jump", [-1e9, -7200, 0, 7200, 1e9])
def test_leftovers_are_judged_by_their_process_not_by_a_clock(tmp_path, plan, jump):
    """What a dead process of this machine left goes at once; what may be alive stays, whatever the clock says."""
    units, manifest, tiles, _ = plan
    writer = CacheWriter(tmp_path / "c", manifest, tiles)
    pid = child(lambda: time.sleep(60))
    try:
        dead, alive = process_name(pid), process_name(os.getppid())
    finally:
        os.kill(pid, signal.SIGKILL)
        wait(pid)
    boot, space, _, start = alive.split("-")
    names = {
        "dead": f"a.{node_name()}.{dead}.aa",
        "alive": f"a.{node_name()}.{alive}.bb",
        "the number was given to another process": f"a.{node_name()}.{boot}-{space}-{os.getpid()}-1{start}.cc",
        "elsewhere": f"a.another-node.{dead}.dd",
        "another boot": f"a.{node_name()}.00000000-{dead.partition('-')[2]}.ee",
        "another container": f"a.{node_name()}.{dead.replace(space, '1' + space)}.ff",
        "ours": temporary_name("a"),
        "foreign": "thesis.txt",
    }
    for name in names.values():
        (writer.path / "tmp" / name).write_bytes(b"")
        os.utime(writer.path / "tmp" / name, (time.time() + jump,) * 2)
    CacheWriter(writer.path, manifest, tiles)
    left = {p.name for p in (writer.path / "tmp").iterdir()}
    assert set(names.values()) - left == {names["dead"], names["the number was given to another process"]}
    make(writer.path, plan)
    assert not any((writer.path / "tmp").iterdir())


def test_a_writer_whose_temporary_file_vanishes_writes_it_again(tmp_path, plan, monkeypatch):
    """Another writer seals the cache and clears tmp/ just before this one names its shard."""
    units, manifest, tiles, expected = plan
    writer = CacheWriter(tmp_path / "c", manifest, tiles)
    vanished = []

    def link(source, target, real=os.link):
        if len(vanished) < 2:
            vanished.append(source)
            os.unlink(source)
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    fill(writer, units, writer.todo())
    writer.seal()
    assert len(vanished) == 2 and shards(tmp_path / "c") == expected and verify(tmp_path / "c").problems == []
