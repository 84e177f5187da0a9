# SPDX-License-Identifier: Apache-2.0
"""`cache bench --teacher`: that both sides do the same work; speeds are never asserted."""

import json

import pytest

from megatron_kd.cache import DocumentUnits
from megatron_kd.teacher import bench
from megatron_kd.teacher.huggingface import HuggingFaceTeacher
from tests.cache.test_commands import run
from tests.teacher.conftest import VOCAB


def test_both_sides_see_the_same_batches(tmp_path, llama, corpus):
    teacher, shapes = HuggingFaceTeacher.load(llama, vocab_size=VOCAB), []
    teacher.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    found = bench.measure(teacher, DocumentUnits(corpus), tmp_path, batch_tokens=150, top_k=5)
    assert found["forward"] > 0 and found["build"] > 0
    count = len(bench.batches(bench.cut_pieces(corpus.lengths, range(len(corpus)), {}), 150))
    gate = len(shapes) // bench._ROUNDS - 2 * count
    for round_ in range(bench._ROUNDS):
        part = shapes[round_ * (gate + 2 * count) :][gate : gate + 2 * count]
        assert part[:count] == part[count:] and len(set(part)) > 3


@pytest.mark.parametrize("of_corpus", [False, True])
def test_the_command(llama, corpus, capsys, of_corpus):
    words = ["--corpus", corpus.prefix] if of_corpus else ["--rows", 300]
    assert run("bench", "--teacher", llama, "--vocab-size", VOCAB, "--json", *words) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"forward", "build"}


def test_made_up_documents_fit_the_teacher():
    units = bench.MadeUp(5000, VOCAB, 700)
    assert units.lengths.sum() == 5000 and units.lengths.max() <= 700 and units.lengths.min() >= 1
    assert all(len(units.tokens(i)) == n and units.tokens(i).max() < VOCAB for i, n in enumerate(units.lengths))
