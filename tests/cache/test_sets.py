# SPDX-License-Identifier: Apache-2.0
"""A grown corpus in two caches, and several teachers mixed; the truth is fp64 numpy over the whole vocabulary."""

import numpy as np
import pytest

from megatron_kd.cache import (
    BadSetting,
    CacheReader,
    CacheWriter,
    CorruptBlock,
    DocumentUnits,
    IdentityMismatch,
    ServeError,
    SpanError,
    make_manifest,
)
from megatron_kd.cache.sets import JoinedReader, LaterUnits, MixedReader, combine, unite
from tests.cache.conftest import SUPPORT, TEACHER, TOKENIZER, VOCAB, random_documents, teacher_rows, write_corpus
from tests.cache.test_roundtrip import random_spans


def other_teacher(tokens, shift, top_k, temperatures=()):
    """A teacher that knows the same ids after a token as the made-up one, and other probabilities."""
    rows = teacher_rows(tokens + shift, top_k, temperatures)
    rows["ids"] = (rows["ids"] + 7 * (tokens % 499 - (tokens + shift) % 499)[:, None]) % VOCAB
    return rows | {"tokens": tokens}


def make(path, units, *, shift=0, top_k=30, repo="toy", **settings):
    """A cache of the made-up teacher, or of another one."""
    settings = {"values": "f32", "tile_tokens": 700, "temperatures": (2.0,)} | settings
    settings |= {"teacher": TEACHER | {"repo": repo}, "tokenizer": TOKENIZER, "top_k": top_k}
    manifest, tiles = make_manifest(units, vocab_real=VOCAB, vocab_padded=VOCAB, **settings)
    writer = CacheWriter(path, manifest, tiles)
    for tile in writer.todo():
        tokens = np.concatenate([units.tokens(u) for u in range(*tiles[tile : tile + 2, 1].tolist())])
        writer.write_tile(tile, other_teacher(tokens, shift, top_k, tuple(manifest.temperatures)))
    writer.seal()
    return CacheReader(path, wait_s=0)


@pytest.fixture
def grown(tmp_path):
    """Units of a corpus before and after it grew twice."""
    documents = random_documents(2, count=12, longest=400)
    return [DocumentUnits(write_corpus(tmp_path / f"corpus{n}", documents[:n])) for n in (5, 9, 12)]


def test_a_grown_corpus_adds_a_cache_and_keeps_the_old_one(tmp_path, grown):
    """Three generations joined read like one cache of the whole, at any span; the old caches are not touched."""
    readers = [make(tmp_path / "0", grown[0])]
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "0").rglob("*")}
    for n, units in enumerate(grown[1:], 1):
        readers.append(make(tmp_path / str(n), LaterUnits.after(units, readers[-1].manifest)))
    whole = make(tmp_path / "whole", grown[2])
    (joined,) = combine(readers[::-1])
    assert isinstance(joined, JoinedReader) and joined.n_rows == whole.n_rows
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "0").rglob("*")} == before
    for spans in (random_spans(whole.n_rows), np.array([[0, whole.n_rows]]), np.zeros((0, 2), int)):
        for settings in ({}, {"top_k": 7, "temperature": 2.0}):
            for ours, theirs in zip(joined.read(spans, **settings), whole.read(spans, **settings), strict=True):
                np.testing.assert_array_equal(ours, theirs)
    joined.expect(corpus=grown[2].identity()["corpus"], tokenizer=TOKENIZER)
    with pytest.raises(IdentityMismatch, match="corpus.n_tokens"):
        joined.expect(corpus=grown[1].identity()["corpus"])
    for span in ([joined.n_rows - 1, 2], [-1, 2], [joined.n_rows + 5, 1]):
        with pytest.raises(SpanError):
            joined.read(np.array([span]))


def test_a_bad_block_of_a_later_generation_is_named_on_the_joined_axis(tmp_path, grown):
    old = make(tmp_path / "0", grown[0])
    new = make(tmp_path / "1", LaterUnits.after(grown[1], old.manifest), tile_tokens=10**6)
    shard = tmp_path / "1" / "shards" / "shard-000000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    joined = JoinedReader([old, new])
    with pytest.raises(CorruptBlock) as caught:
        joined.read(np.array([[0, joined.n_rows]]))
    first, end = caught.value.rows
    assert end == joined.n_rows and old.n_rows <= first < end
    joined.read(np.array([[0, first]]))


def test_a_changed_corpus_or_a_missing_generation_is_refused(tmp_path, grown):
    old = make(tmp_path / "0", grown[0])
    new = make(tmp_path / "1", LaterUnits.after(grown[1], old.manifest))
    with pytest.raises(IdentityMismatch, match=f"name the cache it continues too .*{old.manifest.digest()}"):
        combine([new])
    with pytest.raises(IdentityMismatch, match="no tokens after the 5 units"):
        LaterUnits.after(grown[0], old.manifest)
    other = DocumentUnits(write_corpus(tmp_path / "other", random_documents(3, count=9, longest=400)))
    with pytest.raises(IdentityMismatch, match="does not begin with the 5 documents"):
        LaterUnits.after(other, old.manifest)
    with pytest.raises(IdentityMismatch, match="units.continues"):
        JoinedReader([make(tmp_path / "again", grown[0], top_k=29), new])
    with pytest.raises(IdentityMismatch, match="continues"):  # the joined caches are in the wrong order
        JoinedReader([new, old])


def dense(tokens, shift, temperature):
    """The whole distribution of one teacher, fp64 [n, VOCAB] as (ids, probabilities)."""
    full = other_teacher(tokens, shift, SUPPORT)
    scaled = full["logprobs"] / temperature
    return full["ids"], np.exp(scaled - np.log(np.exp(scaled).sum(-1, keepdims=True)))


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_two_teachers_are_mixed_exactly_on_their_union(tmp_path, grown, temperature):
    """Each id of the union has the weighted sum over the teachers that list it; the tail states the rest."""
    units, k, weights = grown[0], (30, 45), (3.0, 1.0)
    readers = [make(tmp_path / str(i), units, shift=i * 7, top_k=k[i], repo=str(i)) for i in range(2)]
    (mixed,) = combine(readers, weights)
    assert isinstance(mixed, MixedReader)
    rows = mixed.read(np.array([[3, 200]]), temperature=temperature)
    tokens = np.concatenate([units.tokens(u) for u in range(5)])[3:203].astype(np.int64)
    np.testing.assert_array_equal(rows.tokens, tokens)
    overlaps = 0
    for i, token in enumerate(tokens):
        want: dict[int, float] = {}
        tail = 0.0
        for t, weight in enumerate((0.75, 0.25)):
            ids, p = (x[0] for x in dense(np.array([token]), t * 7, temperature))
            for v, mass in zip(ids[: k[t]].tolist(), p[: k[t]], strict=True):
                overlaps += v in want
                want[v] = want.get(v, 0) + weight * mass
            tail += weight * p[k[t] :].sum()
        there = rows.ids[i] >= 0
        got = dict(zip(rows.ids[i][there].tolist(), np.exp(rows.logprobs[i][there].astype(np.float64)), strict=True))
        assert got.keys() == want.keys() and there.sum() == len(want)
        np.testing.assert_allclose([got[v] for v in want], list(want.values()), rtol=1e-4)
        np.testing.assert_allclose(np.exp(rows.log_tail[i]), tail, rtol=1e-4)
        assert (np.diff(rows.logprobs[i][there]) <= 0).all() and np.isneginf(rows.logprobs[i][~there]).all()
    assert overlaps > 1000
    part = mixed.read(np.array([[3, 200]]), temperature=temperature, top_k=10)
    np.testing.assert_array_equal(part.ids, rows.ids[:, :10])
    total = np.exp(part.logprobs.astype(np.float64)).sum(-1) + np.exp(part.log_tail.astype(np.float64))
    np.testing.assert_allclose(total, 1, atol=1e-5)


def test_entries_of_one_id_are_added_up_and_the_rest_kept_apart():
    ids = np.array([[5, 2, 9, 5, 2, 7], [-1, 3, 3, -1, 3, 8]], np.int32)
    values = np.log(np.array([[0.1, 0.2, 0.05, 0.3, 0.1, 0.05], [0, 0.1, 0.2, 0, 0.3, 0.4]], np.float64) + 1e-300)
    values = np.where(ids < 0, -np.inf, values).astype(np.float32)
    found, sums = unite(ids, values)
    assert found.tolist() == [[5, 2, 7, 9, -1, -1], [3, 8, -1, -1, -1, -1]]
    np.testing.assert_allclose(np.exp(sums), [[0.4, 0.3, 0.05, 0.05, 0, 0], [0.6, 0.4, 0, 0, 0, 0]], rtol=1e-5)


def test_teachers_that_cannot_be_mixed_are_refused(tmp_path, grown):
    a, b = (make(tmp_path / name, grown[0], repo=name) for name in "ab")
    for weights, message in (
        (None, "state the weights"),
        ([1.0], "need as many weights"),
        ([1, 0], "positive weights"),
    ):
        with pytest.raises(BadSetting, match=message):
            combine([a, b], weights)
    with pytest.raises(IdentityMismatch, match="corpus"):
        MixedReader([a, make(tmp_path / "c", grown[1])], [1, 1])
    assert len(combine([a, make(tmp_path / "d", grown[1])])) == 2  # two corpora: nothing is mixed
    mixed = MixedReader([a, b], [1, 1])
    mixed.check_serves(top_k=60)
    with pytest.raises(ServeError):
        mixed.check_serves(top_k=61)
    with pytest.raises(ServeError, match="temperature 3.0"):
        mixed.check_serves(temperature=3.0)


def test_one_cache_is_left_as_it_is(tmp_path, grown):
    reader = make(tmp_path / "a", grown[0])
    assert combine([reader]) == [reader] and combine([reader], [0.5]) == [reader]
