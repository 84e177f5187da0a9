# SPDX-License-Identifier: Apache-2.0
"""Whether every part of a corpus that a run asks for has a document. Imports nothing of Megatron.

In: `dataset.split` and corpora. Out: nothing, or an error. Megatron gives documents to training, validation and test
by the split, rounded; of a part that gets none it makes epochs without end, and the run hangs without a word.
"""

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

from megatron_kd.cache.corpus import count_sequences
from megatron_kd.errors import ConfigError

_PARTS = ("training", "validation", "test")


def check_split(split: str, prefixes: Iterable[str]) -> None:
    """Refuse a split that leaves a part of a corpus without a document. A corpus that is not there is left to others.

    Raises:
        ConfigError: names the split, the part, the corpus and its number of documents.
    """
    bounds = split_bounds(split)
    for prefix in prefixes:
        if not Path(f"{prefix}.idx").is_file():
            continue
        count = count_sequences(prefix)
        for part, (first, last) in zip(_PARTS, itertools.pairwise(bounds), strict=True):
            if last > first and round(last * count) <= round(first * count):
                raise ConfigError(
                    f"dataset.split={split} leaves the {part} part without one of the {count} documents of {prefix}, "
                    "and Megatron would wait for it forever. Give it a larger share, or none: "
                    'dataset.split="100,0,0" with validation.eval_iters=0.'
                )


def split_bounds(split: str) -> list[float]:
    """Where the three parts of "80,20,0" begin and end, as shares from 0 to 1: [0, 0.8, 1, 1].

    Raises:
        ConfigError: it has no part above 0.
    """
    weights = [float(word) for word in re.findall(r"[.0-9]+", split)][: len(_PARTS)]
    weights += [0.0] * (len(_PARTS) - len(weights))
    if not sum(weights) > 0:
        raise ConfigError(f"dataset.split={split!r}: expected up to three shares with commas between, such as 98,2,0.")
    return [0.0, *itertools.accumulate(weight / sum(weights) for weight in weights)]
