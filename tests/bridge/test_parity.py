# SPDX-License-Identifier: Apache-2.0
"""A cache of exactly the training samples, with the whole vocabulary, is the teacher in memory."""

from megatron_kd.dryrun import run_ranks
from tests.bridge.parity import sample_parity


def test_a_sample_cache_of_the_whole_vocabulary_is_the_teacher_in_memory(world, tmp_path):
    cached, memory = run_ranks(sample_parity, 1, args=(*world.inputs, tmp_path))[0]
    assert len(cached) == len(memory) == 5
    for ours, truth in zip(cached, memory, strict=True):
        assert ours["kd loss"] > 0.01
        for name in ("kd loss", "total loss", "grad norm"):
            assert abs(ours[name] - truth[name]) <= 1e-5, name
