# SPDX-License-Identifier: Apache-2.0
"""Sets of caches in the real loop: a corpus that grew, and teachers that are mixed."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron_kd.dryrun import RankFailed, run_ranks
from tests.bridge.corpora import build_cache, made_up_rows
from tests.bridge.test_loop import steps


def build_grown(corpus: Path, folder: Path) -> None:
    """Caches of the corpus's first documents and of the others, which continue them."""
    from megatron_kd.bridge.corpus import write_indexed_dataset
    from megatron_kd.cache import CacheReader, Corpus, DocumentUnits
    from megatron_kd.cache.sets import LaterUnits

    whole = DocumentUnits(Corpus(corpus))
    first = len(whole.lengths) // 3
    write_indexed_dataset(folder / "before", [whole.tokens(i) for i in range(first)], np.uint16)
    build_cache(folder / "old", DocumentUnits(Corpus(folder / "before")))
    old = CacheReader(folder / "old")
    later = LaterUnits.after(whole, old.manifest)
    build_cache(folder / "new", later, rows=lambda at, k: made_up_rows(at + old.n_rows, k))


def test_a_grown_corpus_and_a_mixture_of_equal_teachers_train_as_one_cache(world, tmp_path):
    alone = steps(world)
    run_ranks(build_grown, 1, args=(world.corpus, tmp_path))
    shutil.copytree(world.cache, tmp_path / "again")
    both = [str(tmp_path / "new"), str(tmp_path / "old")]
    np.testing.assert_allclose(steps(world, kd={"cache": both}), alone, atol=1e-5, rtol=0)
    mixed = {"cache": [str(world.cache), str(tmp_path / "again")], "cache_weights": [2.0, 1.0]}
    np.testing.assert_allclose(steps(world, kd=mixed), alone, atol=1e-4, rtol=0)
    with pytest.raises(RankFailed, match="state the weights"):
        steps(world, kd={"cache": mixed["cache"]})
