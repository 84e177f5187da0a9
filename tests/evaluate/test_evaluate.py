# SPDX-License-Identifier: Apache-2.0
"""`megatron-kd evaluate` on a task of our own with local data: the accuracy that transformers' logits give."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from megatron_kd import cli
from tests.dryrun.tiny import VOCABULARY, write_tiny_llama

TASK = """\
task: words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def questions() -> list[dict]:
    """Each has two choices of a word; no word begins with w1, the end of text, which is found in w10 too."""
    words = [f"w{i}" for i in range(2, VOCABULARY) if not str(i).startswith("1")]
    rows = np.random.default_rng(0).choice(words, (40, 8)).tolist()
    return [
        {"question": " ".join(row[:6]), "choices": row[6:], "answer": number % 2} for number, row in enumerate(rows)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, questions) -> Path:
    root = tmp_path_factory.mktemp("evaluate")
    for seed, name in enumerate(("teacher", "student")):
        write_tiny_llama(root / name, seed=seed)
    (root / "tasks").mkdir()
    (root / "words.jsonl").write_text("\n".join(map(json.dumps, questions)))
    (root / "tasks" / "words.yaml").write_text(TASK.format(data=root / "words.jsonl"))
    return root


def accuracy(model: Path, questions: list[dict]) -> float:
    """How often the right word has the larger logit after the question."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model).eval()
    right = 0
    for question in questions:
        ids, choices = ([int(w[1:]) for w in words] for words in (question["question"].split(), question["choices"]))
        with torch.no_grad():
            logits = network(torch.tensor([ids])).logits[0, -1, choices]
        right += int(logits.argmax()) == question["answer"]
    return right / len(questions)


@pytest.mark.slow
def test_the_table_has_the_accuracy_of_the_models_logits(folder, questions, tmp_path, capsys, monkeypatch):
    """And a second call measures what is missing, with the same settings only."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    models = {name: folder / name for name in ("teacher", "student")}
    rest = ["--device", "cpu", "--task-folder", str(folder / "tasks"), "--out", str(tmp_path / "out")]
    assert cli.main(["evaluate", f"teacher={models['teacher']}", *rest]) == 0
    before = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    capsys.readouterr()
    assert cli.main(["evaluate", *(f"{name}={path}" for name, path in models.items()), *rest]) == 0
    out = capsys.readouterr().out
    assert "teacher (1 of 2): measured already" in out and "student (2 of 2): /" in out
    expected = {name: accuracy(path, questions) for name, path in models.items()}
    assert expected["teacher"] != expected["student"]
    record = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    found = {score["model"]: score["value"] for score in record["scores"] if score["metric"] == "acc"}
    assert found == pytest.approx(expected) and {score["samples"] for score in record["scores"]} == {len(questions)}
    assert record["scores"][: len(before["scores"])] == before["scores"]
    line = out[out.rindex("words acc") :].splitlines()[0]
    assert all(f"{value:.4f} ±" in line for value in expected.values())
    with open(tmp_path / "out" / "evaluation.csv") as file:
        assert {row["model"]: float(row["value"]) for row in csv.DictReader(file)} == pytest.approx(expected)
    assert cli.main(["evaluate", f"student={models['student']}", *rest, "--limit", "5"]) == 2
    assert "--limit is 5, and was None" in capsys.readouterr().err


@pytest.mark.slow
def test_what_the_harness_cannot_find_is_named(folder, tmp_path, capsys):
    asked = ["evaluate", f"a={folder / 'teacher'}", "--device", "cpu", "--out", str(tmp_path / "out")]
    assert cli.main([*asked, "--tasks", "bolq"]) == 2
    assert "no task 'bolq'. Did you mean boolq" in capsys.readouterr().err
    (tmp_path / "tasks").mkdir()
    assert cli.main([*asked, "--task-folder", str(tmp_path / "tasks")]) == 2
    assert "holds no task" in capsys.readouterr().err
    (tmp_path / "tasks" / "words.yaml").write_text(TASK.format(data="/no/words.jsonl"))
    assert cli.main([*asked, "--task-folder", str(tmp_path / "tasks")]) == 2
    assert "the data of words, or the model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["model"], ["'model' is not NAME=FOLDER"]),
        (["a=/no/model"], ["a: /no/model holds no Hugging Face model", "megatron-kd export"]),
        (["a=x/y", "a=x/z"], ["two models are called a"]),
        (["a=x/y", "--task-folder", "/no/tasks"], ["--task-folder /no/tasks is no folder"]),
    ],
    ids=str,
)
def test_mistakes_are_named(words, parts, capsys):
    assert cli.main(["evaluate", *words]) == 2
    err = capsys.readouterr().err
    assert "Traceback" not in err and all(part in err for part in parts), err
