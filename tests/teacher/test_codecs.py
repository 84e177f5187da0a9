# SPDX-License-Identifier: Apache-2.0
"""A teacher's cache in every codec, whole and masked: what is stored is the teacher's, and `verify` can tell."""

import numpy as np
import pytest

from megatron_kd.cache import CacheReader, DocumentUnits, MaskedUnits
from megatron_kd.cache.verify import verify
from megatron_kd.teacher.build import build_cache
from megatron_kd.teacher.huggingface import HuggingFaceTeacher
from megatron_kd.teacher.passes import unit_rows
from tests.cache.test_commands import run
from tests.teacher.conftest import VOCAB, settings


@pytest.mark.parametrize(
    "codec", [{"codec": "zstd"}, {"values": "u8"}, {"top_p": 0.5}, {"codec": "zstd", "values": "u8", "top_p": 0.5}]
)
@pytest.mark.parametrize("masked", [False, True])
def test_codecs_hold_the_teachers_rows(tmp_path, llama, corpus, codec, masked):
    units = DocumentUnits(corpus)
    if masked:
        units = MaskedUnits(units, lambda unit: np.arange(corpus.lengths[unit]) % 4 > 0)
    teacher = HuggingFaceTeacher.load(llama, vocab_size=settings()["vocab_size"])
    out = build_cache(teacher, units, tmp_path / "c", **(settings(temperatures=(2.0,)) | codec))
    exact = build_cache(teacher, DocumentUnits(corpus), tmp_path / "exact", **settings(values="f32"))
    rows, truth = (reader.read(np.array([[0, reader.n_rows]])) for reader in map(CacheReader, (out, exact)))
    stored = np.concatenate([units.stored(unit) for unit in range(len(corpus))]) if masked else np.ones(len(rows[0]))
    np.testing.assert_array_equal(rows.stored, stored)
    kept = rows.ids >= 0
    np.testing.assert_array_equal(rows.ids[kept], truth.ids[kept])
    np.testing.assert_allclose(rows.logprobs[kept], truth.logprobs[kept], atol=0.03)
    manifest = CacheReader(out).manifest
    report = verify(out, "teacher", units=units, recompute=lambda unit: unit_rows(teacher, units, unit, manifest))
    assert report.problems == []

    def wrong(unit):
        planes = unit_rows(teacher, units, unit, manifest)
        return planes | {"ids": planes["ids"] + 1}

    assert verify(out, "teacher", units=units, recompute=wrong).problems


def test_the_command_builds_what_it_is_told(tmp_path, llama, corpus, capsys):
    options = ["--teacher", llama, "--corpus", corpus.prefix, "--out", tmp_path / "c", "--vocab-size", VOCAB]
    options += ["--top-k", 20, "--codec", "zstd", "--values", "u8", "--top-p", 0.5]
    assert run("build", *options, "--accept-teacher-loss", "--no-progress") == 0
    assert "u8 values, codec zstd, top p 0.5" in capsys.readouterr().out
    manifest = CacheReader(tmp_path / "c").manifest
    assert (manifest.codec, manifest.values, manifest.top_p, manifest.ragged) == ("zstd", "u8", 0.5, True)
