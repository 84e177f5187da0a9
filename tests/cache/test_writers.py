# SPDX-License-Identifier: Apache-2.0
"""Writers that are killed, that meet, and that disagree. Children are real processes and die of a real SIGKILL."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from megatron_kd.cache import (
    CacheReader,
    CacheWriter,
    DocumentUnits,
    IdentityMismatch,
    Incomplete,
    NotACache,
    TileConflict,
    Unsealed,
)
from megatron_kd.cache.store_local import LocalStore
from megatron_kd.cache.verify import verify
from tests.cache.conftest import build, fill, teacher_rows, unit_tokens
from tests.cache.faults import child, wait

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # children of fork only write files


@pytest.fixture
def plan(tmp_path, corpus):
    """Manifest and tiles of a cache of the corpus, and the files a build that nothing disturbed made."""
    writer = build(tmp_path / "undisturbed", corpus, top_k=4, tile_tokens=8000)
    return writer.manifest, writer.tiles, snapshot(writer.path)


def snapshot(path):
    return {p.name: p.read_bytes() for p in sorted((path / "shards").iterdir())}


def test_killed_in_mid_run_and_resumed(tmp_path, corpus, plan):
    """The parent kills a slow writer after two commits; the next one is asked for the missing tiles only."""
    manifest, tiles, expected = plan
    units = DocumentUnits(corpus)

    def work():
        writer = CacheWriter(tmp_path / "c", manifest, tiles)
        for tile in writer.todo():
            fill(writer, units, [tile])
            time.sleep(0.2)

    pid = child(work)
    deadline = time.monotonic() + 30
    while not (tmp_path / "c" / "commits" / "shard-000001.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)
    assert wait(pid) == -signal.SIGKILL
    writer = CacheWriter(tmp_path / "c", manifest, tiles)
    todo = writer.todo()
    assert todo == list(range(len(tiles) - 1))[2:]
    fill(writer, units, todo)
    writer.seal()
    assert snapshot(tmp_path / "c") == expected


def test_several_writers_at_once(tmp_path, corpus, plan):
    """Three processes create the same cache and write all its tiles, in different orders."""
    manifest, tiles, expected = plan
    units = DocumentUnits(corpus)

    def work(turn):
        writer = CacheWriter(tmp_path / "c", manifest, tiles)
        order = list(range(len(tiles) - 1))
        fill(writer, units, order[turn:] + order[:turn])
        writer.seal()

    pids = [child(lambda turn=turn: work(turn)) for turn in range(3)]
    assert [wait(pid) for pid in pids] == [0, 0, 0]
    assert snapshot(tmp_path / "c") == expected
    assert list((tmp_path / "c" / "tmp").iterdir()) == []
    assert verify(tmp_path / "c", "tokens", units=units).problems == []


def test_other_content_for_a_tile_is_an_error_and_changes_nothing(tmp_path, corpus):
    writer = build(tmp_path / "c", corpus, top_k=4)
    before = snapshot(writer.path)
    units = DocumentUnits(corpus)
    fill(writer, units, [0])  # the same again is fine
    rows = teacher_rows(unit_tokens(units, 0, int(writer.tiles[1, 1])), 4)
    with pytest.raises(TileConflict, match="shard-000000.*digest"):
        writer.write_tile(0, rows | {"log_tail": rows["log_tail"] - 1e-3})
    assert snapshot(writer.path) == before and list((writer.path / "tmp").iterdir()) == []
    writer.commit_path(0).unlink()  # killed between shard and commit record: the shard is adopted, not overwritten
    with pytest.raises(TileConflict):
        writer.write_tile(0, rows | {"log_tail": rows["log_tail"] - 1e-3})
    assert writer.todo() == [] and snapshot(writer.path) == before


def test_a_damaged_shard_is_set_aside_and_made_again(tmp_path, corpus):
    """The way the message of CorruptBlock describes: delete the commit record, run the build again."""
    writer = build(tmp_path / "c", corpus, top_k=4)
    before = snapshot(writer.path)
    data = bytearray(writer.shard_path(1).read_bytes())
    data[len(data) // 2] ^= 1
    writer.shard_path(1).write_bytes(data)
    writer.commit_path(1).unlink()
    writer = CacheWriter(writer.path, writer.manifest, writer.tiles)
    assert writer.todo() == [1]
    with pytest.raises(Unsealed):
        CacheReader(writer.path, wait_s=0)
    with pytest.raises(Incomplete, match="1 tiles are not committed: 1"):
        writer.seal()
    fill(writer, DocumentUnits(corpus), [1])
    writer.seal()
    assert snapshot(writer.path) == before
    assert verify(writer.path).problems == [] and any((writer.path / "quarantine").iterdir())


def test_a_damaged_commit_record_or_short_shard_counts_as_missing(tmp_path, corpus):
    writer = build(tmp_path / "c", corpus, top_k=4)
    before = snapshot(writer.path)
    writer.commit_path(0).write_bytes(b"{}")
    os.truncate(writer.shard_path(2), 1000)
    assert writer.todo() == [2]  # the shard of tile 0 is whole, so it is committed again without being computed
    fill(writer, DocumentUnits(corpus), [2])
    writer.seal()
    assert snapshot(writer.path) == before and verify(writer.path).problems == []


@pytest.mark.parametrize(
    "change",
    [{"top_k": 5}, {"values": "f32"}, {"temperatures": (3.0,)}, {"tile_tokens": 999}, {"vocab_padded": 200_064}],
)
def test_a_writer_with_other_settings_is_refused(tmp_path, corpus, change):
    build(tmp_path / "c", corpus, seal=False, top_k=4)
    before = snapshot(tmp_path / "c")
    with pytest.raises(IdentityMismatch, match=next(iter(change)).removesuffix("_tokens")):
        build(tmp_path / "c", corpus, **({"top_k": 4} | change))
    assert snapshot(tmp_path / "c") == before


def test_a_folder_with_other_things_is_left_alone(tmp_path, corpus):
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "thesis.txt").write_text("mine")
    with pytest.raises(NotACache, match="exists and is not a teacher cache"):
        build(tmp_path / "c", corpus)
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["thesis.txt"]
    (tmp_path / "empty").mkdir()
    assert len(np.diff(build(tmp_path / "empty", corpus, top_k=4).tiles, axis=0)) > 1


def test_a_cache_that_another_writer_makes_between_two_looks_is_joined(tmp_path, monkeypatch):
    path, files = tmp_path / "cache", {"manifest.json": b"{}", "tiles.npy": b""}
    looked, others = Path.exists, [LocalStore(path)]

    def exists(self, **options):
        found = looked(self, **options)
        if self == path / "manifest.json" and others:
            others.pop().create(files)
        return found

    monkeypatch.setattr(Path, "exists", exists)
    LocalStore(path).create(files)
    assert not others and (path / "manifest.json").read_bytes() == b"{}"
    assert [entry.name for entry in tmp_path.iterdir()] == ["cache"]
