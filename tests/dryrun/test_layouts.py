# SPDX-License-Identifier: Apache-2.0
"""The real pretrain loop with its stock loss: every layout trains as one rank does."""

import math
import re

import pytest

from megatron_kd.dryrun import run_ranks
from tests.dryrun.tiny import VOCABULARY, train, write_tiny_gpt_oss

LAYOUTS = {
    "TP=2+SP": (2, dict(tp=2)),
    "PP=2": (2, dict(pp=2)),
    "EP=2": (2, dict(ep=2)),
    "DP=2": (2, {}),
    "CP=2": (2, dict(cp=2)),
    "TP=2xPP=2": (4, dict(tp=2, pp=2)),
}


def last_stage(world_size: int, hf, **kwargs) -> list[dict[str, float]]:
    return run_ranks(train, world_size, args=(hf,), kwargs=kwargs)[-1]


def assert_close(steps, expected, tolerance: float) -> None:
    assert [set(step) for step in steps] == [{"lm loss", "grad norm"}] * len(expected)
    for step, right in zip(steps, expected, strict=True):
        assert step == pytest.approx(right, rel=0, abs=tolerance)


@pytest.fixture(scope="module")
def one_rank(gpt_oss) -> list[dict[str, float]]:
    steps = last_stage(1, gpt_oss)
    assert len(steps) == 5
    assert abs(steps[0]["lm loss"] - math.log(VOCABULARY)) < 0.5
    assert len({step["lm loss"] for step in steps}) == 5
    return steps


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fp32_layout_trains_as_one_rank(layout, gpt_oss, one_rank):
    world_size, sizes = LAYOUTS[layout]
    assert_close(last_stage(world_size, gpt_oss, **sizes), one_rank, 1e-4)


def test_interleaved_stages_train_as_one_rank(tmp_path):
    hf = run_ranks(write_tiny_gpt_oss, 1, args=(tmp_path,), kwargs=dict(num_hidden_layers=4))[0]
    assert_close(last_stage(2, hf, pp=2, vp=2, steps=3), last_stage(1, hf, steps=3), 1e-4)


def test_data_parallel_overlap_changes_nothing(gpt_oss, one_rank):
    apart = dict(
        ddp__overlap_grad_reduce=False, ddp__overlap_param_gather=False, optimizer__overlap_param_gather=False
    )
    assert_close(last_stage(2, gpt_oss, **apart), one_rank, 1e-4)


@pytest.mark.parametrize("layout", ["TP=2+SP", "CP=2"])
def test_bf16_layout_stays_near_fp32(layout, gpt_oss, one_rank):
    world_size, sizes = LAYOUTS[layout]
    assert_close(last_stage(world_size, gpt_oss, dtype="bfloat16", **sizes), one_rank, 0.03)


def test_multi_token_prediction_trains(gpt_oss, tmp_path):
    settings = dict(tp=2, steps=2, load_weights=False, model__mtp_num_layers=1)
    run_ranks(train, 2, args=(gpt_oss,), kwargs=settings, log_dir=tmp_path)
    losses = re.findall(r"mtp_1 loss: (\S+)", (tmp_path / "rank-1.log").read_text())
    assert len(losses) == 2 and all(abs(float(loss) - math.log(VOCABULARY)) < 0.5 for loss in losses)
