# SPDX-License-Identifier: Apache-2.0
"""A model card says what a run recorded, and what could not be found out."""

from pathlib import Path

import pytest
import yaml

import megatron_kd
from megatron_kd.bridge.model_card import model_card

SETTINGS = {
    "kd": {"cache": "/no/cache", "divergence": "jsd", "top_k": None},
    "model": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 1},
    "train": {"train_iters": 5},
}


@pytest.fixture
def saved(tmp_path) -> Path:
    """A checkpoint of step 2, by a run that was killed once while it wrote its curve and took step 2 again."""
    steps = '{"step": 1, "kd loss": 3.0}\n{"step": 2, "kd loss": 9.0}\n{"step": 3, "kd\n{"step": 2, "kd loss": 1.25}\n'
    (tmp_path / "history.jsonl").write_text(steps)
    return tmp_path / "checkpoints" / "iter_0000002"


def test_the_card_has_what_is_known_and_no_more(saved):
    card = model_card("healed", "openai/gpt-oss-20b", saved, SETTINGS)
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front)["base_model"] == "openai/gpt-oss-20b"
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = dict(line for line in lines if len(line) == 2)
    assert rows == {
        "started from": "openai/gpt-oss-20b",
        "checkpoint": "iter_0000002",
        "cache": "/no/cache; it could not be read when this card was written",
        "kd.divergence": "jsd",
        "steps planned": "5",
        "layout": "TP=2 PP=1",
        "kd loss at step 2": "1.2500",
        "written by": f"megatron_kd {megatron_kd.__version__}",
    }
    assert 'AutoModelForCausalLM.from_pretrained("path/to/healed")' in text


@pytest.mark.parametrize("reference", ["/models/student", "models: of, mine"])
def test_a_folder_is_no_base_model_for_the_hub(saved, reference):
    card = model_card("healed", reference, saved, SETTINGS)
    assert "base_model" not in yaml.safe_load(card.split("---\n")[1])
    assert f"| started from | {reference} |" in card
