# SPDX-License-Identifier: Apache-2.0
"""The manifest: everything that must match between a cache, the corpus it annotates and the run that reads it.

In: a unit source and descriptions of tokenizer and teacher. Out: a `Manifest` (a few kB of JSON) and the tile table.
Identity is by content, never by path or name, and nothing in it depends on who writes, when, or on how many ranks.
"""

import dataclasses
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.cache.corpus import UnitSource, cut_tiles, unit_table_digest
from megatron_kd.cache.errors import BadSetting, CorruptFile, FutureVersion, IdentityMismatch, NotACache
from megatron_kd.cache.files import decode_record, digest_bytes, encode_record, node_name, parse_json
from megatron_kd.cache.layout import CODECS, FORMAT_VERSION, VALUE_DTYPES, RowFormat, id_hi_bits
from megatron_kd.cache.store import Store, open_store, when_visible

_FORMAT = "megatron-kd-cache"
_JSON_TYPES = {
    dict: "an object",
    int: "an integer",
    str: "a string",
    list: "a list",
    bool: "true or false",
    float: "a number with a point",
}
_MAX_TILES = 1 << 22
"""4 million tiles of a million tokens; their table has 64 MiB."""
_MAX_ROW_BYTES = 1 << 21
"""A row of a whole vocabulary of 300,000 in f32 fits; a block of 512 such rows has at most 1 GiB."""


@dataclass(frozen=True)
class Manifest:
    """Identity and format of a cache."""

    corpus: dict[str, Any]
    """`index_digest`, `data_digest`, `n_tokens`, `n_units` of the indexed dataset (free for other unit sources)."""
    units: dict[str, Any]
    """`kind`, `count`, `digest` of the lengths, and what else the source pins (seed, ...)."""
    context: dict[str, Any]
    """What the teacher saw before a token: `{"kind": "unit"}`, or `{"kind": "window", "window": W, "stride": S}`."""
    tokenizer: dict[str, Any]
    """See `tokenizer_identity`; empty if unknown."""
    teacher: dict[str, Any]
    """`repo`, `revision`, `weights`, `dtype`, `engine`, `version`."""
    vocab_real: int
    """Ids that can occur; the distribution is over these."""
    vocab_padded: int
    """Rows of the teacher's output projection."""
    top_k: int
    values: str
    """`f16`, `f32` or `u8`."""
    id_hi_bits: int
    temperatures: list[float]
    """Temperatures besides 1 that the cache serves."""
    codec: str
    """`raw` or `zstd`."""
    ragged: bool
    """Whether rows may have fewer than K entries, or none."""
    top_p: float
    """A row keeps no more entries than hold this mass; 1 keeps all K."""
    rows: int
    """Length of the token axis."""
    tiles: dict[str, Any]
    """`count`, `tokens` (the target size) and `digest` of tiles.npy."""

    @property
    def row_format(self) -> RowFormat:
        """The part of the manifest that decides the planes of a shard."""
        return RowFormat(self.top_k, self.values, self.id_hi_bits, tuple(self.temperatures), self.codec, self.ragged)

    def to_json(self) -> bytes:
        """Content of manifest.json."""
        return encode_record({"format": _FORMAT, "version": FORMAT_VERSION, **dataclasses.asdict(self)})

    def digest(self) -> str:
        """xxh3-128 of manifest.json; shards, commits and the seal carry it. Computed once."""
        if (known := getattr(self, "_digest", None)) is None:
            object.__setattr__(self, "_digest", known := digest_bytes(self.to_json()))
        return known

    @classmethod
    def from_json(cls, data: bytes, name: str = "manifest.json") -> "Manifest":
        """Read manifest.json strictly.

        Raises:
            NotACache, FutureVersion, CorruptFile.
        """
        header = parse_json(data, name)
        if header.get("format") != _FORMAT:
            raise NotACache(
                f"{name} is not the manifest of a teacher cache: format is {header.get('format')!r}, not {_FORMAT!r}"
            )
        version = header.get("version")
        if type(version) is int and version > FORMAT_VERSION:
            raise FutureVersion(
                f"{name} has format version {version}; this megatron_kd reads up to {FORMAT_VERSION}. Update "
                "megatron_kd"
            )
        body = decode_record(data, name)
        fields = {field.name: field.type for field in dataclasses.fields(cls)}
        body = {key: value for key, value in body.items() if key not in ("format", "version")}
        if type(version) is not int or version != FORMAT_VERSION or body.keys() != fields.keys():
            wrong = sorted(body.keys() ^ fields.keys()) or f"version {version!r}"
            raise CorruptFile(f"{name} is not a version {FORMAT_VERSION} manifest: missing or unknown: {wrong}")
        manifest = cls(**body)
        manifest._check(name)
        return manifest

    def _check(self, name: str) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            wanted = getattr(field.type, "__origin__", field.type)
            if type(value) is not wanted:
                raise CorruptFile(f"{name}: {field.name} must be {_JSON_TYPES[wanted]}, found {_short(value)}")
            if wanted is dict and not _is_plain(value):
                raise CorruptFile(
                    f"{name}: {field.name} must hold texts, numbers and at most one level of objects of them, found "
                    f"{_short(value)}"
                )
        ranges = {
            "vocab_real": (1, 2**31),
            "vocab_padded": (self.vocab_real, 2**31),
            "top_k": (1, self.vocab_real),
            "rows": (1, 2**62),
        }
        for field, (low, high) in ranges.items():
            if not low <= getattr(self, field) <= high:
                raise CorruptFile(f"{name}: {field} must lie in [{low}, {high}], found {_short(getattr(self, field))}")
        bits = id_hi_bits(self.vocab_real)
        if self.values not in VALUE_DTYPES or self.codec not in CODECS or self.id_hi_bits != bits:
            raise CorruptFile(
                f"{name}: values {_short(self.values)}, codec {_short(self.codec)}, id_hi_bits "
                f"{_short(self.id_hi_bits)}; known are "
                f"values {sorted(VALUE_DTYPES)}, codecs {sorted(CODECS)}, and id_hi_bits {bits} for this vocabulary"
            )
        if not 0 < self.top_p <= 1 or (self.top_p < 1 and not self.ragged):
            raise CorruptFile(f"{name}: top_p must lie in (0, 1], and be 1 unless ragged; found {self.top_p}")
        if any(type(t) is not float or not 0 < t < 1e6 or t == 1 for t in self.temperatures):
            raise CorruptFile(
                f"{name}: temperatures must be positive numbers other than 1, found {_short(self.temperatures)}"
            )
        if self.row_format.bytes_per_row > _MAX_ROW_BYTES:
            raise CorruptFile(
                f"{name}: top_k {self.top_k} and {len(self.temperatures)} temperatures make rows of "
                f"{self.row_format.bytes_per_row} bytes; at most {_MAX_ROW_BYTES} are read"
            )
        required = {"tiles": {"digest": str, "count": int, "tokens": int}, "units": {"kind": str, "digest": str}}
        for field, keys in required.items():
            for key, wanted in keys.items():
                if type(value := getattr(self, field).get(key)) is not wanted:
                    raise CorruptFile(f"{name}: {field}.{key} must be {_JSON_TYPES[wanted]}, found {_short(value)}")
        count, most = self.tiles["count"], min(self.rows, _MAX_TILES)
        if not 1 <= count <= most:
            raise CorruptFile(f"{name}: tiles.count must lie in [1, {most}], found {_short(count)}")


def load_manifest(cache: Path | str | Store, *, wait_s: float = 0.0) -> Manifest:
    """The manifest of a cache; `wait_s` is how long to wait for it to show on this node.

    Raises:
        NotACache, FutureVersion, CorruptFile.
    """
    store, name = open_store(cache), "manifest.json"

    def load() -> Manifest:
        return Manifest.from_json(store.read(name), store.where(name))

    try:
        return when_visible(store, name, wait_s, lambda: store.twice(load))
    except FileNotFoundError as error:
        raise not_a_cache(store, name, wait_s) from error


def not_a_cache(store: Store, name: str, wait_s: float) -> NotACache:
    """The error that a cache's file is missing."""
    return NotACache(
        f"{store.path} is not a teacher cache: node {node_name()} sees no {store.where(name)} (waited {wait_s:g} s)"
    )


def make_manifest(
    units: UnitSource,
    *,
    teacher: dict[str, Any],
    tokenizer: dict[str, Any] | None,
    vocab_real: int,
    vocab_padded: int,
    top_k: int,
    values: str = "f16",
    codec: str = "raw",
    top_p: float = 1.0,
    temperatures: tuple[float, ...] = (),
    tile_tokens: int = 1 << 20,
    context: dict[str, Any] | None = None,
) -> tuple[Manifest, np.ndarray]:
    """Describe the cache of `units` under a teacher.

    Args:
        units: source of the token axis; reads the whole corpus once for its digest.
        teacher: `repo`, `revision`, `weights`, `dtype`, `engine`, `version`.
        tokenizer: see `tokenizer_identity`; None if unknown.
        vocab_real: ids that can occur.
        vocab_padded: rows of the teacher's output projection.
        top_k: entries a row; at most `vocab_real`.
        values: `f16`, `f32` or `u8`.
        codec: `raw` or `zstd`.
        top_p: a row keeps no more entries than hold this mass; 1 keeps all K.
        temperatures: temperatures besides 1 to serve.
        tile_tokens: target size of a tile.
        context: what the teacher sees; default the whole unit up to the token.

    Returns:
        The manifest and the tile table int64 [n_tiles + 1, 2] (see `cut_tiles`).

    Raises:
        BadSetting: a setting out of its range.
    """
    if not 1 <= top_k <= vocab_real:
        raise BadSetting(f"top_k must lie in [1, {vocab_real}], the real vocabulary; found {top_k}")
    if bad := [t for t in temperatures if not 0 < t < 1e6]:
        raise BadSetting(f"temperatures must be positive, found {bad}")
    if values not in VALUE_DTYPES:
        raise BadSetting(f"values must be one of {sorted(VALUE_DTYPES)}, found {values!r}")
    if codec not in CODECS or not 0 < top_p <= 1:
        raise BadSetting(f"codec must be one of {CODECS} and top_p lie in (0, 1], found {codec!r} and {top_p}")
    tiles = cut_tiles(units.lengths, tile_tokens)
    identity = units.identity()
    manifest = Manifest(
        corpus=identity.get("corpus", {}),
        units={
            "kind": units.kind,
            "count": len(units.lengths),
            "digest": unit_table_digest(units.lengths),
            **identity.get("units", {}),
        },
        context=context or {"kind": "unit"},
        tokenizer=tokenizer or {},
        teacher=teacher,
        vocab_real=int(vocab_real),
        vocab_padded=int(vocab_padded),
        top_k=int(top_k),
        values=values,
        id_hi_bits=id_hi_bits(vocab_real),
        temperatures=sorted({float(t) for t in temperatures} - {1.0}),
        codec=codec,
        ragged=top_p < 1 or hasattr(units, "stored"),
        top_p=float(top_p),
        rows=int(tiles[-1, 0]),
        tiles={"count": len(tiles) - 1, "tokens": int(tile_tokens), "digest": digest_bytes(encode_tiles(tiles))},
    )
    try:
        manifest._check("the new manifest")
    except CorruptFile as error:
        raise BadSetting(str(error)) from error
    return manifest, tiles


def encode_tiles(tiles: np.ndarray) -> bytes:
    """Content of tiles.npy."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.ascontiguousarray(tiles, "<i8"), version=(1, 0), allow_pickle=False)
    return stream.getvalue()


def decode_tiles(data: bytes, manifest: Manifest, name: str) -> np.ndarray:
    """Read tiles.npy; only the bytes the manifest's digest describes are accepted, so no header is ever parsed."""
    found = digest_bytes(data)
    if found != manifest.tiles["digest"]:
        raise CorruptFile(
            f"{name} has digest {found}, the manifest says {manifest.tiles['digest']}: restore it from a copy"
        )
    shape = (manifest.tiles["count"] + 1, 2)
    start = len(data) - 16 * shape[0]
    tiles = np.frombuffer(data, "<i8", offset=max(start, 0)) if start > 0 else np.empty(0, "<i8")
    if tiles.size != 2 * shape[0] or data != encode_tiles(tiles := tiles.reshape(shape)):
        raise CorruptFile(f"{name} is not the table of {shape[0] - 1} tiles that the manifest describes")
    ends = (manifest.rows, manifest.units.get("count", tiles[-1, 1]))
    if tiles[0].any() or tuple(tiles[-1].tolist()) != ends or (tiles[1:] <= tiles[:-1]).any():
        raise CorruptFile(
            f"{name}: tiles must be ascending from 0 to the manifest's {ends[0]} rows and {ends[1]} units"
        )
    return tiles


def _is_plain(value: dict[str, Any], depth: int = 1) -> bool:
    """Whether an object holds scalars, and objects of them down to `depth` levels."""
    return all(
        _is_plain(item, depth - 1) if isinstance(item, dict) and depth else not isinstance(item, dict | list)
        for item in value.values()
    )


def _short(value: Any) -> str:
    """A value from a file, for a message: escaped and at most 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def differences(found: Any, wanted: Any, field: str = "") -> list[tuple[str, Any, Any]]:
    """Fields of `wanted` that `found` has otherwise or not at all, as (dotted name, found, wanted)."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        result = []
        for key, value in wanted.items():
            result += differences(found.get(key), value, f"{field}.{key}" if field else key)
        return result
    return [] if found == wanted else [(field, found, wanted)]


def expect(manifest: Manifest, path: Path | str, fields: dict[str, Any]) -> None:
    """Raise `IdentityMismatch` unless the manifest has the given values; dicts are compared by the keys given.

    Raises:
        IdentityMismatch: names each field with both values.
        ValueError: a field no manifest has.
    """
    known = dataclasses.asdict(manifest)
    if unknown := sorted(fields.keys() - known.keys()):
        raise ValueError(f"a manifest has no field {unknown}; it has {sorted(known)}")
    wrong = differences(known, fields)
    if wrong:
        lines = [f"  {name}: the cache has {found!r}, expected {wanted!r}" for name, found, wanted in wrong]
        raise IdentityMismatch(
            f"the cache {path} does not belong to this use:\n"
            + "\n".join(lines)
            + "\nUse the cache that was built from the "
            "same corpus, tokenizer and settings, or build one into another folder"
        )


def tokenizer_identity(tokenizer: Any) -> dict[str, Any]:
    """Identity of a tokenizer by content, the same whether it came from tokenizer.json, GGUF or a slow implementation.

    Args:
        tokenizer: anything with `get_vocab()` and optionally `chat_template`, as Hugging Face's tokenizers.

    Returns:
        `digest` of all (token, id) pairs by id, added tokens included; `vocab_size`, the largest id plus one;
        `chat_template`, the template's digest or None.
    """
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    template = getattr(tokenizer, "chat_template", None)
    return {
        "digest": digest_bytes(json.dumps(vocab).encode()),
        "vocab_size": vocab[-1][1] + 1,
        "chat_template": digest_bytes(json.dumps(template, sort_keys=True).encode()) if template else None,
    }
