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
    """Collectives over eight ranks that move nothing; like real ones they need no memory of their own."""
    nothing = lambda *_, **__: SimpleNamespace(wait=lambda: None)  # noqa: E731
    monkeypatch.setattr(vocab_parallel, "_all_gather", nothing)
    monkeypatch.setattr(vocab_parallel, "_reduce_scatter", nothing)
    monkeypatch.setattr(vocab_parallel.dist, "all_reduce", nothing)
    monkeypatch.setattr(vocab_parallel.dist, "get_world_size", lambda group: 8)
    monkeypatch.setattr(vocab_parallel.dist, "get_rank", lambda group: 0)


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
    "32K, forward": (TOKENS_32K, "forward", False, 4.7),
    "32K, recompute into main_grad": (TOKENS_32K, "recompute", True, 4.4),
    "256K, forward": (TOKENS_256K, "forward", False, 7.6),
    "256K, recompute into main_grad": (TOKENS_256K, "recompute", True, 7.6),
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


@pytest.mark.parametrize(
    ("function", "grids"), [(dense_divergence, 6), (forward_chunked_divergence, 2)], ids=("dense", "forward_chunked")
)
def test_the_baselines_hold_grids(function, grids):
    found, _ = count(function, TOKENS_32K, strip_tokens=TOKENS_32K // 4)
    print(f"32K, {function.__name__}: {found:.1f} GiB")
    assert found > grids * TOKENS_32K * V * 4 / GIB
