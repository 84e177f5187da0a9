# SPDX-License-Identifier: Apache-2.0
"""A corpus in which two neighbouring tokens say where on the axis they stand, and a cache whose rows say it too.

So a test can tell which teacher row a training position ought to meet from the batch's tokens alone.
"""

from functools import cache
from pathlib import Path

import numpy as np

from megatron_kd.cache import CacheWriter, Corpus, DocumentUnits, make_manifest

VOCABULARY = 511
"""Real vocabulary; the tiny model pads it to 512."""
LETTERS = 120
TEACHER = {
    "repo": "made-up",
    "revision": "1",
    "weights": "none",
    "dtype": "float32",
    "engine": "numpy",
    "version": "1",
}


@cache
def pair_sequence(letters: int = LETTERS) -> np.ndarray:
    """A de Bruijn sequence of order 2: every ordered pair of the letters stands in it once. [letters ** 2]"""
    words = []
    for i in range(letters):
        words.append([i])
        words.extend([i, j] for j in range(i + 1, letters))
    return np.concatenate(words)


def write_pair_corpus(prefix: Path, *, documents: int = 60, seed: int = 0, dtype: type = np.uint16) -> Corpus:
    """An indexed dataset over `pair_sequence`, cut at random places, written with Megatron's own builder."""
    from megatron_kd.bridge.corpus import write_indexed_dataset

    tokens = pair_sequence()
    cuts = np.sort(np.random.default_rng(seed).choice(np.arange(1, len(tokens)), documents - 1, replace=False))
    write_indexed_dataset(prefix, np.split(tokens, cuts), dtype)
    return Corpus(prefix)


def made_up_rows(positions: np.ndarray, top_k: int) -> dict[str, np.ndarray]:
    """Teacher rows that depend on the axis position alone; ids [n, K], logprobs [n, K], log_tail [n]."""
    position, entry = positions[:, None].astype(np.int64), np.arange(top_k + 1)
    ids = (position * 7 + entry[:-1] * 3) % VOCABULARY
    scores = np.sin(position * 0.37 + entry) + np.where(entry == top_k, 1.0, 0.0) - 0.05 * entry
    logprobs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    return sorted_rows(ids, logprobs[:, :-1], logprobs[:, -1])


def sorted_rows(ids: np.ndarray, logprobs: np.ndarray, log_tail: np.ndarray) -> dict[str, np.ndarray]:
    """Entries in the order the cache wants: most likely first, ties by id."""
    order = np.lexsort((ids, -logprobs), axis=-1)
    return {
        "ids": np.take_along_axis(ids, order, -1),
        "logprobs": np.take_along_axis(logprobs, order, -1),
        "log_tail": log_tail,
    }


def build_cache(path: Path, units: DocumentUnits, *, top_k: int = 20, rows=made_up_rows, **settings) -> Path:
    """A sealed cache of `units` with `rows(positions, top_k)` for teacher."""
    settings = {
        "tokenizer": None,
        "vocab_real": VOCABULARY,
        "vocab_padded": 512,
        "tile_tokens": 4000,
    } | settings
    manifest, tiles = make_manifest(units, teacher=TEACHER, top_k=top_k, **settings)
    writer = CacheWriter(path, manifest, tiles)
    for tile in writer.todo():
        first, last = writer.tiles[tile], writer.tiles[tile + 1]
        tokens = np.concatenate([units.tokens(unit) for unit in range(first[1], last[1])])
        writer.write_tile(tile, {"tokens": tokens, **rows(np.arange(first[0], last[0]), top_k)})
    writer.seal()
    return path
