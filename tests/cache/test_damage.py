# SPDX-License-Identifier: Apache-2.0
"""Whatever is damaged, missing or foreign is named; nothing of it is ever returned as teacher rows."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_kd.cache import (
    CacheError,
    CacheReader,
    Corpus,
    CorruptBlock,
    CorruptFile,
    DocumentUnits,
    FutureVersion,
    MissingShard,
    NotACache,
    Unsealed,
)
from megatron_kd.cache.files import encode_record, node_name
from megatron_kd.cache.manifest import Manifest
from megatron_kd.cache.verify import verify
from tests.cache.conftest import VOCAB, build, random_documents, teacher_rows, write_corpus

FILES = ["manifest.json", "tiles.npy", "SEALED.json", "commits/shard-000001.json", "shards/shard-000001.safetensors"]


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A cache of a few kilobytes: three tiles, K=3."""
    folder = tmp_path_factory.mktemp("small")
    corpus = write_corpus(folder / "corpus", random_documents(4, count=12, longest=250))
    build(folder / "cache", corpus, top_k=3, tile_tokens=600, temperatures=(2.0,))
    return folder / "cache"


@pytest.fixture
def copy(small, tmp_path) -> Path:
    shutil.copytree(small, tmp_path / "cache")
    return tmp_path / "cache"


def read_all(path: Path):
    reader = CacheReader(path, wait_s=0)
    return reader.read(np.array([[0, reader.n_rows]]))


def test_the_sound_cache_has_no_problem(small):
    read_all(small)
    report = verify(small, "tokens", units=DocumentUnits(Corpus(small.parent / "corpus")))
    assert report.problems == [] and report.rows == CacheReader(small).n_rows and report.tiles == 3


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("size", [0, 7, -1])
def test_truncated_files_are_named(copy, name, size):
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(data[:size])
    with pytest.raises(CacheError, match=name):
        read_all(copy)
    assert any(name in problem for problem in verify(copy, "checksums").problems)


@pytest.mark.parametrize("name", FILES)
def test_missing_files_are_named_with_the_node(copy, name):
    (copy / name).unlink()
    kind = {"SEALED.json": Unsealed, "manifest.json": NotACache, "tiles.npy": NotACache}.get(name, MissingShard)
    with pytest.raises(kind, match=rf"node {node_name()} sees no .*{name}.* \(waited 0 s\)"):
        read_all(copy)
    assert any(Path(name).name in problem for problem in verify(copy, "header").problems)


def test_a_missing_shard_says_which_rows_and_spares_the_others(copy):
    (copy / "shards" / "shard-000001.safetensors").unlink()
    reader = CacheReader(copy, wait_s=0)
    first, end = (int(reader.tiles[i, 0]) for i in (1, 2))
    reader.read(np.array([[0, first], [end, 5]]))
    with pytest.raises(MissingShard, match=rf"tile 1 \(rows \[{first}, {end}\)\).*shard-000001"):
        reader.read(np.array([[first - 1, 2]]))


def test_a_file_that_shows_late_is_waited_for(copy, monkeypatch):
    """Another node's file appears after a while (Megatron-Bridge#4207): it is waited for and read."""
    shard = copy / "shards" / "shard-000001.safetensors"
    shard.rename(copy / "late")
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if sum(naps) > 3:
            (copy / "late").rename(shard)

    monkeypatch.setattr("megatron_kd.cache.store.time.sleep", nap)
    rows = CacheReader(copy, wait_s=60).read(np.array([[0, CacheReader(copy).n_rows]]))
    assert len(rows.tokens) and 3 < sum(naps) < 10


def test_shards_and_records_of_another_cache_are_refused(copy, tmp_path):
    """Same shapes, another teacher revision in the manifest: no part can be swapped in."""
    other_corpus = write_corpus(tmp_path / "other", random_documents(5, count=12, longest=250))
    other = build(tmp_path / "foreign", other_corpus, top_k=3, tile_tokens=600, temperatures=(2.0,)).path
    for name in FILES[1:]:
        shutil.copytree(copy, tmp_path / "mixed")
        shutil.copy(other / name, tmp_path / "mixed" / name)
        with pytest.raises(CorruptFile, match=Path(name).name):
            read_all(tmp_path / "mixed")
        shutil.rmtree(tmp_path / "mixed")


def test_a_shard_under_another_name_is_refused(copy):
    shards = copy / "shards"
    shutil.copy(shards / "shard-000000.safetensors", shards / "shard-000001.safetensors")
    with pytest.raises(CorruptFile, match="shard-000001"):
        read_all(copy)


def test_a_bad_block_is_named_and_its_neighbour_still_read(copy):
    path = copy / "shards" / "shard-000000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    reader = CacheReader(copy, wait_s=0)
    rows = int(reader.tiles[1, 0])
    reader.read(np.array([[0, 512]]))
    with pytest.raises(CorruptBlock, match=rf"block 1 \(rows \[512, {rows}\).*cache repair"):
        reader.read(np.array([[600, 10]]))


def test_a_read_that_fails_once_is_repeated(copy, monkeypatch):
    reader = CacheReader(copy, wait_s=0)
    expected = reader.read(np.array([[600, 10]]))
    offsets = []

    def flaky(fd, buffers, offset, real=os.preadv):
        count = real(fd, buffers, offset)
        if not offsets:
            buffers[0][-1] ^= 1
        offsets.append(offset)
        return count

    monkeypatch.setattr("megatron_kd.cache.files.os.preadv", flaky)
    for found, wanted in zip(reader.read(np.array([[600, 10]])), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert len(offsets) == 2 * len(set(offsets))


def test_other_versions_and_other_json_are_named(copy):
    manifest = copy / "manifest.json"
    body = {"format": "megatron-kd-cache", "version": 2, "anything": [1]}
    manifest.write_bytes(encode_record(body))
    with pytest.raises(FutureVersion, match="format version 2.*reads up to 1"):
        CacheReader(copy)
    manifest.write_bytes(encode_record({"format": "other"}))
    with pytest.raises(NotACache, match="format is 'other'"):
        CacheReader(copy)
    for data in (b"[" * 100_000, b'{"a": NaN}', b'{"a": 1, "a": 1}', b"\xff\xfe", b"[1]", b"x" * (2 << 20)):
        manifest.write_bytes(data)
        with pytest.raises((CorruptFile, NotACache), match="manifest.json"):
            CacheReader(copy)


@pytest.mark.parametrize(
    "field,value",
    [
        ("top_k", 0),
        ("top_k", 1 << 40),
        ("top_k", "3"),
        ("top_k", True),
        ("rows", -1),
        ("vocab_padded", 5),
        ("values", "f8"),
        ("codec", "zip"),
        ("id_hi_bits", 16),
        ("temperatures", [0.0]),
        ("temperatures", ["2"]),
        ("tiles", {"count": 1 << 60, "digest": "x"}),
        ("tiles", {}),
        ("tiles", {"count": 3}),
        ("units", {"kind": 1}),
        ("corpus", 3),
        ("unknown", 1),
    ],
)
def test_manifests_with_impossible_values_are_refused(copy, field, value):
    """Right checksum, wrong content, as a hostile or future writer might make it."""
    sound = Manifest.from_json((copy / "manifest.json").read_bytes())
    body = {"format": "megatron-kd-cache", "version": 1, **vars(sound), field: value}
    (copy / "manifest.json").write_bytes(encode_record(body))
    with pytest.raises(CorruptFile, match=field):
        CacheReader(copy)


def test_an_unsealed_cache_says_how_to_finish_it(tmp_path, corpus):
    build(tmp_path / "c", corpus, seal=False)
    with pytest.raises(Unsealed, match="not complete.*running the same `megatron-kd cache build` again"):
        CacheReader(tmp_path / "c", wait_s=0)
    with pytest.raises(NotACache, match="not a teacher cache"):
        CacheReader(tmp_path / "nothing", wait_s=0)


def test_stray_files_and_another_corpus_are_problems(copy, tmp_path):
    (copy / "shards" / "shard-000009.safetensors").write_bytes(b"")
    assert any("shard-000009" in p for p in verify(copy, "commits").problems)
    other = write_corpus(tmp_path / "other", random_documents(5, count=12, longest=250))
    (problem,) = verify(copy, "tokens", units=DocumentUnits(other)).problems
    assert "corpus.data_digest" in problem


@pytest.mark.parametrize("start,count", [(0, 6000), (1, 5998), (700, 4900), (2048, 2048), (511, 2), (5632, 368)])
def test_stored_planes_of_a_long_run_and_the_bad_block_in_it(tmp_path, start, count):
    """A run of many pieces that begins and ends anywhere: the bytes that were put, and which block is damaged."""
    corpus = write_corpus(tmp_path / "corpus", [np.arange(6000) * 7 % VOCAB])
    writer = build(tmp_path / "c", corpus, top_k=5, values="f32", tile_tokens=6000)
    reader, true = CacheReader(tmp_path / "c"), teacher_rows(corpus.tokens(start, count), 5)
    planes = reader.read_planes(np.array([[start, count]]))
    np.testing.assert_array_equal(planes["tokens"], true["tokens"])
    np.testing.assert_array_equal(planes["ids_lo"], true["ids"] & 0xFFFF)
    np.testing.assert_array_equal(planes["logprobs"], true["logprobs"].astype(np.float32))
    shard = writer.shard_path(0)
    sound, width = shard.read_bytes(), 5 * 4
    first = sound.index(teacher_rows(corpus.tokens(0, 1), 5)["logprobs"].astype("<f4").tobytes())
    for row in {start, start + count // 2, start + count - 1, start // 512 * 512}:
        data = bytearray(sound)
        data[first + row * width] ^= 1
        shard.write_bytes(data)
        with pytest.raises(CorruptBlock, match=rf"block {row // 512} \(rows \[{row // 512 * 512}, "):
            CacheReader(tmp_path / "c").read_planes(np.array([[start, count]]))
