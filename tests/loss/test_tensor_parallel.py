# SPDX-License-Identifier: Apache-2.0
"""Values and gradients on two and four real ranks equal the oracle's, times exactly one."""

import pytest

from tests.loss.ranks import compare_all, on_ranks, problems


@pytest.fixture(scope="module")
def combinations():
    return list(problems())


@pytest.fixture(scope="module", params=(2, 4), ids=("TP=2", "TP=4"))
def outcomes(request, combinations):
    """Outcomes of all calls of all ranks of one world size."""
    return [outcome for rank in on_ranks(request.param, compare_all, combinations) for outcome in rank]


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
