# SPDX-License-Identifier: Apache-2.0
"""Caches built with Hugging Face models, against the model's own full logits in fp64."""

import json

import numpy as np
import pytest
import torch

from megatron_kd.cache import CacheReader, Corpus, DocumentUnits, FirstUnits
from megatron_kd.teacher.build import build_cache
from megatron_kd.teacher.errors import TeacherError
from megatron_kd.teacher.huggingface import HuggingFaceTeacher
from megatron_kd.teacher.passes import batches, cut_pieces
from tests.cache.conftest import write_corpus
from tests.cache.test_commands import run
from tests.teacher.conftest import VOCAB, documents, save_llama, settings


def full_logprobs(folder, tokens, real=VOCAB, temperature=1.0, **options):
    """The model's own logits of one unpadded sequence, log-softmax over the real vocabulary in fp64: [n, real]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options).eval()
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(np.asarray(tokens, np.int64))[None]).logits[0, :, :real].double()
    return (logits / temperature).log_softmax(-1).numpy()


def compare(rows, logprobs, atol):
    """Rows of a cache (f32 values) against dense log-probabilities."""
    own = np.take_along_axis(logprobs, rows.ids, -1)
    np.testing.assert_allclose(rows.logprobs, own, atol=atol)
    rest = logprobs.copy()
    np.put_along_axis(rest, rows.ids, -np.inf, -1)
    assert (rest.max(-1) <= own.min(-1) + atol).all()  # they are the largest
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(rows.log_tail, np.log(np.exp(rest).sum(-1)), atol=atol)


@pytest.mark.parametrize("batch_tokens", [1, 200, 10_000])
def test_rows_equal_the_models_own_logits(tmp_path, llama, corpus, batch_tokens):
    """Padded or not, alone or in a batch, at T = 1 and 2: the rows are those of the document read alone."""
    out = build_cache(
        llama,
        DocumentUnits(corpus),
        tmp_path / "cache",
        **settings(batch_tokens=batch_tokens, values="f32", temperatures=(2.0,), tile_tokens=150, strip_tokens=13),
    )
    reader = CacheReader(out)
    assert reader.manifest.tiles["count"] > 2
    for unit in range(len(corpus)):
        span = np.array([[corpus.starts[unit], corpus.lengths[unit]]])
        tokens = corpus.tokens(*span[0].tolist())
        for temperature in (1.0, 2.0):
            rows = reader.read(span, temperature=temperature)
            np.testing.assert_array_equal(rows.tokens, tokens)
            compare(rows, full_logprobs(llama, tokens, temperature=temperature), atol=2e-4)


def test_gpt_oss_rows_equal_its_own_logits(tmp_path, corpus):
    """Mixture of experts, learnable softmax, sliding window of 16, biases."""
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(1)
    config = GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = GptOssForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "sinks" in name:
                parameter.normal_()
    model.save_pretrained(tmp_path / "teacher")
    out = build_cache(
        tmp_path / "teacher", DocumentUnits(corpus), tmp_path / "cache", **settings(values="f32", batch_tokens=300)
    )
    reader = CacheReader(out)
    for unit in (2, 4, 6):
        start, length = int(corpus.starts[unit]), int(corpus.lengths[unit])
        eager = {"experts_implementation": "eager", "attn_implementation": "eager"}  # the grouped ones lack fp64
        truth = full_logprobs(tmp_path / "teacher", corpus.tokens(start, length), **eager)
        compare(reader.read(np.array([[start, length]])), truth, atol=1e-4)


def test_padded_vocabulary_enters_neither_top_k_nor_normaliser(tmp_path, corpus):
    """320 rows, 300 real ids, the padding made to win everywhere (Model-Optimizer#2489, LMOps#331)."""
    folder = save_llama(tmp_path / "teacher", vocab_size=320)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] = 100 * model.lm_head.weight[:20]
    model.save_pretrained(folder)
    out = build_cache(folder, DocumentUnits(corpus), tmp_path / "cache", **settings(top_k=VOCAB, values="f32"))
    reader = CacheReader(out)
    assert (reader.manifest.vocab_real, reader.manifest.vocab_padded) == (VOCAB, 320)
    rows = reader.read(np.array([[0, 17]]))
    assert rows.ids.max() < VOCAB and np.isneginf(rows.log_tail).all()
    np.testing.assert_allclose(np.exp(rows.logprobs.astype(np.float64)).sum(-1), 1, atol=1e-5)
    compare(rows, full_logprobs(folder, corpus.tokens(0, 17)), atol=2e-4)


def test_windows_cover_long_documents_as_the_manifest_says(tmp_path, llama):
    """300 tokens in a context of 128: token t sees the window its piece was given, no more and no less."""
    corpus = write_corpus(tmp_path / "long", documents(5, [300, 40]))
    with pytest.raises(TeacherError, match=r"document 0 has 300 tokens, the teacher's context is 128.*--window 128"):
        build_cache(llama, DocumentUnits(corpus), tmp_path / "cache", **settings())
    assert not (tmp_path / "cache").exists()
    out = build_cache(
        llama, DocumentUnits(corpus), tmp_path / "cache", **settings(window=100, stride=60, values="f32")
    )
    reader = CacheReader(out)
    assert reader.manifest.context == {"kind": "window", "window": 100, "stride": 60}
    tokens = corpus.tokens(0, 300)
    for first, start, stop in [(0, 0, 100), (100, 60, 160), (160, 120, 220), (220, 180, 280), (280, 200, 300)]:
        rows = reader.read(np.array([[first, stop - first]]))
        compare(rows, full_logprobs(llama, tokens[start:stop])[first - start :], atol=2e-4)
    compare(reader.read(np.array([[300, 40]])), full_logprobs(llama, corpus.tokens(300, 40)), atol=2e-4)


def test_pieces_cover_every_position_once_and_batches_keep_their_size():
    lengths = np.random.default_rng(0).integers(0, 500, 50)
    for context in ({}, {"window": 100, "stride": 100}, {"window": 64, "stride": 1}, {"window": 500, "stride": 3}):
        pieces = cut_pieces(lengths, range(50), context)
        covered = np.zeros(lengths.sum(), int)
        starts = np.append(0, lengths.cumsum())
        for piece in pieces:
            assert piece.length <= context.get("window", 500)
            assert piece.row == starts[piece.unit] + piece.start + piece.skip
            covered[piece.row : starts[piece.unit] + piece.stop] += 1
        assert (covered == 1).all()
        groups = list(batches(pieces, 800))
        assert sorted(sum(groups, [])) == sorted(pieces)
        assert all(len(g) * g[0].length <= 800 or len(g) == 1 for g in groups)


def test_limit_takes_the_first_units_and_is_part_of_the_identity(tmp_path, llama, corpus):
    whole = build_cache(llama, DocumentUnits(corpus), tmp_path / "whole", **settings())
    part = build_cache(llama, DocumentUnits(corpus), tmp_path / "part", **settings(limit=4))
    a, b = CacheReader(whole), CacheReader(part)
    assert b.n_rows == corpus.starts[4] and b.manifest.units["limit"] == 4
    np.testing.assert_array_equal(b.read(np.array([[0, b.n_rows]])).ids, a.read(np.array([[0, b.n_rows]])).ids)
    assert FirstUnits(DocumentUnits(corpus), 4).identity()["corpus"] == DocumentUnits(corpus).identity()["corpus"]


def test_sample_units_are_seen_whole(tmp_path, llama):
    """A unit source from outside: overlapping training samples across document borders, with their own identity."""
    corpus = write_corpus(tmp_path / "c", documents(8, [50, 30, 45]))

    class Samples:
        kind = "sample"
        lengths = np.full(5, 24, np.int64)

        def tokens(self, unit):
            return corpus.tokens(unit * 20, 24)

        def identity(self):
            return {"corpus": {"data_digest": corpus.data_digest()}, "units": {"seq_length": 24, "seed": 7}}

    out = build_cache(llama, Samples(), tmp_path / "cache", **settings(values="f32", top_k=VOCAB))
    reader = CacheReader(out)
    assert reader.manifest.units["kind"] == "sample" and reader.manifest.units["seed"] == 7
    for unit in range(5):
        tokens = corpus.tokens(unit * 20, 24)
        rows = reader.read(np.array([[unit * 24, 24]]))
        np.testing.assert_array_equal(rows.tokens, tokens)
        compare(rows, full_logprobs(llama, tokens), atol=2e-4)


def test_stores_corpora_of_16_bit_tokens(tmp_path, llama):
    texts = documents(9, [20, 30])
    narrow, wide = write_corpus(tmp_path / "n", texts, code=8), write_corpus(tmp_path / "w", texts, code=4)
    rows = []
    for corpus in (narrow, wide):
        out = build_cache(llama, DocumentUnits(Corpus(corpus.prefix)), f"{corpus.prefix}-cache", **settings())
        rows.append(CacheReader(out).read(np.array([[0, 50]])))
    for a, b in zip(*rows, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_device_map_gives_the_same_rows(tmp_path, llama, corpus):
    """One layer on disk, loaded for every pass by accelerate: equal shards. No second GPU can be had here."""
    units = DocumentUnits(corpus)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    plain = build_cache(llama, units, tmp_path / "plain", **settings())
    words = [
        "build",
        "--teacher",
        llama,
        "--corpus",
        corpus.prefix,
        "--out",
        tmp_path / "mapped",
        "--vocab-size",
        VOCAB,
    ]
    words += ["--vocab-size", VOCAB, "--top-k", 20, "--accept-teacher-loss", "--no-progress"]
    assert run(*words, "--device-map", json.dumps(places)) == 0
    for shard in (plain / "shards").iterdir():
        assert shard.read_bytes() == (tmp_path / "mapped" / "shards" / shard.name).read_bytes()
    teacher = HuggingFaceTeacher.load(llama, vocab_size=VOCAB, device_map=places)
    assert not any("layers.1." in name for name, _ in teacher.named_parameters())
    with pytest.raises(TeacherError, match="leaves the output projection on disk"):
        HuggingFaceTeacher.load(llama, vocab_size=VOCAB, device_map={"model": "cpu", "lm_head": "disk"})
    with pytest.raises(TeacherError, match="device 'cpu' and a device map"):
        HuggingFaceTeacher.load(llama, vocab_size=VOCAB, device_map="auto", device="cpu")
    with pytest.raises(SystemExit, match="2"):
        run(*words, "--device-map", "everywhere")
