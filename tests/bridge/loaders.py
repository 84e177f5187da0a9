# SPDX-License-Identifier: Apache-2.0
"""A run in the real Bridge loop that checks each teacher row it takes against the tokens it came with; in a rank."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.bridge.corpora import made_up_rows, pair_sequence
from tests.bridge.loop import distil_config
from tests.bridge.spans import true_positions
from tests.dryrun.tiny import Recorder


def distil_checked(
    hf: Path, corpus: Path, index_cache: Path, *, cache: Path, **kwargs: Any
) -> tuple[list[dict[str, float]], list[int], int]:
    """Train on the first tenth of the corpus, some 20 samples.

    Returns the losses by name of each step; the numbers of the samples in the order they were taken; how many rows
    were checked.
    """
    from megatron_kd.bridge.teacher_feed import CacheFeed
    from megatron_kd.bridge.train import train

    taken: list[int] = []
    checked = 0
    take = CacheFeed.take

    def take_and_check(self: CacheFeed, batch: dict[str, Any]) -> Any:
        nonlocal checked
        rows = take(self, batch)
        dataset, _ = self._resolvers[0]
        for b, ((_, index), tokens) in enumerate(zip(batch["kd_key"].tolist(), batch["tokens"].numpy(), strict=True)):
            for at, axis in true_positions(dataset, index, len(tokens)):
                part, want = slice(at, at + len(axis)), made_up_rows(axis, 20)
                assert np.array_equal(tokens[part], pair_sequence()[axis])
                ids, logprobs, log_tail = (x[part, b] for x in rows.teacher)
                assert np.array_equal(ids.numpy(), want["ids"])
                torch.testing.assert_close(logprobs.double(), torch.from_numpy(want["logprobs"]), atol=2e-3, rtol=0)
                torch.testing.assert_close(log_tail.double(), torch.from_numpy(want["log_tail"]), atol=2e-3, rtol=0)
                checked += len(axis)
            taken.append(index)
        return rows

    CacheFeed.take = take_and_check
    cfg = distil_config(hf, corpus, index_cache, kd={"cache": str(cache), "ce_weight": 0.5}, **kwargs)
    cfg.dataset.split = "10,90,0"
    recorder = Recorder()
    train(cfg, callbacks=[recorder])
    return recorder.steps, taken, checked
