# SPDX-License-Identifier: Apache-2.0
"""A cache serves only what it was built from; content decides, and every refusal shows both values."""

import copy
import dataclasses
import re
import shutil

import numpy as np
import pytest

from megatron_kd.cache import (
    BadSetting,
    CacheError,
    CacheReader,
    CacheWriter,
    Corpus,
    DocumentUnits,
    EchoMismatch,
    FirstUnits,
    IdentityMismatch,
    Manifest,
    check_echo,
    make_manifest,
    note_tokenizer,
    tokenizer_identity,
)
from tests.cache.conftest import TEACHER, TOKENIZER, VOCAB, build, random_documents, write_corpus
from tests.cache.test_commands import run


class Tokenizer:
    """The two things of a Hugging Face tokenizer that identify it."""

    def __init__(self, words, chat_template=None):
        self.words, self.chat_template = words, chat_template

    def get_vocab(self):
        return {word: i for i, word in enumerate(self.words)}


def test_another_corpus_is_refused_by_content_whatever_its_name(tmp_path):
    """Same path, same lengths, one token changed: refused. Another path, same content: accepted."""
    documents = random_documents(1)
    corpus = write_corpus(tmp_path / "corpus", documents)
    build(tmp_path / "cache", corpus, top_k=2)
    reader = CacheReader(tmp_path / "cache")
    right = DocumentUnits(corpus).identity()["corpus"]
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus.prefix}{suffix}", tmp_path / f"renamed{suffix}")
    reader.expect(corpus=DocumentUnits(Corpus(tmp_path / "renamed")).identity()["corpus"])
    documents[7] = documents[7].copy()
    documents[7][0] += 1
    wrong = DocumentUnits(write_corpus(tmp_path / "corpus", documents)).identity()["corpus"]
    assert wrong["index_digest"] == right["index_digest"]
    both = rf"corpus.data_digest: the cache has '{right['data_digest']}', expected '{wrong['data_digest']}'"
    with pytest.raises(IdentityMismatch, match=both):
        reader.expect(corpus=wrong)


def leaves(value, place=()):
    """(place, value) of everything in a manifest that is no object."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*place, key))
    else:
        yield place, value


def changed(body, place):
    """A copy of a manifest's fields with another value at one place, and that value."""
    body = copy.deepcopy(body)
    part = body
    for key in place[:-1]:
        part = part[key]
    old = part[place[-1]]
    others = {"values": "f32", "codec": "zstd", "top_k": 99, "vocab_padded": VOCAB + 64, "temperatures": [3.0]}
    part[place[-1]] = new = others.get(place[0], old + 1 if isinstance(old, int) else f"other than {old}")
    return body, new


def test_every_field_is_checked_and_named_with_both_values(cache):
    """Whatever a manifest holds, down to the last sub-field: other content is refused by name, with both values."""
    reader = CacheReader(cache)
    body = dataclasses.asdict(reader.manifest)
    places = [place for place, _ in leaves(body)]
    wanted = ["index_digest", "data_digest", "n_tokens", "n_units"]
    assert {("corpus", name) for name in wanted} | {("units", "kind"), ("units", "digest")} <= set(places)
    assert {("teacher", name) for name in TEACHER} | {("tokenizer", name) for name in TOKENIZER} <= set(places)
    assert {("top_k",), ("vocab_real",), ("vocab_padded",), ("context", "kind"), ("tiles", "digest")} <= set(places)
    for place in places:
        other, new = changed(body, place)
        message = f"{'.'.join(place)}: the cache has {dict(leaves(body))[place]!r}, expected {new!r}"
        with pytest.raises(IdentityMismatch, match=re.escape(message)):
            reader.expect(**{place[0]: other[place[0]]})
    reader.expect(**body)
    with pytest.raises(ValueError, match="no field .*'corpsu'"):
        reader.expect(corpsu={})


def test_a_writer_with_any_other_field_is_refused(cache, monkeypatch):
    """The same for whoever wants to write into the cache."""
    reader = CacheReader(cache)
    body = dataclasses.asdict(reader.manifest)
    monkeypatch.setattr("megatron_kd.cache.writer.decode_tiles", lambda *_: None)  # the refusal is to come later
    for place, old in leaves(body):
        other, new = changed(body, place)
        message = f"{'.'.join(place)}: the cache has {old!r}, this build {new!r}"
        with pytest.raises(IdentityMismatch, match=re.escape(message)):
            CacheWriter(cache, Manifest(**other), reader.tiles)
    CacheWriter(cache, Manifest(**body), reader.tiles)


def test_info_shows_in_which_fields_two_caches_differ(tmp_path, corpus, capsys):
    """Fields that one of them lacks included; equal caches are said to be equal."""
    a, b = (build(tmp_path / name, corpus, top_k=k).path for name, k in (("a", 2), ("b", 3)))
    note_tokenizer(corpus.prefix, {"digest": "x"})
    assert run("info", "--diff", a, b) == 1
    text = capsys.readouterr().out
    assert f"top_k:\n  2  ({a})\n  3  ({b})\n" in text and "1 fields differ" in text
    shutil.copytree(a, tmp_path / "c")
    assert run("info", "--diff", a, tmp_path / "c") == 0 and "same identity" in capsys.readouterr().out
    limited = FirstUnits(DocumentUnits(corpus), 3)
    manifest, tiles = make_manifest(
        limited, teacher=TEACHER, tokenizer=TOKENIZER, vocab_real=VOCAB, vocab_padded=VOCAB, top_k=2, tile_tokens=4000
    )
    CacheWriter(tmp_path / "d", manifest, tiles)
    for order in ((a, tmp_path / "d"), (tmp_path / "d", a)):
        assert run("info", "--diff", *order) == 1
        text = capsys.readouterr().out
        assert "units.limit:" in text and "None" in text and "rows:" in text and "corpus" not in text
    with pytest.raises(CacheError, match="name a cache, or two with --diff"):
        run("info")


def test_the_manifest_knows_nothing_of_paths_or_time(tmp_path):
    digests = set()
    for name in ("a", "b"):
        corpus = write_corpus(tmp_path / name, random_documents(1))
        digests.add(build(tmp_path / f"{name}-cache", corpus, top_k=2).manifest.digest())
    assert len(digests) == 1


def test_tokenizers_are_told_apart_by_vocabulary_and_template():
    words = ["a", "b", "c"]
    same = tokenizer_identity(Tokenizer(words))
    assert tokenizer_identity(Tokenizer(list(words))) == same and same["vocab_size"] == 3
    others = [Tokenizer(["a", "c", "b"]), Tokenizer([*words, "d"]), Tokenizer(words, "{{ x }}")]
    assert len({str(tokenizer_identity(t)) for t in [*others, Tokenizer(words)]}) == 4


def test_a_corpus_remembers_its_tokenizer(corpus):
    assert "tokenizer" not in DocumentUnits(corpus).identity()
    note_tokenizer(corpus.prefix, tokenizer_identity(Tokenizer(["a"])))
    assert DocumentUnits(corpus).identity()["tokenizer"]["vocab_size"] == 1


@pytest.mark.parametrize("shift", [1, -1])
def test_rows_shifted_by_one_are_recognised(cache, corpus, shift):
    """The classic fault: the teacher's rows of position g used at g + 1 or g - 1 (ms-swift#8436, axolotl#2700)."""
    rows = CacheReader(cache).read(np.array([[100, 64]]))
    check_echo(rows.tokens, corpus.tokens(100, 64).astype(np.int64), where="batch 3")
    with pytest.raises(EchoMismatch, match=rf"batch 3: .* look shifted by \{shift:+d} "):
        check_echo(rows.tokens, corpus.tokens(100 + shift, 64), where="batch 3")


def test_other_tokens_are_reported_with_position_and_both_values(cache, corpus):
    rows = CacheReader(cache).read(np.array([[100, 64]]))
    batch = corpus.tokens(100, 64).copy()
    batch[9] += 5
    with pytest.raises(
        EchoMismatch, match=rf"1 of 64 tokens differ, first at position 9: the cache has {batch[9] - 5}, the"
    ):
        check_echo(rows.tokens, batch, where="batch 3")
    with pytest.raises(EchoMismatch, match=r"64 of 64 tokens differ.*another corpus, tokenizer, seed or order"):
        check_echo(rows.tokens, batch[::-1] + VOCAB, where="batch 3")
    with pytest.raises(EchoMismatch, match=r"shape \(64,\), the batch \(63,\)"):
        check_echo(rows.tokens, batch[:63], where="batch 3")


@pytest.mark.parametrize(
    "settings,name",
    [
        ({"top_k": VOCAB + 1}, "top_k"),
        ({"top_k": 0}, "top_k"),
        ({"temperatures": (0.0,)}, "temperatures"),
        ({"values": "f64"}, "values"),
        ({"tile_tokens": 0}, "tile_tokens"),
    ],
)
def test_settings_no_cache_can_have_are_refused_before_anything_is_written(tmp_path, corpus, settings, name):
    with pytest.raises(BadSetting, match=name):
        build(tmp_path / "cache", corpus, **settings)
    assert not (tmp_path / "cache").exists()


def test_temperature_one_is_always_served_and_stored_once(corpus):
    manifest, _ = make_manifest(
        DocumentUnits(corpus),
        teacher={},
        tokenizer=None,
        vocab_real=9,
        vocab_padded=9,
        top_k=2,
        temperatures=(2, 1, 2.0),
    )
    assert manifest.temperatures == [2.0] and manifest.row_format.bytes_per_row == 4 + 4 + 4 + 4 + 4 + 1
