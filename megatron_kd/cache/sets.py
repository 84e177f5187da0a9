# SPDX-License-Identifier: Apache-2.0
"""Several caches that serve as one: of a corpus that grew, and of several teachers of one corpus.

In: open caches. Out: readers with the interface of `CacheReader`.

- A corpus that grew at its end: the cache of what was there stays as it is, another one holds the rows of the new
  documents (`LaterUnits`) and names the manifest it continues; `JoinedReader` puts their axes one after the other.
- Several teachers: `MixedReader` mixes their distributions with weights w_t. A row's entries are the union of the
  teachers' entries: p(v) = sum over the teachers that list v of w_t p_t(v), and the tail sum of w_t tail_t. That is
  the mixture exactly for every v that all teachers list; what a teacher does not list of v stays in the tail.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_kd.cache.corpus import UnitSource, unit_table_digest
from megatron_kd.cache.errors import BadSetting, CorruptBlock, IdentityMismatch
from megatron_kd.cache.manifest import Manifest, expect
from megatron_kd.cache.reader import CacheReader, Rows


class LaterUnits:
    """The units of a grown corpus that an earlier cache does not have.

    Args:
        units: of the grown corpus.
        first: the first of them that is new.
        continues: digest of the earlier cache's manifest.
    """

    def __init__(self, units: UnitSource, first: int, continues: str):
        self.kind, self.lengths, self._units = units.kind, units.lengths[first:], units
        self._first, self._continues = first, continues

    @classmethod
    def after(cls, units: UnitSource, earlier: Manifest) -> "LaterUnits":
        """The units that come after those of a cache.

        Raises:
            IdentityMismatch: the corpus does not begin with the units of that cache, or has no more.
        """
        first = earlier.units.get("first", 0) + earlier.units["count"]
        known = units.lengths[earlier.units.get("first", 0) : first]
        if units.kind != earlier.units["kind"] or unit_table_digest(known) != earlier.units["digest"]:
            raise IdentityMismatch(
                f"the corpus does not begin with the {first} {earlier.units['kind']}s of the cache to continue: it "
                "was changed, not only added to. Build its cache anew"
            )
        if len(units.lengths) == first or not units.lengths[first:].any():
            raise IdentityMismatch(f"the corpus has no tokens after the {first} units of the cache to continue")
        return cls(units, first, earlier.digest())

    def tokens(self, unit: int) -> np.ndarray:
        """Token ids of one unit."""
        return self._units.tokens(self._first + unit)

    def identity(self) -> dict[str, Any]:
        """Identity of the grown corpus, where these units begin, and the manifest that they continue."""
        identity = self._units.identity()
        more = {"first": self._first, "continues": self._continues}
        return identity | {"units": identity.get("units", {}) | more}


class _Several:
    """What the readers of several caches have in common."""

    def __init__(self, readers: Sequence[CacheReader]):
        self.readers = list(readers)
        first = self.readers[0].manifest
        for reader in self.readers[1:]:
            expect(reader.manifest, reader.path, {"vocab_real": first.vocab_real, "tokenizer": first.tokenizer})

    def check_serves(self, *, top_k: int | None = None, temperature: float = 1.0) -> None:
        """Raise `ServeError` if one of the caches cannot serve this."""
        for reader in self.readers:
            reader.check_serves(top_k=top_k, temperature=temperature)


class JoinedReader(_Several):
    """Caches of one corpus, each continuing the one before it.

    Args:
        readers: in the order of the corpus.

    Raises:
        IdentityMismatch: one does not continue the one before.
    """

    def __init__(self, readers: Sequence[CacheReader]):
        super().__init__(readers)
        for before, reader in zip(self.readers, self.readers[1:], strict=False):
            expect(reader.manifest, reader.path, {"units": {"continues": before.manifest.digest()}})
        self.path = self.readers[-1].path
        self._starts = np.cumsum([0, *(reader.n_rows for reader in self.readers)])
        self.n_rows = int(self._starts[-1])
        last = self.readers[-1].manifest
        count = sum(reader.manifest.units["count"] for reader in self.readers)
        self.manifest = dataclasses.replace(last, rows=self.n_rows, units={**last.units, "first": 0, "count": count})

    def expect(self, **fields: Any) -> None:
        """As `CacheReader.expect`; what is of a corpus's end is checked of the last cache alone."""
        for reader in self.readers[:-1]:
            reader.expect(**{name: value for name, value in fields.items() if name not in ("corpus", "units", "rows")})
        self.readers[-1].expect(**fields)

    def read(self, spans: np.ndarray, *, top_k: int | None = None, temperature: float = 1.0) -> Rows:
        """As `CacheReader.read`, on the joined axis. Without `top_k`, as many entries as every cache has."""
        top_k = min(reader.manifest.top_k for reader in self.readers) if top_k is None else top_k
        pieces = []
        for start, length in np.asarray(spans).tolist():
            while length > 0 or not pieces:
                part = min(max(int(np.searchsorted(self._starts, start, side="right")) - 1, 0), len(self.readers) - 1)
                last = part == len(self.readers) - 1
                count = length if last else min(length, int(self._starts[part + 1]) - start)
                pieces.append(self._read(part, start, count, top_k, temperature))
                start, length = start + count, length - count
        if not pieces:
            return self.readers[0].read(np.zeros((0, 2), np.int64), top_k=top_k, temperature=temperature)
        return Rows(*(np.concatenate(plane) for plane in zip(*pieces, strict=True)))

    def _read(self, part: int, start: int, count: int, top_k: int, temperature: float) -> Rows:
        offset = int(self._starts[part])
        try:
            return self.readers[part].read(np.array([[start - offset, count]]), top_k=top_k, temperature=temperature)
        except CorruptBlock as error:
            rows = error.rows and (error.rows[0] + offset, error.rows[1] + offset)
            raise CorruptBlock(str(error), rows=rows) from error


class MixedReader(_Several):
    """Caches of several teachers of one corpus, read as the mixture of their distributions.

    Args:
        readers: one a teacher.
        weights: one a teacher, positive; they are divided by their sum.

    Raises:
        IdentityMismatch: the caches are not of the same units.
        BadSetting: weights that are not positive, or not one a cache.
    """

    def __init__(self, readers: Sequence[CacheReader], weights: Sequence[float]):
        super().__init__(readers)
        if len(weights) != len(self.readers) or not all(0 < w < np.inf for w in weights):
            raise BadSetting(
                f"{len(self.readers)} caches are to be mixed and need as many positive weights, found {list(weights)}"
            )
        first = self.readers[0].manifest
        for reader in self.readers[1:]:
            expect(reader.manifest, reader.path, {"corpus": first.corpus, "units": first.units, "rows": first.rows})
        self.path, self.n_rows = self.readers[0].path, self.readers[0].n_rows
        self._log_weights = np.log(np.asarray(weights, np.float64) / np.sum(weights)).astype(np.float32)
        self.manifest = dataclasses.replace(first, top_k=sum(reader.manifest.top_k for reader in self.readers))

    def expect(self, **fields: Any) -> None:
        """As `CacheReader.expect`, of every cache."""
        for reader in self.readers:
            reader.expect(**fields)

    def read(self, spans: np.ndarray, *, top_k: int | None = None, temperature: float = 1.0) -> Rows:
        """As `CacheReader.read`; each teacher's distribution is taken at the temperature, then they are mixed.

        Args:
            spans, temperature: as for `CacheReader.read`.
            top_k: entries of the mixture that are kept, the rest joins the tail. Without it the whole union, as wide
                as all the caches' K together; entries that are not used have id -1 and log-probability -inf.
        """
        each = [reader.read(spans, temperature=temperature) for reader in self.readers]
        known = np.stack([np.isfinite(rows.logprobs[:, 0]) for rows in each])  # some may have no teacher there
        weights = np.where(known, self._log_weights[:, None], -np.inf)
        with np.errstate(invalid="ignore"):
            weights = weights - np.logaddexp.reduce(weights, axis=0)
        weights = np.where(known, weights, -np.inf).astype(np.float32)
        ids = np.concatenate([rows.ids for rows in each], axis=1)
        values = np.concatenate([rows.logprobs + w[:, None] for rows, w in zip(each, weights, strict=True)], axis=1)
        tails = np.stack([rows.log_tail + w for rows, w in zip(each, weights, strict=True)])
        tail = np.where(known.any(0), np.logaddexp.reduce(tails, axis=0), 0).astype(np.float32)
        ids, values = unite(np.where(np.isfinite(values), ids, -1), values)
        if top_k is not None:
            tail = np.logaddexp(tail, np.logaddexp.reduce(values[:, top_k:], axis=1, initial=-np.inf))
            ids, values = ids[:, :top_k], values[:, :top_k]
        return Rows(each[0].tokens, np.ascontiguousarray(ids), np.ascontiguousarray(values), tail)

    def check_serves(self, *, top_k: int | None = None, temperature: float = 1.0) -> None:
        """Raise `ServeError` if the mixture has fewer entries, or a cache does not serve the temperature."""
        widest = max(self.readers, key=lambda reader: reader.manifest.top_k)
        if top_k is None or top_k > self.manifest.top_k:
            widest.check_serves(top_k=top_k, temperature=temperature)
        for reader in self.readers:
            reader.check_serves(temperature=temperature)


def unite(ids: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Add up the entries of a row that have the same id, and order them.

    Args:
        ids: int32 [n, m]; -1 where there is no entry.
        values: float32 [n, m] log masses; -inf where there is no entry.

    Returns:
        The same shapes: each id once, largest mass first, equal ones by id; then what is not used.
    """
    order = np.argsort(ids, axis=1, kind="stable")
    ids, values = np.take_along_axis(ids, order, 1), np.take_along_axis(values, order, 1)
    starts = np.ones(ids.shape, bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    flat = np.flatnonzero(starts)
    if not len(flat):
        return ids, values
    sums = np.logaddexp.reduceat(values.reshape(-1), flat).astype(np.float32)
    ids, out = np.where(starts, ids, -1), np.full(values.shape, -np.inf, np.float32)
    out.reshape(-1)[flat] = sums
    out[ids < 0] = -np.inf
    order = np.lexsort((ids, -out), axis=1)
    return np.take_along_axis(ids, order, 1).astype(np.int32), np.take_along_axis(out, order, 1)


def combine(
    readers: Sequence[CacheReader], weights: Sequence[float] | None = None
) -> list[CacheReader | JoinedReader | MixedReader]:
    """One reader a corpus: caches that continue others are joined to them, those of one corpus are mixed.

    Args:
        readers: open caches, in any order.
        weights: one a cache; only the proportions between teachers of one corpus matter. None: one teacher a corpus.

    Raises:
        IdentityMismatch: a cache continues one that is not there.
        BadSetting: several teachers of one corpus without weights, or weights that do not fit.
    """
    if weights is not None and len(weights) != len(readers):
        raise BadSetting(f"{len(readers)} caches need as many weights, found {list(weights)}")
    weight_of = dict(zip((id(reader) for reader in readers), weights or [1.0] * len(readers), strict=True))
    by_digest = {reader.manifest.digest(): reader for reader in readers}
    continued = {reader.manifest.units.get("continues") for reader in readers}
    groups: dict[str, list[tuple[Any, float]]] = {}
    for reader in readers:
        if reader.manifest.digest() in continued:
            continue
        chain = [reader]
        while (wanted := chain[0].manifest.units.get("continues")) is not None:
            if wanted not in by_digest:
                raise IdentityMismatch(
                    f"{chain[0].path} holds only the rows that were added to a corpus; name the cache it continues "
                    f"too (its manifest has digest {wanted})"
                )
            chain.insert(0, by_digest[wanted])
        whole = reader if len(chain) == 1 else JoinedReader(chain)
        corpus = repr((whole.manifest.corpus, whole.manifest.units["kind"], whole.n_rows))
        groups.setdefault(corpus, []).append((whole, weight_of[id(reader)]))
    result = []
    for members in groups.values():
        if len(members) > 1 and weights is None:
            paths = ", ".join(str(reader.path) for reader, _ in members)
            raise BadSetting(f"{paths} are of one corpus; state the weights with which their teachers are to be mixed")
        result.append(MixedReader(*zip(*members, strict=True)) if len(members) > 1 else members[0][0])
    return result
