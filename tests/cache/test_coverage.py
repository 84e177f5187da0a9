# SPDX-License-Identifier: Apache-2.0
"""`cache info --coverage` and `cache bench`: figures against a direct computation; speeds are never asserted."""

import json

import numpy as np
import pytest

from megatron_kd.cache import CacheError, CacheReader, bench
from megatron_kd.cache.coverage import coverage, table
from tests.cache.conftest import build
from tests.cache.test_commands import run


@pytest.mark.parametrize("settings", [{}, {"values": "u8", "codec": "zstd", "top_p": 0.8}])
def test_figures_are_those_of_all_rows(tmp_path, corpus, settings):
    path = build(tmp_path / "c", corpus, **settings).path
    reader, found = CacheReader(path), coverage(path)
    rows = reader.read(np.array([[0, reader.n_rows]]))
    mass, tail = np.exp(rows.logprobs.astype(np.float64)), np.exp(rows.log_tail.astype(np.float64))
    every = np.concatenate([mass, tail[:, None]], 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.nansum(every * np.log(every), 1)
    assert found["rows"] == reader.n_rows and found["stored"] == 1
    np.testing.assert_allclose(found["mass"]["mean"], mass.sum(1).mean())
    np.testing.assert_allclose(
        [found["mass"][f"p{q}"] for q in (1, 10, 50)], np.quantile(mass.sum(1), [0.01, 0.1, 0.5])
    )
    np.testing.assert_allclose(found["mass_of_first"][8], mass[:, :8].sum(1).mean())
    np.testing.assert_allclose(found["tail"], tail.mean())
    np.testing.assert_allclose(found["entropy"]["mean"], entropy.mean())
    assert sum(found["entropy"]["counts"]) == sum(found["tail_histogram"]["counts"]) == reader.n_rows
    np.testing.assert_allclose(found["entries"], (rows.ids >= 0).sum(1).mean())
    size = sum(shard.stat().st_size for shard in (path / "shards").iterdir())
    np.testing.assert_allclose(found["bytes"], size / reader.n_rows)
    last = (rows.ids >= 0).sum(1) - 1
    pairs = np.take_along_axis(rows.logprobs, np.stack([last, np.maximum(last - 1, 0)], 1), 1)
    np.testing.assert_allclose(found["ties_at_cut"], np.mean((last > 0) & (pairs[:, 0] == pairs[:, 1])))
    assert f"{found['tail']:.4f}" in table(found)


def test_a_sample_is_spread_over_the_axis_and_close(tmp_path, corpus):
    path = build(tmp_path / "c", corpus).path
    whole, sample = coverage(path), coverage(path, sample_rows=4096)
    assert sample["rows"] <= 4096 < whole["rows"]
    np.testing.assert_allclose(sample["mass"]["mean"], whole["mass"]["mean"], rtol=0.02)


def test_info_shows_and_draws_it(cache, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert run("info", cache, "--coverage", "--chart", tmp_path / "c.png") == 0
    assert "tie at the cut" in capsys.readouterr().out
    assert (tmp_path / "c.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert run("info", cache, "--coverage", "--json") == 0
    assert json.loads(capsys.readouterr().out)["coverage"]["rows"] == CacheReader(cache).n_rows


def test_bench_of_made_up_and_of_cached_rows(cache, tmp_path, capsys):
    options = ["--rows", "3000", "--folder", tmp_path, "--json", "--codec", "raw", "--codec", "zstd u8"]
    for source in ([], ["--from", cache]):
        assert run("bench", *options, *source) == 0
        found = json.loads(capsys.readouterr().out)["codecs"]
        assert 433 < found["raw"]["bytes"] < 434 and found["zstd u8"]["bytes"] < 290
        assert 0 < found["raw"]["kl_mean"] < found["zstd u8"]["kl_mean"] < 1e-4 or source
        assert all(value > 0 for name, value in found["raw"].items() if not name.startswith("kl"))
    assert run("bench", "--rows", "600", "--folder", tmp_path, "--codec", "zstd p=0.99") == 0
    text = capsys.readouterr().out
    assert "bytes/token" in text and "zstd p=0.99" in text and "memory copy" in text
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("cache-bench")] == []
    with pytest.raises(CacheError, match="--rows"):
        run("bench", "--rows", "0")
    ragged = bench.write(tmp_path / "ragged", bench.synthetic_rows(100, top_k=5, vocab=100), 100, vocab=100, top_p=0.5)
    with pytest.raises(CacheError, match="ragged"):
        run("bench", "--from", ragged.path)
