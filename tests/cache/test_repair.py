# SPDX-License-Identifier: Apache-2.0
"""Bad parts are set aside and only they are made again; the cache is then byte for byte what it was."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from megatron_kd.cache import (
    CacheError,
    CacheReader,
    CorruptFile,
    DocumentUnits,
    IdentityMismatch,
    Incomplete,
    MissingShard,
    Unsealed,
)
from megatron_kd.cache.manifest import load_manifest
from megatron_kd.cache.repair import _restore_tiles, quarantine, repair
from megatron_kd.cache.verify import verify
from tests.cache.conftest import build, fill, random_documents, teacher_rows, unit_tokens, write_corpus
from tests.cache.faults import at_call, needs_ptrace
from tests.cache.test_commands import run

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # children of fork only write files

SHARD, COMMIT = "shards/shard-000001.safetensors", "commits/shard-000001.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """A cache of three tiles, and its units."""
    folder = tmp_path_factory.mktemp("original")
    units = DocumentUnits(write_corpus(folder / "corpus", random_documents(4, count=12, longest=250)))
    writer = build(folder / "cache", units.corpus, top_k=3, tile_tokens=600)
    assert len(writer.tiles) == 4
    return writer.path, units


@pytest.fixture
def copy(original, tmp_path) -> Path:
    return Path(shutil.copytree(original[0], tmp_path / "cache"))


def content(path: Path) -> dict[str, bytes]:
    """Files of a cache; of commit records only what does not say who wrote them, and when."""
    files = {p.name: p.read_bytes() for p in path.iterdir() if p.is_file()}
    return files | {p.name: p.read_bytes() for p in (path / "shards").iterdir()}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


DAMAGE = {
    **{f"{how.__name__} {name}": (how, name) for name in (SHARD, COMMIT) for how in (flip, truncate, Path.unlink)},
    **{f"{how.__name__} {name}": (how, name) for name in ("SEALED.json", "tiles.npy") for how in (flip, Path.unlink)},
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_only_what_is_bad_is_computed_again(original, copy, damage):
    how, name = DAMAGE[damage]
    how(copy / name)
    before = {p.name: p.stat().st_ino for p in (copy / "shards").iterdir()}
    asked = []

    def compute(writer, todo):
        asked.extend(todo)
        fill(writer, original[1], todo)

    assert verify(copy, "checksums").problems
    report, made = repair(copy, units=original[1], compute=compute)
    assert made == asked == ([1] if name == SHARD else [])
    assert content(copy) == content(original[0]) and verify(copy, "tokens", units=original[1]).problems == []
    after = {p.name: p.stat().st_ino for p in (copy / "shards").iterdir()}
    assert {name for name in before if before[name] != after[name]} <= {Path(SHARD).name if made else None}
    set_aside = [p.read_bytes() for p in (copy / "quarantine").iterdir() if Path(name).name in p.name]
    assert len(set_aside) == (how is not Path.unlink)


def test_what_is_set_aside_is_not_read_and_its_neighbours_are(copy, capsys):
    """`verify --quarantine` on damage, then on the rest; a reader that was open before goes on."""
    flip(copy / SHARD)
    reader = CacheReader(copy, wait_s=0)
    first, end = (int(reader.tiles[i, 0]) for i in (1, 2))
    assert run("verify", copy, "--no-progress", "--quarantine") == 1
    assert "1 tiles have to be computed again; `megatron-kd cache repair`" in capsys.readouterr().out
    with pytest.raises(Unsealed):
        CacheReader(copy, wait_s=0)
    reader.read(np.array([[0, first], [end, 5]]))
    with pytest.raises(MissingShard, match="tile 1 "):
        reader.read(np.array([[first, 1]]))
    assert sorted(p.name.rpartition(".")[0] for p in (copy / "quarantine").iterdir()) == [
        "SEALED.json",
        Path(COMMIT).name,
        Path(SHARD).name,
    ]
    assert quarantine(verify(copy)) == [1]  # once more changes nothing
    assert len(list((copy / "quarantine").iterdir())) == 3


def test_without_a_teacher_records_are_mended_and_lost_tiles_named(original, copy, capsys):
    flip(copy / COMMIT)
    (copy / "SEALED.json").unlink()
    assert run("repair", copy, "--no-progress") == 0
    assert "2 problems, 0 tiles computed again; the cache is sealed" in capsys.readouterr().out
    assert content(copy) == content(original[0])
    flip(copy / SHARD)
    with pytest.raises(Incomplete, match="1 tiles have to be computed again: 1.*--teacher"):
        run("repair", copy, "--no-progress")
    with pytest.raises(Unsealed):
        CacheReader(copy, wait_s=0)


def test_rows_of_other_tokens_are_found_by_level_tokens(original, copy):
    """A shard that is sound in itself and was made from a shifted corpus."""
    path, units = original
    reader = CacheReader(path)
    shifted = np.roll(unit_tokens(units, 0, len(units.lengths)), 1)
    rows = teacher_rows(shifted[int(reader.tiles[1, 0]) : int(reader.tiles[2, 0])], 3)
    (copy / SHARD).unlink()
    (copy / COMMIT).unlink()
    _, made = repair(copy, compute=lambda writer, todo: writer.write_tile(1, rows))
    assert made == [1] and verify(copy).problems == []
    _, made = repair(copy, level="tokens", units=units, compute=lambda writer, todo: fill(writer, units, todo))
    assert made == [1] and content(copy) == content(path)


def test_other_units_and_a_lost_manifest_are_refused(original, copy, tmp_path):
    other = DocumentUnits(write_corpus(tmp_path / "other", random_documents(5, count=12, longest=250)))
    flip(copy / SHARD)
    with pytest.raises(IdentityMismatch, match="corpus.data_digest"):
        repair(copy, units=other, compute=lambda writer, todo: fill(writer, other, todo))
    assert not any((copy / "quarantine").iterdir())
    flip(copy / "manifest.json")
    with pytest.raises(CacheError, match="manifest.json"):
        repair(copy, units=original[1])
    (copy / "manifest.json").write_bytes((original[0] / "manifest.json").read_bytes())
    (copy / "tiles.npy").unlink()
    with pytest.raises(CorruptFile, match="cut in some other way"):
        units = DocumentUnits(original[1].corpus)
        units.lengths = units.lengths[::-1]
        _restore_tiles(copy, load_manifest(copy), units)


def test_another_teachers_content_takes_the_place_of_what_was_set_aside(original, copy):
    """On a GPU the same teacher may give other last bits: the tile made again need not equal the damaged one."""
    flip(copy / SHARD)
    units = original[1]
    reader = CacheReader(original[0])
    tokens = unit_tokens(units, int(reader.tiles[1, 1]), int(reader.tiles[2, 1]))
    rows = teacher_rows(tokens, 3)
    rows["log_tail"] = rows["log_tail"] - 1e-4
    repair(copy, compute=lambda writer, todo: writer.write_tile(1, rows))
    assert verify(copy, "tokens", units=units).problems == []
    found = CacheReader(copy).read(np.array([[int(reader.tiles[1, 0]), len(tokens)]]))
    np.testing.assert_allclose(found.log_tail, rows["log_tail"], rtol=1e-6)


@needs_ptrace
def test_a_repair_killed_at_every_second_call_is_finished_by_the_next(original, tmp_path):
    """After each kill the cache is either sealed and sound, or not sealed; the damaged rows are never readable."""
    path, units = original

    def work(copy):
        repair(copy, units=units, compute=lambda writer, todo: fill(writer, units, todo))

    number, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        copy = Path(shutil.copytree(path, tmp_path / str(number)))
        flip(copy / SHARD)
        flip(copy / "commits/shard-000002.json")
        code, _ = at_call(lambda copy=copy: work(copy), number)
        try:
            rows = CacheReader(copy, wait_s=0)
            rows.read(np.array([[0, rows.n_rows]]))
            assert content(copy) == content(path)
        except CacheError:
            work(copy)
        assert content(copy) == content(path) and verify(copy).problems == []
        number += 2
    assert code == 0 and number > 20
