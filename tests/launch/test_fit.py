# SPDX-License-Identifier: Apache-2.0
"""Sizes that do not fit each other are met before Megatron is loaded; those of our recipes are known without it."""

import json
import re
from pathlib import Path

import pytest

from megatron_kd.bridge.layout import LayoutError
from megatron_kd.launch.fit import check_fit, known_values
from megatron_kd.launch.node import settings_as_written

ROOT = Path(__file__).parent.parent.parent
OURS = "gpt_oss_20b_pretrain_8gpu_h200_bf16_kd_config"  # TP=4 EP=8, batch 64, 64 heads, 24 layers, 32 experts
RUNS = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if "_cache_" not in path.name)

MISTAKES = {
    "ranks": ({}, 12, ["12 ranks do not split into TP=4 PP=1 CP=1 EP=8 ETP=1", "ETP*PP*EP = 8", "8 or 16 ranks fit"]),
    "batch": ({"train": {"global_batch_size": 9}}, 8, ["global_batch_size=9", "1 * 2 = 2", "8 would fit"]),
    "lengths": ({"dataset": {"seq_length": 8192}}, 8, ["model.seq_length=32768 and dataset.seq_length=8192"]),
    "context": ({"model": {"context_parallel_size": 3}}, 24, ["a multiple of 2 * CP = 6", "32772 would fit"]),
    "heads": ({"model": {"tensor_model_parallel_size": 5}}, None, ["model.num_attention_heads=64", "TP = 5"]),
    "layers": ({"model": {"pipeline_model_parallel_size": 5}}, None, ["model.num_layers=24", "PP = 5", "6, 8, 12"]),
    "interleaved": (
        {"model": {"pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 5}},
        None,
        ["model.num_layers=24 does not split into PP * VP = 20"],
    ),
    "experts": ({"model": {"expert_model_parallel_size": 3}}, None, ["model.num_moe_experts=32", "EP = 3"]),
    "a reference": ({"kd": {"top_k": 7}, "train": {"global_batch_size": "${kd.top_k}"}}, 8, ["global_batch_size=7"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_names_the_key_and_what_would_fit(mistake):
    tree, ranks, parts = MISTAKES[mistake]
    with pytest.raises(LayoutError) as refused:
        check_fit({"recipe": OURS, **tree}, ranks)
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_recipes_fit_the_gpus_of_their_names(path):
    found = re.search(r"_(\d+)gpu_", path.name)
    check_fit(settings_as_written(path, [], None), int(found[1]) if found else 3)


def test_the_students_own_configuration_comes_before_the_recipes(tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps({"num_hidden_layers": 7, "text_config": {"num_attention_heads": 6}, "num_local_experts": 16})
    )
    tree = {"recipe": OURS, "student": str(tmp_path)}
    known = known_values(tree)
    assert [known[f"model.{name}"] for name in ("num_layers", "num_attention_heads", "num_moe_experts")] == [7, 6, 16]
    with pytest.raises(LayoutError, match="num_attention_heads=6"):
        check_fit(tree, None)
    check_fit({**tree, "model": {"tensor_model_parallel_size": 2}}, None)
    assert known_values({"recipe": f"hf:{tmp_path}"})["model.num_layers"] == 7


def test_of_what_is_not_known_nothing_is_said():
    check_fit({"recipe": "mine:recipe", "model": {"tensor_model_parallel_size": 2}}, 6)  # its EP, its batch
    check_fit({"recipe": OURS, "train": {"global_batch_size": "${oc.env:NOT_SET_ANYWHERE}"}}, 8)
    check_fit({"recipe": OURS, "student": "org/on-the-hub", "model": {"tensor_model_parallel_size": 5}}, 40)
    check_fit(
        {"recipe": OURS, "model": {"pipeline_model_parallel_size": 5, "num_layers_in_first_pipeline_stage": 4}}, None
    )
    with pytest.raises(LayoutError):
        check_fit({"recipe": "mine:recipe", "model": {"tensor_model_parallel_size": 2}}, 5)


SCHEDULES = {
    "a lower peak alone": ({"optimizer": {"lr": 1e-6}}, ["optimizer.min_lr=3e-05 is above optimizer.lr=1e-06"]),
    "fewer steps alone": ({"train": {"train_iters": 50}}, ["lr_warmup_iters=2000 must be below train.train_iters=50"]),
    "fewer to fall": ({"scheduler": {"lr_decay_iters": 2000}}, ["must be below scheduler.lr_decay_iters=2000"]),
    "a rate below 0": ({"optimizer": {"lr": -1}}, ["optimizer.lr must be at least 0, found -1"]),
    "no batch": ({"train": {"micro_batch_size": 0}}, ["train.micro_batch_size must be at least 1, found 0"]),
    "no ranks": ({"model": {"tensor_model_parallel_size": 0}}, ["tensor_model_parallel_size must be at least 1"]),
}


@pytest.mark.parametrize("mistake", SCHEDULES)
def test_what_megatron_would_stop_at_once_the_model_is_built(mistake):
    tree, parts = SCHEDULES[mistake]
    with pytest.raises(LayoutError) as refused:
        check_fit({"recipe": OURS, **tree}, 8)
    for part in parts:
        assert part in str(refused.value)


def test_schedules_that_megatron_takes():
    check_fit({"recipe": OURS, "optimizer": {"lr": 1e-6, "min_lr": 0}}, 8)
    check_fit({"recipe": OURS, "train": {"train_iters": 50}, "scheduler": {"lr_warmup_fraction": 0.1}}, 8)
    check_fit({"recipe": OURS, "train": {"train_iters": 50}, "scheduler": {"lr_decay_iters": 5000}}, 8)
    check_fit({"recipe": "mine:recipe", "train": {"train_iters": 50}, "scheduler": {"lr_warmup_iters": 100}}, 8)
