# SPDX-License-Identifier: Apache-2.0
"""What every importer makes of its source: sequences of tokens with the teacher's top K after each of them.

In: ids and log-probabilities as a source has them, in any order along K, ragged or not. Out: `Record`s in the order a
cache wants. No source knows the mass outside its K; `with_tail` derives it where the values are good enough.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xxhash

from megatron_kd.cache.errors import ImportRefused
from megatron_kd.cache.tile import rows_with_repeats

RESOLUTION = {"f32": 1e-6, "f16": 1e-3, "bf16": 8e-3, "approximate": 1e-2}
"""How well 1 - sum(p) is known for values of each precision: the least mass that a derived tail gets."""


@dataclass(frozen=True)
class Record:
    """One sequence of a source."""

    where: str
    """File and place in it, for messages."""
    tokens: np.ndarray | None
    """int64 [n]; None if the source does not say."""
    ids: np.ndarray
    """int64 [m, K], most likely first; 0 where there is no entry. Row i describes the token after position i."""
    logprobs: np.ndarray
    """float32 [m, K], not increasing along K; -inf where there is no entry."""

    def digest(self) -> str:
        """xxh3-128 of the rows."""
        state = xxhash.xxh3_128(np.ascontiguousarray(self.ids, "<i8"))
        state.update(np.ascontiguousarray(self.logprobs, "<f4"))
        return state.hexdigest()


class Source(Protocol):
    """A place that records come from."""

    precision: str
    """Key of `RESOLUTION`: how exact its values are."""
    settings: dict[str, Any]
    """What it says of itself; goes into the manifest."""

    def __iter__(self) -> Iterator[tuple[Any, Record]]:
        """All records, each with a handle that `load` takes."""
        ...

    def load(self, handle: Any) -> Record:
        """One record again."""
        ...


def make_record(
    where: str, tokens: np.ndarray | None, ids: np.ndarray, logprobs: np.ndarray, *, predicts: str = "next"
) -> Record:
    """Order the entries of each row and check their number.

    Args:
        where: for messages.
        tokens: [n].
        ids, logprobs: [m, K]; -inf marks no entry.
        predicts: `next`: row i is about token i + 1; `same`: row i is about token i, and row 0 about nothing.

    Raises:
        ImportRefused: NaN, positive log-probabilities, or a number of rows that does not fit the tokens.
    """
    if ids.shape != logprobs.shape or ids.ndim != 2 or not ids.shape[1]:
        raise ImportRefused(f"{where}: ids {ids.shape} and log-probabilities {logprobs.shape} must be equal [rows, K]")
    if predicts == "same":
        if tokens is not None and len(ids) != len(tokens):
            raise ImportRefused(f"{where}: {len(ids)} rows for {len(tokens)} tokens: the rows are not complete")
        ids, logprobs = ids[1:], logprobs[1:]
    if tokens is not None and not len(tokens) - 1 <= len(ids) <= len(tokens):
        raise ImportRefused(
            f"{where}: {len(ids)} rows for {len(tokens)} tokens, expected {max(len(tokens) - 1, 0)} or {len(tokens)}: "
            "the rows are not complete, or belong to another text"
        )
    logprobs = np.asarray(logprobs, np.float32)
    if not (logprobs <= 1e-3).all():  # NaN fails too
        row = int(np.flatnonzero(~(logprobs <= 1e-3).all(1))[0])
        raise ImportRefused(f"{where}, row {row}: log-probabilities must not be positive or NaN; are these logits?")
    there = np.isfinite(logprobs)
    if not there.any(1).all():
        row = int(np.flatnonzero(~there.any(1))[0])
        raise ImportRefused(f"{where}, row {row}: no entry at all: the rows are not complete")
    logprobs = np.minimum(logprobs, 0)
    ids = np.where(there, ids, 0).astype(np.int64)
    unordered = ~(logprobs[:, 1:] < logprobs[:, :-1]).all(1)  # ties are put in the order of their ids
    order = np.lexsort((ids[unordered], -logprobs[unordered]), axis=-1)
    for plane in (ids, logprobs):
        plane[unordered] = np.take_along_axis(plane[unordered], order, -1)
    repeated = rows_with_repeats(ids, logprobs)
    if repeated.any():
        raise ImportRefused(f"{where}, row {int(repeated.argmax())}: an id occurs twice among the entries")
    return Record(where, None if tokens is None else np.asarray(tokens, np.int64), ids, logprobs)


def with_tail(record: Record, precision: str) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and log tail that together hold a mass of 1.

    The tail is 1 - sum(p), but at least the `RESOLUTION` of the values; where that makes more than 1, all are scaled.

    Returns:
        float64 [m, K] and [m].

    Raises:
        ImportRefused: the mass of a row exceeds 1 by more than five times the resolution.
    """
    floor = RESOLUTION[precision]
    logprobs = record.logprobs.astype(np.float64)
    mass = np.exp(logprobs).sum(-1)
    if (mass > 1 + 5 * floor).any():
        row = int(np.argmax(mass))
        raise ImportRefused(
            f"{record.where}, row {row}: the entries hold a mass of {mass[row]:.4f}; log-probabilities of one "
            "distribution hold at most 1. Were they taken at another temperature, or renormalised?"
        )
    tail = np.maximum(1 - mass, floor)
    scale = np.log(mass + tail)
    return logprobs - scale[:, None], np.log(tail) - scale
