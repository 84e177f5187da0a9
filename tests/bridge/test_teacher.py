# SPDX-License-Identifier: Apache-2.0
"""A Megatron teacher at every layout writes the cache that the Hugging Face producer writes."""

import re
from pathlib import Path

import numpy as np
import pytest

from megatron_kd import cli, dryrun
from megatron_kd.cache import CacheReader, Corpus, DocumentUnits
from tests.bridge import teachers
from tests.cache.conftest import write_corpus
from tests.dryrun.tiny import VOCABULARY, write_tiny_gpt_oss


@pytest.fixture(scope="module")
def caches(tmp_path_factory) -> Path:
    """A folder with a cache by transformers and one by Megatron for every layout."""
    root = tmp_path_factory.mktemp("teachers")
    hf = dryrun.run_ranks(write_tiny_gpt_oss, 1, args=(root / "hf",), kwargs={"num_hidden_layers": 4})[0]
    rng = np.random.default_rng(0)
    lengths = [17, 1, 64, 2, 128, 33, 250, 33, 90, 5, 70, 300]
    write_corpus(root / "corpus", [rng.integers(0, VOCABULARY, length) for length in lengths])
    from megatron_kd.teacher.build import build_cache

    units = DocumentUnits(Corpus(root / "corpus"))
    build_cache(hf, units, root / "transformers", accept_teacher_loss=True, progress=False, **teachers.OPTIONS)
    dryrun.run_ranks(teachers.build_all, 4, args=(hf, root / "corpus", root))
    return root


def rows(path: Path):
    reader = CacheReader(path)
    spans = np.array([[0, reader.n_rows]])
    return reader.read(spans), reader.read(spans, temperature=2.0)


@pytest.fixture
def command(caches) -> list[str]:
    """`cache build` with a file that says all but where to."""
    (caches / "build.yaml").write_text(
        f"""\
teacher: {caches / "hf"}
engine: megatron
corpus: {caches / "corpus"}
top_k: 7
temperature: [2.0]
values: f32
tile_tokens: 300
batch_tokens: 256
accept_teacher_loss: true
model:
  tensor_model_parallel_size: 2
"""
    )
    return ["cache", "build", "--config-file", str(caches / "build.yaml"), "--out", str(caches / "by-command")]


def test_the_command_reads_a_file_and_overrides_it(caches, command, capsys):
    assert cli.main([*command, "--cpu-ranks", "2", "--dry-run", "model.sequence_parallel=true"]) == 0
    assert re.search(r"993 tokens in \d tiles, .*\n.* tokens/s.*\nNothing was written", capsys.readouterr().out)
    assert not (caches / "by-command").exists()
    assert cli.main([*command, "--cpu-ranks", "2", "--top-k", "20"]) == 0
    assert "top 20 of 512 ids" in capsys.readouterr().out
    assert_same(caches / "by-command", caches / "transformers")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--cpu-ranks", "1", "model.tensor_model_parallel_sise=2"],
            r"unknown key model.tensor_model_parallel_sise. Did you mean model.tensor_model_parallel_size\b",
        ),
        (
            ["--cpu-ranks", "1", "model.tensor_model_parallel_size=two"],
            r"model.tensor_model_parallel_size expects int, found 'two' \(str\)",
        ),
        (
            ["--cpu-ranks", "2", "model.expert_tensor_parallel_size=2"],
            r"Megatron refuses the teacher .*/hf with these settings of model.\*: Bias in Moe is only supported",
        ),
        (["--engine", "transformers"], "model.* is for a Megatron teacher; add --engine megatron"),
        (["--engine", "transformers", "--cpu"], "--cpu is for a Megatron teacher; add --engine megatron"),
        (["kd.top_k=3"], "kd= is no setting of a teacher"),
    ],
)
def test_bad_settings_are_refused(caches, command, more, message, capsys):
    assert cli.main([*command, *more]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_bad_line_of_the_file_is_named(caches, command, capsys):
    file = caches / "bad.yaml"
    file.write_text("teacher: here\ntile_token: 3\n")
    assert cli.main(["cache", "build", "--config-file", str(file)]) == 2
    assert f"{file}:2: tile_token is no option of `cache build`. Did you mean tile_tokens?" in capsys.readouterr().err
    file.write_text("teacher: here\n")
    assert cli.main(["cache", "build", "--config-file", str(file)]) == 2
    assert "--corpus is missing" in capsys.readouterr().err


@pytest.mark.parametrize("layout", teachers.LAYOUTS)
def test_the_cache_is_that_of_transformers(caches, layout):
    assert_same(caches / layout, caches / "transformers")


def test_mxfp4_experts_are_those_numbers(caches, tmp_path):
    """To the last bit: what four bits and a power of two say, bf16 can say."""
    dryrun.run_ranks(teachers.write_mxfp4, 1, args=(tmp_path,))
    for name in ("bf16", "mxfp4"):
        words = ["cache", "build", "--engine", "megatron", "--cpu-ranks", "2", "--teacher", tmp_path / name]
        words += [
            "--corpus",
            caches / "corpus",
            "--out",
            tmp_path / f"{name}-cache",
            "--values",
            "f32",
            "--top-k",
            "20",
        ]
        words += ["--accept-teacher-loss", "--no-progress", "model.expert_model_parallel_size=2"]
        assert cli.main([str(word) for word in words]) == 0
    quantised, true = (CacheReader(tmp_path / f"{name}-cache") for name in ("mxfp4", "bf16"))
    for found, expected in zip(*(reader.read(np.array([[0, 993]])) for reader in (quantised, true)), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert quantised.manifest.teacher["weights"] != true.manifest.teacher["weights"]


def assert_same(path: Path, reference: Path) -> None:
    """Ids equal but for near ties, log-probabilities within 1e-5, at both temperatures."""
    for found, expected in zip(rows(path), rows(reference), strict=True):
        assert np.array_equal(found.tokens, expected.tokens)
        differ = (found.ids != expected.ids).any(1)
        near_ties = np.abs(np.diff(expected.logprobs[differ], axis=1)).min(1, initial=1) < 1e-5
        assert near_ties.all() and differ.mean() < 0.05
        assert np.abs(found.logprobs - expected.logprobs).max() <= 1e-5
        assert np.abs(found.log_tail - expected.log_tail).max() <= 1e-5
