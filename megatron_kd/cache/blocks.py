# SPDX-License-Identifier: Apache-2.0
"""One block of a blocked shard: rows to bytes and back, as `layout` specifies.

In: planes of up to 512 rows, with all K entries a row. Out: the stored bytes, and the same planes again. Costs one
payload of memory (222 kB at K=100); unpacking takes about 0.7 microseconds a row on one core, half of it zstd.
"""

from collections.abc import Sequence

import numpy as np
import zstandard

from megatron_kd.cache.codecs import ABSENT, first_entries, join_ids, split_ids
from megatron_kd.cache.layout import RowFormat

LEVEL = 1
"""zstd level that blocks are written with; after the rearrangement higher ones gain nothing. Readers take any."""
_NO_MASS = {"f16": -np.inf, "f32": -np.inf, "u8": 255}


class BadBlock(ValueError):
    """Bytes that no writer makes."""


class Scratch:
    """Buffers of one thread, used again: what `take` returned is overwritten when that name is taken next."""

    def __init__(self):
        self._buffers: dict[str, np.ndarray] = {}
        self._rows: tuple[RowFormat | None, int, dict[str, np.ndarray]] = (None, 0, {})
        self._spare = memoryview(b"")
        self.decompressor = zstandard.ZstdDecompressor()

    def take(self, name: str, shape: tuple[int, ...], dtype: np.dtype | type) -> np.ndarray:
        """An array with undefined content."""
        dtype = np.dtype(dtype)
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < size:
            buffer = self._buffers[name] = np.empty(size, np.uint8)
        return buffer[:size].view(dtype).reshape(shape)

    def rows(self, row_format: RowFormat, rows: int) -> dict[str, np.ndarray]:
        """Planes of so many rows, as `row_planes` describes them."""
        known, room, planes = self._rows
        if known != row_format or room < rows:
            planes = {name: np.empty(shape, dtype) for name, shape, dtype in row_planes(row_format, rows)}
            self._rows = row_format, rows, planes
        return planes if room == rows else {name: plane[:rows] for name, plane in planes.items()}

    def spare(self, size: int) -> memoryview:
        """Bytes that nobody looks at twice."""
        if len(self._spare) < size:
            self._spare = memoryview(bytearray(size))
        return self._spare


def row_planes(row_format: RowFormat, rows: int) -> list[tuple[str, tuple[int, ...], np.dtype]]:
    """Planes of rows in memory: as stored, but for whole `ids` i32 [rows, K] in a ragged cache."""
    planes = [(plane.name, plane.shape, plane.dtype) for plane in row_format.data_planes(rows)]
    if row_format.ragged:
        planes = [plane for plane in planes if plane[0] not in ("ids_lo", "ids_hi")]
        planes.append(("ids", (rows, row_format.top_k), np.dtype(np.int32)))
    return planes


def pack(planes: dict[str, np.ndarray], row_format: RowFormat, compressor: zstandard.ZstdCompressor | None) -> bytes:
    """The stored bytes of a block.

    Args:
        planes: as `row_planes` describes, [n, ...].
        row_format: of the cache.
        compressor: for codec `zstd`; `compressor()` makes it.
    """
    if row_format.ragged:
        kept = first_entries(planes["count"], row_format.top_k)
        low, high = split_ids(planes["ids"][kept][None], row_format.id_hi_bits)
        planes = planes | {"logprobs": planes["logprobs"][kept], "ids_lo": low, "ids_hi": high}
    items = {p.name: np.ascontiguousarray(planes[p.name]).reshape(-1) for p in row_format.data_planes(1)}
    if compressor is None:
        return b"".join(plane.tobytes() for plane in items.values())
    frame = compressor.compress(b"".join(_rearrange(name, plane).tobytes() for name, plane in items.items()))
    low = items["ids_lo"].view(np.uint8)[::2].tobytes()
    return len(low).to_bytes(4, "little") + low + frame


def compressor(row_format: RowFormat) -> zstandard.ZstdCompressor | None:
    """What `pack` needs; None for codec `raw`."""
    return zstandard.ZstdCompressor(level=LEVEL) if row_format.codec == "zstd" else None


def _rearrange(name: str, items: np.ndarray) -> np.ndarray:
    if name == "logprobs":
        whole = items.view(f"<u{items.itemsize}")
        items = whole.copy()
        items[1:] -= whole[:-1]
    if name == "ids_lo":
        return items.view(np.uint8)[1::2]
    if items.itemsize > 1:
        items = np.ascontiguousarray(items.view(np.uint8).reshape(-1, items.itemsize).T)
    return items


def unpack(data: memoryview, row_format: RowFormat, out: dict[str, np.ndarray], scratch: Scratch) -> None:
    """Fill the planes `out` (see `row_planes`; contiguous, all of the same n rows) from a block's stored bytes.

    Raises:
        BadBlock: the bytes are not a block of n rows.
    """
    rows = len(out["tokens"])
    low = None
    if row_format.codec == "zstd":
        entries = int.from_bytes(data[:4], "little")
        low, frame = data[4 : 4 + entries], data[4 + entries :]
        data = _decompress(frame, rows * row_format.bytes_per_row, scratch)
    payload = _Payload(data, low, scratch)
    if not row_format.ragged:
        for plane in row_format.data_planes(rows):
            payload.fill(plane.name, out[plane.name].reshape(-1))
    else:
        _unpack_ragged(payload, row_format, rows, out)
    if payload.left:
        raise BadBlock(f"{payload.left} bytes are left over")


def _unpack_ragged(payload: "_Payload", row_format: RowFormat, rows: int, out: dict[str, np.ndarray]) -> None:
    payload.fill("count", out["count"])
    if rows and out["count"].max() > row_format.top_k:
        raise BadBlock(f"a row has {out['count'].max()} entries, more than {row_format.top_k}")
    entries = int(out["count"].sum(dtype=np.int64))
    sizes = {"logprobs": entries, "ids_lo": entries, "ids_hi": row_format.id_hi_bytes(entries)}
    flat = {}
    for plane in row_format.data_planes(rows)[1:]:
        if plane.name in sizes:
            target = payload.scratch.take(plane.name + "/entries", (sizes[plane.name],), plane.dtype)
            flat[plane.name] = target
        else:
            target = out[plane.name].reshape(-1)
        payload.fill(plane.name, target)
    ids = payload.scratch.take("ids/entries", (1, entries), np.int32)
    join_ids(flat["ids_lo"][None], flat["ids_hi"][None], row_format.id_hi_bits, ids)
    kept = first_entries(out["count"], row_format.top_k)
    for name, fill, values in (
        ("logprobs", _NO_MASS[row_format.values], flat["logprobs"]),
        ("ids", ABSENT, ids[0]),
    ):
        out[name].fill(fill)
        out[name][kept] = values


def _decompress(frame: memoryview, largest: int, scratch: Scratch) -> memoryview:
    """Content of a zstd frame; what it says of its own size is checked before memory is taken."""
    try:
        stated = zstandard.get_frame_parameters(frame)
        if stated.content_size > largest or stated.window_size > 2 * largest + 1024:
            raise BadBlock(f"its zstd frame states {stated.content_size} bytes, more than {largest}")
        if stated.content_size == 0:
            raise BadBlock("its zstd frame is empty or states no size")
        return memoryview(scratch.decompressor.decompress(frame, max_output_size=largest, allow_extra_data=False))
    except zstandard.ZstdError as error:
        raise BadBlock(f"it is not a zstd frame: {error}") from error


class _Payload:
    """The planes of a payload, taken off one after the other; rearranged if the ids' lowest bytes come apart."""

    def __init__(self, data: memoryview, low: memoryview | None, scratch: Scratch):
        self._data, self._low, self._at, self.scratch = data, low, 0, scratch

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def fill(self, name: str, out: np.ndarray) -> None:
        """Fill the flat array `out` from the bytes that come next."""
        size = out.nbytes if self._low is None or name != "ids_lo" else out.size
        if size > self.left:
            raise BadBlock(f"{name} needs {size} bytes, {self.left} are there")
        stored = np.frombuffer(self._data, np.uint8, size, self._at)
        self._at += size
        if self._low is None:
            out.view(np.uint8)[:] = stored
        elif name == "ids_lo":
            if len(self._low) != size:
                raise BadBlock(f"it has {len(self._low)} low bytes of ids for {size} ids")
            _merge([np.frombuffer(self._low, np.uint8), stored], out)
        elif name == "logprobs":
            whole = np.dtype(f"<u{out.itemsize}")
            merged = self.scratch.take("merged", out.shape, whole)
            _merge(stored.reshape(out.itemsize, -1), merged)
            np.add.accumulate(merged, out=out.view(whole))
        else:
            _merge(stored.reshape(out.itemsize, -1), out)


def _merge(runs: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Items [m] from runs [m] of their bytes, the lowest first; two bytes the fast way."""
    if out.dtype == np.uint16:
        np.copyto(out, runs[1])
        np.left_shift(out, 8, out=out)
        np.bitwise_or(out, runs[0], out=out)
    else:
        places = out.view(np.uint8).reshape(-1, out.itemsize)
        for place, run in enumerate(runs):
            places[:, place] = run
