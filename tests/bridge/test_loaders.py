# SPDX-License-Identifier: Apache-2.0
"""Every way Bridge loads pre-training data: each token meets its own teacher row, over epochs and in a resumed run."""

import numpy as np
import pytest

from megatron_kd.dryrun import run_ranks
from tests.bridge.loaders import distil_checked
from tests.bridge.test_loop import LOSSES

RUN = {"steps": 4, "global_batch": 16, "micro_batch": 4}
"""64 samples, of which an epoch has about 20."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["single", "cyclic", "batch"])
def test_rows_follow_their_tokens_over_epochs_and_in_a_run_resumed_within_one(world, tmp_path, kind):
    """Two data workers on each of two ranks."""
    kwargs = {"cache": world.cache, "dataset__dataloader_type": kind, "dataset__num_workers": 2, **RUN}
    kwargs["run_dir"] = tmp_path / "run"
    whole = run_ranks(distil_checked, 2, args=world.inputs, kwargs=kwargs)
    resumed = run_ranks(distil_checked, 2, args=world.inputs, kwargs=kwargs | {"checkpoint__ckpt_step": 2})
    for (steps, taken, checked), (later_steps, later, later_checked) in zip(whole, resumed, strict=True):
        assert len(taken) == 32 and taken[16:] == later
        assert checked > 32 * 60 and later_checked > 16 * 60
        table, end = ([[step[name] for name in LOSSES] for step in part] for part in (steps, later_steps))
        np.testing.assert_allclose(end, table[2:], atol=1e-6, rtol=0)
    samples = [index for _, taken, _ in whole for index in taken]
    assert len(set(samples)) == 64
    assert (sorted(samples[:32]) == samples[:32]) == (kind == "single")
