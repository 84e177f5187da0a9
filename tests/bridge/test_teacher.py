# SPDX-License-Identifier: Apache-2.0
"""A Megatron teacher at every layout writes the cache that the Hugging Face producer writes."""

from pathlib import Path

import numpy as np
import pytest

from megatron_kd import dryrun
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
    from megatron_kd.teacher.huggingface import build_cache

    units = DocumentUnits(Corpus(root / "corpus"))
    build_cache(hf, units, root / "transformers", accept_teacher_loss=True, progress=False, **teachers.OPTIONS)
    dryrun.run_ranks(teachers.build_all, 4, args=(hf, root / "corpus", root))
    return root


def rows(path: Path):
    reader = CacheReader(path)
    spans = np.array([[0, reader.n_rows]])
    return reader.read(spans), reader.read(spans, temperature=2.0)


@pytest.mark.parametrize("layout", teachers.LAYOUTS)
def test_the_cache_is_that_of_transformers(caches, layout):
    for found, expected in zip(rows(caches / layout), rows(caches / "transformers"), strict=True):
        assert np.array_equal(found.tokens, expected.tokens)
        differ = (found.ids != expected.ids).any(1)
        near_ties = np.abs(np.diff(expected.logprobs[differ], axis=1)).min(1, initial=1) < 1e-5
        assert near_ties.all() and differ.mean() < 0.05
        assert np.abs(found.logprobs - expected.logprobs).max() <= 1e-5
        assert np.abs(found.log_tail - expected.log_tail).max() <= 1e-5
