# SPDX-License-Identifier: Apache-2.0
"""A checkpoint of any layout, tied or untied, as a Hugging Face folder with its model card."""

import json
import re
from pathlib import Path

import pytest
import yaml

from megatron_kd import cli
from megatron_kd.cache import CacheReader
from megatron_kd.dryrun import run_ranks
from tests.bridge.loop import distil, next_loss_of_export
from tests.dryrun.tiny import write_tiny_llama

pytestmark = pytest.mark.slow
KD = {"ce_weight": 0.5, "divergence": "jsd"}
CASES = {
    "untied, TP=2 PP=2": ("gpt_oss", 4, {"tp": 2, "pp": 2}),
    "untied, EP=2": ("gpt_oss", 2, {"ep": 2}),
    "tied, TP=2": ("llama", 2, {"tp": 2}),
    "tied, PP=2": ("llama", 2, {"pp": 2}),
    "untied from a tied one, TP=2": ("untied llama", 2, {"tp": 2}),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return run_ranks(write_tiny_llama, 1, args=(tmp_path_factory.mktemp("llama") / "hf",))[0]


@pytest.mark.parametrize("case", CASES)
def test_the_exported_model_has_the_students_logits(world, llama, tmp_path, case):
    """The loss that Megatron reports for the batch after the checkpoint is that of transformers' logits."""
    model, ranks, settings = CASES[case]
    inputs = (world.hf if model == "gpt_oss" else llama, *world.inputs[1:])
    if model.startswith("untied"):  # the folder has no weights for the head: it starts at random
        settings = settings | {"load_weights": False, "model__share_embeddings_and_output_weights": False}

    def train(steps: int):
        kwargs = {"kd": KD | {"cache": str(world.cache)}, "steps": steps, "run_dir": tmp_path / "run" / "checkpoints"}
        return run_ranks(distil, ranks, args=inputs, kwargs=kwargs | settings)[-1]

    train(2)
    (loss,) = run_ranks(next_loss_of_export, 1, args=(*inputs, tmp_path / "run", tmp_path / "out"))
    (resumed,) = train(3)
    assert loss == pytest.approx(resumed["lm loss"], abs=1e-4)
    tied = json.loads((tmp_path / "out" / "config.json").read_text()).get("tie_word_embeddings")
    assert tied == case.startswith("tied")
    card = (tmp_path / "out" / "README.md").read_text()
    assert yaml.safe_load(card.split("---\n")[1])["library_name"] == "transformers"
    assert f"| started from | {inputs[0]} |" in card and CacheReader(world.cache).manifest.digest() in card
    for key, value in {"teacher": "made-up, revision 1", "kd.divergence": "jsd", "checkpoint": "iter_0000002"}.items():
        assert re.search(rf"^\| {key} \| {value}", card, re.M), card


def test_the_command_exports_a_runs_folder_and_names_what_is_wrong(world, tmp_path, capsys):
    run_dir, out = tmp_path / "run", tmp_path / "out"
    kwargs = {"kd": KD | {"cache": str(world.cache)}, "steps": 2, "run_dir": run_dir / "checkpoints"}
    run_ranks(distil, 1, args=world.inputs, kwargs=kwargs)
    (run_dir / "checkpoints" / "iter_0000003").mkdir()  # as a run leaves it that is killed while it saves
    asked = ["export", "--run-dir", str(run_dir), "--out", str(out)]
    assert cli.main([*asked, "--iteration", "7"]) == 2
    assert "has no iteration 7; it has 2, 3" in capsys.readouterr().err
    assert cli.main(asked) == 0  # the reference is the model that the run started from
    assert "GptOssForCausalLM" in capsys.readouterr().out
    assert "| checkpoint | iter_0000002 |" in (out / "README.md").read_text()
    assert {"config.json", "tokenizer.json", "README.md"} <= {path.name for path in out.iterdir()}
    assert cli.main(asked) == 2
    assert "already holds a model" in capsys.readouterr().err
    assert cli.main(["export", "--run-dir", "/no/run", "--out", str(tmp_path / "x")]) == 2
    assert "--run-dir /no/run does not exist" in capsys.readouterr().err
