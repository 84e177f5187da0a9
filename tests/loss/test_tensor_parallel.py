# SPDX-License-Identifier: Apache-2.0
"""Values and gradients on two and four real ranks equal the oracle's, times exactly one."""

import pytest
import torch

from megatron_kd.loss import fused_linear_topk
from tests.loss import ranks

WORLDS = (2, 4)


@pytest.fixture(scope="module")
def results():
    """What the ranks of all world sizes return."""
    return ranks.run_worlds(WORLDS)


@pytest.fixture(scope="module", params=WORLDS, ids=("TP=2", "TP=4"))
def by_rank(request, results):
    """What the ranks of one world size return."""
    return results[request.param]


@pytest.fixture(scope="module")
def outcomes(by_rank):
    """Outcomes of all float64 calls of all ranks."""
    return [outcome for rank in by_rank for outcome in rank.outcomes]


def test_gradients_equal_the_oracle(outcomes):
    assert len(outcomes) > 200
    worst = max(outcomes, key=lambda outcome: outcome.difference)
    print(f"largest difference {worst.difference:.1e} in {len(outcomes)} calls: {worst.name}")
    assert worst.difference <= 1e-10, worst


def test_the_factor_over_the_oracle_is_one(outcomes):
    worst = max(outcomes, key=lambda outcome: abs(outcome.factor - 1))
    assert abs(worst.factor - 1) < 1e-9, worst


def test_padded_columns_get_exact_zeros(outcomes):
    assert [outcome.name for outcome in outcomes if not outcome.padding_is_zero] == []


def test_sums_have_the_same_bits_on_all_ranks(outcomes):
    assert [outcome.name for outcome in outcomes if not outcome.same_on_all_ranks] == []


def test_bf16_gradients_lose_only_their_rounding(by_rank):
    """A hidden gradient is rounded once per rank, as in Megatron, and once in the sum over the ranks."""
    assert max(error for rank in by_rank for error in rank.bf16_errors) < 6e-3


def test_collectives_follow_from_the_shapes_alone(by_rank):
    """The same on every rank, also on one without a real column, and the same if all tokens are masked."""
    world = len(by_rank)
    assert all(rank.collectives == by_rank[0].collectives for rank in by_rank)
    for mode in ("forward", "recompute"):
        for parallel in (False, True):
            calls = by_rank[0].collectives[f"{mode} sp={parallel} some"]
            assert calls == by_rank[0].collectives[f"{mode} sp={parallel} masked"]
            assert calls == expected_collectives(world, mode, parallel)


def test_the_teachers_top_k_is_that_of_one_rank(by_rank):
    """Ids equal, ties included; whatever the shards, with one that has less than K columns or none."""
    hidden, weight, labels = ranks.teacher_case()
    alone = fused_linear_topk(hidden, weight[:507], labels=labels, **ranks.TEACHER)
    for rank in by_rank:
        assert len(rank.teacher_rows) == 6
        for found in rank.teacher_rows.values():
            assert torch.equal(found.ids, alone.ids)
            for one, other in zip(found[1:], alone[1:], strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def expected_collectives(world, mode, parallel):
    """24 tokens in strips of 16 over all ranks; H = 8, K = 20 and the label. Both all-gathers start before strip 0."""
    rows = (16, 8)
    hidden = [("all_gather", n * 8) for n in rows] if parallel else []
    statistics = [("all_reduce", n * (21 + world)) for n in rows]
    again = [("all_reduce", n * 21) for n in rows]
    grads = [("scatter", n * 8 // world) if parallel else ("all_reduce", n * 8) for n in rows]
    in_turn = lambda *kinds: [one for strip in zip(*kinds, strict=True) for one in strip]  # noqa: E731
    if mode == "forward":
        return hidden + in_turn(statistics, grads)
    return hidden + statistics + hidden + in_turn(again, grads)
