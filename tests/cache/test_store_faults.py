# SPDX-License-Identifier: Apache-2.0
"""Faults between a cache and its object store, made on the HTTP path by the server's own process.

Wrong bytes, short answers, refusals, lost answers, silence, writers killed at every request that changes something,
several writers, and a store that ignores conditions. What is committed stays, or the error says what is not.
"""

import contextlib
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

from megatron_kd.cache import (
    CacheError,
    CacheReader,
    CacheWriter,
    CannotWrite,
    CorruptBlock,
    CorruptFile,
    DocumentUnits,
    NotACache,
    StoreError,
    TileConflict,
    Unsealed,
)
from megatron_kd.cache.copy import copy_cache
from megatron_kd.cache.repair import repair
from megatron_kd.cache.store import open_store
from megatron_kd.cache.verify import verify
from tests.cache.conftest import build, fill, random_documents, teacher_rows, unit_tokens, write_corpus
from tests.cache.faults import child, wait

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")

PATIENCE = "megatron_kd.cache.store_client.PATIENCE_S"
CHANGE = {"method": "PUT|POST|DELETE"}
CHANGES = 10
"""Requests that make the cache of `plan`, if none is repeated."""


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """Units, manifest, tile table and, by name, the shards that an undisturbed build of two tiles makes."""
    folder = tmp_path_factory.mktemp("plan")
    units = DocumentUnits(write_corpus(folder / "corpus", random_documents(6, count=4, longest=60)))
    writer = build(folder / "undisturbed", units.corpus, top_k=3, tile_tokens=60)
    assert len(writer.tiles) == 3
    return units, writer.manifest, writer.tiles, {p.name: p.read_bytes() for p in (writer.path / "shards").iterdir()}


@pytest.fixture(scope="module", params=["raw", "zstd"])
def on_disk(request, tmp_path_factory):
    """A cache of three tiles of more than two blocks."""
    folder = tmp_path_factory.mktemp("disk")
    corpus = write_corpus(folder / "corpus", random_documents(4, count=10, longest=900))
    return build(folder / "cache", corpus, top_k=5, tile_tokens=1500, codec=request.param).path


@pytest.fixture
def sealed(server, on_disk):
    """That cache on the store."""
    place = server.place()
    copy_cache(on_disk, place)
    return place


def shards(server, place):
    return {name[7:]: server.get(place, name) for name in server.names(place, "shards/")}


def make(place, plan):
    units, manifest, tiles, _ = plan
    writer = CacheWriter(place, manifest, tiles)
    fill(writer, units, writer.todo())
    writer.seal()


def check_and_finish(server, place, plan):
    """What a disturbed build left is valid, and readable only if sealed; the next one makes what is missing."""
    units, manifest, tiles, expected = plan
    there = shards(server, place)
    assert all(expected[name] == data for name, data in there.items())
    if "SEALED.json" in server.names(place):
        assert verify(place).problems == []
    else:
        with pytest.raises((Unsealed, NotACache)):
            CacheReader(place, wait_s=0)
    writer = CacheWriter(place, manifest, tiles)
    todo = writer.todo()
    assert todo == [tile for tile in range(2) if writer.shard_path(tile).name not in there]
    fill(writer, units, todo)
    writer.seal()
    assert shards(server, place) == expected and verify(place).problems == []
    assert not server.names(place, "tmp/") and not server.names(place, "quarantine/")
    return len(todo)


def same_rows(reader, truth):
    everything = np.array([[0, truth.n_rows]])
    for ours, theirs in zip(reader.read(everything), truth.read(everything), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("stride", [11, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", ["flip", "shift", "short"])
def test_any_answer_that_is_wrong_once_is_asked_again(server, on_disk, sealed, how, stride):
    """Answers that a reader gets from opening the cache to its last row, one at a time."""
    truth = CacheReader(on_disk)
    server.faults()
    same_rows(CacheReader(sealed, wait_s=0), truth)
    answers = sum(line[0] == "GET" for line in server.log())
    assert answers > 15
    for number in range(0, answers, stride):
        server.faults({"method": "GET", "skip": number, "times": 1, "action": how})
        same_rows(CacheReader(sealed, wait_s=0), truth)
        assert sum(line[0] == "GET" for line in server.log()) > answers


@pytest.mark.parametrize("how", ["flip", "shift"])
def test_ranges_that_stay_wrong_are_an_error_with_file_and_rows(server, on_disk, sealed, how):
    """The reader does not return a row of them; the other tiles are read as before."""
    truth = CacheReader(on_disk)
    reader = CacheReader(sealed, wait_s=0)
    first, end = (int(reader.tiles[i, 0]) for i in (1, 2))
    reader.read(np.array([[first, 1]]))
    server.faults({"path": "shard-000001.safetensors", "range": "bytes", "action": how})
    name = f"{sealed}/shards/shard-000001.safetensors"
    with pytest.raises(CorruptBlock, match=rf"{name}: block 1 \(rows \[512, 1024\) of the shard") as error:
        reader.read(np.array([[first + 600, 10]]))
    assert error.value.rows == (first + 512, first + 1024)
    around = np.array([[0, first], [end, truth.n_rows - end]])
    for ours, theirs in zip(reader.read(around), truth.read(around), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    (problem,) = verify(sealed).problems
    assert name in problem
    server.faults()
    same_rows(reader, truth)


def test_requests_that_fail_are_repeated_for_a_while(server, on_disk, sealed, monkeypatch, caplog):
    truth = CacheReader(on_disk)
    server.faults({"method": "GET", "range": "bytes", "skip": 3, "times": 4, "action": "status", "status": 503})
    same_rows(CacheReader(sealed, wait_s=0), truth)
    assert sum(line[3] == 503 for line in server.log()) == 4 and "asking again" in caplog.text
    reader = CacheReader(sealed, wait_s=0)
    monkeypatch.setattr(PATIENCE, 0.3)
    server.faults({"path": "shard-000001.safetensors", "action": "status", "status": 500})
    where = rf"{sealed}/shards/shard-000001.safetensors cannot be .* on node .*asked \d+ times"
    with pytest.raises(StoreError, match=where):
        reader.read(np.array([[0, truth.n_rows]]))
    for check in (verify, repair):  # no answer is no damage: nothing is moved for it
        with pytest.raises(StoreError, match=where):
            check(sealed)
    server.faults()
    assert verify(sealed).problems == [] and not server.names(sealed, "quarantine/")


def test_a_refusal_is_final_at_once(server, sealed):
    reader = CacheReader(sealed, wait_s=0)
    server.faults({"path": "shard-", "action": "status", "status": 403})
    started = time.monotonic()
    with pytest.raises(StoreError, match="asked 1 times.*403.*Check the store, and profile 'lab'"):
        reader.read(np.array([[0, 10]]))
    assert time.monotonic() - started < 2 and len(server.log()) == 1


def test_a_server_that_is_slow_or_silent(server, on_disk, sealed, plan):
    """Slower than the profile's read_timeout of a second: asked again. Only slow: waited for."""
    server.faults({"range": "bytes", "skip": 5, "times": 2, "action": "delay", "seconds": 1.6})
    same_rows(CacheReader(sealed, wait_s=0), CacheReader(on_disk))
    server.faults({"action": "delay", "seconds": 0.05})
    same_rows(CacheReader(sealed, wait_s=0), CacheReader(on_disk))


def test_a_silent_server_does_not_break_a_write(server, plan):
    """The first PUT of a shard is carried out after the client has given up on it and asks again."""
    place = server.place()
    server.faults({"method": "PUT", "path": "shards/", "times": 1, "action": "delay", "seconds": 1.6})
    make(place, plan)
    server.faults()
    assert check_and_finish(server, place, plan) == 0


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("how", [{"action": "status", "status": 503}, {"action": "lose answer"}])
def test_each_write_that_fails_or_whose_answer_is_lost(server, plan, how, stride):
    """A lost answer makes the repeated PUT find its own object, which is no conflict."""
    place = server.place()
    server.faults()
    make(place, plan)
    count = lambda: sum(line[0] not in ("GET", "HEAD") for line in server.log())  # noqa: E731
    assert count() >= CHANGES  # on a slow machine one may have been repeated already
    for number in range(0, CHANGES, stride):
        place = server.place()
        server.faults({**CHANGE, "skip": number, "times": 1, **how})
        make(place, plan)
        assert count() > CHANGES
        server.faults()
        assert check_and_finish(server, place, plan) == 0


def test_a_store_that_refuses_writes_is_named(server, plan, monkeypatch):
    monkeypatch.setattr(PATIENCE, 0.3)
    units, manifest, tiles, _ = plan
    place = server.place()
    server.faults({"method": "PUT", "action": "status", "status": 403})
    with pytest.raises(CannotWrite, match=f"{place} cannot be made or joined on node .*403.*is kept"):
        CacheWriter(place, manifest, tiles)
    server.faults()
    writer = CacheWriter(place, manifest, tiles)
    fill(writer, units, [0])
    server.faults({"method": "PUT", "action": "status", "status": 507})
    with pytest.raises(CannotWrite, match=f"{place} cannot take tile 1 on node"):
        fill(writer, units, [1])
    server.faults()
    assert check_and_finish(server, place, plan) == 1


@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_request_that_changes_something(server, plan, stride):
    """SIGKILL from the server before it carries out request n. After request n is the same as before request n + 1."""
    open_store(server.place())  # the client's modules are loaded once, here
    left, number, code = [], 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        place = server.place()

        def work(place=place, number=number):
            server.faults({**CHANGE, "skip": number, "times": 1, "action": "kill", "pid": os.getpid()})
            make(place, plan)

        code = wait(child(work))
        server.faults()
        left.append(check_and_finish(server, place, plan))
        number += stride
    assert code == 0 and number > 10
    assert left == sorted(left, reverse=True) and {0, 2} <= set(left)  # later kills leave less to do


def test_several_writers_at_once(server, plan):
    """Four processes make one cache, each all of its tiles, over a server that answers in its own time."""
    units, manifest, tiles, expected = plan
    place, rng = server.place(), random.Random(1)
    server.faults(*[
        {"skip": rng.randrange(60), "times": 3, "action": "delay", "seconds": rng.random() / 5} for _ in range(12)
    ])  # fmt: skip

    def work(turn):
        writer = CacheWriter(place, manifest, tiles)
        fill(writer, units, [turn % 2, 1 - turn % 2])
        writer.seal()

    assert [wait(pid) for pid in [child(lambda turn=turn: work(turn)) for turn in range(4)]] == [0, 0, 0, 0]
    server.faults()
    assert check_and_finish(server, place, plan) == 0


def test_other_content_for_a_tile_is_an_error_and_changes_nothing(server, plan):
    units, manifest, tiles, expected = plan
    place = server.place()
    make(place, plan)
    before = server.objects(place)
    rows = teacher_rows(unit_tokens(units, 0, int(tiles[1, 1])), 3)
    writer = CacheWriter(place, manifest, tiles)
    with pytest.raises(TileConflict, match="shard-000000.*digest"):
        writer.write_tile(0, rows | {"log_tail": rows["log_tail"] - 1e-3})
    assert server.objects(place) == before
    server.faults({"method": "GET", "path": "shards/shard-000000", "times": 1, "action": "flip"})
    fill(writer, units, [0])  # the same again, though what is there is read wrong at first
    assert server.objects(place) == before


def test_a_file_that_took_the_place_of_the_judged_one_stays(server, plan):
    """Two writers judge a damaged shard; the slow one's delete comes after the quick one has put a sound one there."""
    units, manifest, tiles, expected = plan
    place = server.place()
    make(place, plan)
    name = "shards/shard-000001.safetensors"
    server.put(place, name, expected["shard-000001.safetensors"][:-1] + b"x")
    server.delete(place, "commits/shard-000001.json")
    # the first delete of the shard waits; those that come later do not
    server.faults({"method": "DELETE", "path": name, "times": 1, "action": "delay", "seconds": 0.8})
    slow = threading.Thread(target=lambda: CacheWriter(place, manifest, tiles).todo())
    slow.start()
    time.sleep(0.4)
    make(place, plan)
    assert shards(server, place) == expected
    slow.join()
    statuses = [line[3] for line in server.log() if line[0] == "DELETE" and line[1].endswith(name)]
    assert sorted(statuses) == [204, 412]
    objects = server.objects(place)
    assert shards(server, place) == expected
    assert len([n for n in objects if n.startswith("quarantine/shard")]) == 1
    server.delete(place, next(n for n in objects if n.startswith("quarantine/shard")))
    for seal in [n for n in objects if n.startswith("quarantine/SEALED")]:
        server.delete(place, seal)
    assert check_and_finish(server, place, plan) == 0


@pytest.mark.parametrize("condition,method", [("If-None-Match", "PUT"), ("If-Match", "DELETE")])
def test_a_store_that_ignores_conditions_is_refused(server, plan, condition, method):
    """Before anything of the cache is written, or moved."""
    units, manifest, tiles, expected = plan
    place = server.place()
    if method == "DELETE":
        make(place, plan)
        server.put(place, "commits/shard-000000.json", b"{}")
    before = server.objects(place)
    server.faults({"method": method, "action": "ignore condition"})
    with pytest.raises(CannotWrite, match=f"{place}: the object store ignores the condition {condition},"):
        make(place, plan)
    server.faults()
    assert server.objects(place) == before


def test_what_is_damaged_at_the_source_does_not_arrive(server, sealed, tmp_path):
    server.faults({"path": "shard-000001.safetensors", "range": "bytes", "action": "flip"})
    with pytest.raises(
        CorruptFile, match="shard-000001.safetensors (has digest .* it is damaged there|does not match)"
    ):
        copy_cache(sealed, tmp_path / "copy")
    assert [p.name for p in (tmp_path / "copy" / "shards").iterdir()] == ["shard-000000.safetensors"]
    other = server.place()
    with pytest.raises(CorruptFile, match="shard-000001.safetensors (has digest|does not match)"):
        copy_cache(sealed, other)
    assert list(shards(server, other)) == ["shard-000000.safetensors"]
    server.faults({"path": "shard-000001.safetensors", "range": "bytes", "times": 1, "action": "flip"})
    assert copy_cache(sealed, tmp_path / "copy") == 2 and copy_cache(sealed, other) == 2
    assert verify(tmp_path / "copy").problems == [] and verify(other).problems == []


@pytest.mark.slow
def test_a_repair_killed_at_any_request_is_finished_by_the_next(server, plan):
    """After each kill the cache is either sealed and sound, or not readable where it was damaged."""
    units, manifest, tiles, expected = plan
    sound = server.place()
    make(sound, plan)
    damaged = server.objects(sound) | {
        "shards/shard-000001.safetensors": expected["shard-000001.safetensors"][:-1] + b"x",
        "commits/shard-000000.json": b"{}",
    }
    number, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        place = server.place()
        for name, data in damaged.items():
            server.put(place, name, data)

        def mend(place=place):
            return repair(place, units=units, compute=lambda writer, todo: fill(writer, units, todo))

        def work(place=place, number=number):
            server.faults({**CHANGE, "skip": number, "times": 1, "action": "kill", "pid": os.getpid()})
            mend(place)

        code = wait(child(work))
        server.faults()
        with contextlib.suppress(CacheError):
            reader = CacheReader(place, wait_s=0)
            reader.read(np.array([[0, reader.n_rows]]))
            assert shards(server, place) == expected
        mend(place)
        assert shards(server, place) == expected and verify(place).problems == []
        number += 1
    assert code == 0 and number > 12
