# SPDX-License-Identifier: Apache-2.0
"""The real Megatron-Bridge loop with the teacher cache: layouts, resume, and what it refuses."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_kd.dryrun import RankFailed, run_ranks
from tests.bridge.loop import (
    distil,
    distil_damaged,
    distil_evaluated,
    distil_several_tokens,
    next_loss_of_export,
)
from tests.dryrun.tiny import write_tiny_gpt_oss, write_tiny_llama, write_tiny_qwen3_moe

LAYOUTS = {
    "TP=2+SP": ({"tp": 2}, 2),
    "PP=2": ({"pp": 2}, 2),
    "EP=2": ({"ep": 2}, 2),
    "DP=2": ({}, 2),
    "CP=2": ({"cp": 2}, 2),
    "TP=2xPP=2": ({"tp": 2, "pp": 2}, 4),
}
LOSSES = ("lm loss", "kd loss", "total loss", "grad norm")


def steps(world, world_size=1, **kwargs):
    """Losses and gradient norms [steps, 4] of the last rank (which is on the last stage)."""
    kd = {"cache": str(world.cache), "ce_weight": 0.5} | kwargs.pop("kd", {})
    report = run_ranks(distil, world_size, args=world.inputs, kwargs={"kd": kd, **kwargs})[-1]
    return np.array([[step[name] for name in LOSSES] for step in report])


@pytest.fixture(scope="module")
def dense_on_one_rank(world):
    return steps(world, kd={"loss": "dense"})


@pytest.mark.parametrize(
    "settings", [{"loss": "fused"}, {"gradient": "recompute"}, {"strip_tokens": 7}, {"loss": "forward_chunked"}]
)
def test_every_loss_trains_as_the_dense_one(world, dense_on_one_rank, settings):
    np.testing.assert_allclose(steps(world, kd=settings), dense_on_one_rank, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_alike_with_the_fused_and_the_dense_loss(world, dense_on_one_rank, layout):
    parallel, world_size = LAYOUTS[layout]
    fused = steps(world, world_size, **parallel)
    dense = steps(world, world_size, kd={"loss": "dense"}, **parallel)
    np.testing.assert_allclose(fused, dense, atol=1e-4, rtol=0)
    np.testing.assert_allclose(fused, dense_on_one_rank, atol=1e-4, rtol=0)


PER_TOKEN = {"model__calculate_per_token_loss": True, "ddp__average_in_collective": False}
UNEVEN = {"context": "exact"}
"""Leaves out the positions of documents that a sample's start cuts: in some samples most, in others none."""


def cuts(world, world_size, **kwargs):
    """The run with a micro-batch of 1, 2 and 4 samples, of which a global batch has 4."""
    return [steps(world, world_size, micro_batch=size, **kwargs) for size in (1, 2, 4) if size * world_size <= 4]


@pytest.mark.slow
def test_it_does_not_matter_how_a_batch_with_uneven_masks_is_cut(world):
    """The loss is a sum over tokens, divided once by all tokens of the global batch."""
    few = {"steps": 2, **PER_TOKEN}
    whole = steps(world, micro_batch=4, kd=UNEVEN | {"loss": "dense"}, **few)
    tables = [*cuts(world, 1, kd=UNEVEN, **few), *cuts(world, 2, kd=UNEVEN, **few)]
    tables.append(steps(world, 2, micro_batch=2, cp=2, kd=UNEVEN, **few))
    np.testing.assert_allclose(tables, [whole] * 6, atol=1e-4, rtol=0)
    assert np.abs(whole - steps(world, micro_batch=4, **few)).max() > 1e-2  # so the masks did something


@pytest.mark.slow
def test_it_does_not_matter_how_a_batch_with_even_masks_is_cut(world, dense_on_one_rank):
    """Also where Megatron averages over micro-batches and ranks (calculate_per_token_loss off)."""
    tables = [*cuts(world, 1, steps=2), *cuts(world, 2, steps=2)]
    np.testing.assert_allclose(tables, [dense_on_one_rank[:2]] * 5, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}])
def test_a_tied_head_trains_as_the_dense_loss_trains_it(world, tmp_path, layout):
    """Its weight has a second gradient, from the embedding; Megatron adds the two over pipeline stages."""
    tied = run_ranks(write_tiny_llama, 1, args=(tmp_path / "tied",))[0]
    inputs = (tied, *world.inputs[1:])
    cached = {"cache": str(world.cache), "ce_weight": 0.5}

    def table(world_size, **kwargs):
        report = run_ranks(distil, world_size, args=inputs, kwargs={"kd": cached, "steps": 3, **kwargs})[-1]
        return [[step[name] for name in LOSSES] for step in report]

    dense = table(1, kd=cached | {"loss": "dense"})
    np.testing.assert_allclose(table(2, micro_batch=2 if "pp" in layout else 1, **layout), dense, atol=1e-4, rtol=0)


def test_interleaved_stages_train_as_one_rank(world, tmp_path):
    """Four layers in two chunks a stage: the teacher's rows go to the last chunk of the last stage alone."""
    deep = run_ranks(write_tiny_gpt_oss, 1, args=(tmp_path / "deep",), kwargs={"num_hidden_layers": 4})[0]
    inputs = (deep, *world.inputs[1:])
    kd = {"kd": {"cache": str(world.cache), "ce_weight": 0.5}, "steps": 3}
    one, chunks = (
        [[step[name] for name in LOSSES] for step in run_ranks(distil, ranks, args=inputs, kwargs=kd | layout)[-1]]
        for ranks, layout in ((1, {}), (2, {"pp": 2, "vp": 2}))
    )
    np.testing.assert_allclose(chunks, one, atol=1e-4, rtol=0)


def test_a_cross_entropy_run_is_the_stock_run(world):
    """With the divergence's weight 0 what remains is Megatron's default loss, up to its one padded column."""
    ours = run_ranks(
        distil, 1, args=world.inputs, kwargs={"kd": {"cache": str(world.cache), "kd_weight": 0.0, "ce_weight": 1.0}}
    )
    stock = run_ranks(distil, 1, args=world.inputs, kwargs={"kd": None})
    assert [sorted(step) for step in stock[0]] == [["grad norm", "lm loss"]] * 5
    for name, tolerance in (("lm loss", 5e-3), ("grad norm", 5e-3)):
        np.testing.assert_allclose(
            [step[name] for step in ours[0]], [step[name] for step in stock[0]], atol=tolerance, rtol=0
        )


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {"cp": 2}])
def test_heads_for_later_tokens_are_trained_by_megatrons_own_loss(world, layout):
    """The divergence is the main head's. With its weight 0 the run is the stock one, in both heads' losses."""

    def several(kd):
        kwargs = {"kd": kd, "steps": 3, **layout}
        report, later = run_ranks(distil_several_tokens, math.prod(layout.values()), args=world.inputs, kwargs=kwargs)[
            -1
        ]
        return [[step[name] for name in LOSSES if name in step] for step in report], later

    cached = {"cache": str(world.cache), "ce_weight": 0.5}
    (fused, later), (dense, later_with_dense) = several(cached), several(cached | {"loss": "dense"})
    np.testing.assert_allclose(fused, dense, atol=1e-4, rtol=0)
    np.testing.assert_allclose(later, later_with_dense, atol=1e-4, rtol=0)
    (ours, later), (stock, stock_later) = several(cached | {"kd_weight": 0.0, "ce_weight": 1.0}), several(None)
    np.testing.assert_allclose(np.array(ours)[:, [0, 3]], stock, rtol=3e-3)  # the stock loss has a padded column
    np.testing.assert_allclose(later, stock_later, rtol=3e-3)


def test_validation_reads_the_cache_as_well(world):
    """The divergence of held-out samples, the same at every layout; their cross entropy is what Megatron reports."""

    def evaluated(world_size=1, kd=None, **kwargs):
        return run_ranks(distil_evaluated, world_size, args=world.inputs, kwargs={"kd": kd, **kwargs})[-1]

    cached = {"cache": str(world.cache), "ce_weight": 0.5}
    dense = evaluated(kd=cached | {"loss": "dense"})
    fused = evaluated(2, kd=cached, tp=2)
    assert fused["kd loss"] == pytest.approx(dense["kd loss"], abs=1e-4)
    assert fused["lm loss"] == pytest.approx(evaluated()["lm loss"], abs=5e-3)


def test_a_killed_run_resumes_with_the_same_losses(world, tmp_path):
    whole = steps(world, 2, tp=2, steps=6)
    with pytest.raises(RankFailed, match="exit code -9"):
        steps(world, 2, tp=2, steps=6, run_dir=tmp_path / "killed", kill_after=5)
    resumed = steps(world, 2, tp=2, steps=6, run_dir=tmp_path / "killed")
    assert len(resumed) == 2  # checkpoints every second iteration: 5 and 6 remain
    np.testing.assert_allclose(resumed, whole[4:], atol=1e-6, rtol=0)


def test_overlapped_parameter_gather_and_gradient_reduce_change_nothing(world, dense_on_one_rank):
    """The hook bypasses the output layer's call, where the gather of its parameters is waited for."""
    overlap = {
        "ddp__use_distributed_optimizer": True,
        "optimizer__use_distributed_optimizer": True,
        "ddp__overlap_grad_reduce": True,
        "ddp__overlap_param_gather": True,
        "optimizer__overlap_param_gather": True,
    }
    np.testing.assert_allclose(steps(world, 2, **overlap), dense_on_one_rank, atol=1e-4, rtol=0)


def test_tensor_parallel_ranks_mask_what_is_bad_for_one_of_them(world, tmp_path):
    """Blocks that only rank 1 cannot read are left out by both, as on one rank; what is masked is reported."""
    bad = Path(shutil.copytree(world.cache, tmp_path / "bad"))
    for shard in (bad / "shards").iterdir():
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    one = run_ranks(distil_damaged, 1, args=(*world.inputs, [str(bad)]))[0]
    two = run_ranks(distil_damaged, 2, args=(*world.inputs, [str(world.cache), str(bad)]), kwargs={"tp": 2})
    names = (*LOSSES, "kd masked")
    table = [[[step[name] for name in names] for step in report] for report in (one, *two)]
    np.testing.assert_allclose(table[1:], [table[0]] * 2, atol=1e-4, rtol=0)
    assert 0 < np.mean([step["kd masked"] for step in one]) < 0.5


RECOMPUTE = {"granularity": "full", "method": "uniform", "num_layers": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, settings",
    [(1, {f"model__recompute_{name}": value for name, value in RECOMPUTE.items()}), (4, {"tp": 2, "cp": 2})],
    ids=["recompute", "TP=2xCP=2"],
)
def test_what_megatron_does_otherwise_changes_nothing(world, dense_on_one_rank, ranks, settings):
    np.testing.assert_allclose(steps(world, ranks, steps=3, **settings), dense_on_one_rank[:3], atol=1e-4, rtol=0)


@pytest.mark.slow
def test_tensor_parallel_experts_train_as_one_rank(world, tmp_path):
    inputs = (run_ranks(write_tiny_qwen3_moe, 1, args=(tmp_path / "moe",))[0], *world.inputs[1:])
    kd = {"kd": {"cache": str(world.cache), "ce_weight": 0.5}, "steps": 3}
    one, two = (
        [[step[name] for name in LOSSES] for step in run_ranks(distil, ranks, args=inputs, kwargs=kd | layout)[-1]]
        for ranks, layout in ((1, {}), (2, {"tp": 2, "model__expert_tensor_parallel_size": 2}))
    )
    np.testing.assert_allclose(two, one, atol=1e-4, rtol=0)


def test_an_iteration_that_is_run_twice_meets_the_same_rows(world, dense_on_one_rank):
    """Bridge's rerun machinery replays the batches it kept; their keys find the rows again."""
    rerun = {"rerun_state_machine__rerun_mode": "report_determinism_stats"}
    np.testing.assert_allclose(steps(world, **rerun), dense_on_one_rank, atol=1e-4, rtol=0)


def test_an_exported_checkpoint_has_the_students_logits(world, tmp_path):
    """The loss that Megatron reports for the next batch is the exported model's own, computed by transformers."""
    steps(world, 2, tp=2, steps=2, run_dir=tmp_path / "run")
    (exported,) = run_ranks(next_loss_of_export, 1, args=(*world.inputs, tmp_path / "run", tmp_path / "hf"))
    resumed = steps(world, 2, tp=2, steps=3, run_dir=tmp_path / "run")
    assert len(resumed) == 1
    assert abs(exported - resumed[0][0]) <= 1e-4
