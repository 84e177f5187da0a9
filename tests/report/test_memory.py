# SPDX-License-Identifier: Apache-2.0
"""The byte counter against sums done by hand, and the order of the three losses."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_kd.report.loss_memory import LossShape, loss_memory
from megatron_kd.report.memory import LiveBytes, peak_bytes

MIB = 1 << 20


def floats(mib: int, **kwargs) -> torch.Tensor:
    return torch.ones(mib * MIB // 4, **kwargs)


def test_freed_memory_is_no_longer_live_but_stays_the_peak():
    with LiveBytes() as counter:
        a = floats(2)
        b = a * 2
        assert counter.live == 4 * MIB
        del a
        assert counter.live == 2 * MIB
        c = b + 1
        del b, c
    assert (counter.live, counter.peak) == (0, 4 * MIB)


def test_views_and_in_place_operations_cost_nothing():
    with LiveBytes() as counter:
        a = floats(2)
        kept = [a.view(2, -1), a[:10], a.add_(1), a.detach()]
    assert len(kept) == 4
    assert counter.peak == 2 * MIB


def test_a_view_keeps_the_whole_storage_alive():
    with LiveBytes() as counter:
        a = floats(2)
        b = a[:1]
        del a
        assert counter.live == 2 * MIB
        del b
    assert counter.live == 0


def test_tensors_from_before_are_counted_only_if_given():
    a = floats(1)
    with LiveBytes() as without:
        b = a * 2
    with LiveBytes(a) as counted:
        c = a * 2
    assert b.equal(c)
    assert (without.peak, counted.peak) == (1 * MIB, 2 * MIB)


@pytest.mark.parametrize("fake", [False, True])
def test_saved_tensors_and_gradients_count_in_backward(fake: bool):
    """x.exp().exp().sum(): both outputs are saved, and the last backward step makes the third and fourth tensor."""

    def count() -> int:
        return peak_bytes(lambda x: x.exp().exp().sum(), floats(4, requires_grad=True))

    if not fake:
        found = count()
    else:
        with FakeTensorMode():
            found = count()
    # x, both exps; backward: the gradient of the outer exp while the outer exp is still saved.
    scalar = 64
    assert 4 * 4 * MIB <= found <= 4 * 4 * MIB + scalar


def test_a_linear_layer_by_hand():
    """Input, weight, output; then both gradients, made from an expanded one that has no memory of its own."""

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sum()

    x = torch.ones(256, 1024, requires_grad=True)
    w = torch.ones(1024, 512, requires_grad=True)
    size_x, size_w = (4 * tensor.numel() for tensor in (x, w))
    assert peak_bytes(run, x, w) == 2 * size_x + 2 * size_w + 2 * 4  # and two scalars: the sum and its gradient


def test_the_fused_loss_never_holds_the_grid():
    shape = LossShape(2048, 20_000, 64, top_k=10, dtype=torch.float32, strip_tokens=128)
    found = loss_memory(shape)
    grid = 4 * shape.tokens * shape.vocabulary
    assert found["dense"] > found["forward_chunked"] > 2 * grid
    assert found["fused"] < grid / 2
