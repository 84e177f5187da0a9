# SPDX-License-Identifier: Apache-2.0
"""The signal that ends a job reaches every process of a task; a checkpoint is written all the same.

tests/slurm has the whole of it, on a real Slurm.
"""

import os
import signal

import pytest

from megatron_kd import dryrun


def in_rank_signalled() -> tuple[list, str]:
    import multiprocessing

    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

    from megatron_kd.bridge.recipes import build_recipe
    from megatron_kd.bridge.train import leave_on_signal

    cfg = build_recipe("smollm2_135m_pretrain_3cpu_fp32_kd_config")
    leave_on_signal(cfg, [])
    helpers = multiprocessing.active_children()
    for helper in helpers:
        os.kill(helper.pid, signal.SIGTERM)
    queue = get_write_results_queue()
    queue.put("written")
    set_by_us = [cfg.train.exit_signal_handler, cfg.train.exit_signal_handler_for_dataloader, len(helpers)]
    return set_by_us, queue.get(timeout=30)


@pytest.mark.slow
def test_the_checkpoints_helper_survives_the_signal():
    assert dryrun.run_ranks(in_rank_signalled, 1)[0] == ([True, True, 1], "written")
