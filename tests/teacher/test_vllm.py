# SPDX-License-Identifier: Apache-2.0
"""vLLM as the teacher, without vLLM: a stand-in for the engine alone answers in the structure that vLLM documents."""

import argparse
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_kd.cache import CacheReader, DocumentUnits
from megatron_kd.cache.commands import add_parser
from megatron_kd.teacher import vllm
from megatron_kd.teacher.build import build_cache
from megatron_kd.teacher.errors import ImplausibleTeacher, TeacherError
from tests.teacher.conftest import VOCAB, settings

K = 20


@dataclass
class FlatLogprobs:
    """The fields of vLLM's class of that name."""

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int | None] = field(default_factory=list)

    def __len__(self):
        return len(self.start_indices)

    def add(self, ids, logprobs, ranks):
        self.start_indices.append(len(self.token_ids))
        for mine, more in ((self.token_ids, ids), (self.logprobs, logprobs), (self.ranks, ranks)):
            mine.extend(more)
        self.end_indices.append(len(self.token_ids))


def engine(folder, change=lambda answer: None):
    """Asks a transformers model. For each token but the first: itself with its rank, then the top K."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def ask(prompts, top_k):
        answers = []
        for prompt in prompts:
            with torch.no_grad():
                every = model(input_ids=torch.from_numpy(prompt)[None]).logits[0].log_softmax(-1)
            found = FlatLogprobs()
            found.add([], [], [])
            for row, token in zip(every, prompt[1:].tolist(), strict=False):
                top = row.topk(top_k)
                rank = int((row >= row[token]).sum())
                found.add([token, *top.indices.tolist()], [float(row[token]), *top.values.tolist()],
                          [rank, *range(1, top_k + 1)])  # fmt: skip
            answers.append(SimpleNamespace(prompt_token_ids=prompt.tolist(), prompt_logprobs=found))
            change(answers[-1])
        return answers

    return ask


def teacher(ask, **more):
    options = {"vocab_real": VOCAB, "vocab_padded": VOCAB, "max_context": 128, "tokenizer": None}
    return vllm.VllmTeacher(ask, identity={"repo": "x", "engine": "vllm"}, **options | more)


def options(**more):
    return {"top_k": K, "accept_teacher_loss": True, "progress": False} | more


def test_the_cache_is_that_of_transformers(tmp_path, llama, corpus):
    """All rows, the last of each document too; a window, so that rows are asked for by mask."""
    units = DocumentUnits(corpus)
    for name, more in (("whole", {}), ("window", {"window": 40, "stride": 30})):
        true = build_cache(llama, units, tmp_path / f"{name}-hf", **settings(values="f32", top_k=K, **more))
        found = build_cache(teacher(engine(llama)), units, tmp_path / name, **options(values="f32", **more))
        found, true = (CacheReader(path).read(np.array([[0, corpus.n_tokens]])) for path in (found, true))
        np.testing.assert_array_equal(found.tokens, true.tokens)
        np.testing.assert_array_equal(found.ids, true.ids)
        np.testing.assert_allclose(found.logprobs, true.logprobs, atol=2e-5)
        np.testing.assert_allclose(np.exp(found.log_tail), np.exp(true.log_tail), atol=3e-6)


def test_the_command(tmp_path, llama, corpus, monkeypatch):
    """Settings reach the engine and the manifest; those that rows depend on cannot be changed."""
    started = {}

    def start(source, settings):
        started.update(settings, source=source)
        return engine(source), "9.9"

    monkeypatch.setattr(vllm, "_start", start)
    words = ["build", "--engine", "vllm", "--teacher", llama, "--corpus", corpus.prefix, "--out", tmp_path / "c"]
    words += ["--vocab-size", VOCAB, "--top-k", K, "--accept-teacher-loss", "--no-progress", "--max-context", 128]

    def run(setting):
        parser = argparse.ArgumentParser()
        add_parser(parser.add_subparsers())
        args = parser.parse_args(["cache", *map(str, words)])
        args.overrides = [setting]
        return args.run(args)

    assert run("model.max_num_batched_tokens=64") == 0
    fixed = {"logprobs_mode": "raw_logprobs", "enable_prefix_caching": False, "max_logprobs": K}
    assert started.items() >= (fixed | {"max_num_batched_tokens": 64, "max_model_len": 128}).items()
    identity = CacheReader(tmp_path / "c").manifest.teacher
    assert (identity["engine"], identity["version"], identity["dtype"]) == ("vllm", "9.9", "float32")
    assert identity["settings"]["logprobs_mode"] == "raw_logprobs" and identity["tail"].startswith("derived")
    with pytest.raises(TeacherError, match="model.enable_prefix_caching=True would make rows that are wrong"):
        run("model.enable_prefix_caching=true")


def cut(answer):
    for plane in (answer.prompt_logprobs.start_indices, answer.prompt_logprobs.end_indices):
        plane.pop()


def fewer_entries(answer):
    found = FlatLogprobs()
    found.add([], [], [])
    whole = answer.prompt_logprobs
    for start, end in zip(whole.start_indices[1:], whole.end_indices[1:], strict=True):
        found.add(*(getattr(whole, name)[start : end - 1] for name in ("token_ids", "logprobs", "ranks")))
    answer.prompt_logprobs = found


def other(plane, place, value):
    return lambda answer: getattr(answer.prompt_logprobs, plane).__setitem__(place, value)


WRONG = {
    "another prompt": (lambda answer: answer.prompt_token_ids.append(1), "the answer is to another prompt"),
    "no rows": (lambda answer: setattr(answer, "prompt_logprobs", None), "no rows came back; prefix caching"),
    "a row less": (cut, "rows came back; prefix caching must be off"),
    "K less": (fewer_entries, "entries, expected the next token and the 1 most likely"),
    "another token first": (other("token_ids", 0, VOCAB - 1), "does not begin with the token that follows"),
    "padding": (other("token_ids", 1, VOCAB), f"id {VOCAB} is among the most likely, the tokenizer has {VOCAB}"),
    "logits": (other("logprobs", 1, 7.5), "are these logits"),
    "NaN": (other("logprobs", 1, float("nan")), "NaN"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_an_answer_that_is_not_whole_is_refused(tmp_path, llama, corpus, case):
    change, message = WRONG[case]
    with pytest.raises(TeacherError, match=message):
        build_cache(teacher(engine(llama, change)), DocumentUnits(corpus), tmp_path / "c", **options())
    assert not (tmp_path / "c").exists()


def test_the_gate_and_what_vllm_cannot_tell(tmp_path, llama, corpus):
    def constant(answer):
        found = answer.prompt_logprobs
        for start, end in zip(found.start_indices[1:], found.end_indices[1:], strict=True):
            found.token_ids[start + 1 : end] = range(end - start - 1)

    units = DocumentUnits(corpus)
    with pytest.raises(ImplausibleTeacher, match="predicts token 0 at each of"):
        build_cache(teacher(engine(llama, constant)), units, tmp_path / "c", **options(accept_teacher_loss=False))
    with pytest.raises(ImplausibleTeacher, match="loss of"):
        build_cache(teacher(engine(llama)), units, tmp_path / "c", **options(accept_teacher_loss=False))
    with pytest.raises(TeacherError, match=r"temperature 1 only; temperatures \[2.0\]"):
        build_cache(teacher(engine(llama)), units, tmp_path / "c", **options(temperatures=(2.0,)))
    with pytest.raises(TeacherError, match="the teacher's context is 100"):
        build_cache(teacher(engine(llama), max_context=100), units, tmp_path / "d", **options())
    with pytest.raises(TeacherError, match="vLLM is not installed"):
        vllm.VllmTeacher.load(llama, top_k=5, vocab_size=VOCAB)
