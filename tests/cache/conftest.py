# SPDX-License-Identifier: Apache-2.0
"""A small corpus, and teacher rows computed in fp64 straight from random logits."""

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from megatron_kd.cache import CacheWriter, Corpus, DocumentUnits, make_manifest
from tests.cache.store_server import server, store_server  # noqa: F401  fixtures

TEACHER = {
    "repo": "toy",
    "revision": "1",
    "weights": "none",
    "dtype": "float64",
    "engine": "numpy",
    "version": "2",
}
TOKENIZER = {"digest": "abc", "vocab_size": 200_000, "chat_template": None}
VOCAB = 200_000


def write_corpus(prefix: Path, documents: list[np.ndarray], code: int = 4) -> Corpus:
    """An indexed dataset, written by hand from the format's description."""
    dtype = {4: np.int32, 8: np.uint16}[code]
    lengths = np.array([len(d) for d in documents], np.int32)
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]) * np.dtype(dtype).itemsize
    marks = np.arange(len(documents) + 1, dtype=np.int64)
    head = b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([code])
    head += len(lengths).to_bytes(8, "little") + len(marks).to_bytes(8, "little")
    Path(f"{prefix}.idx").write_bytes(head + lengths.tobytes() + pointers.astype("<i8").tobytes() + marks.tobytes())
    Path(f"{prefix}.bin").write_bytes(np.concatenate(documents).astype(dtype).tobytes())
    return Corpus(prefix)


def random_documents(seed: int, count: int = 40, longest: int = 900) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(1, longest)) for _ in range(count)]


SUPPORT = 150
_KINDS = 499


@lru_cache
def _table() -> tuple[np.ndarray, np.ndarray]:
    """499 distributions over 150 ids spread over the vocabulary, in fp64, most likely first."""
    kind, entry = np.arange(_KINDS)[:, None], np.arange(SUPPORT)
    logits = 4 * np.sin(kind * 0.1 + entry**1.5) + 1e-6 * entry
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    order = np.argsort(-logp, axis=-1)
    return (order * 1327 + kind * 7) % VOCAB, np.take_along_axis(logp, order, -1)


def teacher_rows(tokens: np.ndarray, top_k: int, temperatures: tuple[float, ...] = ()) -> dict[str, np.ndarray]:
    """Rows that depend on the token alone."""
    ids, logp = (table[np.asarray(tokens) % _KINDS] for table in _table())
    rest = logp[:, top_k:]
    with np.errstate(divide="ignore"):
        tails = [np.log(np.exp(rest / t).sum(-1)) for t in (1.0, *temperatures)]
    planes = {"tokens": tokens, "ids": ids[:, :top_k], "logprobs": logp[:, :top_k], "log_tail": tails[0]}
    return planes | {"tail_T": np.stack(tails[1:], -1)} if temperatures else planes


def unit_tokens(units: DocumentUnits, first: int, end: int) -> np.ndarray:
    return np.concatenate([units.tokens(unit) for unit in range(first, end)])


def fill(writer: CacheWriter, units: DocumentUnits, tiles: list[int]) -> None:
    for tile in tiles:
        tokens = unit_tokens(units, int(writer.tiles[tile, 1]), int(writer.tiles[tile + 1, 1]))
        writer.write_tile(tile, teacher_rows(tokens, writer.manifest.top_k, tuple(writer.manifest.temperatures)))


def build(path: Path, corpus: Corpus, *, seal: bool = True, **settings) -> CacheWriter:
    settings = {"top_k": 100, "vocab_real": VOCAB, "vocab_padded": VOCAB, "tile_tokens": 4000} | settings
    units = DocumentUnits(corpus)
    manifest, tiles = make_manifest(units, teacher=TEACHER, tokenizer=TOKENIZER, **settings)
    writer = CacheWriter(path, manifest, tiles)
    fill(writer, units, writer.todo())
    if seal:
        writer.seal()
    return writer


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    return write_corpus(tmp_path / "corpus", random_documents(1))


@pytest.fixture
def cache(tmp_path, corpus) -> Path:
    """A sealed cache of the corpus: K=100, T in {1, 2}, five tiles or so."""
    build(tmp_path / "cache", corpus, temperatures=(2.0,))
    return tmp_path / "cache"
