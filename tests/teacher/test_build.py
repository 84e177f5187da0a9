# SPDX-License-Identifier: Apache-2.0
"""Building as a whole: gates, resume, several writers, commands, verification by the teacher; tiny teachers."""

import argparse
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_kd.cache import BadSetting, CacheReader, CorpusError, DocumentUnits, IdentityMismatch, note_tokenizer
from megatron_kd.cache.codecs import split_ids
from megatron_kd.cache.commands import add_parser
from megatron_kd.cache.manifest import Manifest
from megatron_kd.cache.verify import verify
from megatron_kd.cache.writer import CacheWriter
from megatron_kd.teacher.build import build_cache, prepare_build
from megatron_kd.teacher.errors import ImplausibleTeacher, TeacherError
from megatron_kd.teacher.huggingface import HuggingFaceTeacher
from megatron_kd.teacher.passes import unit_rows
from tests.cache.conftest import write_corpus
from tests.teacher.conftest import VOCAB, documents, save_llama, settings
from tests.teacher.test_huggingface import compare, full_logprobs


class Interrupted(DocumentUnits):
    """Documents that count how often they are asked for, and stop the build at one of them."""

    def __init__(self, corpus, stop_at=None):
        super().__init__(corpus)
        self.asked, self.stop_at = [], stop_at

    def tokens(self, unit):
        self.asked.append(unit)
        if self.asked.count(unit) > 1 and unit == self.stop_at:  # the first time is the gate's sample
            raise KeyboardInterrupt
        return super().tokens(unit)


def shards(path):
    return {p.name: p.read_bytes() for p in sorted((path / "shards").iterdir())}


def test_an_interrupted_build_does_only_what_is_missing(tmp_path, llama, corpus):
    options = settings(tile_tokens=100, batch_tokens=64)
    whole = build_cache(llama, DocumentUnits(corpus), tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        build_cache(llama, Interrupted(corpus, stop_at=5), tmp_path / "c", **options)
    kept = shards(tmp_path / "c")
    assert 0 < len(kept) < len(shards(whole))
    units = Interrupted(corpus)
    build_cache(llama, units, tmp_path / "c", **options)
    again = {unit for unit in units.asked if units.asked.count(unit) > 1}
    tiles = CacheReader(whole).tiles
    assert again == set(range(int(tiles[len(kept), 1]), len(corpus)))
    assert shards(tmp_path / "c") == shards(whole)


def test_writers_share_the_tiles_and_the_last_one_seals(tmp_path, llama, corpus):
    options = settings(tile_tokens=60)
    whole = build_cache(llama, DocumentUnits(corpus), tmp_path / "whole", **options)
    for index in (1, 0, 2):
        assert not (tmp_path / "c" / "SEALED.json").exists()
        build_cache(llama, DocumentUnits(corpus), tmp_path / "c", writer=(index, 3), **options)
    assert shards(tmp_path / "c") == shards(whole) and CacheReader(tmp_path / "c").n_rows == corpus.n_tokens


@pytest.mark.parametrize("kind", ["softcap", "granite", "cohere"])
def test_capped_and_scaled_logits_are_honoured(tmp_path, corpus, kind):
    """Gemma's soft cap, Granite's and Cohere's scales: rows equal the model's own logits."""
    import transformers

    small = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    if kind == "softcap":
        config = transformers.Gemma2Config(**small, head_dim=8, final_logit_softcapping=3.0, sliding_window=16)
        model = transformers.Gemma2ForCausalLM(config)
    elif kind == "granite":
        model = transformers.GraniteForCausalLM(transformers.GraniteConfig(**small, logits_scaling=0.125))
    else:
        model = transformers.CohereForCausalLM(transformers.CohereConfig(**small, logit_scale=5.0))
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    model.save_pretrained(tmp_path / "teacher")
    out = build_cache(tmp_path / "teacher", DocumentUnits(corpus), tmp_path / "cache", **settings(values="f32"))
    compare(
        CacheReader(out).read(np.array([[0, 17]])), full_logprobs(tmp_path / "teacher", corpus.tokens(0, 17)), 5e-4
    )


def test_a_logit_scale_nobody_knows_is_refused_by_name(llama, monkeypatch):
    """An architecture that changes its logits in a way the config keys do not tell."""
    from transformers import LlamaForCausalLM

    forward = LlamaForCausalLM.forward

    def scaled(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.logits = output.logits * 1.1
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    with pytest.raises(TeacherError, match="LlamaForCausalLM.*not output weight x hidden state"):
        HuggingFaceTeacher.load(llama, vocab_size=VOCAB)


def edit(folder, source, change):
    """A copy of a teacher with its state dict changed."""
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    "change,error,message",
    [
        (
            lambda w: w["model.layers.1.mlp.up_proj.weight"].zero_(),
            ImplausibleTeacher,
            "layers.1.mlp.up_proj.*is zero",
        ),
        (
            lambda w: w.pop("model.layers.0.mlp.up_proj.weight"),
            TeacherError,
            "lacks 1 of the model's weights.*up_proj",
        ),
        (lambda w: w["model.norm.weight"].fill_(torch.nan), TeacherError, "logits"),
    ],
)
def test_damaged_weights_are_refused_even_if_any_loss_is_accepted(tmp_path, llama, corpus, change, error, message):
    teacher = edit(tmp_path / "teacher", llama, change)
    with pytest.raises(error, match=message):
        build_cache(teacher, DocumentUnits(corpus), tmp_path / "cache", **settings())
    assert not (tmp_path / "cache").exists()


def test_a_teacher_no_better_than_chance_is_refused(tmp_path, llama, corpus):
    with pytest.raises(
        ImplausibleTeacher, match=r"loss of .* guessing among 300 ids gives 5.70.*--accept-teacher-loss"
    ):
        build_cache(llama, DocumentUnits(corpus), tmp_path / "cache", **settings(accept_teacher_loss=False))
    constant = edit(tmp_path / "constant", llama, lambda w: w["lm_head.weight"][:, :].mul_(0).__setitem__((5, 0), 1.0))
    norm = load_file(constant / "model.safetensors")
    norm["model.norm.weight"].zero_()
    save_file(norm, constant / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ImplausibleTeacher, match="predicts token 0 at each of"):
        build_cache(constant, DocumentUnits(corpus), tmp_path / "cache", **settings(accept_teacher_loss=False))
    assert not (tmp_path / "cache").exists()


def test_wrong_input_is_refused_before_anything_is_written(tmp_path, llama, corpus):
    units, out = DocumentUnits(corpus), tmp_path / "cache"
    cases = [
        (dict(teacher=tmp_path / "absent"), TeacherError, "absent does not exist"),
        (dict(teacher="./absent"), TeacherError, "absent does not exist"),
        (dict(top_k=VOCAB + 1), TeacherError, f"top_k={VOCAB + 1} exceeds the {VOCAB} ids"),
        (dict(vocab_size=VOCAB + 1), TeacherError, f"ids up to {VOCAB}, .* has {VOCAB} rows"),
        (dict(vocab_size=200), IdentityMismatch, r"knows ids below 200: the corpus was made with another tokenizer"),
        (dict(vocab_size=None), TeacherError, "no tokenizer can be loaded.*--vocab-size"),
        (dict(max_context=100), TeacherError, "document 4 has 128 tokens, the teacher's context is 100"),
        (dict(window=200), TeacherError, "window 200"),
        (dict(window=50, stride=51), TeacherError, "stride 51"),
        (dict(stride=5), TeacherError, "without a window"),
        (dict(dtype="float8"), TeacherError, "'float8' is not known"),
        (dict(temperatures=(-1.0,)), BadSetting, "temperatures"),
        (dict(tile_tokens=0), BadSetting, "tile_tokens"),
        (dict(writer=(2, 2)), BadSetting, "0 <= i < n"),
        (dict(limit=0), CorpusError, "at least one unit"),
    ]
    for change, error, message in cases:
        options = {"teacher": llama} | settings() | change
        with pytest.raises(error, match=message):
            build_cache(options.pop("teacher"), units, out, **options)
        assert not out.exists()


class Tokenizer:
    chat_template = None

    def __init__(self, size):
        self.size = size

    def get_vocab(self):
        return {f"word{i}": i for i in range(self.size)}


def test_a_corpus_of_another_tokenizer_is_refused(tmp_path, llama, corpus):
    from megatron_kd.cache import tokenizer_identity

    note_tokenizer(corpus.prefix, tokenizer_identity(Tokenizer(VOCAB)))
    options = settings(vocab_size=None)
    out = build_cache(llama, DocumentUnits(corpus), tmp_path / "c", tokenizer=Tokenizer(VOCAB), **options)
    assert CacheReader(out).manifest.tokenizer["vocab_size"] == VOCAB
    with pytest.raises(IdentityMismatch, match="tokenizer.digest: the teacher has .*, the corpus '"):
        build_cache(llama, DocumentUnits(corpus), tmp_path / "d", tokenizer=Tokenizer(VOCAB - 1), **options)


def test_another_teacher_cannot_continue_a_cache(tmp_path, llama, corpus):
    """Same architecture and name, other weights: the content decides."""
    other = save_llama(tmp_path / llama.name, seed=1)
    out = build_cache(llama, DocumentUnits(corpus), tmp_path / "c", **settings())
    before = shards(out)
    with pytest.raises(IdentityMismatch, match="teacher.weights: the cache has '.*', this build '"):
        build_cache(other, DocumentUnits(corpus), tmp_path / "c", **settings())
    assert shards(out) == before


def test_the_teacher_level_finds_rows_that_are_not_its_own(tmp_path, llama, corpus):
    """Two rows exchanged, ids permuted, values moved: valid in form, with right checksums, and found."""
    units = DocumentUnits(corpus)
    out = build_cache(llama, units, tmp_path / "c", **settings())
    teacher = HuggingFaceTeacher.load(llama, vocab_size=VOCAB)
    manifest = Manifest.from_json((out / "manifest.json").read_bytes())

    def problems(path):
        found = verify(
            path, "teacher", units=units, recompute=lambda u: unit_rows(teacher, units, u, manifest), sample_units=10
        )
        return found.problems

    assert problems(out) == []

    def shifted(planes):
        for name in ("ids", "logprobs", "log_tail"):
            planes[name][1:] = planes[name][:-1].copy()

    def permuted(planes):
        planes["ids"][3, :2] = planes["ids"][3, 1::-1].copy()

    def moved(planes):
        planes["log_tail"] += 0.02

    for change in (shifted, permuted, moved):
        planes = {}
        for unit in range(len(corpus)):
            for name, plane in unit_rows(teacher, units, unit, manifest).items():
                planes[name] = np.concatenate([planes[name], plane]) if name in planes else plane
        change(planes)
        writer = CacheWriter(tmp_path / change.__name__, manifest, CacheReader(out).tiles)
        writer.write_tile(0, planes)
        writer.seal()
        assert any("in the cache" in problem and "recomputed" in problem for problem in problems(writer.path))
    assert split_ids(planes["ids"], 2)[1].shape[1] == 5  # K = 20


def test_the_command_builds_continues_and_verifies(tmp_path, llama, corpus, capsys):
    def run(*argv):
        parser = argparse.ArgumentParser(prog="megatron-kd")
        add_parser(parser.add_subparsers())
        args = parser.parse_args(["cache", *map(str, argv)])
        return args.run(args)

    common = ["--teacher", llama, "--vocab-size", VOCAB, "--corpus", corpus.prefix, "--no-progress"]
    build = ["build", *common, "--out", tmp_path / "c", "--top-k", 7, "--temperature", 2, "--accept-teacher-loss"]
    build += ["--limit", 6, "--tile-tokens", 100]
    for _ in range(2):
        assert run(*build) == 0
        text = capsys.readouterr().out
        assert "(sealed)" in text and "top 7 of 300 ids" in text and "limit 6" in text
    assert run("verify", tmp_path / "c", "--level", "teacher", *common) == 0
    assert "no problem" in capsys.readouterr().out
    other = save_llama(tmp_path / "other", seed=5)
    with pytest.raises(IdentityMismatch, match="teacher.weights"):
        run("verify", tmp_path / "c", "--level", "teacher", *common, "--teacher", other)


def test_a_long_document_goes_alone_and_short_ones_together(tmp_path, llama):
    """Padding cannot leak: the same documents in other company give the same rows to rounding."""
    texts = documents(2, [120, 3, 3, 40, 41])
    corpus = write_corpus(tmp_path / "c", texts)
    rows = []
    for batch_tokens in (41, 5000):
        out = build_cache(
            llama,
            DocumentUnits(corpus),
            tmp_path / f"c{batch_tokens}",
            **settings(batch_tokens=batch_tokens, values="f32", top_k=VOCAB),
        )
        rows.append(CacheReader(out).read(np.array([[0, 207]])))
    dense = [np.zeros((207, VOCAB)) for _ in rows]
    for grid, part in zip(dense, rows, strict=True):
        np.put_along_axis(grid, part.ids, part.logprobs, -1)
    np.testing.assert_allclose(dense[0], dense[1], atol=2e-5)


def test_positions_that_are_not_stored_are_not_projected(tmp_path, llama, corpus, monkeypatch):
    """The output projection meets the stored positions alone; the cache is that of a teacher that projected all."""
    from megatron_kd.cache import MaskedUnits
    from megatron_kd.teacher import huggingface

    units = DocumentUnits(corpus)
    mask = lambda unit: (np.arange(units.lengths[unit]) % 5 > 1) & (unit != 3)  # noqa: E731 (one has none at all)
    masked = MaskedUnits(units, mask)
    options = settings(temperatures=(2.0,), window=64, batch_tokens=64)
    met, project = [], huggingface.fused_linear_topk

    def counted(hidden, *args, **kwargs):
        met.append(len(hidden))
        return project(hidden, *args, **kwargs)

    monkeypatch.setattr(huggingface, "fused_linear_topk", counted)
    teacher = HuggingFaceTeacher.load(llama, vocab_size=VOCAB)
    build = prepare_build(
        teacher, masked, tmp_path / "c", **{k: v for k, v in options.items() if k not in ("progress", "vocab_size")}
    )
    met.clear()
    build.run(progress=False)
    stored = np.concatenate([mask(unit) for unit in range(len(units.lengths))])
    assert sum(met) == stored.sum()
    whole = build_cache(llama, units, tmp_path / "whole", **options)
    for temperature in (1.0, 2.0):
        found, true = (
            CacheReader(path).read(np.array([[0, corpus.n_tokens]]), temperature=temperature)
            for path in (tmp_path / "c", whole)
        )
        np.testing.assert_array_equal(found.stored, stored)
        np.testing.assert_array_equal(found.tokens, true.tokens)
        np.testing.assert_array_equal(found.ids[stored], true.ids[stored])
        np.testing.assert_allclose(found.logprobs[stored], true.logprobs[stored], rtol=2**-10, atol=1e-5)
        np.testing.assert_allclose(found.log_tail[stored], true.log_tail[stored], atol=1e-3)
    assert (
        verify(
            tmp_path / "c",
            "teacher",
            units=masked,
            sample_units=99,
            recompute=lambda unit: unit_rows(teacher, masked, unit, build.manifest),
        ).problems
        == []
    )
