# SPDX-License-Identifier: Apache-2.0
"""Parts of a corpus: their bounds are Megatron's, and one without a document is refused."""

import pytest

from megatron_kd import dryrun
from megatron_kd.bridge.splits import check_split, split_bounds
from megatron_kd.errors import ConfigError
from tests.cache.conftest import random_documents, write_corpus

SPLITS = ["100,0,0", "80,20,0", "9999,8,2", "969, 30, 1", "1,1,1", "99/1", "0,50,50", "0.8,0.1,0.1", "7"]


def of_megatron() -> list[list[tuple[float, float] | None]]:
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    return [convert_split_vector_to_split_matrix(parse_and_normalize_split(split)) for split in SPLITS]


def test_bounds_are_megatrons():
    for split, parts in zip(SPLITS, dryrun.run_ranks(of_megatron, 1)[0], strict=True):
        bounds = split_bounds(split)
        for at, part in enumerate(parts):
            if part is None:
                assert bounds[at] == bounds[at + 1], split
            else:
                assert bounds[at : at + 2] == pytest.approx(part), split


def test_a_part_without_a_document_is_refused(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", random_documents(1, count=5))
    for split in ("100,0,0", "80,20,0", "60,20,20"):
        check_split(split, [corpus.prefix])
    check_split("9999,8,2", [tmp_path / "not-there"])
    with pytest.raises(ConfigError, match="leaves the validation part without one of the 5 documents"):
        check_split("9999,8,2", [corpus.prefix])
    with pytest.raises(ConfigError, match="leaves the test part"):
        check_split("80,15,5", [corpus.prefix])
    with pytest.raises(ConfigError, match="such as 98,2,0"):
        check_split("0,0,0", [corpus.prefix])
