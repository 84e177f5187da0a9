# SPDX-License-Identifier: Apache-2.0
"""The corpus a cache belongs to, and the units its token axis is made of.

In: Megatron's indexed dataset, `<prefix>.bin` and `<prefix>.idx`. Out: tokens by position, lengths, content digests.
Needs numpy alone; opening costs 12 bytes of memory a sequence, tokens are read when asked for.

`.idx`: magic `MMIDIDX\\0\\0`, u64 version 1, u8 dtype code, u64 sequences, u64 document marks, i32 lengths, i64 byte
pointers, i64 document marks. `.bin`: the tokens, one sequence after the other. Megatron's GPTDataset calls each
*sequence* a document, and so does this module.
"""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from megatron_kd.cache.errors import BadSetting, CorpusError
from megatron_kd.cache.files import digest_bytes, digest_file, parse_json, read_bounded, read_exact

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def count_sequences(prefix: str | Path) -> int:
    """Sequences of an indexed dataset, from the first bytes of its index.

    Raises:
        CorpusError: it is no index.
    """
    idx = Path(f"{prefix}.idx")
    with open(idx, "rb") as file:
        return _counts(idx, file.read(_HEADER.size))[1]


def _counts(idx: Path, data: bytes) -> tuple[int, int, int]:
    """Dtype code, sequences and document marks, as an index begins."""
    if len(data) < _HEADER.size or data[:9] != _MAGIC:
        raise CorpusError(f"{idx} is not the index of a Megatron indexed dataset (wrong first bytes)")
    _, version, code, sequences, marks = _HEADER.unpack_from(data)
    if version != 1 or code not in _DTYPES:
        raise CorpusError(f"{idx} has version {version}, dtype code {code}; known are version 1, {list(_DTYPES)}")
    return code, sequences, marks


class Corpus:
    """A Megatron indexed dataset, read with numpy.

    Args:
        prefix: path without `.bin` or `.idx`.

    Raises:
        CorpusError: a file is missing or its parts do not fit together.
    """

    lengths: np.ndarray
    """int32 [n]: tokens of each sequence."""
    starts: np.ndarray
    """int64 [n + 1]: position of each sequence on the token axis, and the end of the last."""
    dtype: np.dtype
    """Type of the stored tokens."""

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        self._idx, self._bin = Path(f"{self.prefix}.idx"), Path(f"{self.prefix}.bin")
        self._digests: dict[Path, str] = {}
        for path in (self._idx, self._bin):
            if not path.is_file():
                raise CorpusError(
                    f"{path} does not exist; give the prefix of an indexed dataset, without .bin or .idx"
                )
        self._read_index(self._idx.read_bytes())
        size, expected = self._bin.stat().st_size, self.n_tokens * self.dtype.itemsize
        if size != expected:
            raise CorpusError(
                f"{self._bin} has {size} bytes; its index describes {expected}: they do not belong together"
            )
        self._fd = os.open(self._bin, os.O_RDONLY)

    def __del__(self):
        if (fd := getattr(self, "_fd", None)) is not None:
            os.close(fd)

    def __len__(self) -> int:
        return len(self.lengths)

    def _read_index(self, data: bytes) -> None:
        code, sequences, marks = _counts(self._idx, data)
        expected = _HEADER.size + 12 * sequences + 8 * marks
        if len(data) != expected:
            raise CorpusError(
                f"{self._idx} has {len(data)} bytes; {sequences} sequences and {marks} document marks make "
                f"{expected}. It is truncated, or a multimodal dataset, which has no teacher cache"
            )
        self.dtype = np.dtype(_DTYPES[code])
        self.lengths = np.frombuffer(data, "<i4", sequences, _HEADER.size)
        pointers = np.frombuffer(data, "<i8", sequences, _HEADER.size + 4 * sequences)
        if sequences and self.lengths.min() < 0:
            raise CorpusError(f"{self._idx} has a sequence of negative length")
        self.starts = np.zeros(sequences + 1, np.int64)
        np.cumsum(self.lengths, dtype=np.int64, out=self.starts[1:])
        if not np.array_equal(pointers, self.starts[:-1] * self.dtype.itemsize):
            raise CorpusError(
                f"{self._idx}: byte pointers are not the running sum of the lengths; rebuild the dataset"
            )

    @property
    def n_tokens(self) -> int:
        """Tokens of the whole corpus."""
        return int(self.starts[-1])

    def tokens(self, start: int, length: int) -> np.ndarray:
        """Tokens [start, start + length) of the axis, in the stored dtype."""
        if not 0 <= start <= start + length <= self.n_tokens:
            raise CorpusError(f"tokens [{start}, {start + length}) asked of {self.prefix}, which has {self.n_tokens}")
        out = np.empty(length, self.dtype)
        if length:
            read_exact(self._fd, memoryview(out), start * self.dtype.itemsize, str(self._bin))
        return out

    def index_digest(self) -> str:
        """xxh3-128 of the `.idx` file."""
        return self._digest(self._idx)

    def data_digest(self) -> str:
        """xxh3-128 of the `.bin` file (streamed: seconds per 10 GB; done once)."""
        return self._digest(self._bin)

    def _digest(self, path: Path) -> str:
        if path not in self._digests:
            self._digests[path] = digest_file(path)
        return self._digests[path]

    def tokenizer(self) -> dict[str, Any] | None:
        """What `note_tokenizer` stored beside the corpus, or None if nobody did."""
        path = Path(f"{self.prefix}.tokenizer.json")
        return parse_json(read_bounded(path, follow_links=True), str(path)) if path.is_file() else None


def note_tokenizer(prefix: str | Path, identity: dict[str, Any]) -> None:
    """Store beside a corpus which tokenizer made it, so that a cache with another one can be refused.

    Args:
        prefix: the corpus.
        identity: what `megatron_kd.cache.tokenizer_identity` returned.
    """
    Path(f"{prefix}.tokenizer.json").write_text(json.dumps(identity, indent=1, sort_keys=True) + "\n")


class UnitSource(Protocol):
    """What a producer consumes: the token axis is these units in a row; the teacher sees one unit at a time."""

    kind: str
    """`document`, `sample` or `example`."""
    lengths: np.ndarray
    """int64 [n]: tokens of each unit."""

    def tokens(self, unit: int) -> np.ndarray:
        """Token ids of one unit, [lengths[unit]].

        A source may have one more method, `stored(unit)`: bool [lengths[unit]], the positions that can carry loss. Of
        the others a cache keeps the token alone, some bytes instead of hundreds.
        """
        ...

    def identity(self) -> dict[str, Any]:
        """What pins the content, JSON values only.

        `corpus`; `units` where the lengths do not say it all (seed, order); `tokenizer` if it is known.
        """
        ...


class DocumentUnits:
    """Each sequence of a corpus is a unit."""

    kind = "document"

    def __init__(self, corpus: Corpus):
        self.corpus = corpus
        self.lengths = corpus.lengths.astype(np.int64)

    def tokens(self, unit: int) -> np.ndarray:
        """Token ids of one sequence."""
        return self.corpus.tokens(int(self.corpus.starts[unit]), int(self.lengths[unit]))

    def identity(self) -> dict[str, Any]:
        """Content digests of the corpus, independent of its path."""
        identity = {
            "corpus": {
                "index_digest": self.corpus.index_digest(),
                "data_digest": self.corpus.data_digest(),
                "n_tokens": self.corpus.n_tokens,
                "n_units": len(self.corpus),
            }
        }
        tokenizer = self.corpus.tokenizer()
        return identity | {"tokenizer": tokenizer} if tokenizer else identity


class FirstUnits:
    """The first `limit` units of a source, for a trial cache; the manifest says so."""

    def __init__(self, units: UnitSource, limit: int):
        if limit < 1:
            raise CorpusError(f"at least one unit is needed, limit is {limit}")
        self.kind, self.lengths, self._units = units.kind, units.lengths[:limit], units
        for name in ("stored", "table"):
            if hasattr(units, name):
                setattr(self, name, getattr(units, name))

    def tokens(self, unit: int) -> np.ndarray:
        """Token ids of one unit."""
        return self._units.tokens(unit)

    def identity(self) -> dict[str, Any]:
        """Identity of the whole source, with the number of units taken."""
        identity = self._units.identity()
        return identity | {"units": identity.get("units", {}) | {"limit": len(self.lengths)}}


class MaskedUnits:
    """A source of which only some positions are stored: the rest (prompts, padding) never carries loss.

    Args:
        units: the source.
        stored: for a unit's number, bool [length]: the positions that can carry loss. Part of the identity: all masks
            are made once for their digest.
    """

    def __init__(self, units: UnitSource, stored: Callable[[int], np.ndarray]):
        self.kind, self.lengths, self._units, self._stored = units.kind, units.lengths, units, stored

    def tokens(self, unit: int) -> np.ndarray:
        """Token ids of one unit."""
        return self._units.tokens(unit)

    def stored(self, unit: int) -> np.ndarray:
        """Positions of a unit that are stored, bool [length].

        Raises:
            CorpusError: the mask does not fit the unit.
        """
        mask = np.asarray(self._stored(unit))
        if mask.dtype != bool or mask.shape != (self.lengths[unit],):
            raise CorpusError(
                f"{self.kind} {unit} has {self.lengths[unit]} tokens; its mask is {mask.dtype} {mask.shape}, not bool"
            )
        return mask

    def identity(self) -> dict[str, Any]:
        """Identity of the source, with the digest of all masks."""
        state = xxhash.xxh3_128()
        for unit in range(len(self.lengths)):
            state.update(np.packbits(self.stored(unit)))
        identity = self._units.identity()
        return identity | {"units": identity.get("units", {}) | {"stored": state.hexdigest()}}


def cut_tiles(lengths: np.ndarray, tile_tokens: int) -> np.ndarray:
    """Cut the axis at unit boundaries into tiles of about `tile_tokens` tokens; depends on the lengths alone.

    A tile closes with the unit that reaches the next multiple of `tile_tokens`, so a unit is never split and the cut
    can be computed without a walk over the units.

    Returns:
        int64 [n_tiles + 1, 2]: first row and first unit of each tile; the last line is the end of both axes.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    if total == 0:
        raise CorpusError("the units hold no tokens: there is nothing to cache")
    if tile_tokens < 1:
        raise BadSetting(f"tile_tokens must be at least 1, found {tile_tokens}")
    marks = np.arange(tile_tokens, total, tile_tokens, dtype=np.int64)
    last_units = np.unique(np.append(np.searchsorted(ends, marks), len(ends) - 1))
    tiles = np.zeros((len(last_units) + 1, 2), np.int64)
    tiles[1:, 0], tiles[1:, 1] = ends[last_units], last_units + 1
    if len(tiles) > 2 and tiles[-1, 0] == tiles[-2, 0]:  # only empty units after the last mark
        tiles = np.delete(tiles, -2, axis=0)
    return tiles


def unit_table_digest(lengths: np.ndarray) -> str:
    """xxh3-128 of the unit lengths as little-endian int64."""
    return digest_bytes(np.ascontiguousarray(lengths, "<i8").tobytes())
