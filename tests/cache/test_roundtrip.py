# SPDX-License-Identifier: Apache-2.0
"""What is written is what is read: values, order, temperatures, K, sizes; the truth is fp64 numpy."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from megatron_kd.cache import CacheReader, CacheWriter, DocumentUnits, Incomplete, ServeError, SpanError, make_manifest
from megatron_kd.cache.codecs import join_ids, split_ids
from tests.cache.conftest import SUPPORT, VOCAB, build, fill, random_documents, teacher_rows, unit_tokens, write_corpus


def truth(corpus, spans, temperature=1.0, top_k=100):
    """Teacher rows at T in fp64, tail included, straight from the full distribution."""
    tokens = np.concatenate([corpus.tokens(int(s), int(n)) for s, n in spans])
    full = teacher_rows(tokens, SUPPORT)
    scaled = full["logprobs"] / temperature
    scaled = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    return tokens, full["ids"][:, :top_k], scaled[:, :top_k], np.log(np.exp(scaled[:, top_k:]).sum(-1))


def random_spans(n_rows: int, count: int = 60) -> np.ndarray:
    rng = np.random.default_rng(0)
    starts = rng.integers(0, n_rows, count)
    return np.stack([starts, np.minimum(rng.integers(0, 1500, count), n_rows - starts)], 1)


@pytest.mark.parametrize("check", ["always", "sample"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("top_k", [100, 13])
def test_rows_equal_the_dense_distribution(cache, corpus, check, temperature, top_k):
    reader = CacheReader(cache, check_blocks=check)
    spans = random_spans(reader.n_rows)
    rows = reader.read(spans, top_k=top_k, temperature=temperature)
    tokens, ids, logprobs, log_tail = truth(corpus, spans, temperature, top_k)
    np.testing.assert_array_equal(rows.tokens, tokens)
    np.testing.assert_array_equal(rows.ids, ids)
    np.testing.assert_allclose(rows.logprobs, logprobs, rtol=2**-10, atol=2e-3)  # f16 has 11 bits
    np.testing.assert_allclose(rows.log_tail, log_tail, atol=1e-3)


def test_f32_values_are_exact_to_f32(tmp_path, corpus):
    build(tmp_path / "c", corpus, values="f32", temperatures=(2.0, 0.5))
    reader = CacheReader(tmp_path / "c")
    spans = np.array([[0, reader.n_rows]])
    for temperature in (1.0, 2.0, 0.5):
        rows = reader.read(spans, temperature=temperature)
        _, _, logprobs, log_tail = truth(corpus, spans, temperature)
        np.testing.assert_allclose(rows.logprobs, logprobs, rtol=1e-6, atol=2e-6)
        np.testing.assert_allclose(rows.log_tail, log_tail, rtol=1e-6, atol=2e-6)
        total = np.exp(rows.logprobs.astype(np.float64)).sum(-1) + np.exp(rows.log_tail.astype(np.float64))
        np.testing.assert_allclose(total, 1, atol=1e-5)


def test_all_ids_kept_leaves_an_empty_tail_and_truncation_refills_it(tmp_path, corpus):
    """K = the whole support: log_tail is -inf, at T too; a smaller K reads its tail back from the entries."""
    units = DocumentUnits(corpus)
    manifest, tiles = make_manifest(
        units,
        teacher={},
        tokenizer=None,
        top_k=SUPPORT,
        vocab_real=VOCAB,
        vocab_padded=VOCAB,
        values="f32",
        temperatures=(3.0,),
    )
    writer = CacheWriter(tmp_path / "c", manifest, tiles)
    fill(writer, units, writer.todo())
    writer.seal()
    reader = CacheReader(tmp_path / "c")
    spans = np.array([[5, 2000]])
    for temperature in (1.0, 3.0):
        whole = reader.read(spans, temperature=temperature)
        assert np.isneginf(whole.log_tail).all() and np.isfinite(whole.logprobs).all()
        _, _, logprobs, log_tail = truth(corpus, spans, temperature, 20)
        part = reader.read(spans, top_k=20, temperature=temperature)
        np.testing.assert_allclose(part.logprobs, logprobs, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(part.log_tail, log_tail, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits,top", [(2, 1 << 18), (4, 1 << 20), (8, 1 << 24), (16, 2**31 - 1)])
@pytest.mark.parametrize("top_k", [1, 2, 3, 100])
def test_id_packing_is_lossless_at_every_width(bits, top, top_k):
    ids = np.random.default_rng(top_k).integers(0, top, (257, top_k))
    ids[0, 0], ids[-1, -1] = top - 1, 0
    low, high = split_ids(ids, bits)
    assert high.shape == (257, -(-top_k * bits // 8))
    for k in {1, top_k}:
        out = np.empty((257, k), np.int32)
        join_ids(low, high, bits, out)
        np.testing.assert_array_equal(out, ids[:, :k])


def test_safetensors_reads_the_same_planes(cache, corpus):
    """An independent reader of the container agrees on types, shapes and content."""
    planes = load_file(cache / "shards" / "shard-000001.safetensors")
    first, end = (CacheReader(cache).tiles[i, 0] for i in (1, 2))
    expected = teacher_rows(corpus.tokens(int(first), int(end - first)), 100, (2.0,))
    np.testing.assert_array_equal(planes["tokens"], expected["tokens"])
    np.testing.assert_array_equal(planes["ids_lo"], expected["ids"] & 0xFFFF)
    two_bits = np.unpackbits(planes["ids_hi"], axis=-1, bitorder="little").reshape(end - first, 100, 2)
    np.testing.assert_array_equal(two_bits @ [1, 2], expected["ids"] >> 16)
    np.testing.assert_array_equal(planes["logprobs"], expected["logprobs"].astype(np.float16))
    assert planes["checksum"].dtype == np.uint64


def test_size_of_a_row(tmp_path):
    """433 bytes at K=100 and 18-bit ids, and one 8-byte checksum per 512 rows."""
    corpus = write_corpus(tmp_path / "big", random_documents(2, count=60, longest=1500))
    writer = build(tmp_path / "c", corpus, tile_tokens=1 << 20)
    rows, size = writer.manifest.rows, writer.shard_path(0).stat().st_size
    assert writer.manifest.row_format.bytes_per_row == 433
    assert size / rows <= 433 + 8 / 512 + 2048 / rows


def test_tiles_hold_whole_units_whatever_the_lengths(corpus):
    units = DocumentUnits(corpus)
    for tile_tokens in (1, 100, 4000, 10**9):
        _, tiles = make_manifest(
            units, teacher={}, tokenizer=None, top_k=1, vocab_real=9, vocab_padded=9, tile_tokens=tile_tokens
        )
        np.testing.assert_array_equal(tiles[:, 0], corpus.starts[tiles[:, 1]])
        assert tiles[-1, 0] == corpus.n_tokens and tiles[-1, 1] == len(corpus)
        sizes = np.diff(tiles[:, 0])
        assert (sizes > 0).all() and (sizes[:-1] < tile_tokens + 2 * units.lengths.max()).all()


def test_rows_may_come_in_any_order_but_each_once(tmp_path, corpus):
    ordered = build(tmp_path / "a", corpus)
    units = DocumentUnits(corpus)
    writer = CacheWriter(tmp_path / "b", ordered.manifest, ordered.tiles)
    buffer = writer.open_tile(0)
    last = int(writer.tiles[1, 1])
    for unit in reversed(range(last)):
        rows = teacher_rows(unit_tokens(units, unit, unit + 1), 100)
        if unit == 0:
            with pytest.raises(Incomplete, match=f"{units.lengths[0]} of {buffer.rows} rows"):
                writer.commit(buffer)
        buffer.put(int(corpus.starts[unit]), **rows)
    with pytest.raises(ValueError, match="already stored"):
        buffer.put(0, **rows)
    writer.commit(buffer)
    assert writer.shard_path(0).read_bytes() == ordered.shard_path(0).read_bytes()


def test_requests_the_cache_cannot_meet(cache):
    reader = CacheReader(cache)
    with pytest.raises(ServeError, match=r"top_k=101 .* stores 100 entries"):
        reader.read(np.array([[0, 1]]), top_k=101)
    with pytest.raises(ServeError, match=r"temperature 1.5 .* serves \[1.0, 2.0\]"):
        reader.read(np.array([[0, 1]]), temperature=1.5)
    n = reader.n_rows
    for span in ([-1, 1], [n - 1, 2], [n + 1, 0], [0, -1], [2**62, 2**62]):
        with pytest.raises(SpanError, match=rf"has \[0, {n}\)"):
            reader.read(np.array([span]))
    assert len(reader.read(np.empty((0, 2), np.int64)).tokens) == 0


def test_an_id_that_a_row_repeats_is_refused_where_it_has_mass(tmp_path, corpus):
    buffer = build(tmp_path / "c", corpus, seal=False).open_tile(0)
    rows = teacher_rows(np.arange(10), 100)
    rows["ids"][7, 42] = rows["ids"][7, 3]
    with pytest.raises(ValueError, match="occurs twice among the entries of row 7 "):
        buffer.put(0, **rows)
    rows["logprobs"][7, 42:] = -np.inf
    buffer.put(0, **rows)


@pytest.mark.parametrize("field", ["ids", "logprobs", "log_tail", "tail_T"])
def test_planes_that_no_teacher_makes_are_refused(tmp_path, corpus, field):
    writer = build(tmp_path / "c", corpus, seal=False, temperatures=(2.0,))
    rows = teacher_rows(np.arange(10), 100, (2.0,))
    bad = {
        "ids": rows["ids"] + VOCAB,
        "logprobs": rows["logprobs"][:, ::-1],
        "log_tail": rows["log_tail"] * np.nan,
        "tail_T": None,
    }
    with pytest.raises(ValueError, match=field):
        writer.open_tile(0).put(0, **(rows | {field: bad[field]}))
