# SPDX-License-Identifier: Apache-2.0
"""Peak bytes at full scale: GPT-OSS's head, H = 2,880, V = 201,088, a teacher of K = 100, bf16.

Counted on meta tensors, which have a size and no content and take the path of CUDA: weight, hidden, teacher, both
gradients and whatever lies in between, forward and backward. All strips do the same, so most counts walk the first
three; one walks them all.
"""

from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_kd.loss import (
    TopK,
    VocabShard,
    dense_divergence,
    forward_chunked_divergence,
    fused_linear,
    fused_linear_divergence,
    vocab_parallel,
)
from megatron_kd.loss.arguments import default_strip_tokens
from megatron_kd.loss.strips import strips
from megatron_kd.report.memory import LiveBytes

GIB = 1 << 30
H, V, K = 2880, 201_088, 100
TOKENS_32K, TOKENS_256K = 1 << 15, 1 << 18


@pytest.fixture
def three_strips(monkeypatch):
    """Stop every loop over strips after three."""
    monkeypatch.setattr(fused_linear, "strips", lambda *arguments: islice(strips(*arguments), 3))


@pytest.fixture
def eight_ranks(monkeypatch):
    """Collectives over eight ranks that move nothing; like real ones they need no memory of their own.

    Returns the events: G, S, R when an all-gather, reduce-scatter, all-reduce starts, g, s, r when it is awaited.
    """
    events = []

    def started(letter):
        def collective(*_, async_op, **__):
            events.append(letter)
            return SimpleNamespace(wait=lambda: events.append(letter.lower()))

        return collective

    monkeypatch.setattr(vocab_parallel, "_all_gather", started("G"))
    monkeypatch.setattr(vocab_parallel, "_reduce_scatter", started("S"))
    monkeypatch.setattr(vocab_parallel.dist, "all_reduce", started("R"))
    monkeypatch.setattr(vocab_parallel.dist, "get_world_size", lambda group: 8)
    monkeypatch.setattr(vocab_parallel.dist, "get_rank", lambda group: 0)
    return events


class Products(TorchDispatchMode):
    """Notes every product in a list of events."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "mm" in str(function):
            self.events.append("*")
        return function(*args, **(kwargs or {}))


def count(function, tokens, *, main_grad=False, ranks=1, **options):
    """(all bytes at the peak, those of weight, main_grad and hidden), in GiB."""
    make = lambda *shape, **kinds: torch.empty(*shape, **kinds, device="meta")  # noqa: E731
    hidden = make(tokens // ranks, H, dtype=torch.bfloat16, requires_grad=True)
    weight = make(V // ranks, H, dtype=torch.bfloat16, requires_grad=True)
    given = [hidden, weight]
    if main_grad:
        weight.main_grad, weight.grad_added_to_main_grad = make(V // ranks, H), False
        given.append(weight.main_grad)
    teacher = TopK(make(tokens, K, dtype=torch.int32), make(tokens, K), make(tokens))
    token_weight = make(tokens)
    with LiveBytes(*given, *teacher, token_weight) as counter:
        function(hidden, weight, teacher, token_weight, **options).total.backward()
    return counter.peak / GIB, sum(part.nbytes for part in given) / GIB


FUSED = {
    "32K, forward": (TOKENS_32K, "forward", False, 4.4),
    "32K, recompute": (TOKENS_32K, "recompute", False, 4.4),
    "32K, recompute into main_grad": (TOKENS_32K, "recompute", True, 4.4),
    "256K, forward": (TOKENS_256K, "forward", False, 7.1),
    "256K, recompute into main_grad": (TOKENS_256K, "recompute", True, 7.1),
}


@pytest.mark.parametrize("name", FUSED)
def test_all_that_is_there_on_one_rank(name, three_strips):
    tokens, mode, main_grad, limit = FUSED[name]
    found, _ = count(fused_linear_divergence, tokens, gradient=mode, main_grad=main_grad)
    found += 8 * tokens / GIB  # what "recompute" keeps of the strips left out
    print(f"{name}: {found:.3f} GiB")
    assert found <= limit


def test_three_strips_are_enough_to_know_the_peak(monkeypatch):
    tokens = 8 * default_strip_tokens(VocabShard(0, V, V), torch.float32)
    whole = count(fused_linear_divergence, tokens, gradient="recompute", main_grad=True)[0]
    monkeypatch.setattr(fused_linear, "strips", lambda *arguments: islice(strips(*arguments), 3))
    part = count(fused_linear_divergence, tokens, gradient="recompute", main_grad=True)[0]
    assert part <= whole <= part + 8 * tokens / GIB


@pytest.mark.parametrize("mode", ("forward", "recompute"))
def test_what_is_added_on_each_of_eight_ranks(mode, three_strips, eight_ranks):
    shard = VocabShard(0, V // 8, V, object())
    options = {"gradient": mode, "main_grad": True, "shard": shard, "sequence_parallel": True}
    found, given = count(fused_linear_divergence, TOKENS_256K, ranks=8, **options)
    print(f"256K, TP=8, {mode}: {found - given:.3f} GiB beyond weight, main_grad and hidden")
    assert found - given <= 1.6


def test_what_travels_is_hidden_by_products(eight_ranks):
    """Between start and wait of each all-gather but the first, and of each reduce-scatter, lie products (*)."""
    shard = VocabShard(0, V // 8, V, object())
    options = {"main_grad": True, "shard": shard, "sequence_parallel": True, "ranks": 8}
    four_strips = 4 * default_strip_tokens(shard, torch.float32)
    gradients = "G" + "Gg*Rr*S*" + 2 * "Gg*Rrs*S*" + "g*Rrs*S*" + "s"
    for mode, before in (("forward", ""), ("recompute", "G" + 3 * "Gg*Rr" + "g*Rr")):
        eight_ranks.clear()
        with Products(eight_ranks):
            count(fused_linear_divergence, four_strips, gradient=mode, **options)
        assert "".join(eight_ranks) == before + gradients


@pytest.mark.parametrize(
    ("function", "grids"), [(dense_divergence, 6), (forward_chunked_divergence, 2)], ids=("dense", "forward_chunked")
)
def test_the_baselines_hold_grids(function, grids):
    found, _ = count(function, TOKENS_32K, strip_tokens=TOKENS_32K // 4)
    print(f"32K, {function.__name__}: {found:.1f} GiB")
    assert found > grids * TOKENS_32K * V * 4 / GIB
