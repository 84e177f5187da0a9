# SPDX-License-Identifier: Apache-2.0
"""The student is cut where the definition of block influence says, and is the teacher's own weights."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from megatron_kd.demo.models import block_influence, prune

LAYERS = 6


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    """Six random layers, of which the second and the fourth hardly change anything."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for idle in (1, 3):
            model.model.layers[idle].self_attn.o_proj.weight.mul_(1e-3)
            model.model.layers[idle].mlp.down_proj.weight.mul_(1e-3)
    model.save_pretrained(tmp_path / "teacher")
    (tmp_path / "teacher" / "tokenizer.json").write_text("{}")
    return tmp_path / "teacher"


def documents() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(97, size=length) for length in (40, 9)]


def test_block_influence_is_one_minus_the_mean_cosine_over_tokens(teacher: Path):
    model = AutoModelForCausalLM.from_pretrained(teacher)
    states = [
        model(torch.from_numpy(document)[None], output_hidden_states=True).hidden_states for document in documents()
    ]
    expected = []
    for layer in range(LAYERS - 1):  # transformers normalises the last layer's output
        before, after = (torch.cat([s[i][0] for s in states]).double() for i in (layer, layer + 1))
        cosine = (before * after).sum(-1) / before.norm(dim=-1) / after.norm(dim=-1)
        expected.append(1 - cosine.mean().item())
    assert block_influence(model, documents())[:-1] == pytest.approx(expected, rel=1e-4, abs=1e-7)


def test_the_idle_layers_go_and_the_rest_is_the_teacher(teacher: Path, tmp_path: Path):
    found = prune(teacher, tmp_path / "student", layers=4, calibration=documents())
    assert found["kept"] == [0, 2, 4, 5]
    assert json.loads((tmp_path / "student" / "config.json").read_text())["num_hidden_layers"] == 4
    assert (tmp_path / "student" / "tokenizer.json").exists()
    whole, cut = (AutoModelForCausalLM.from_pretrained(path) for path in (teacher, tmp_path / "student"))
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        kept = {new: old for new, old in enumerate(found["kept"])}
        for new, old in kept.items():
            theirs = whole.model.layers[old].state_dict()
            assert all(value.equal(theirs[name]) for name, value in cut.model.layers[new].state_dict().items())
        # Without its idle layers the teacher says nearly the same; without a busy one it does not.
        difference = (cut(tokens).logits - whole(tokens).logits).abs().max()
        assert difference < 0.05 * whole(tokens).logits.abs().max()
