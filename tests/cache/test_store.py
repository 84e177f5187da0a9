# SPDX-License-Identifier: Apache-2.0
"""A cache on an object store is the same cache: built, read, verified, repaired and copied over HTTP.

The server is real (moto, in its own process); the truth is a cache of the same rows on disk, and the objects as boto3
gives them.
"""

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest

from megatron_kd.cache import (
    BadSetting,
    CacheError,
    CacheReader,
    CacheWriter,
    DocumentUnits,
    NotACache,
    Unsealed,
    make_manifest,
)
from megatron_kd.cache.copy import copy_cache
from megatron_kd.cache.repair import repair
from megatron_kd.cache.store import cache_path, open_store
from megatron_kd.cache.verify import verify
from tests.cache.conftest import build, fill, random_documents, write_corpus
from tests.cache.test_commands import run

FORMATS = {
    "raw": {"temperatures": (2.0,)},
    "zstd": {"codec": "zstd"},
    "ragged u8": {"codec": "zstd", "values": "u8", "top_p": 0.9},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus", random_documents(4, count=10, longest=900))


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory, corpus):
    """The same cache on disk in each format; three tiles of more than one block."""
    folder = tmp_path_factory.mktemp("disk")
    settings = {"top_k": 5, "tile_tokens": 1500}
    return {name: build(folder / name, corpus, **settings, **FORMATS[name]).path for name in FORMATS}


def files(path):
    """Files of a cache on disk; commit records say who wrote them, and are left out."""
    found = {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}
    return {name: data for name, data in found.items() if not name.startswith("commits/")}


def objects(server, place):
    return {name: data for name, data in server.objects(place).items() if not name.startswith("commits/")}


@pytest.mark.parametrize("name", FORMATS)
def test_built_on_a_store_it_has_the_same_bytes_and_rows(server, corpus, on_disk, name):
    place = server.place()
    writer = build(place, corpus, top_k=5, tile_tokens=1500, **FORMATS[name])
    assert objects(server, place) == files(on_disk[name]) and writer.todo() == []
    reader, truth = CacheReader(place, wait_s=0), CacheReader(on_disk[name])
    rng = np.random.default_rng(0)
    starts = rng.integers(0, truth.n_rows - 700, 6)
    spans = np.stack([np.append(starts, 0), np.append(rng.integers(1, 700, 6), truth.n_rows)], 1)
    for ours, theirs in zip(reader.read(spans), truth.read(spans), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    report = verify(place, "tokens", units=DocumentUnits(corpus))
    assert report.problems == [] and report.rows == truth.n_rows and str(report.path) == place


def test_the_commands_take_it(server, corpus, on_disk, tmp_path, capsys):
    """info, copy, verify, repair; what a command says names the place as it was given."""
    place = server.place()
    assert run("copy", on_disk["raw"], place, "--no-progress") == 0
    assert f"{place}: 3 tiles copied and checked" in capsys.readouterr().out
    assert objects(server, place) == files(on_disk["raw"])
    assert run("info", place) == 0
    assert f"{place} (sealed)" in capsys.readouterr().out
    assert run("info", "--diff", place, on_disk["raw"]) == 0
    assert run("verify", place, "--no-progress") == 0
    assert f"{place}: 3 tiles" in capsys.readouterr().out
    server.delete(place, "commits/shard-000001.json")
    server.put(place, "stray", b"x")
    assert run("verify", place, "--no-progress") == 1
    text = capsys.readouterr().out
    assert "tile 1 is not committed" in text and f"{place}/stray' does not belong" in text
    assert run("repair", place, "--no-progress") == 0
    assert verify(place).problems == [f"{place + '/stray'!r} does not belong to the cache"]
    assert run("copy", place, tmp_path / "back", "--no-progress") == 0
    assert files(tmp_path / "back") == files(on_disk["raw"])


def test_a_run_opens_it(server, on_disk):
    """kd.cache goes through pathlib in places, which takes a slash out of the URL."""
    from pathlib import Path

    from megatron_kd.launch.node import check_inputs

    place = server.place()
    copy_cache(on_disk["raw"], place)
    rows = CacheReader(on_disk["raw"]).n_rows
    assert check_inputs({"kd": {"cache": [place]}}) == rows
    assert CacheReader(Path(place), wait_s=0).path == place


def test_copies_between_stores_are_resumed(server, on_disk):
    first, second = server.place(), server.place()
    assert copy_cache(on_disk["zstd"], first) == 3
    assert copy_cache(first, second) == 3 and objects(server, second) == files(on_disk["zstd"])
    server.delete(second, "SEALED.json")
    server.delete(second, "commits/shard-000001.json")
    server.delete(second, "shards/shard-000001.safetensors")
    assert copy_cache(first, second) == 1 and objects(server, second) == files(on_disk["zstd"])
    with pytest.raises(BadSetting, match="is the cache itself"):
        copy_cache(first, first + "/")


def test_only_what_is_bad_is_computed_again(server, corpus, on_disk):
    place = server.place()
    copy_cache(on_disk["raw"], place)
    bad = bytearray(server.get(place, "shards/shard-000001.safetensors"))
    bad[len(bad) // 2] ^= 1
    server.put(place, "shards/shard-000001.safetensors", bytes(bad))
    server.put(place, "commits/shard-000002.json", b"{}")
    server.put(place, "tiles.npy", b"")
    asked = []

    def compute(writer, todo):
        asked.extend(todo)
        fill(writer, DocumentUnits(corpus), todo)

    report, made = repair(place, units=DocumentUnits(corpus), compute=compute)
    assert made == asked == [1] and report.bad_shards == {1} and report.bad_records == {2}
    after = objects(server, place)
    aside = {name.split("/")[1].rsplit(".", 1)[0]: data for name, data in after.items() if "quarantine/" in name}
    assert aside["shard-000001.safetensors"] == bytes(bad) and aside["tiles.npy"] == b""
    assert {name: data for name, data in after.items() if "quarantine/" not in name} == files(on_disk["raw"])
    assert verify(place).problems == []


def test_unfinished_foreign_and_absent_places_are_named(server, corpus):
    place = server.place()
    with pytest.raises(NotACache, match=f"sees no {place}/manifest.json"):
        CacheReader(place, wait_s=0)
    build(place, corpus, seal=False, top_k=5, tile_tokens=1500)
    with pytest.raises(Unsealed, match=f"sees no {place}/SEALED.json"):
        CacheReader(place, wait_s=0)
    other = server.place()
    server.put(other, "thesis.txt", b"mine")
    with pytest.raises(NotACache, match=f"{other} exists and is not a teacher cache"):
        build(other, corpus)
    assert server.objects(other) == {"thesis.txt": b"mine"}
    with pytest.raises(CacheError, match="there is no such bucket"):
        build("msc://lost/x", corpus)


@pytest.mark.parametrize(
    "place,message",
    [
        ("msc://lab", "write msc://PROFILE/PATH"),
        ("msc://lab/", "write msc://PROFILE/PATH"),
        ("msc://unknown/cache", 'Profile "unknown" not found.*MSC_CONFIG'),
        ("s3://bucket/cache", "reached through multi-storage-client, as msc://PROFILE/PATH"),
    ],
)
def test_places_that_cannot_be_opened_say_what_to_do(server, place, message):
    with pytest.raises(BadSetting, match=message):
        CacheReader(place)
    with pytest.raises(BadSetting, match=message):
        run("info", place)


@pytest.mark.parametrize("package", ["multistorageclient", "boto3"])
def test_a_missing_package_is_named_with_the_extra(server, package):
    program = f"import sys; sys.modules[{package!r}] = None\n" + (
        "from megatron_kd.cli import main; sys.exit(main(['cache', 'info', 'msc://lab/x']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (
        done.returncode != 0 and "pip install 'megatron-kd[store]'" in done.stderr and "Traceback" not in done.stderr
    )


def test_a_tile_too_large_for_one_object_is_refused_before_it_is_computed(server, corpus, tmp_path):
    """Documents of 16 million tokens at K=100 make shards of 7 GB."""

    class Long:
        kind, lengths = "document", np.array([1 << 24])

        def identity(self):
            return {}

    plan = make_manifest(Long(), teacher={}, tokenizer=None, vocab_real=200_000, vocab_padded=200_000, top_k=100)
    place = server.place()
    with pytest.raises(BadSetting, match="one object takes 5368709120; build with smaller tiles"):
        CacheWriter(place, *plan)
    assert server.names(place) == [] and CacheWriter(tmp_path / "disk", *plan).todo() == [0]


def test_paths_stay_paths(tmp_path):
    assert cache_path(str(tmp_path)) == tmp_path and cache_path("msc:/lab//x") == "msc://lab//x"
    assert open_store(tmp_path).path == tmp_path


@pytest.mark.slow
def test_memory_does_not_grow_with_a_shard(server, tmp_path):
    """A shard of 70 MB is read, verified and staged in pieces; only writing one to a store takes it whole."""
    corpus = write_corpus(tmp_path / "corpus", random_documents(2, count=200, longest=1600))
    build(tmp_path / "disk", corpus, tile_tokens=1 << 20)
    place, rows = server.place(), CacheReader(tmp_path / "disk").n_rows
    peaks = []

    def peak(work):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        work()
        peaks.append((tracemalloc.get_traced_memory()[1] - before) / 1e6)

    tracemalloc.start()
    try:
        peak(lambda: copy_cache(tmp_path / "disk", place))
        peak(lambda: copy_cache(place, tmp_path / "staged"))
        peak(lambda: verify(place))
        reader = CacheReader(place, wait_s=0)
        peak(lambda: [reader.read(np.array([[row, 2000]])) for row in range(0, rows - 2000, 20_000)])
    finally:
        tracemalloc.stop()
    size = (tmp_path / "disk/shards/shard-000000.safetensors").stat().st_size / 1e6
    assert size > 65 and peaks[0] > size and max(peaks[1:]) < 40, (size, peaks)
