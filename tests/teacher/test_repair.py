# SPDX-License-Identifier: Apache-2.0
"""`cache repair` with a real teacher: the damaged tile is computed again, bit for bit; another teacher is refused."""

import os
import shutil

import numpy as np
import pytest

from megatron_kd.cache import CacheReader, DocumentUnits, IdentityMismatch
from megatron_kd.cache.sets import combine
from megatron_kd.cache.verify import verify
from megatron_kd.teacher.build import build_cache
from tests.cache.conftest import write_corpus
from tests.cache.test_commands import run
from tests.teacher.conftest import VOCAB, save_llama, settings
from tests.teacher.test_build import shards


@pytest.mark.parametrize("options", [{}, {"window": 64, "stride": 16}, {"limit": 7}])
def test_repair_gives_back_the_same_bytes(tmp_path, llama, corpus, options, capsys):
    """For whole documents, for windows, and for a cache of the first documents only; the manifest says which."""
    cache = build_cache(llama, DocumentUnits(corpus), tmp_path / "c", **settings(tile_tokens=100, **options))
    before = shards(cache)
    untouched = {p.name: p.stat().st_ino for p in (cache / "shards").iterdir() if "000001" not in p.name}
    with open(cache / "shards" / "shard-000001.safetensors", "r+b") as stream:
        stream.seek(-3, os.SEEK_END)
        stream.write(b"\xff\xff")
    common = ["--corpus", corpus.prefix, "--vocab-size", str(VOCAB), "--no-progress"]
    other = save_llama(tmp_path / "other", seed=5)
    with pytest.raises(IdentityMismatch, match="teacher.weights"):
        run("repair", cache, "--teacher", other, *common)
    assert run("repair", cache, "--teacher", llama, *common) == 0
    assert "1 tiles computed again" in capsys.readouterr().out
    assert shards(cache) == before and verify(cache).problems == []
    assert all((cache / "shards" / name).stat().st_ino == inode for name, inode in untouched.items())


def test_a_grown_corpus_is_built_verified_and_repaired_from_where_it_grew(tmp_path, llama, corpus, capsys):
    """`--continues`: only new documents are computed; both caches together read like one of the whole corpus."""
    documents = [corpus.tokens(int(start), int(n)) for start, n in zip(corpus.starts, corpus.lengths, strict=False)]
    before = write_corpus(tmp_path / "before", documents[:6])
    model = ["--vocab-size", str(VOCAB), "--no-progress", "--teacher", llama]
    common = [*model, "--accept-teacher-loss", "--top-k", 20, "--tile-tokens", 100]
    assert run("build", "--corpus", before.prefix, "--out", tmp_path / "old", *common) == 0
    later = ["--corpus", corpus.prefix, "--out", tmp_path / "new", "--continues", tmp_path / "old"]
    assert run("build", *later, *common) == 0
    whole = build_cache(llama, DocumentUnits(corpus), tmp_path / "whole", **settings())
    (joined,) = combine([CacheReader(tmp_path / name) for name in ("new", "old")])
    spans = np.array([[0, corpus.n_tokens]])
    for ours, theirs in zip(joined.read(spans), CacheReader(whole).read(spans), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2**-9, atol=1e-3)
    assert run("verify", tmp_path / "new", "--level", "teacher", "--corpus", corpus.prefix, *model) == 0
    (tmp_path / "new" / "shards" / "shard-000000.safetensors").unlink()
    assert run("repair", tmp_path / "new", "--corpus", corpus.prefix, *model) == 0
    assert "1 tiles computed again" in capsys.readouterr().out


def test_a_damaged_table_needs_the_corpus_but_no_teacher(tmp_path, llama, corpus):
    cache = build_cache(llama, DocumentUnits(corpus), tmp_path / "c", **settings(tile_tokens=100))
    shutil.copy(cache / "manifest.json", cache / "tiles.npy")
    assert run("repair", cache, "--corpus", corpus.prefix, "--no-progress") == 0
    assert verify(cache).problems == []
