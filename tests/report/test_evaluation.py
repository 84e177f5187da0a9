# SPDX-License-Identifier: Apache-2.0
"""An evaluation's folder: continued by the same settings, refused by others."""

import csv
import json
from pathlib import Path

import pytest

from megatron_kd.errors import UserError
from megatron_kd.report.evaluation import Evaluation, Score

SETTINGS = {"--tasks": "boolq", "--shots": None}
FIRST = Score("boolq", "acc", "teacher", 0.75, 0.125, 40)
SECOND = Score("boolq", "acc", "healed", 0.5, None, 40)


@pytest.fixture
def model(tmp_path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path / "model"


def started(out: Path, model: Path) -> Evaluation:
    evaluation = Evaluation(out, SETTINGS, {})
    evaluation.add("teacher", str(model), [FIRST])
    return evaluation


def test_a_second_call_adds_to_the_first_ones_results(tmp_path, model):
    started(tmp_path / "out", model)
    again = Evaluation(tmp_path / "out", SETTINGS, {})
    assert again.finished("teacher", str(model)) and not again.finished("healed", str(model))
    again.add("healed", str(model), [SECOND])
    record = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert [score["value"] for score in record["scores"]] == [0.75, 0.5]
    with open(tmp_path / "out" / "evaluation.csv") as file:
        assert [(row["model"], row["value"], row["stderr"]) for row in csv.DictReader(file)] == [
            ("teacher", "0.75", "0.125"),
            ("healed", "0.5", ""),
        ]
    assert again.table(["teacher", "healed"]).splitlines()[-1].split() == [
        "boolq",
        "acc",
        "0.7500",
        "±0.1250",
        "0.5000",
    ]
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"evaluation.json", "evaluation.csv"}


def test_other_settings_are_refused_by_name(tmp_path, model):
    started(tmp_path / "out", model)
    with pytest.raises(UserError, match="--shots is 5, and was None"):
        Evaluation(tmp_path / "out", SETTINGS | {"--shots": 5}, {})


def test_another_model_by_the_same_name_is_refused(tmp_path, model):
    evaluation = started(tmp_path / "out", model)
    with pytest.raises(UserError, match="teacher is /elsewhere, and in .*out it is .*model"):
        evaluation.finished("teacher", "/elsewhere")
    (model / "config.json").write_text('{"changed": true}')
    with pytest.raises(UserError, match="the files of .*model have changed"):
        evaluation.finished("teacher", str(model))


def test_a_file_of_another_kind_is_refused_and_kept(tmp_path):
    (tmp_path / "evaluation.json").write_text("[]")
    with pytest.raises(UserError, match="not one of evaluate's"):
        Evaluation(tmp_path, SETTINGS, {})
    assert (tmp_path / "evaluation.json").read_text() == "[]"
