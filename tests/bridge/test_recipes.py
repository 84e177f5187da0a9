# SPDX-License-Identifier: Apache-2.0
"""Recipes by name, without network; a student's folder in the place of the hub's model; the files of recipes/."""

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_kd import dryrun
from tests.cli.hub_cache import put_model

ROOT = Path(__file__).parent.parent.parent
GPT_OSS = "gpt_oss_20b_pretrain_8gpu_h200_bf16_kd_config"
SMOLLM2 = "smollm2_135m_pretrain_3cpu_fp32_kd_config"


def run(function, *args):
    """One CPU rank's result; the hub cannot be reached."""
    return dryrun.run_ranks(function, 1, args=args, timeout_s=300, env={"HF_HUB_OFFLINE": "1"})[0]


# ---- architectures ----


# Parameter counts as the models' makers publish them.
PARAMETERS = {
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "meta-llama/Meta-Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
}


def in_rank_count_parameters() -> dict[str, int]:
    import torch
    from transformers import AutoModelForCausalLM

    from megatron_kd.bridge.recipes import _ARCHITECTURES

    counts = {}
    for name, architecture in _ARCHITECTURES.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(architecture())
        counts[name] = sum(parameter.numel() for parameter in model.parameters())
    return counts


def test_architectures_have_the_published_size():
    assert run(in_rank_count_parameters) == PARAMETERS


def in_rank_own_recipes() -> None:
    from megatron_kd.bridge.config import KDConfig, KDConfigContainer
    from megatron_kd.bridge.recipes import build_recipe

    gpt_oss, smollm2 = build_recipe(GPT_OSS), build_recipe(SMOLLM2)
    for cfg in (gpt_oss, smollm2):
        assert type(cfg) is KDConfigContainer and cfg.kd == KDConfig()
        assert not cfg.tokenizer.use_tokenizer_vocab_size
    model = gpt_oss.model
    assert (model.num_layers, model.hidden_size, model.num_moe_experts, model.moe_router_topk) == (24, 2880, 32, 4)
    assert (model.vocab_size, model.window_size, model.softmax_type) == (201088, (127, 0), "learnable")
    assert model.hf_model_id == "openai/gpt-oss-20b"
    model = smollm2.model
    assert (model.num_layers, model.hidden_size, model.num_attention_heads, model.num_query_groups) == (30, 576, 9, 3)
    assert model.share_embeddings_and_output_weights and model.rotary_base == 100000
    assert not (model.bf16 or smollm2.optimizer.bf16 or smollm2.mixed_precision)


def test_own_recipes_need_no_network():
    run(in_rank_own_recipes)


def in_rank_stock_recipes() -> None:
    from megatron.bridge.recipes.gpt.h100.vanilla_gpt import vanilla_gpt_pretrain_1gpu_h100_bf16_config

    from megatron_kd.bridge.config import KDConfigContainer, load_config
    from megatron_kd.bridge.recipes import build_recipe, recipe_names

    names = recipe_names()
    assert len(names) == len(set(names)) > 200 and names[:2] == [SMOLLM2, GPT_OSS]
    # By name, as a function, as package.module:function, and as a container they are the same.
    stock = vanilla_gpt_pretrain_1gpu_h100_bf16_config()
    path = "megatron.bridge.recipes.gpt.h100.vanilla_gpt:vanilla_gpt_pretrain_1gpu_h100_bf16_config"
    for what in (path.rpartition(":")[2], vanilla_gpt_pretrain_1gpu_h100_bf16_config, path, stock):
        assert build_recipe(what).to_dict() == stock.to_dict()
    assert build_recipe(stock) is not stock
    cfg, _ = load_config(path)
    assert type(cfg) is KDConfigContainer and cfg.kd is None
    assert build_recipe("gpt_oss_120b_pretrain_64gpu_h100_bf16_config").model.num_layers == 36
    assert build_recipe("llama31_8b_pretrain_2gpu_h100_bf16_config").model.hidden_size == 4096


def test_every_recipe_of_bridge_can_be_the_base():
    run(in_rank_stock_recipes)


# ---- the student ----


def in_rank_student(folder: Path) -> None:
    from megatron.bridge import AutoBridge

    from megatron_kd.bridge.config import load_config
    from megatron_kd.bridge.recipes import build_recipe
    from megatron_kd.errors import ConfigError
    from tests.dryrun.tiny import write_tiny_gpt_oss

    stock = AutoBridge.__dict__["from_hf_pretrained"]
    student = write_tiny_gpt_oss(folder / "student", num_hidden_layers=3)
    # In a stock recipe, in ours, and in none: the folder gives architecture, tokenizer, weights; the recipe the rest.
    for name in (GPT_OSS, "gpt_oss_20b_pretrain_16gpu_h100_bf16_config", f"hf:{student}"):
        cfg = build_recipe(name, None if name.startswith("hf:") else student)
        assert (cfg.model.num_layers, cfg.model.hidden_size, cfg.model.vocab_size) == (3, 64, 512)
        assert cfg.model.hf_model_id == cfg.tokenizer.tokenizer_model == str(student)
        assert cfg.checkpoint.pretrained_checkpoint == str(student)
        assert not cfg.tokenizer.use_tokenizer_vocab_size
    assert build_recipe(GPT_OSS, student).model.expert_model_parallel_size == 8
    # From the YAML, and the command line wins.
    (folder / "run.yaml").write_text(f"recipe: {GPT_OSS}\nstudent: /not/there\n")
    cfg, values = load_config(config_file=folder / "run.yaml", student=str(student))
    assert cfg.model.num_layers == 3 and not [*values]
    cfg, _ = load_config(config_file=folder / "run.yaml", overrides=[f"student={student}"])
    assert cfg.model.num_layers == 3
    # Where there is no hub's model to replace.
    with pytest.raises(ConfigError, match="takes no Hugging Face model"):
        build_recipe("vanilla_gpt_pretrain_1gpu_h100_bf16_config", student)
    with pytest.raises(ConfigError, match="has its own"):
        build_recipe(cfg, student)
    # What cannot be had.
    (folder / "empty").mkdir()
    for wrong, expected in {
        "/not/there": "student '/not/there' is no folder",
        "some/model": "student 'some/model' is no folder, and the hub does not give it",
        str(folder / "empty"): "holds no Hugging Face model: expected config.json",
    }.items():
        with pytest.raises(ConfigError, match=expected):
            build_recipe(GPT_OSS, wrong)
    assert AutoBridge.__dict__["from_hf_pretrained"] is stock


def test_a_folder_takes_the_place_of_the_hubs_model(tmp_path: Path):
    run(in_rank_student, tmp_path)


def in_rank_first_losses(student: Path, by_path: bool) -> list[dict[str, float]]:
    """Steps from the student's weights: by `checkpoint.pretrained_checkpoint`, as we set it, or by Bridge's hook."""
    from megatron_kd.bridge.config import KDConfigContainer
    from megatron_kd.bridge.train import train
    from tests.dryrun.tiny import Recorder, tiny_gpt_oss

    cfg = KDConfigContainer.wrap(tiny_gpt_oss(student, load_weights=not by_path))
    if by_path:
        cfg.checkpoint.pretrained_checkpoint = str(student)
    recorder = Recorder()
    train(cfg, callbacks=[recorder])
    return recorder.steps


def test_the_students_weights_are_where_training_starts(tmp_path: Path):
    student = tmp_path / "student"
    dryrun.run_ranks(write_student, 1, args=(student,))
    by_path, by_hook = (run(in_rank_first_losses, student, way) for way in (True, False))
    assert by_path == by_hook
    other = tmp_path / "other"
    dryrun.run_ranks(write_student, 1, args=(other, 1))
    assert run(in_rank_first_losses, other, True)[0]["lm loss"] != by_path[0]["lm loss"]


def write_student(folder: Path, seed: int = 0) -> None:
    from tests.dryrun.tiny import write_tiny_gpt_oss

    write_tiny_gpt_oss(folder, seed=seed)


def broken_recipe():
    """A recipe that fails while `AutoBridge` is set up to read elsewhere."""
    raise RuntimeError("broken")


def no_recipe():
    """Returns no container."""
    return 5


def in_rank_wrong_names() -> dict[str, str]:
    from megatron.bridge import AutoBridge

    from megatron_kd.bridge.recipes import build_recipe
    from megatron_kd.errors import ConfigError

    stock = AutoBridge.__dict__["from_hf_pretrained"]
    messages = {}
    for wrong in WRONG_NAMES:
        with pytest.raises(ConfigError) as refused:
            build_recipe(wrong)
        messages[wrong] = str(refused.value)
    with pytest.raises(RuntimeError, match="broken"):
        build_recipe(broken_recipe)
    assert AutoBridge.__dict__["from_hf_pretrained"] is stock
    return messages


WRONG_NAMES = {
    GPT_OSS.replace("h200", "h20"): ["unknown recipe", f"Did you mean {GPT_OSS}"],
    "zzz": ["unknown recipe 'zzz'", GPT_OSS, "hf:FOLDER", "package.module:function"],
    "no.such.module:recipe": ["'no.such.module:recipe' cannot be imported"],
    "tests.bridge.test_recipes:none": ["cannot be imported", "none"],
    "tests.bridge.test_recipes:no_recipe": ["returned int, expected a ConfigContainer"],
    "hf:/not/there": ["student '/not/there' is no folder"],
}


def test_wrong_names_are_refused_with_the_nearest():
    messages = run(in_rank_wrong_names)
    for wrong, parts in WRONG_NAMES.items():
        for part in parts:
            assert part in messages[wrong]


# ---- recipes/*.yaml ----


RUNS = sorted(path for path in (ROOT / "recipes").glob("*.yaml") if "_cache_" not in path.name)
CACHES = sorted((ROOT / "recipes").glob("*_cache_*.yaml"))


def world_size(path: Path) -> int:
    return int(re.search(r"_(\d+)gpu_", path.name)[1]) if "gpu_" in path.name else 3


def in_rank_yaml(paths: list[Path]) -> dict[str, Any]:
    """Loads and checks each recipe of its real size; its number of parameters, and its shrunk twin as a digest."""
    from megatron_kd.bridge.config import check_before_start, load_config
    from megatron_kd.bridge.planning import describe_model
    from megatron_kd.report.plan_memory import total_parameters
    from megatron_kd.report.plan_shape import Model

    found = {}
    for path in paths:
        cfg, values = load_config(config_file=path, overrides=["kd.cache=/cache", "dataset.data_path=/corpus"])
        dryrun.prepare_model(cfg.model)
        check_before_start(cfg, values, world_size=world_size(path))
        assert len([*values]) > 10 and cfg.checkpoint.load is None
        parameters, model = total_parameters(Model.of(describe_model(cfg.model))), cfg.model.hf_model_id
        changes = [*dryrun.shrink(cfg), *dryrun.prepare(cfg)]
        assert changes
        found[path.name] = (model, parameters, hashlib.sha1(repr(cfg.to_dict()).encode()).hexdigest())
    return found


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    return run(in_rank_yaml, RUNS)


def test_yaml_recipes_load_and_fit_their_machine(loaded):
    assert len(loaded) == len(RUNS) >= 13
    for name, (model, parameters, *_) in loaded.items():
        assert parameters == PARAMETERS[model], name


def test_yaml_recipes_fit_one_screen_and_say_what_they_take():
    """The figures themselves are compared with the planner's in tests/report/test_plan_bridge.py."""
    for path in RUNS:
        text = path.read_text()
        assert len(text.splitlines()) <= 54 and max(map(len, text.splitlines())) <= 119
        if "gpu_" not in path.name:
            continue
        comment = " ".join(re.findall(r"^# *(.*)", text, re.M))
        assert re.search(r"weights, gradients, Adam \d+ GB, activations \d+ GB", comment)
        memory = {"h200": 141, "b200": 180}[re.search("h200|b200", path.name)[0]]
        assert f"of {memory}" in comment
        assert f"megatron-kd submit recipes/{path.name}" in comment


def in_rank_shrunk(path: Path) -> list[dict[str, float]]:
    from megatron_kd.bridge.commands import Request
    from megatron_kd.bridge.rehearsal import train_shrunk

    return train_shrunk(Request(None, None, path, ()), None)


def in_rank_ranks(path: Path) -> int:
    from megatron_kd.bridge.commands import Request
    from megatron_kd.bridge.rehearsal import check

    return check(Request(None, None, path, ()), None, world_size(path))[0]


@pytest.mark.slow
def test_every_yaml_recipe_trains_shrunk(loaded):
    """Recipes whose shrunk twins are the same, setting by setting, train once."""
    twins = {digest: ROOT / "recipes" / name for name, (*_, digest) in loaded.items()}
    assert 3 <= len(twins) <= 8, twins
    for path in twins.values():
        ranks = run(in_rank_ranks, path)
        losses = dryrun.run_ranks(in_rank_shrunk, ranks, args=(path,), env={"HF_HUB_OFFLINE": "1"})[-1]
        assert len(losses) == 5 and all(0 < step["kd loss"] < 10 for step in losses), path.name


@pytest.mark.parametrize("path", CACHES, ids=os.path.basename)
def test_cache_recipes_are_options_of_cache_build(path: Path, tmp_path, monkeypatch):
    from huggingface_hub import constants

    from megatron_kd.cli import build_parser
    from megatron_kd.teacher.commands import merged

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for name in PARAMETERS:
        put_model(tmp_path, name)
    words = ["cache", "build", "--config-file", str(path), "--corpus", "/corpus", "--out", "/out"]
    args, rest = build_parser().parse_known_args(words)
    args.overrides, args.argv = rest, words
    args, model = merged(args)
    assert args.dtype == "bfloat16" and args.top_k == 100 and args.teacher in PARAMETERS
    assert (args.engine == "megatron") == (model == {"expert_model_parallel_size": 8})
    assert f"megatron-kd submit recipes/{path.name}" in path.read_text() and len(CACHES) == 6
