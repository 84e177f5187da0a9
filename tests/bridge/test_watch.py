# SPDX-License-Identifier: Apache-2.0
"""What a run shows of itself beside its losses: right at every layout, under the same names everywhere."""

import pytest

from megatron_kd.dryrun import run_ranks
from tests.bridge.online import distil_online, write_sharp_teacher
from tests.bridge.watched import advices, by_class, by_transformers, logged

SHARES = ("teacher tail", "student tail", "top-1 agreement")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("watch") / "teacher"
    return run_ranks(write_sharp_teacher, 1, args=(folder,))[0]


@pytest.fixture(scope="module")
def truth(world, teacher):
    return run_ranks(by_transformers, 1, args=world.inputs, kwargs={"teacher": teacher, "top_k": 50})[0]


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"cp": 2}], ids=str)
def test_tails_and_agreement_are_those_of_both_models_logits(world, teacher, truth, layout):
    """A sample has 64 tokens, so all of them are watched."""
    kd = {"teacher": str(teacher), "top_k": 50}
    found = run_ranks(distil_online, 2 if layout else 1, args=world.inputs, kwargs={"kd": kd, "steps": 1, **layout})[
        -1
    ]["steps"][0]
    assert 0.01 < truth["teacher tail"] < truth["student tail"] < 1
    for name in SHARES:
        assert found[name] == pytest.approx(truth[name], abs=2e-4), name


def test_every_logger_has_the_same_names_and_values(world, tmp_path):
    found = run_ranks(logged, 1, args=world.inputs, kwargs={"kd": {"cache": str(world.cache)}, "folder": tmp_path})[0]
    names = {"lm loss", "kd loss", "total loss", *SHARES, "kd cut", "kd absent", "kd read seconds", "kd loss seconds"}
    assert names <= set(found["events"]) and names <= set(found["wandb"]) and names <= set(found["mlflow"])
    for step, line in enumerate(found["console"]):
        for name in names:
            for logger in ("events", "wandb", "mlflow"):
                value = found[logger][name][step]
                assert value == pytest.approx(found["history"][step][name], rel=1e-6, abs=1e-9), (logger, name)
            assert f"{name}: {found['history'][step][name]:.6E}" in line
    assert len(found["console"]) == len(found["history"]) == 3
    assert all(0 < step["kd loss seconds"] < step["seconds"] for step in found["history"])


def test_agreement_is_told_by_how_often_the_corpus_has_the_teachers_choice(tmp_path):
    found = run_ranks(by_class, 1, args=(tmp_path,))[0]
    assert found["found"] == found["true"]
    assert min(count for _, count in found["true"]) > 0 and min(found["classes"]) > 0


def test_a_run_says_what_could_be_better():
    good = {
        "kd read seconds": 0.01, "step seconds": 1.0, "teacher tail": 0.05, "kd loss": 1.0, "lm loss": 2.0,
    }  # fmt: skip
    both = {"cache": "x", "ce_weight": 0.5}
    cases = [
        (good, both),
        (good | {"kd read seconds": 0.3}, both),
        (good | {"teacher tail": 0.4}, both),
        (good | {"kd loss": 0.01}, both),
        (good | {"kd loss": 0.01}, {"cache": "x"}),
    ]
    found = run_ranks(advices, 1, args=(cases,))[0]
    assert [list(texts) for texts in found] == [[], ["reader"], ["tail"], ["scale"], []]
    assert "30% of a step" in found[1]["reader"] and "kd.read_ahead (now 2)" in found[1]["reader"]
    assert "40%" in found[2]["tail"] and "kd.top_k" in found[2]["tail"]
    assert "0.01" in found[3]["scale"] and "kd.ce_weight" in found[3]["scale"]
