# SPDX-License-Identifier: Apache-2.0
"""Parquet files: a Hugging Face dataset with id and log-probability columns, and DistillKit's compressed rows.

In: `*.parquet` files; pyarrow reads them, and no extension type or pandas metadata of theirs is acted upon. Out:
records, one a row of the table. Memory is four row groups.

DistillKit packs a position's K values and K ids into two byte strings. Values, by its `compression_config.yaml`:
`exact_k` values of type `exact_dtype`; then, if there are `polynomial_terms`, one coefficient of `term_dtype` each, of
a function of t = 0, 1, ... (0 to 1 with `normalize_t`) that the others follow; then for each of `residual_bins` a
scale and `num_elements` integers of `element_bits`, most significant bit first, offset by half their range, which
times the scale are added. With `delta_encoding` each value but the first is stored less the one before. Ids have
ceil(log2(d)) bits each, most significant first.
"""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.cache.errors import ImportRefused
from megatron_kd.cache.importers.records import Record, make_record

_MAX_GROUP_BYTES = 1 << 33
_DTYPES = {"float16": "<f2", "bfloat16": "<u2", "float32": "<f4", "float64": "<f8"}
_PRECISION = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f32"}


class _Tables:
    """Rows of the Parquet files of a folder."""

    columns: tuple[str, ...]

    def __init__(self, path: str | Path):
        try:
            import pyarrow.parquet
        except ImportError as error:
            raise ImportRefused("Parquet files are read with pyarrow: install megatron-kd[import]") from error
        self._parquet, path = pyarrow.parquet, Path(path)
        self._errors = (pyarrow.ArrowException, OSError, ValueError)
        self.files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
        if not self.files or not all(file.is_file() for file in self.files):
            raise ImportRefused(f"{path} is no file, and no folder with *.parquet files")
        self._group = lru_cache(maxsize=4)(self._read_group)

    def __iter__(self) -> Iterator[tuple[tuple[int, int, int], Record]]:
        for number, file in enumerate(self.files):
            for group in range(self._open(file).num_row_groups):
                for row in range(len(self._group(number, group)[0])):
                    yield (number, group, row), self.load((number, group, row))

    def load(self, handle: tuple[int, int, int]) -> Record:
        """The record of one row."""
        number, group, row = handle
        where = f"{self.files[number]}, row group {group}, row {row}"
        try:
            return self._record(where, *(column[row] for column in self._group(number, group)))
        except (*self._errors, TypeError, AttributeError) as error:
            raise ImportRefused(f"{where}: cannot be used: {error}") from error

    def _open(self, file: Path) -> Any:
        try:
            return self._parquet.ParquetFile(file)
        except self._errors as error:
            raise ImportRefused(f"{file} is not a Parquet file: {error}") from error

    def _read_group(self, number: int, group: int) -> list[Any]:
        file = self.files[number]
        table = self._open(file)
        absent = [name for name in self.columns if name not in table.schema_arrow.names]
        if absent:
            raise ImportRefused(f"{file} has no column {absent}; it has {table.schema_arrow.names}")
        size = table.metadata.row_group(group).total_byte_size
        if size > _MAX_GROUP_BYTES:
            raise ImportRefused(f"{file}, row group {group} has {size} bytes, more than {_MAX_GROUP_BYTES}")
        try:
            read = table.read_row_group(group, columns=list(self.columns))
        except self._errors as error:
            raise ImportRefused(f"{file}, row group {group} is damaged: {error}") from error
        return [read.column(name) for name in self.columns]

    def _record(self, where: str, tokens: Any, *columns: Any) -> Record:
        raise NotImplementedError


class Columns(_Tables):
    """A dataset with a column of token lists, one of lists of id lists and one of lists of log-probability lists.

    Args:
        path: file or folder.
        tokens, ids, logprobs: names of the columns.
        predicts: `next`: row i of a record is about token i + 1; `same`: about token i.
    """

    def __init__(self, path: str | Path, *, tokens: str, ids: str, logprobs: str, predicts: str):
        super().__init__(path)
        if predicts not in ("next", "same"):
            raise ImportRefused(f"rows predict the `next` or the `same` token, found {predicts!r}")
        self.columns, self._predicts = (tokens, ids, logprobs), predicts
        schema = self._open(self.files[0]).schema_arrow
        kind = "float" if logprobs not in schema.names else str(schema.field(logprobs).type)
        self.precision = "f16" if "halffloat" in kind else "f32"
        self.settings = {"format": "columns", "columns": ", ".join(self.columns), "predicts": predicts}

    def _record(self, where: str, tokens: Any, *columns: Any) -> Record:
        tokens = _numbers(tokens.values, np.int64)
        (ids, counts), (logprobs, others) = (_padded(c.values, d) for c, d in zip(columns, "if", strict=True))
        if not np.array_equal(counts, others):
            raise ImportRefused(f"{where}: ids and log-probabilities differ in number")
        return make_record(where, tokens, ids, logprobs, predicts=self._predicts)


def _numbers(array: Any, dtype: Any) -> np.ndarray:
    if array.null_count:
        raise ValueError("a number is missing")
    return array.to_numpy(zero_copy_only=False).astype(dtype)


def _padded(lists: Any, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Lists of lists as an array [rows, longest], padded with 0 or -inf, and the lists' lengths."""
    counts = np.array([0 if item is None else item for item in lists.value_lengths().to_pylist()], np.int64)
    flat = _numbers(lists.flatten(), np.int64 if kind == "i" else np.float32)
    out = np.full((len(counts), max(counts.max(initial=0), 1)), 0 if kind == "i" else -np.inf, flat.dtype)
    out[np.arange(out.shape[1]) < counts[:, None]] = flat
    return out, counts


class DistillKit(_Tables):
    """A folder that DistillKit's sampler wrote: `data_*.parquet` and `compression_config.yaml`."""

    columns = ("input_ids", "compressed_logprobs", "bytepacked_indices")

    def __init__(self, path: str | Path):
        super().__init__(path)
        self.config = _read_config(Path(path) / "compression_config.yaml")
        exact = self.config["exact_k"] == self.config["k"]
        self.precision = _PRECISION[self.config["exact_dtype"]] if exact else "approximate"
        self.settings = {"format": "distillkit", "config": repr(self.config)}

    def _record(self, where: str, tokens: Any, *columns: Any) -> Record:
        values, ids = (_bytes(column.values) for column in columns)
        if len(values) != len(ids):
            raise ImportRefused(f"{where}: {len(values)} rows of values, {len(ids)} of ids")
        config = self.config
        logprobs = decode_values(values, config, where)
        bits = int(np.ceil(np.log2(config["d"])))
        if ids.shape[1] != -(-config["k"] * bits // 8):
            raise ImportRefused(f"{where}: {ids.shape[1]} bytes of ids, {config['k']} ids of {bits} bits are expected")
        ids = unpack_bits(ids, bits, config["k"])
        return make_record(where, _numbers(tokens.values, np.int64), ids, np.minimum(logprobs, 0))


def _bytes(lists: Any) -> np.ndarray:
    """Lists of equally many bytes: uint8 [rows, bytes]."""
    counts = set(lists.value_lengths().to_pylist())
    if len(counts) != 1 or None in counts:
        raise ValueError(f"rows of different sizes: {sorted(map(str, counts))[:5]}")
    return _numbers(lists.flatten(), np.uint8).reshape(len(lists), counts.pop())


def _read_config(path: Path) -> dict[str, Any]:
    import yaml

    from megatron_kd.cache.files import read_bounded

    try:
        config = yaml.safe_load(read_bounded(path, follow_links=True))
        defaults = {"exact_dtype": "float32", "term_dtype": "float32", "polynomial_terms": None}
        defaults |= {"delta_encoding": True, "normalize_t": False, "error_diffusion": False}
        config = defaults | config
        k, exact = config["k"], config["exact_k"]
        sizes = [1 <= config["d"] <= 1 << 31, 1 <= k <= 1 << 16, 0 <= exact <= k]
        dtypes = [config["exact_dtype"], config["term_dtype"], *(b["scale_dtype"] for b in config["residual_bins"])]
        bits = [1 <= b["element_bits"] <= 64 for b in config["residual_bins"]]
        elements = [b["num_elements"] for b in config["residual_bins"]]
        terms = [t in ("sqrt", "exp") or type(t) is int for t in config["polynomial_terms"] or ()]
        known = all(
            sizes + bits + terms + [d in _DTYPES for d in dtypes] + [type(e) is int and e > 0 for e in elements]
        )
        if not known or sum(elements) > k - exact:
            raise ValueError("values out of range")
    except FileNotFoundError as error:
        raise ImportRefused(f"{path} is missing: without it DistillKit's bytes mean nothing") from error
    except (yaml.YAMLError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ImportRefused(f"{path} is no compression config of DistillKit: {error!r}") from error
    return config


def decode_values(data: np.ndarray, config: dict[str, Any], where: str) -> np.ndarray:
    """DistillKit's values: uint8 [m, bytes] -> float32 [m, k]."""
    m, at = len(data), 0

    def take(count: int, dtype: str) -> np.ndarray:
        nonlocal at
        size = count * np.dtype(_DTYPES[dtype]).itemsize
        part = np.ascontiguousarray(data[:, at : at + size])
        if part.shape[1] != size:
            raise ImportRefused(f"{where}: {data.shape[1]} bytes of values are fewer than the config describes")
        at += size
        part = part.view(_DTYPES[dtype]) if m else np.zeros((0, count), _DTYPES[dtype])
        return (part.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else part.astype(np.float64)

    exact = take(config["exact_k"], config["exact_dtype"])
    rest = np.zeros((m, config["k"] - config["exact_k"]))
    if terms := config["polynomial_terms"]:
        rest += take(len(terms), config["term_dtype"]) @ _terms(terms, rest.shape[1], config["normalize_t"])
    first = 0
    for block in config["residual_bins"]:
        scale, bits, count = take(1, block["scale_dtype"]), block["element_bits"], block["num_elements"]
        size = -(-count * bits // 8)
        steps = unpack_bits(data[:, at : at + size], bits, count).astype(np.float64)
        rest[:, first : first + count] += (2 * steps - 1 if bits == 1 else steps - 2.0 ** (bits - 1)) * scale
        at, first = at + size, first + count
    if at != data.shape[1]:
        raise ImportRefused(f"{where}: {data.shape[1]} bytes of values, the config describes {at}")
    values = np.concatenate([exact, rest], axis=1)
    return (np.cumsum(values, axis=1) if config["delta_encoding"] else values).astype(np.float32)


def _terms(terms: list[Any], count: int, normalize: bool) -> np.ndarray:
    """The functions of t that the coefficients belong to: [terms, count]."""
    t = np.linspace(0, 1, count) if normalize else np.arange(count, dtype=np.float64)
    with np.errstate(divide="ignore", over="ignore"):
        return np.stack([t**term if type(term) is int else getattr(np, term)(t) for term in terms])


def unpack_bits(data: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Integers of `bits` bits each, most significant first: uint8 [m, bytes] -> int64 [m, count]."""
    if data.shape[1] * 8 < count * bits:
        raise ImportRefused(f"{count} integers of {bits} bits do not fit into {data.shape[1]} bytes")
    out = np.zeros((len(data), count), np.int64)
    stream = np.unpackbits(np.ascontiguousarray(data), axis=-1)[:, : count * bits].reshape(len(data), count, bits)
    for bit in range(bits):
        out = out << 1 | stream[:, :, bit]
    return out
