# SPDX-License-Identifier: Apache-2.0
"""Online distillation: the teacher beside the student, at every layout, in nothing that is the student's."""

import numpy as np
import pytest

from megatron_kd import dryrun
from megatron_kd.dryrun import run_ranks
from tests.bridge.online import distil_online, saved_names
from tests.dryrun.tiny import write_tiny_gpt_oss

LAYOUTS = {
    "TP=2+SP": ({"tp": 2}, 2),
    "EP=2": ({"ep": 2}, 2),
    "DP=2": ({}, 2),
    "CP=2": ({"cp": 2}, 2),
}
LOSSES = ("lm loss", "kd loss", "total loss", "grad norm")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A GPT-OSS of another seed, wider than the student."""
    folder = tmp_path_factory.mktemp("online") / "teacher"
    return run_ranks(write_tiny_gpt_oss, 1, args=(folder,), kwargs={"seed": 5, "hidden_size": 96})[0]


def online(world, teacher, world_size=1, **kwargs):
    kd = {"teacher": str(teacher), "ce_weight": 0.5} | kwargs.pop("kd", {})
    return run_ranks(distil_online, world_size, args=world.inputs, kwargs={"kd": kd, "steps": 3, **kwargs})


def figures(found):
    return np.array([[step[name] for name in LOSSES] for step in found["steps"]])


@pytest.fixture(scope="module")
def on_one_rank(world, teacher, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("online") / "run"
    return online(world, teacher, watch=True, run_dir=run_dir)[0] | {"run_dir": run_dir}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_rank(world, teacher, on_one_rank, layout):
    parallel, world_size = LAYOUTS[layout]
    found = online(world, teacher, world_size, **parallel)[-1]
    np.testing.assert_allclose(figures(found), figures(on_one_rank), atol=1e-4, rtol=0)


def test_the_teacher_is_in_nothing_of_the_students(world, on_one_rank):
    """Not in its parameters, gradient buffers, checkpoint or random numbers; and no step moves it."""
    found = on_one_rank
    assert found["teachers"] == 1 and found["teacher moved"] == [0.0]
    assert found["shared"] == found["teacher requires grad"] == found["teacher has grad"] == 0
    cached = run_ranks(
        distil_online,
        1,
        args=world.inputs,
        kwargs={
            "kd": {"cache": str(world.cache)},
            "steps": 3,
            "run_dir": found["run_dir"].parent / "cached",
            "watch": True,
        },
    )[0]
    assert found["buffered"] == cached["buffered"] >= found["student"]
    assert saved_names(found["run_dir"]) == saved_names(found["run_dir"].parent / "cached")
    assert found["random"] == cached["random"]
    assert len(found["gradient"]) == len(cached["gradient"]) == found["student"]


def test_the_teacher_of_a_student_with_heads_for_later_tokens_has_none(world, on_one_rank):
    more = {"model__mtp_num_layers": 1, "load_weights": False}
    found = online(world, "synthetic", steps=1, watch=True, **more)[0]
    assert found["teacher"] == on_one_rank["student"] < found["student"]


@pytest.mark.parametrize("top_k", [100, 512])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(world, top_k):
    """Forward KL and its gradient are 0 whatever K is."""
    found = online(world, world.hf, kd={"ce_weight": 0.0, "top_k": top_k}, steps=1)[0]
    assert abs(found["steps"][0]["kd loss"]) < 1e-6
    assert found["steps"][0]["grad norm"] < 1e-5
    assert np.abs(found["gradient"]).max() < 1e-6


@pytest.mark.parametrize(
    ("kd", "layout", "message"),
    [
        ({"cache": "/a/cache"}, {}, "kd.cache=/a/cache and kd.teacher=.* exclude each other"),
        ({"teacher": None}, {}, "kd.cache is not set.*or a teacher's folder as kd.teacher"),
        ({"teacher": "/no/such/folder"}, {}, "kd.teacher=/no/such/folder: expected a Hugging Face model"),
        ({}, {"pp": 2}, "pipeline_model_parallel_size=2 with kd.teacher does not work.*expected 1, or a cache"),
    ],
)
def test_what_cannot_run_is_refused(world, teacher, kd, layout, message):
    with pytest.raises(dryrun.RankFailed, match=message) as caught:
        online(world, teacher, 2 if layout else 1, kd=kd, **layout)
    assert caught.value.refusal


def test_a_teacher_that_does_not_split_is_refused_by_its_name(world, tmp_path):
    folder = run_ranks(
        write_tiny_gpt_oss, 1, args=(tmp_path / "odd",), kwargs={"num_attention_heads": 3, "num_key_value_heads": 1}
    )[0]
    with pytest.raises(dryrun.RankFailed, match="Megatron refuses the teacher at the student's layout"):
        online(world, folder, 2, tp=2)
