# SPDX-License-Identifier: Apache-2.0
"""A cache of exactly the training samples is the teacher beside the student; and what the top 100 leave out."""

import numpy as np
import pytest

from megatron_kd.dryrun import run_ranks
from tests.bridge.online import distil_online, sample_cache, write_sharp_teacher
from tests.bridge.parity import sample_parity
from tests.dryrun.tiny import VOCABULARY

LOSSES = ("lm loss", "kd loss", "total loss", "grad norm")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """Sure of some tokens, as a trained one is: its logits have a spread of 2, so that 100 tokens hold most mass."""
    folder = tmp_path_factory.mktemp("parity") / "teacher"
    return run_ranks(write_sharp_teacher, 1, args=(folder,))[0]


def run(world, world_size=1, **kwargs):
    kd = {"ce_weight": 0.5} | kwargs.pop("kd")
    found = run_ranks(distil_online, world_size, args=world.inputs, kwargs={"kd": kd, **kwargs})[-1]
    return np.array([[step[name] for name in LOSSES] for step in found["steps"]]), found["gradient"]


def test_a_sample_cache_of_the_whole_vocabulary_is_the_teacher_in_memory(world, tmp_path):
    cached, memory = run_ranks(sample_parity, 1, args=(*world.inputs, tmp_path))[0]
    assert len(cached) == len(memory) == 5
    for ours, truth in zip(cached, memory, strict=True):
        assert ours["kd loss"] > 0.01
        for name in ("kd loss", "total loss", "grad norm"):
            assert abs(ours[name] - truth[name]) <= 1e-5, name


@pytest.fixture(scope="module")
def cache(world, teacher, tmp_path_factory):
    """The top 100 of exactly the training samples, by transformers."""
    out = tmp_path_factory.mktemp("parity") / "cache"
    options = {"teacher": teacher, "out": out, "top_k": 100, "temperatures": (2.0,)}
    run_ranks(sample_cache, 1, args=world.inputs, kwargs=options)
    return out


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_offline_and_online_top_100_are_one_training(world, teacher, cache, temperature):
    """Losses of five steps, and the last one's whole gradient: by the time weights differ, so does everything."""
    kd = {"top_k": 100, "temperature": temperature}
    offline, offline_gradient = run(world, kd=kd | {"cache": str(cache)})
    online, online_gradient = run(world, kd=kd | {"teacher": str(teacher)})
    assert (offline[:, 1] > 0.01).all()
    np.testing.assert_allclose(online, offline, atol=2e-5, rtol=0)
    error = np.linalg.norm(online_gradient - offline_gradient) / np.linalg.norm(offline_gradient)
    assert error < 1e-4


def test_the_top_100_against_the_whole_vocabulary(world, teacher):
    """On the student's first step, KD alone: merging buckets can only lower a KL, and K = V leaves nothing out."""
    found = {
        k: run(world, kd={"top_k": k, "teacher": str(teacher), "ce_weight": 0.0}, steps=1)
        for k in (20, 100, VOCABULARY, 2 * VOCABULARY)
    }
    losses = {k: float(figures[0, 1]) for k, (figures, _) in found.items()}
    whole = found[VOCABULARY][1]
    errors = {k: float(np.linalg.norm(g - whole) / np.linalg.norm(whole)) for k, (_, g) in found.items()}
    for k in (20, 100):
        print(f"K={k}: kd loss {losses[k]:.5f} of {losses[VOCABULARY]:.5f}, gradient differs by {errors[k]:.3%}")
    assert 0 < losses[20] < losses[100] < losses[VOCABULARY]
    assert errors[20] > errors[100] > 0
    assert losses[2 * VOCABULARY] == losses[VOCABULARY] and errors[2 * VOCABULARY] == 0
