# SPDX-License-Identifier: Apache-2.0
"""Training from a cache on an object store: the same numbers as from disk, and what wrong bytes on the way do."""
# ruff: noqa: F811  (fixtures are imported)

import os

import numpy as np
import pytest

from megatron_kd.cache.copy import copy_cache
from megatron_kd.dryrun import RankFailed, run_ranks
from tests.bridge.loop import distil
from tests.cache.store_server import server, store_server  # noqa: F401

pytestmark = pytest.mark.slow
LOSSES = ("lm loss", "kd loss", "total loss", "grad norm")


def distil_from_store(config: str, *args, **kwargs) -> list[dict[str, float]]:
    os.environ["MSC_CONFIG"] = config
    return distil(*args, **kwargs)


def steps(world, cache, *, ranks=1, kd=None, **kwargs):
    """Losses and gradient norms [steps, 4] of the last rank."""
    kd = {"cache": cache, "ce_weight": 0.5, **(kd or {})}
    args = (os.environ["MSC_CONFIG"], *world.inputs)
    report = run_ranks(distil_from_store, ranks, args=args, kwargs={"kd": kd, **kwargs})[-1]
    return np.array([[step[name] for name in LOSSES] for step in report])


@pytest.fixture
def place(server, world):
    url = server.place()
    copy_cache(world.cache, url)
    return url


def test_a_run_from_a_store_is_the_run_from_disk(server, world, place):
    """On one rank and on two, with failing, wrong and slow answers now and then."""
    want = steps(world, str(world.cache))
    np.testing.assert_array_equal(steps(world, place), want)
    server.faults(
        {"range": "bytes", "skip": 3, "times": 1, "action": "flip"},
        {"range": "bytes", "skip": 9, "times": 2, "action": "status", "status": 503},
        {"range": "bytes", "skip": 13, "times": 1, "action": "short"},
        {"range": "bytes", "action": "delay", "seconds": 0.01},
    )
    np.testing.assert_array_equal(steps(world, place), want)
    assert sum(line[3] == 503 for line in server.log()) == 2
    server.faults()
    np.testing.assert_allclose(steps(world, place, ranks=2, tp=2), want, atol=1e-4, rtol=0)


def test_a_range_that_stays_wrong_ends_the_run_or_is_masked(server, world, place):
    """One of the ranges of rows that the run asks for has a wrong byte whenever it is read."""
    server.faults()
    want = steps(world, place)
    _, path, wrong, _ = [line for line in server.log() if "/shards/" in line[1] and len(line[2]) > len("bytes=9999-")][
        -1
    ]
    server.faults({"path": path, "range": f"^{wrong}$", "action": "flip"})
    with pytest.raises(RankFailed, match=rf"{path.rpartition('/')[2]}: block .* does not match its checksum, twice"):
        steps(world, place)
    masked = steps(world, place, kd={"bad_blocks": "mask", "bad_blocks_limit": 0.5})
    assert np.isfinite(masked).all() and (masked[:, 1] != want[:, 1]).any()
