# SPDX-License-Identifier: Apache-2.0
"""The planner on real recipes: parameters of the models Megatron builds, Bridge's own estimates, real CPU ranks."""

import json
import re
from pathlib import Path

import pytest

from megatron_kd import dryrun
from megatron_kd.cli import main
from megatron_kd.report.plan_memory import activation_bytes, rank_memory, rank_parameters, state_bytes
from megatron_kd.report.plan_shape import MACHINES, Run
from megatron_kd.report.plan_time import step_flops
from tests.report.meta_models import measured, of_recipes

ROOT = Path(__file__).parent.parent.parent
RUNS = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if "_cache_" not in path.name)


@pytest.fixture(scope="module")
def found() -> dict:
    return dryrun.run_ranks(of_recipes, 1, args=(RUNS,), timeout_s=300, env={"HF_HUB_OFFLINE": "1"})[0]


@pytest.mark.parametrize("name", [path.name for path in RUNS])
def test_parameters_of_first_and_last_rank_are_those_megatron_builds(name, found):
    """TP, PP and EP of the recipe at its real size, on the meta device: equal to the last parameter."""
    run = Run.from_dict(found[name]["run"])
    first, last = (sum(rank_parameters(run.model, run.layout, stage)) for stage in (0, run.layout.pipeline - 1))
    assert found[name]["built"] == {0: first} | {run.layout.gpus - 1: last}


@pytest.mark.parametrize("name", [path.name for path in RUNS])
def test_bridges_own_estimates(name, found):
    """How far ours is from megatron.bridge.training.utils (0.6).

    FLOPs: equal to 1e-4.
    Weights, gradients, optimizer in bf16: to 1 %, if Bridge is told that the activation is SiLU. Of GPT-OSS's own it
    does not see that it is gated, counts two products an expert for three, and is 20 to 33 % too low. A run in fp32
    takes 16 bytes a parameter; Bridge assumes bf16's 18.
    Activations: Bridge takes 18 bytes a hidden element whatever the number of key-value heads, counts no copies of
    routed tokens and always assumes sequence parallelism; ours are 0.8 to 1.65 times as many.
    """
    run, bridge = Run.from_dict(found[name]["run"]), found[name]["bridge"]
    assert step_flops(run) == pytest.approx(bridge["flops"], rel=1e-4)
    if run.training.weight_bytes == 2:
        assert sum(state_bytes(run, 0).values()) == pytest.approx(bridge["state, gated"], rel=0.01)
    if run.model.experts:
        assert bridge["state"] < 0.8 * bridge["state, gated"]
    assert 0.8 < activation_bytes(run, 0) / bridge["activations"] < 1.65


@pytest.mark.parametrize("name", [path.name for path in RUNS if "gpu_" in path.name])
def test_recipes_say_what_the_planner_does(name, found):
    """The comment's figures are the planner's, to the GB, and leave room."""
    run = Run.from_dict(found[name]["run"])
    text = " ".join(re.findall(r"^# *(.*)", (ROOT / "recipes" / name).read_text(), re.M))
    said = re.search(r"weights, gradients, Adam (\d+) GB, activations (\d+) GB", text)
    parts = rank_memory(run)
    state = parts["weights"] + parts["gradients"] + parts["optimizer"]
    assert (int(said[1]), int(said[2])) == (round(state / 1e9), round(parts["activations"] / 1e9))
    machine = MACHINES["h200" if "h200" in name else "b200"]
    assert f"of {machine.memory / 1e9:.0f}" in text and sum(parts.values()) < 0.85 * machine.memory


LAYOUTS = {"TP=2": (2, {"tp": 2}), "EP=2": (2, {"ep": 2}), "PP=2": (2, {"pp": 2})}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_hold_what_was_planned(layout, dtype, tmp_path):
    """A step of the real loop: bytes of each rank's weights, gradient buffers and Adam's state, to the byte but for
    what the buffers are padded by."""
    world_size, sizes = LAYOUTS[layout]
    ranks = dryrun.run_ranks(measured, world_size, args=(tmp_path, dtype, world_size), kwargs=sizes, timeout_s=300)
    run = Run.from_dict(ranks[0]["run"])
    padding = 1 << 16
    for rank, bytes_ in enumerate(ranks):
        planned = state_bytes(run, rank if layout == "PP=2" else 0)
        assert bytes_["weights"] == planned["weights"]
        assert 0 <= bytes_["gradients"] - planned["gradients"] < padding
        assert abs(bytes_["optimizer"] - planned["optimizer"]) < padding


def test_the_command_writes_what_it_prints(tmp_path, capsys):
    """From a recipe to files, with overrides and own figures; and what it refuses."""
    recipe = ROOT / "recipes" / "llama32_3b_pretrain_1gpu_h200_bf16_kd_8k.yaml"
    words = ["plan", "--config-file", str(recipe), "--gpus", "2", "--out", str(tmp_path), "--memory", "40"]
    assert main([*words, "kd.loss=dense", "kd.top_k=20", "train.micro_batch_size=2"]) == 0
    printed = capsys.readouterr().out
    plan = json.loads((tmp_path / "plan.json").read_text())
    run = Run.from_dict(plan["run"])
    assert (run.loss.method, run.loss.top_k, run.training.micro_batch, run.layout.data) == ("dense", 20, 2, 2)
    assert plan["machine"]["memory"] == 40e9 and not plan["fits"] and "DOES NOT FIT (modelled)" in printed
    assert plan["command"][1:] == [*words, "kd.loss=dense", "kd.top_k=20", "train.micro_batch_size=2"]
    assert (tmp_path / "plan.html").exists() and (tmp_path / "plan.csv").exists()
    assert main(["plan", "--config-file", str(recipe), "kd.teacher=/t"]) == 2
    assert "kd.teacher /t holds no config.json" in capsys.readouterr().err
    fp8 = "mixed_precision=bf16_with_fp8_current_scaling_mixed"
    assert main(["plan", "--config-file", str(recipe), fp8]) == 2
    assert "a plan does not model weights kept in fp8" in capsys.readouterr().err
    assert main(["plan", "--config-file", str(recipe), "--gpus", "3", "train.global_batch_size=32"]) == 2
    assert "train.global_batch_size=32" in capsys.readouterr().err


def test_a_teacher_beside_the_student(tmp_path, capsys):
    """GPT-OSS 120B beside 20B on TP=4 x EP=8, by the sizes that its maker states; and the same as an alternative."""
    recipe = ["plan", "--config-file", str(ROOT / "recipes" / "gpt_oss_20b_pretrain_8gpu_h200_bf16_kd_32k.yaml")]
    assert main([*recipe, "kd.teacher=openai/gpt-oss-120b", "--out", str(tmp_path / "online")]) == 0
    printed = capsys.readouterr().out
    online = json.loads((tmp_path / "online" / "plan.json").read_text())
    hidden, expert = 2880, 3 * 2880 * 2880 + 3 * 2880
    attention = 2 * hidden * 64 * (64 + 8) + (64 + 2 * 8) * 64  # products and their biases, cut for TP
    whole = hidden + 2 * hidden + (64 // 4) + 128 * (hidden + 1)  # what every rank has: bias, norms, its sinks, router
    rank = 36 * (128 // 8 * expert + attention // 4 + whole) + 2 * 201_088 // 4 * hidden + hidden
    for parts in online["memory"].values():
        assert parts["teacher"] == 2 * rank  # its forward needs less than the student's activations take afterwards
    assert online["step"]["fused"]["parts"]["teacher"] > 0 and online["beside"] is None
    assert "teacher" in (tmp_path / "online" / "plan.html").read_text() and "runs beside the student" in printed
    assert main([*recipe, "--teacher", "openai/gpt-oss-120b", "--out", str(tmp_path / "cache")]) == 0
    printed = capsys.readouterr().out
    cached = json.loads((tmp_path / "cache" / "plan.json").read_text())
    assert "teacher" not in cached["memory"]["fused"] and "teacher" not in cached["step"]["fused"]["parts"]
    beside, parts = cached["beside"], online["step"]["fused"]["parts"]
    assert beside["bytes"] == 2 * rank and beside["fits"] == online["fits"]
    assert beside["seconds"] == pytest.approx(parts["teacher"])
    assert online["step"]["fused"]["seconds"] == pytest.approx(cached["step"]["fused"]["seconds"] + beside["seconds"])
    assert f"{2 * rank / 1e9:.1f} GB more on each rank" in printed
    for words, message in (
        (["kd.teacher=openai/gpt-oss-120b", "--teacher", "openai/gpt-oss-20b"], "Give one of them"),
        (
            ["kd.teacher=openai/gpt-oss-120b", "model.pipeline_model_parallel_size=2", "--gpus", "16"],
            "without a pipeline alone",
        ),
    ):
        assert main([*recipe, *words]) == 2
        assert message in capsys.readouterr().err
