# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning examples as the units of a cache, and where the rows of an example lie, by its tokens.

In: token sequences with the positions that carry loss. Out: a `UnitSource` of kind `example`, and in the cache's
folder `examples.npy`: two lines (key, first row) an example, sorted by key, 32 bytes. One key is a digest of the
tokens the model is fed, from the first to the last that carries loss. What a causal teacher says there depends on
these tokens alone, so whoever is fed them again, in whatever order, batch, packing or layout, is served, and examples
with equal tokens are one. So is whoever is fed the beginning of an example, cut elsewhere: the other key is a digest
up to the first token that carries loss, and the tokens that the cache holds decide.

A wrong row would take a collision of 64 bits: those of the cache's own examples are refused when it is built, and any
other ends the run when the stored tokens are compared with the batch's. Costs memory for all tokens while a cache is
built, and the table in a training process.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import xxhash

from megatron_kd.cache.errors import CorpusError, CorruptFile
from megatron_kd.cache.files import digest_bytes
from megatron_kd.cache.manifest import Manifest
from megatron_kd.cache.store import Store

NAME = "examples.npy"


_WHOLE, _HEAD = 0, 1


def example_key(tokens: np.ndarray, kind: int = _WHOLE) -> int:
    """Digest of a token sequence, 64 bits; of an example's head another one than of a whole example."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens, "<u4"), seed=kind)


class ExampleUnits:
    """Each distinct example is a unit, up to the last position that carries loss; what carries none is left out.

    Args:
        sequences: tokens as the model is fed them, integers [n], and their loss mask, bool [n].
        tokenizer: identity of the tokenizer that made them; None if unknown.

    Raises:
        CorpusError: no example carries loss, or two different ones have the same key.
    """

    kind = "example"

    def __init__(
        self,
        sequences: Iterable[tuple[np.ndarray, np.ndarray]],
        *,
        tokenizer: dict[str, Any] | None = None,
    ):
        self._tokens: list[np.ndarray] = []
        self._stored: list[np.ndarray] = []
        self._tokenizer = tokenizer
        known: dict[int, int] = {}
        for tokens, mask in sequences:
            if len(tokens := tokens[: last(mask)]):
                self._add(np.asarray(tokens, np.uint32), np.asarray(mask, bool)[: len(tokens)], known)
        if not known:
            raise CorpusError("the fine-tuning data has no example with a position that carries loss")
        self.lengths = np.array([len(tokens) for tokens in self._tokens], np.int64)
        self.table = self._table(known)

    def _add(self, tokens: np.ndarray, mask: np.ndarray, known: dict[int, int]) -> None:
        unit = known.setdefault(example_key(tokens), len(self._tokens))
        if unit == len(self._tokens):
            self._tokens.append(tokens)
            self._stored.append(mask)
        elif not np.array_equal(self._tokens[unit], tokens):
            raise CorpusError(f"examples {unit} and another have the same 64-bit digest; leave one of them out")
        else:
            self._stored[unit] = self._stored[unit] | mask

    def _table(self, known: dict[int, int]) -> np.ndarray:
        """Keys and first rows, uint64 [2 * n, 2], by key."""
        starts = (np.cumsum(self.lengths) - self.lengths).tolist()
        lines = [(key, starts[unit]) for key, unit in known.items()]
        for start, tokens, stored in zip(starts, self._tokens, self._stored, strict=True):
            lines.append((example_key(tokens[: int(np.argmax(stored)) + 1], _HEAD), start))
        return np.array(sorted(lines), np.uint64)

    def tokens(self, unit: int) -> np.ndarray:
        """Token ids of one example."""
        return self._tokens[unit]

    def stored(self, unit: int) -> np.ndarray:
        """Positions that carry loss, bool [length]."""
        return self._stored[unit]

    def identity(self) -> dict[str, Any]:
        """Digests of the tokens, of the positions that carry loss, and of the table of keys."""
        tokens, stored = xxhash.xxh3_128(), xxhash.xxh3_128()
        for unit in range(len(self.lengths)):
            tokens.update(self._tokens[unit])
            stored.update(np.packbits(self._stored[unit]))
        identity = {
            "corpus": {
                "data_digest": tokens.hexdigest(),
                "n_tokens": int(self.lengths.sum()),
                "n_units": len(self.lengths),
            },
            "units": {"stored": stored.hexdigest(), "examples": digest_bytes(encode(self.table))},
        }
        return identity | {"tokenizer": self._tokenizer} if self._tokenizer else identity


def last(mask: np.ndarray) -> int:
    """How many positions there are up to the last that is set."""
    where = np.flatnonzero(mask)
    return int(where[-1]) + 1 if len(where) else 0


def encode(table: np.ndarray) -> bytes:
    """Content of examples.npy."""
    return np.ascontiguousarray(table, "<u8").tobytes()


def publish_table(store: Store, data: bytes) -> None:
    """Put a table into the cache; one that is there stays."""
    if not store.exists(NAME):
        with store.draft(NAME, [data]) as draft:
            draft.publish()


def read_table(store: Store, manifest: Manifest) -> bytes | None:
    """The table of a cache of examples; None of another cache.

    Raises:
        CorruptFile: it is not the one that the manifest describes, or is missing.
    """
    wanted = manifest.units.get("examples")
    if wanted is None:
        return None
    if not store.exists(NAME):
        raise CorruptFile(f"{store.where(NAME)} is missing; run the same `megatron-kd cache build` again")
    size = 32 * manifest.corpus["n_units"]

    def read() -> bytes:
        with contextlib.closing(store.open(NAME)) as file:
            if file.size != size:
                raise CorruptFile(
                    f"{store.where(NAME)} has {file.size} bytes, expected {size}: restore it from a copy"
                )
            data = bytearray(size)
            file.fill([memoryview(data)], 0, size)
        if (found := digest_bytes(data)) != wanted:
            raise CorruptFile(
                f"{store.where(NAME)} has digest {found}, the manifest says {wanted}: restore it from a copy"
            )
        return bytes(data)

    return store.twice(read)


class ExampleTable:
    """Where the rows of an example begin.

    Args:
        data: what `read_table` returned.
        n_rows: length of the axis.
        read: for a first row and a number of rows, the tokens stored there.
    """

    def __init__(self, data: bytes, n_rows: int, read: Callable[[int, int], np.ndarray]):
        self._keys, self._starts = np.frombuffer(data, "<u8").reshape(-1, 2).T.copy()
        self._ends = np.append(np.unique(self._starts[self._starts < n_rows])[1:], np.uint64(n_rows)).astype(np.int64)
        self._n_rows, self._read = n_rows, read

    def find(self, tokens: np.ndarray, first: int) -> int | None:
        """First row of an example that is, or begins with, these tokens; None if there is none.

        Args:
            tokens: integers [n], up to the last position that carries loss.
            first: the first position that carries loss.
        """
        for start in self._lines(example_key(tokens)):
            if start + len(tokens) <= self._n_rows:
                return start
        for start in self._lines(example_key(tokens[: first + 1], _HEAD)):
            end = int(self._ends[np.searchsorted(self._ends, start, side="right")]) if start < self._n_rows else 0
            if start + len(tokens) <= end and np.array_equal(self._read(start, len(tokens)), tokens):
                return start
        return None

    def _lines(self, key: int) -> list[int]:
        span = slice(*(int(np.searchsorted(self._keys, np.uint64(key), side=side)) for side in ("left", "right")))
        return self._starts[span].tolist()
