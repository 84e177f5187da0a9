# SPDX-License-Identifier: Apache-2.0
"""Values and gradients on two and four real ranks equal the oracle's, times exactly one."""

import pytest

from tests.loss.ranks import run_worlds

WORLDS = (2, 4)


@pytest.fixture(scope="module")
def results():
    """What the ranks of all world sizes return."""
    return run_worlds(WORLDS)


@pytest.fixture(scope="module", params=WORLDS, ids=("TP=2", "TP=4"))
def by_rank(request, results):
    """What the ranks of one world size return."""
    return results[request.param]


@pytest.fixture(scope="module")
def outcomes(by_rank):
    """Outcomes of all float64 calls of all ranks."""
    return [outcome for rank, _ in by_rank for outcome in rank]


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
    assert max(error for _, errors in by_rank for error in errors) < 6e-3
