# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's cached logits, version 1: a folder of `cp{C}_dp{D}__{last iteration}.tar`.

In: the tars that the saver's ranks wrote. Out: one record for each sample of the training run, in the run's order; so
the units are the samples of the same run (`SampleUnits` of its dataset, or `IndexedSamples` of the files it left), and
a record's number is its unit.

A tar holds `_meta.json` (`hash`, `identifiers`, `saver`) and for each iteration `{i}.pt.zst`: a zstd frame around a
torch file with lists over the M micro-batches: `values` [S/CP, B, K] (fp16, bf16 or fp32), `indices_low` uint16,
`bit_17` bool. Context-parallel rank c holds chunks c and 2·CP-1-c of 2·CP. Place b of micro-batch m of data-parallel
rank d in iteration i is sample ((i·M + m)·DP + d)·B + b. Entries that top-p dropped have index -1, stored as 131,071,
and value -1e4.

There are no tokens in it. What can be checked is: every iteration from the first to the last is there once for each
rank, and the labels fit the rows better than if either were shifted.
"""

import json
import re
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.cache.corpus import UnitSource
from megatron_kd.cache.errors import ImportRefused
from megatron_kd.cache.importers.records import Record, make_record
from megatron_kd.cache.importers.torch_file import read_tensors

_TAR = re.compile(r"cp(\d+)_dp(\d+)__(\d+)\.tar")
_MEMBER = re.compile(r"(\d+)\.pt\.zst")
_MAX_PAYLOAD_BYTES = 1 << 32
_DROPPED = -1e3
_PRECISION = {"fp16": "f16", "bf16": "bf16", "fp32": "f32"}


class MegatronTars:
    """The tars of one saving run.

    Args:
        path: their folder.
        units: samples of the run the saver was part of, in the order they were consumed; used to check the alignment.

    Raises:
        ImportRefused: iterations or ranks are missing or doubled, tars are of different runs, or the rows belong to
            other samples.
    """

    def __init__(self, path: str | Path, units: UnitSource):
        self.path, self._units = Path(path), units
        self._members: dict[tuple[int, int, int], tuple[Path, int, int]] = {}
        metas: dict[str, Any] = {}
        tars = [(match, file) for file in sorted(self.path.glob("*.tar")) if (match := _TAR.fullmatch(file.name))]
        if not tars:
            raise ImportRefused(f"{self.path} holds no cp*_dp*__*.tar, as version 1 of the saver writes")
        for match, file in tars:
            metas[file.name] = self._index(file, int(match[1]), int(match[2]))
        first = next(iter(metas.values()))
        if other := next((name for name, meta in metas.items() if meta != first), None):
            raise ImportRefused(f"{self.path / other} is of another run than {tars[0][1]}: their _meta.json differ")
        self._ranks()
        saver = first.get("saver", {})
        self.precision = _PRECISION.get(saver.get("save_dtype"), "f16")
        self.settings = {"format": "megatron-tar", "hash": str(first.get("hash")), "saver": json.dumps(saver)}
        self.settings["identifiers"] = json.dumps(first.get("identifiers"))
        self._payload = lru_cache(maxsize=4)(self._read_payload)
        self._check_alignment()

    def _index(self, file: Path, cp: int, dp: int) -> dict[str, Any]:
        """Note where the iterations of a tar are; returns its `_meta.json`."""
        meta = None
        try:
            with tarfile.open(file, "r:") as tar:
                for member in tar:
                    if member.type != tarfile.REGTYPE:
                        raise ImportRefused(f"{file} holds {member.name!r}, which is no plain file")
                    if member.name == "_meta.json" and member.size < 1 << 16:
                        meta = json.loads(tar.extractfile(member).read())
                    elif match := _MEMBER.fullmatch(member.name):
                        key = (int(match[1]), cp, dp)
                        if key in self._members:
                            raise ImportRefused(f"{file} repeats iteration {key[0]} of {self._members[key][0]}")
                        self._members[key] = (file, member.offset_data, member.size)
        except (tarfile.TarError, ValueError, OSError, RecursionError) as error:
            raise ImportRefused(f"{file} is damaged: {error}") from error
        if not isinstance(meta, dict):
            raise ImportRefused(f"{file} has no _meta.json, so nothing says what run it is of")
        return meta

    def _ranks(self) -> None:
        """Sizes of the saver's groups and the iterations; nothing is inferred beyond what must be complete."""
        iterations, cps, dps = (sorted(set(part)) for part in zip(*self._members, strict=True))
        self.iterations, self._cp, self._dp = iterations, len(cps), len(dps)
        wanted = range(iterations[0], iterations[0] + len(iterations))
        missing = [i for i in wanted if i not in set(iterations)] or [
            key for key in ((i, c, d) for i in iterations for c in cps for d in dps) if key not in self._members
        ]
        if missing or iterations[0] != 0 or cps != list(range(self._cp)) or dps != list(range(self._dp)):
            raise ImportRefused(
                f"{self.path} is not complete: iterations {iterations[0]} to {iterations[-1]}, context-parallel ranks "
                f"{cps}, data-parallel ranks {dps}; missing {missing[:3] or 'the first'}. Rows are found by counting, "
                "so all must be there"
            )

    def __iter__(self) -> Iterator[tuple[tuple[int, int, int, int, int], Record]]:
        sample = 0
        for iteration in self.iterations:
            batches = len(self._payload(iteration, 0, 0)["values"])
            for batch in range(batches):
                size = self._payload(iteration, 0, 0)["values"][batch].shape[1]
                for rank in range(self._dp):
                    for place in range(size):
                        if sample >= len(self._units.lengths):
                            raise ImportRefused(
                                f"{self.path} has more samples than the {len(self._units.lengths)} of the run: the "
                                "batch size was another, or this is another run"
                            )
                        handle = (sample, iteration, batch, rank, place)
                        yield handle, self.load(handle)
                        sample += 1

    def load(self, handle: tuple[int, int, int, int, int]) -> Record:
        """The record of one sample."""
        sample, iteration, batch, rank, place = handle
        where = f"{self.path}, iteration {iteration}, micro-batch {batch}, data-parallel rank {rank}, sample {place}"
        chunks: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for cp in range(self._cp):
            payload = self._payload(iteration, cp, rank)
            values = payload["values"][batch][:, place].astype(np.float32)
            ids = payload["indices_low"][batch][:, place].astype(np.int64)
            ids |= payload["bit_17"][batch][:, place].astype(np.int64) << 16
            halves = zip(np.array_split(values, 2), np.array_split(ids, 2), strict=True)
            chunks |= dict(zip((cp, 2 * self._cp - 1 - cp), halves, strict=True))
        widest = max(part.shape[1] for part, _ in chunks.values())
        values, ids = (
            np.concatenate([_widen(chunks[i][j], widest, fill) for i in sorted(chunks)])
            for j, fill in ((0, -np.inf), (1, 0))
        )
        values[values <= _DROPPED] = -np.inf
        if len(values) != self._units.lengths[sample]:
            raise ImportRefused(f"{where}: {len(values)} rows, the run's samples have {self._units.lengths[sample]}")
        return make_record(where, None, ids, values)

    def _read_payload(self, iteration: int, cp: int, dp: int) -> dict[str, list[np.ndarray]]:
        file, offset, size = self._members[iteration, cp, dp]
        with open(file, "rb") as stream:
            stream.seek(offset)
            data = _decompress(stream.read(size), f"{file}, iteration {iteration}")
        body = read_tensors(data, f"{file}, iteration {iteration}")
        names, shapes = ("values", "indices_low", "bit_17"), []
        for name in names:
            tensors = body.get(name) if isinstance(body, dict) else None
            if not isinstance(tensors, list) or not all(isinstance(t, np.ndarray) and t.ndim == 3 for t in tensors):
                raise ImportRefused(f"{file}, iteration {iteration}: {name} is no list of tensors [S, B, K]")
            shapes.append([t.shape for t in tensors])
        if not shapes[0] == shapes[1] == shapes[2]:
            raise ImportRefused(f"{file}, iteration {iteration}: values and ids have different shapes")
        return body

    def _check_alignment(self) -> None:
        """The token that follows must be found among the entries more often than the ones before and after it."""
        hits: dict[int, list[float]] = defaultdict(list)
        for _, (handle, record) in zip(range(16), self, strict=False):
            tokens = np.asarray(self._units.tokens(handle[0]), np.int64)
            for shift in (0, 1, 2):
                labels = tokens[shift : shift + len(tokens) - 2]
                hits[shift].append((record.ids[: len(labels)] == labels[:, None]).any(1).mean())
        rates = {shift: float(np.mean(rate)) for shift, rate in hits.items()}
        if not rates[1] > max(rates[0], rates[2]):
            raise ImportRefused(
                f"{self.path}: of the tokens that follow a row {rates[1]:.0%} are among its entries, of the tokens at "
                f"its own place {rates[0]:.0%}, of those two further {rates[2]:.0%}. These rows were made from other "
                "samples than those given"
            )


def _widen(part: np.ndarray, width: int, fill: float) -> np.ndarray:
    return np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=fill)


def _decompress(data: bytes, where: str) -> bytes:
    try:
        import zstandard
    except ImportError as error:
        raise ImportRefused("these tars hold zstd frames: install megatron-kd[import]") from error
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= _MAX_PAYLOAD_BYTES:
            raise ImportRefused(f"{where}: the frame states {size} bytes; at most {_MAX_PAYLOAD_BYTES} are read")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise ImportRefused(f"{where} is damaged: {error}") from error
