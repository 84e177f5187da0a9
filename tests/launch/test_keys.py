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


def test_what_the_list_cannot_know_is_left_to_the_full_check():
    keys.check_keys({"recipe": "some_other_config", "model": {"q_lora_rank_of_mine": 2}, "kd": {"cache": "x"}})
    keys.check_keys(
        {"recipe": OURS, "student": "x", "kd": None, "mixed_precision": "bf16_mixed", "env_vars": {"A": 1}}
    )


def in_rank_kd_keys() -> list[str]:
    from megatron_kd.bridge.config import KDConfig
    from megatron_kd.bridge.overrides import field_hints

    return list(field_hints(KDConfig))


def test_kds_keys_are_read_from_its_source():
    assert keys._kd_keys() == dryrun.run_ranks(in_rank_kd_keys, 1)[0]
