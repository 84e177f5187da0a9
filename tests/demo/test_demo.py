# SPDX-License-Identifier: Apache-2.0
"""The demo as a user runs it: real teacher, real text, real Bridge on three CPU ranks, at its quick size."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_kd.cache import Corpus, DocumentUnits

pytestmark = pytest.mark.slow
PRUNED, DEFAULT, DISTILLED = "pruned student", "healed, default loss", "healed, distilled"


def demo(run_dir: Path) -> str:
    command = [sys.executable, "-m", "megatron_kd.cli", "demo", "--quick", "--run-dir", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    run_dir = tmp_path_factory.mktemp("demo") / "run"
    return run_dir, demo(run_dir)


@pytest.fixture
def found(run: tuple[Path, str]) -> dict[str, Any]:
    return json.loads((run[0] / "results.json").read_text())


def test_healing_brings_the_student_closer_to_the_teacher(found: dict[str, Any]):
    held_out = found["held_out"]
    assert set(held_out) == {PRUNED, DEFAULT, DISTILLED, "teacher"}
    assert all(math.isfinite(value) for figures in held_out.values() for value in figures.values())
    assert held_out["teacher"]["kl"] == 0 and held_out["teacher"]["agreement"] == 1
    assert held_out[DISTILLED]["kl"] < 0.85 * held_out[PRUNED]["kl"]
    assert held_out[DISTILLED]["kl"] < held_out[DEFAULT]["kl"]
    assert held_out[DISTILLED]["agreement"] > 1.15 * held_out[PRUNED]["agreement"]
    assert held_out[DEFAULT]["perplexity"] < 0.75 * held_out[PRUNED]["perplexity"]


def test_the_figures_are_those_of_the_exported_models(run: tuple[Path, str], found: dict[str, Any]):
    """KL of the distilled student once more: whole grids, fp64, from the folders on disk."""
    folder = run[0]
    units = DocumentUnits(Corpus(folder / "corpus" / "held-out"))
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(path) for path in (folder / "teacher", folder / "distilled" / "hf")
    )
    kl = []
    for unit in range(len(units.lengths)):
        tokens = torch.from_numpy(units.tokens(unit).astype("int64"))[None]
        with torch.no_grad():
            p, q = (model(tokens).logits[0].double().log_softmax(-1) for model in (teacher, student))
        kl.append((p.exp() * (p - q)).sum(-1))
    assert torch.cat(kl).mean().item() == pytest.approx(found["held_out"][DISTILLED]["kl"], rel=1e-4)


def test_both_runs_start_from_the_same_student_on_the_same_data(found: dict[str, Any]):
    default, distilled = found["training"][DEFAULT], found["training"][DISTILLED]
    assert [step["step"] for step in default] == [step["step"] for step in distilled] == list(range(1, 9))
    assert default[0]["lm loss"] == pytest.approx(distilled[0]["lm loss"], rel=1e-4)
    assert "kd loss" not in default[0]
    assert distilled[-1]["kd loss"] < 0.85 * distilled[0]["kd loss"]


def test_the_fused_loss_takes_least_memory(found: dict[str, Any]):
    (shape,) = found["loss_memory"]
    assert shape["bytes"]["fused"] < shape["bytes"]["forward_chunked"] < shape["bytes"]["dense"]


def test_the_table_is_printed_and_the_chart_drawn(run: tuple[Path, str]):
    folder, output = run
    table = (folder / "table.txt").read_text()
    assert table in output
    assert all(name in table for name in (PRUNED, DEFAULT, DISTILLED, "teacher", "fused"))
    assert (folder / "chart.png").stat().st_size > 20_000


def test_a_second_call_reuses_every_stage(run: tuple[Path, str], found: dict[str, Any]):
    output = demo(run[0])
    assert output.count("Reused from") == 8
    again = json.loads((run[0] / "results.json").read_text())
    assert again["held_out"] == found["held_out"]
    assert all(stage["reused"] for stage in again["stages"])
