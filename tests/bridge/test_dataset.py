# SPDX-License-Identifier: Apache-2.0
"""Which teacher rows a training position meets, against Megatron's own token stream."""

from megatron_kd.dryrun import run_ranks
from tests.bridge import spans


def on_a_rank(function, world, tmp_path):
    return run_ranks(function, 1, args=(world.hf, tmp_path))[0]


def test_coordinates_are_those_of_megatrons_token_stream(world, tmp_path):
    assert on_a_rank(spans.check_coordinates, world, tmp_path) > 50_000


def test_one_document_cache_serves_every_seed_length_and_layout(world, tmp_path):
    counts = on_a_rank(spans.check_feed, world, tmp_path)
    assert counts["runs"] == 16
    assert counts["positions"] > 10_000
    assert counts["rows"] > 10 * counts["positions"]


def test_bad_blocks_lose_their_weight_up_to_a_limit_or_end_the_run(world, tmp_path):
    counts = on_a_rank(spans.check_bad_blocks, world, tmp_path)
    assert counts["masked"] > 200 and counts["kept"] > 5_000 and counts["refused"] > 10


def test_positions_that_see_less_than_the_teacher_are_counted_and_can_be_left_out(world, tmp_path):
    counts = on_a_rank(spans.check_context, world, tmp_path)
    assert 2_000 < counts["cut"] < 0.9 * counts["all"]


def test_rows_without_a_teacher_take_no_part(world, tmp_path):
    counts = on_a_rank(spans.check_unknown_rows, world, tmp_path)
    assert counts["unknown"] > 200 and counts["known"] > 1_000


def test_a_blend_reads_each_sample_from_the_cache_of_its_corpus(world, tmp_path):
    counts = on_a_rank(spans.check_blend, world, tmp_path)
    assert counts["a"] > 20 and counts["b"] > 50
