# SPDX-License-Identifier: Apache-2.0
"""Examples are found by their tokens, whole or cut, and by nothing else; the table travels with a copy."""

import os

import numpy as np
import pytest

from megatron_kd.cache import CacheReader, CacheWriter, CorpusError, CorruptFile, make_manifest
from megatron_kd.cache.copy import copy_cache
from megatron_kd.cache.examples import NAME, ExampleTable, ExampleUnits, encode, publish_table, read_table
from megatron_kd.cache.verify import verify

TEACHER = {name: "none" for name in ("repo", "revision", "weights", "dtype", "engine", "version")}


def sequence(tokens, loss):
    return np.array(tokens), np.isin(np.arange(len(tokens)), loss)


EXAMPLES = [
    sequence([5, 6, 7, 8, 9, 1, 1], [2, 3, 4]),  # two of padding
    sequence([5, 6, 7, 2], [2]),  # the same prompt, another answer
    sequence([4, 4], []),  # an empty answer
    sequence([5, 6, 7, 8, 9], [4]),  # the first once more, learned from in part
    sequence([3], [0]),
]


@pytest.fixture
def cache(tmp_path):
    units = ExampleUnits(EXAMPLES)
    manifest, tiles = make_manifest(
        units, teacher=TEACHER, tokenizer=None, vocab_real=16, vocab_padded=16, top_k=2, tile_tokens=6
    )
    writer = CacheWriter(tmp_path / "cache", manifest, tiles)
    publish_table(writer.store, encode(units.table))
    for tile in writer.todo():
        span = range(*writer.tiles[tile : tile + 2, 1].tolist())
        tokens, stored = (np.concatenate([part(unit) for unit in span]) for part in (units.tokens, units.stored))
        logprobs = np.where(stored[:, None], np.log([0.5, 0.25]), -np.inf)
        ids = np.tile([1, 2], (len(tokens), 1))
        planes = {"tokens": tokens, "ids": ids, "logprobs": logprobs, "log_tail": np.full(len(tokens), np.log(0.25))}
        writer.write_tile(tile, {**planes, "stored": stored})
    writer.seal()
    return tmp_path / "cache"


def test_examples_are_distinct_and_end_with_their_loss():
    units = ExampleUnits(EXAMPLES)
    assert units.lengths.tolist() == [5, 3, 1]
    assert [units.tokens(unit).tolist() for unit in range(3)] == [[5, 6, 7, 8, 9], [5, 6, 7], [3]]
    assert units.stored(0).tolist() == [False, False, True, True, True]  # of both that are alike
    with pytest.raises(CorpusError, match="no example"):
        ExampleUnits(EXAMPLES[2:3])


def test_a_sequence_is_found_whole_or_cut_and_not_otherwise(cache):
    reader = CacheReader(cache)
    table = ExampleTable(
        read_table(reader.store, reader.manifest),
        reader.n_rows,
        lambda start, length: reader.read(np.array([[start, length]])).tokens,
    )
    find = lambda tokens, first: table.find(np.array(tokens), first)  # noqa: E731
    assert find([5, 6, 7, 8, 9], 2) == 0
    assert find([5, 6, 7, 8], 2) == 0  # cut after its second token with loss
    assert find([5, 6, 7], 2) in (0, 5)
    assert find([3], 0) == 8
    assert find([5, 6, 7, 3], 2) is None  # the second example and what happens to lie behind it
    assert find([5, 6, 8], 2) is None and find([6, 7], 1) is None
    shorter = ExampleTable(read_table(reader.store, reader.manifest), 8, None)  # as --limit makes it
    assert shorter.find(np.array([3]), 0) is None


def test_the_table_is_copied_and_damage_to_it_is_seen(cache, tmp_path):
    copy_cache(cache, tmp_path / "copy")
    assert (tmp_path / "copy" / NAME).read_bytes() == (cache / NAME).read_bytes()
    assert not verify(tmp_path / "copy").problems
    (cache / NAME).write_bytes(bytes(32))
    with pytest.raises(CorruptFile, match=NAME):
        copy_cache(cache, tmp_path / "other")


def test_a_table_of_another_size_is_named_before_memory_is_taken_for_it(cache):
    os.truncate(cache / NAME, 1 << 42)
    reader = CacheReader(cache)
    with pytest.raises(CorruptFile, match=rf"{NAME} has {1 << 42} bytes, expected 96"):
        read_table(reader.store, reader.manifest)
