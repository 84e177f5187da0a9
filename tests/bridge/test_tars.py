# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's cached logits, written by its own saver, imported as a cache of the run's samples."""

from megatron_kd.dryrun import run_ranks
from tests.bridge import tars


def test_rows_of_megatrons_own_saver_reach_the_run(world, tmp_path):
    (counts,) = run_ranks(tars.check_tars, 1, args=(world.hf, tmp_path))
    assert counts["rows"] == 3 * 16 * 64 and counts["dropped"] > 300


def test_samples_from_the_files_that_a_run_left(world, tmp_path):
    (checked,) = run_ranks(tars.check_indexed_samples, 1, args=(world.hf, tmp_path))
    assert checked >= 3 * 16


def test_tars_that_do_not_fit_are_refused_and_nothing_in_them_runs(world, tmp_path):
    (messages,) = run_ranks(tars.check_refused_tars, 1, args=(world.hf, tmp_path))
    expected = (
        ["the trap is no torch file of plain tensors"] * 3
        + ["is not complete", "is of another run", "has no _meta.json", "is not done", "at most", "damaged"]
        + ["These rows were made from other samples", "holds no cp"]
    )
    for message, part in zip(messages[: len(expected)], expected, strict=True):
        assert part in message, (part, message)
    assert messages[len(expected) :].count("noise") > 200 and "accepted" not in messages
