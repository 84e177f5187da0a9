# SPDX-License-Identifier: Apache-2.0
"""Misspelt keys are met in a second; the list they are looked up in is that of the installed Bridge."""

import json

import pytest

from megatron_kd import dryrun
from megatron_kd.errors import ConfigError
from megatron_kd.launch import keys

OURS = "gpt_oss_20b_pretrain_8gpu_h200_bf16_kd_config"


@pytest.mark.slow
def test_the_list_is_that_of_the_installed_bridge():
    found = dryrun.run_ranks(keys.collect, 1)[0]
    if json.loads(keys.PATH.read_text()) != found:
        new = keys.PATH.with_suffix(".new.json")
        new.write_text(json.dumps(found, indent=1) + "\n")
        raise AssertionError(f"{keys.PATH} is out of date: mv {new} {keys.PATH}")


@pytest.mark.parametrize(
    ("tree", "parts"),
    [
        ({"kd": {"cachee": "x"}}, ["unknown key kd.cachee", "kd.cache"]),
        ({"kdd": {"cache": "x"}}, ["unknown key kdd", "kd"]),
        ({"train": {"train_itres": 5}}, ["unknown key train.train_itres", "train.train_iters"]),
        ({"train": {"lr": 5}}, ["unknown key train.lr", "optimizer.lr"]),
        ({"model": {"tensor_parallel_size": 2}}, ["unknown key model.tensor_parallel_size", "tensor_model_parallel"]),
    ],
    ids=str,
)
def test_a_misspelt_key_meets_its_neighbour(tree, parts):
    with pytest.raises(ConfigError) as refused:
        keys.check_keys({"recipe": OURS, **tree})
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("tree", "parts"),
    [
        ({"train": {"train_iters": "many"}}, ["train.train_iters expects int", "'many'"]),
        ({"train": {"train_iters": 2.5}}, ["train.train_iters expects int", "2.5"]),
        ({"optimizer": {"lr": "fast"}}, ["optimizer.lr expects", "float", "'fast'"]),
        ({"model": {"sequence_parallel": 1}}, ["model.sequence_parallel expects bool", "found 1"]),
        ({"kd": {"top_k": "all"}}, ["kd.top_k expects int or null", "'all'"]),
        ({"kd": {"top_k": 0}}, ["kd.top_k must be a finite number, above 0", "found 0"]),
        ({"kd": {"temperature": -1}}, ["kd.temperature must be a finite number, above 0", "-1"]),
        ({"kd": {"loss": "fast"}}, ["kd.loss expects fused or dense", "'fast'"]),
    ],
    ids=str,
)
def test_a_value_of_another_kind_is_told_what_is_expected(tree, parts):
    with pytest.raises(ConfigError) as refused:
        keys.check_keys({"recipe": OURS, **tree})
    for part in parts:
        assert part in str(refused.value)


@pytest.mark.parametrize("name", [OURS, "llama32_1b_pretrain_config", "hf:/any", "package.module:function", None])
def test_a_recipe_is_known_or_says_where_it_is(name):
    keys.check_recipe(name)
    if name and ":" not in name:
        with pytest.raises(ConfigError, match=f"unknown recipe '{name}x'. Did you mean {name}"):
            keys.check_recipe(name + "x")


def test_what_the_list_cannot_know_is_left_to_the_full_check():
    keys.check_keys({"recipe": "mine:recipe", "model": {"q_lora_rank_of_mine": 2}, "kd": {"cache": "x"}})
    keys.check_keys(
        {"recipe": OURS, "optimizer": {"lr": 1}, "model": {"rotary_base": 150000.0}, "kd": {"top_k": None}}
    )
    keys.check_keys({"recipe": OURS, "train": {"train_iters": "${oc.env:STEPS}"}})
    keys.check_keys(
        {"recipe": OURS, "student": "x", "kd": None, "mixed_precision": "bf16_mixed", "env_vars": {"A": 1}}
    )


def in_rank_kd_keys() -> dict[str, object]:
    from megatron_kd.bridge.config import KDConfig
    from megatron_kd.bridge.overrides import field_hints

    default = KDConfig()
    return {name: getattr(default, name) for name in field_hints(KDConfig)}


def test_kds_keys_are_read_from_its_source():
    assert {name: default for name, (_, default) in keys._kd_fields().items()} == dryrun.run_ranks(in_rank_kd_keys, 1)[
        0
    ]


@pytest.mark.parametrize(
    ("tree", "parts"),
    [
        ({"train": 5}, ["train is a section", "found 5"]),
        ({"recipe": ["a"]}, ["recipe expects text", "['a']"]),
        ({"student": 7}, ["student expects text"]),
        (
            {"model": {"seq_length": "${dataset.seqlength}"}},
            ["${dataset.seqlength} leads nowhere", "dataset.seq_length"],
        ),
        ({"model": {"seq_length": "${datasets.seq_length}"}}, ["leads nowhere", "dataset"]),
        ({"model": {"_target_": "os.system", "command": "ls"}}, ["_target_ os.system is not built"]),
        ({"dataset": {"x": [{"_target_": "subprocess.run"}]}}, ["_target_ subprocess.run is not built"]),
        ({"kd": {"divergence": "forwardkl"}}, ["kd.divergence", "'forwardkl'", "Did you mean 'forward_kl'"]),
        ({"kd": {"kd_weight": 0}}, ["both 0"]),
        ({"kd": {"kd_weight": -1}}, ["kd.kd_weight", "at least 0, found -1"]),
        ({"kd": {"bad_blocks_limit": 2}}, ["kd.bad_blocks_limit", "from 0 to 1"]),
        ({"kd": {"cache": "a", "teacher": "b"}}, ["kd.cache=a and kd.teacher=b exclude each other"]),
    ],
    ids=str,
)
def test_what_a_tree_cannot_hold(tree, parts):
    with pytest.raises(ConfigError) as refused:
        keys.check_keys({"recipe": OURS, **tree})
    for part in parts:
        assert part in str(refused.value)


def test_references_and_targets_that_lead_somewhere():
    keys.check_keys(
        {"recipe": OURS, "dataset": {"seq_length": "${model.seq_length}"}, "kd": {"divergence": "jsd(0.3)"}}
    )
    keys.check_keys({"recipe": OURS, "train": {"train_iters": "${oc.env:STEPS}"}, "kd": {"divergence": "a.b:c"}})
    keys.check_keys({"recipe": "mine:recipe", "model": {"of_mine": "${dataset.of_mine}"}, "kd": {"kd_weight": 0}})
    keys.check_keys({"recipe": "mine:recipe", "dataset": {"_target_": "of_mine.Dataset"}})  # mine may allow it
    keys.check_keys({"recipe": OURS, "dataset": {"_target_": "megatron.bridge.data.builders.GPTSFTDatasetConfig"}})


def test_a_teacher_is_asked_for_where_the_recipe_has_none():
    for tree in ({"recipe": OURS}, {"recipe": "hf:/x", "kd": {"top_k": 5}}):
        with pytest.raises(ConfigError, match="kd.cache is not set"):
            keys.check_teacher_named(tree)
    for tree in ({"recipe": OURS, "kd": None}, {"recipe": OURS, "kd": {"teacher": "x"}}, {"recipe": "mine:recipe"}):
        keys.check_teacher_named(tree)


def test_a_cache_comes_with_its_corpus():
    cache = {"recipe": OURS, "kd": {"cache": "/k"}}
    for tree in (cache, {**cache, "recipe": "hf:/x", "dataset": {"split": "1,0,0"}}):
        with pytest.raises(ConfigError, match=r"dataset\.data_path is not set, and kd\.cache=/k belongs to a corpus"):
            keys.check_corpus_named(tree)
    for further in (
        {"dataset": {"data_path": "/c"}},
        {"dataset": {"blend": [["/c"], None]}},
        {"dataset": {"_target_": "megatron.bridge.data.builders.GPTSFTDatasetConfig"}},
        {"kd": {"cache": "synthetic"}},
        {"kd": None},
        {"recipe": "mine:recipe"},  # which may name one itself
    ):
        keys.check_corpus_named({**cache, **further})
