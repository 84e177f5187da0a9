# SPDX-License-Identifier: Apache-2.0
"""Killed in mid-run and resumed: the same losses, to the bit, as the run that was not killed."""

import time
from pathlib import Path

import pytest

from megatron_kd.dryrun import run_ranks, start_ranks
from tests.dryrun.tiny import train

LAYOUTS = {
    "DP=2": {},
    "TP=2, fully reshardable": dict(tp=2, checkpoint__dist_ckpt_optim_fully_reshardable=True),
    "bf16, PP=2": dict(pp=2, dtype="bfloat16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_resume_after_sigkill(layout, gpt_oss, tmp_path):
    settings = dict(steps=6, **LAYOUTS[layout])
    whole = run_ranks(train, 2, args=(gpt_oss,), kwargs=settings)
    reached = tmp_path / "reached"
    killed = dict(settings, run_dir=tmp_path / "run", stall=(5, reached))  # checkpoints after steps 2 and 4
    with start_ranks(train, 2, args=(gpt_oss,), kwargs=killed) as ranks:
        wait_for(reached, ranks)
    resumed = run_ranks(train, 2, args=(gpt_oss,), kwargs=dict(settings, run_dir=tmp_path / "run"))
    assert [steps[4:] for steps in whole] == resumed
    assert len(resumed[-1]) == 2 and "lm loss" in resumed[-1][0]


def wait_for(path: Path, ranks) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, ranks.log_path(0).read_text()[-3000:]
        time.sleep(0.05)
