# SPDX-License-Identifier: Apache-2.0
"""Tiny teachers, made from transformers' own configs, and corpora for them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_kd.cache import Corpus
from tests.cache.conftest import write_corpus

VOCAB = 300


def save_llama(folder: Path, *, seed: int = 0, sharpness: float = 8.0, **config) -> Path:
    """A random Llama whose embedding is scaled so that its predictions are sharp and differ from place to place."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    settings = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(LlamaConfig(**(settings | config)))
    with torch.no_grad():
        model.lm_head.weight *= sharpness
    model.save_pretrained(folder)
    return folder


def documents(seed: int, lengths: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length) for length in lengths]


@pytest.fixture(scope="session")
def llama(tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    """Lengths 1, 2, 128 (the teacher's whole context) among them; some equal, some not."""
    return write_corpus(tmp_path / "corpus", documents(3, [17, 1, 64, 2, 128, 33, 33, 90, 5, 70]))


def settings(**other) -> dict:
    """Options of build_cache that all tests share: a random teacher cannot predict a random corpus."""
    return {"vocab_size": VOCAB, "accept_teacher_loss": True, "progress": False, "top_k": 20} | other
