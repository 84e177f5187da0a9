# SPDX-License-Identifier: Apache-2.0
"""Bridge's own recipes, shrunk: small, of the same structure, every change on record, and they train."""

import math

import pytest

from megatron_kd import dryrun
from megatron_kd.dryrun import Change, run_ranks


def gpt_oss_20b():
    """Bridge's recipe as it stands, given the architecture of the hub's gpt-oss-20b without asking the hub."""
    from unittest.mock import patch

    from megatron.bridge import AutoBridge
    from megatron.bridge.recipes.gpt_oss import gpt_oss_20b_pretrain_config
    from transformers import GptOssConfig

    config = GptOssConfig(architectures=["GptOssForCausalLM"], num_hidden_layers=24, num_local_experts=32)
    with patch.object(AutoBridge, "from_hf_pretrained", lambda name: AutoBridge.from_hf_config(config)):
        return gpt_oss_20b_pretrain_config()


def edited(settings) -> object:
    cfg = gpt_oss_20b()
    for key, value in settings.items():
        section, name = key.split(".")
        setattr(getattr(cfg, section), name, value)
    return cfg


def shrunk(settings, world_size=None) -> tuple[list[Change], dict, dict]:
    """The changes, all settings before and all settings after."""
    cfg = edited(settings)
    before = flat(cfg)
    changes = dryrun.shrink(cfg, world_size=world_size) + dryrun.prepare(cfg)
    return [Change(c.key, str(c.old), str(c.new), c.why) for c in changes], before, flat(cfg)


def flat(cfg) -> dict[str, str]:
    sections = {name: vars(value) for name, value in vars(cfg).items() if hasattr(value, "__dict__")}
    leaves = {f"{section}.{name}": value for section, values in sections.items() for name, value in values.items()}
    plain = {name: value for name, value in vars(cfg).items() if name not in sections}
    return {name: str(value) for name, value in (leaves | plain).items()}


def shrink_on_rank(settings, world_size=None):
    return run_ranks(shrunk, 1, args=(settings, world_size))[0]


def train_shrunk(settings) -> list[dict[str, float]]:
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from tests.dryrun.tiny import Recorder

    cfg = edited(settings)
    dryrun.shrink(cfg)
    dryrun.prepare(cfg)
    recorder = Recorder()
    pretrain(cfg, forward_step, callbacks=[recorder])
    return recorder.steps


def test_rules_on_gpt_oss():
    changes, before, after = shrink_on_rank({})
    small = {
        "model.tensor_model_parallel_size": 2,
        "model.pipeline_model_parallel_size": 2,
        "model.expert_model_parallel_size": 2,
        "model.context_parallel_size": 1,
        "model.num_layers": 4,
        "model.num_attention_heads": 16,
        "model.num_query_groups": 2,
        "model.num_moe_experts": 4,
        "model.moe_router_topk": 2,
        "model.window_size": (15, 0),
        "model.seq_length": 64,
        "dataset.seq_length": 64,
        "train.train_iters": 5,
        "checkpoint.save": None,
        "logger.tensorboard_dir": None,
    }
    assert {key: after[key] for key in small} == {key: str(value) for key, value in small.items()}
    kept = ["softmax_type", "window_attn_skip_freq", "add_bias_linear", "share_embeddings_and_output_weights"]
    kept += ["sequence_parallel", "position_embedding_type", "glu_linear_offset", "moe_token_dispatcher_type"]
    assert all(before[f"model.{name}"] == after[f"model.{name}"] for name in kept)


def test_every_difference_is_on_record():
    changes, before, after = shrink_on_rank({})
    recorded = {change.key: (change.old, change.new) for change in changes}
    differing = {key: (before[key], after[key]) for key in before if before[key] != after.get(key)}
    assert differing == recorded
    assert all(change.why for change in changes)


@pytest.mark.parametrize(
    ("settings", "world_size", "sizes"),
    [
        ({}, 2, (2, 1, 1, 2)),
        ({}, 1, (1, 1, 1, 1)),
        ({"model.context_parallel_size": 8, "model.pipeline_model_parallel_size": 1}, None, (2, 1, 2, 2)),
        ({"model.context_parallel_size": 8}, None, (2, 2, 1, 2)),
    ],
)
def test_parallel_sizes_fit_the_ranks(settings, world_size, sizes):
    _, _, after = shrink_on_rank(settings, world_size)
    names = ["tensor_model", "pipeline_model", "context", "expert_model"]
    assert tuple(int(after[f"model.{name}_parallel_size"]) for name in names) == sizes


def test_data_that_are_not_here_are_replaced():
    changes, _, after = shrink_on_rank({"dataset.blend": (["/nowhere/corpus_text_document"], None)})
    assert [change.why for change in changes if change.key == "dataset"] == [
        "/nowhere/corpus_text_document.bin is not on this machine"
    ]


def test_shrunk_recipe_trains():
    steps = run_ranks(train_shrunk, 4, args=({},))[-1]
    assert len(steps) == 5
    assert abs(steps[0]["lm loss"] - math.log(512)) < 0.2 and all(step["grad norm"] > 0 for step in steps)


def prepare_twice() -> list[Change]:
    cfg = gpt_oss_20b()
    assert dryrun.prepare(cfg)
    return dryrun.prepare(cfg)


def test_preparing_again_changes_nothing():
    assert run_ranks(prepare_twice, 1) == [[]]
