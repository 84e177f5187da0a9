# SPDX-License-Identifier: Apache-2.0
"""A copy is the same cache, sealed; what is damaged at the source does not arrive; a killed copy is finished."""

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from megatron_kd.cache import (
    BadSetting,
    CacheReader,
    CorruptFile,
    IdentityMismatch,
    MissingShard,
    NotACache,
    Unsealed,
)
from megatron_kd.cache.copy import copy_cache
from megatron_kd.cache.verify import verify
from tests.cache.conftest import build, random_documents, write_corpus
from tests.cache.faults import at_call, needs_ptrace
from tests.cache.test_commands import run

pytestmark = pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # children of fork only write files


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    corpus = write_corpus(folder / "corpus", random_documents(4, count=6, longest=100))
    return build(folder / "cache", corpus, top_k=3, tile_tokens=100).path


def content(path: Path) -> dict[str, bytes]:
    """Everything but the commit records, which say who wrote them."""
    files = [p for p in path.rglob("*") if p.is_file() and p.parent.name != "commits"]
    return {str(p.relative_to(path)): p.read_bytes() for p in files}


def test_a_copy_has_the_same_bytes_and_copying_again_copies_nothing(source, tmp_path, capsys):
    tiles = len(CacheReader(source).tiles) - 1
    assert run("copy", source, tmp_path / "copy", "--no-progress") == 0
    assert f"{tiles} tiles copied and checked; the cache is sealed" in capsys.readouterr().out
    assert content(tmp_path / "copy") == content(source) and verify(tmp_path / "copy").problems == []
    assert copy_cache(source, tmp_path / "copy") == 0
    reader = CacheReader(tmp_path / "copy")
    for ours, theirs in zip(
        reader.read(np.array([[0, reader.n_rows]])), CacheReader(source).read(np.array([[0, reader.n_rows]])),
        strict=True,
    ):  # fmt: skip
        np.testing.assert_array_equal(ours, theirs)


@needs_ptrace
def test_a_copy_killed_at_any_call_is_finished_by_the_next(source, tmp_path):
    tiles, number, code, left = len(CacheReader(source).tiles) - 1, 0, -signal.SIGKILL, []
    while code == -signal.SIGKILL:
        target = tmp_path / str(number)
        code, _ = at_call(lambda target=target: copy_cache(source, target), number)
        left.append(copy_cache(source, target))
        assert content(target) == content(source)
        number += 5
    assert code == 0 and left[0] == tiles and left[-1] == 0 and left == sorted(left, reverse=True)


def test_damage_at_the_source_does_not_arrive(source, tmp_path):
    """The sound tiles are there afterwards, the copy is not sealed; with the source repaired it is finished."""
    shutil.copytree(source, tmp_path / "damaged")
    shard = tmp_path / "damaged" / "shards" / "shard-000001.safetensors"
    sound = shard.read_bytes()
    shard.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    with pytest.raises(CorruptFile, match="shard-000001.safetensors has digest .* it is damaged there"):
        copy_cache(tmp_path / "damaged", tmp_path / "copy")
    with pytest.raises(Unsealed):
        CacheReader(tmp_path / "copy", wait_s=0)
    assert [p.name for p in (tmp_path / "copy" / "shards").iterdir()] == ["shard-000000.safetensors"]
    assert not any((tmp_path / "copy" / "tmp").iterdir())
    shard.unlink()
    with pytest.raises(MissingShard, match="tile 1 cannot be copied.*shard-000001"):
        copy_cache(tmp_path / "damaged", tmp_path / "copy")
    shard.write_bytes(sound)
    assert copy_cache(tmp_path / "damaged", tmp_path / "copy") == len(CacheReader(source).tiles) - 2
    assert content(tmp_path / "copy") == content(source)


def test_a_read_that_fails_once_is_repeated(source, tmp_path, monkeypatch):
    """A file system that gives wrong bytes now and then."""
    import os

    from megatron_kd.cache import files

    calls = []

    def flaky(fd, buffers, offset, real=os.preadv):
        count = real(fd, buffers, offset)
        if len(buffers[0]) > 500 and not calls:
            calls.append(offset)
            buffers[0][0] ^= 1
        return count

    shards = (source / "shards").iterdir()
    assert min(p.stat().st_size for p in shards) > 500
    manifest = (source / "manifest.json").stat().st_size

    def only_shards(fd, buffers, offset):
        return flaky(fd, buffers, offset) if len(buffers[0]) != manifest else os_preadv(fd, buffers, offset)

    os_preadv = os.preadv
    monkeypatch.setattr(files.os, "preadv", only_shards)
    copy_cache(source, tmp_path / "copy")
    monkeypatch.undo()
    assert calls and content(tmp_path / "copy") == content(source)


def test_places_that_are_no_copy_are_left_alone(source, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.txt").write_text("mine")
    other = build(
        tmp_path / "other", write_corpus(tmp_path / "corpus", random_documents(5, count=6, longest=100)), top_k=3,
        tile_tokens=100,
    ).path  # fmt: skip
    for target, error in (("thesis", NotACache), ("other", IdentityMismatch)):
        with pytest.raises(error):
            copy_cache(source, tmp_path / target)
    with pytest.raises(BadSetting, match="is the cache itself"):
        copy_cache(source, source)
    (other / "SEALED.json").unlink()
    with pytest.raises(Unsealed):
        copy_cache(other, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
