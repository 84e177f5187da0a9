# SPDX-License-Identifier: Apache-2.0
"""What each codec costs: bytes a token, distance from the exact rows, and speed on one core.

In: rows of a made-up teacher of 201,088 ids, or of a cache that is there. Out: one line a codec. Costs some 20 s and
as much disk as `--rows` tokens take in the largest codec; the files stay in the page cache, so no disk is measured.

The made-up teacher: gaps between ranks r and r + 1 are exponential with mean s / r (the order statistics of a power
law p(r) ~ r**-s), s differs from token to token, and often the first id stands out; ids are drawn from the frequent
ones (log-uniform), from a topic of each document, and from the rest. On average the first id holds 0.60 of the mass
and the first 100 hold 0.96, as on web text; the ids are somewhat harder to compress than those of a real model.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.cache.commits import shard_file
from megatron_kd.cache.errors import CacheError
from megatron_kd.cache.manifest import make_manifest
from megatron_kd.cache.reader import CacheReader, Rows
from megatron_kd.cache.shard import Shard
from megatron_kd.cache.writer import CacheWriter

VOCAB = 201_088
CODECS: dict[str, dict[str, Any]] = {
    "raw": {},
    "raw f32": {"values": "f32"},
    "raw u8": {"values": "u8"},
    "zstd": {"codec": "zstd"},
    "zstd u8": {"codec": "zstd", "values": "u8"},
    "zstd p=0.99": {"codec": "zstd", "top_p": 0.99},
    "zstd u8 p=0.95": {"codec": "zstd", "values": "u8", "top_p": 0.95},
}
_MADE_ROWS = 1 << 13
_PUT_ROWS = 1 << 12
_DOCUMENT = 1000
_TOPIC = 600
_SPEED_ROWS = 1 << 17

EXAMPLES = """\
Speeds are millions of tokens a second of CPU time on one core, files in the page cache. gather: planes as stored,
verified, front to back; read: the same, decoded to int32 and float32; gather 1k and read 1k: documents of 1,000
tokens on average, each at a random place, of which whole 512-row blocks are verified; verify: every byte against
checksums and digest. KL: from the exact rows to the codec's, over the stored entries and the tail, in nats. The last
line is what this core makes of copying 433 bytes a token from one array to another.

With --teacher: what `cache build` makes of this model, beside the model's bare forward pass (its logits of the same
padded batches, kept and dropped), in tokens a second of wall time; three rounds of each in turn, of which the best
counts. The documents are those of --corpus, or made of random ids, 1,000 tokens on average.

examples:
  megatron-kd cache bench
  megatron-kd cache bench --teacher ./gpt-oss-20b --dtype bfloat16 --corpus data/trial_text_document
  megatron-kd cache bench --from caches/train --rows 200000 --json
"""


def synthetic_rows(rows: int, *, top_k: int = 100, vocab: int = VOCAB, seed: int = 0) -> Rows:
    """Rows of the made-up teacher, in float32."""
    rng = np.random.default_rng(seed)
    slope = 1.15 + rng.gamma(2.0, 0.39, rows)
    gaps = rng.standard_exponential((rows, top_k - 1)) * slope[:, None] / np.arange(1, top_k)
    if top_k > 1:
        gaps[:, 0] += rng.gamma(0.5, 2.5, rows) * (rng.random(rows) < 0.35)
    logits = np.concatenate([np.zeros((rows, 1)), -np.cumsum(gaps, 1)], 1)
    rest = np.exp(logits[:, -1]) * top_k / (slope - 1) * (1 - (vocab / top_k) ** (1 - slope))
    total = np.log(np.exp(logits).sum(1) + rest)
    return Rows(
        _frequent_ids(rng, (rows,), vocab).astype(np.uint32),
        _distinct_ids(rng, rows, top_k, vocab),
        (logits - total[:, None]).astype(np.float32),
        (np.log(rest) - total).astype(np.float32),
    )


def _frequent_ids(rng: np.random.Generator, shape: tuple[int, ...], vocab: int) -> np.ndarray:
    return np.minimum(vocab ** rng.random(shape), vocab - 1).astype(np.int32)


def _distinct_ids(rng: np.random.Generator, rows: int, top_k: int, vocab: int) -> np.ndarray:
    shape = (rows, 2 * top_k + 8)
    topics = (vocab * rng.random((rows // _DOCUMENT + 1, _TOPIC)) ** 1.5).astype(np.int32)
    own = topics[np.arange(rows)[:, None] // _DOCUMENT, (_TOPIC * rng.random(shape) ** 2).astype(np.int32)]
    wide = (vocab * rng.random(shape) ** 1.3).astype(np.int32)
    kind = rng.random(shape)
    drawn = np.where(kind < 0.4, _frequent_ids(rng, shape, vocab), np.where(kind < 0.65, own, wide))
    order = drawn.argsort(1, kind="stable")
    repeated = np.zeros(shape, bool)
    ordered = np.take_along_axis(drawn, order, 1)
    np.put_along_axis(repeated, order[:, 1:], ordered[:, 1:] == ordered[:, :-1], 1)
    first = repeated.argsort(1, kind="stable")[:, :top_k]
    if np.take_along_axis(repeated, first, 1).any():
        raise ValueError(f"a vocabulary of {vocab} is too small for {top_k} distinct made-up ids")
    return np.take_along_axis(drawn, first, 1)


def cached_rows(path: Path, rows: int) -> Rows:
    """Up to `rows` rows of a sealed cache, in pieces of 4,096 spread over its axis."""
    reader = CacheReader(path, wait_s=0)
    if reader.manifest.ragged:
        raise CacheError(f"{path} is ragged: its rows are no full top K, so no codec can be compared on them")
    rows = min(rows, reader.n_rows)
    starts = np.linspace(0, reader.n_rows - min(rows, _PUT_ROWS), -(-rows // _PUT_ROWS)).astype(np.int64)
    return reader.read(np.stack([starts, np.full(len(starts), min(rows, _PUT_ROWS))], 1))


class _Axis:
    """Documents that nobody reads; only their lengths matter."""

    kind = "document"

    def __init__(self, rows: int):
        whole, rest = divmod(rows, _DOCUMENT)
        self.lengths = np.array([_DOCUMENT] * whole + [rest] * (rest > 0), np.int64)

    def tokens(self, unit: int) -> np.ndarray:
        """Not used: rows are put as they are."""
        raise NotImplementedError

    def identity(self) -> dict[str, Any]:
        """Nothing to pin."""
        return {}


def write(path: Path, exact: Rows, rows: int, *, vocab: int = VOCAB, **settings: Any) -> CacheWriter:
    """A sealed cache of one tile whose `rows` rows repeat `exact`."""
    options = {"teacher": {"repo": "made up"}, "tokenizer": None, "vocab_real": vocab, "vocab_padded": vocab}
    manifest, tiles = make_manifest(
        _Axis(rows), top_k=exact.ids.shape[1], tile_tokens=max(rows, 1), **options, **settings
    )
    writer = CacheWriter(path, manifest, tiles)
    buffer = writer.open_tile(0)
    for row in range(0, rows, _PUT_ROWS):
        start = row % len(exact.tokens)
        part = Rows(*(plane[start : start + min(_PUT_ROWS, rows - row)] for plane in exact))
        buffer.put(row, *part)
    writer.commit(buffer)
    writer.seal()
    return writer


def divergence(exact: Rows, stored: Rows) -> np.ndarray:
    """KL [n] from exact rows to the codec's, over the entries that are stored and the tail, with fp64 sums.

    The mass of both is 1 only up to rounding, so the terms q - p are kept; each term is then positive.
    """
    kept = stored.ids >= 0
    if not np.array_equal(stored.ids[kept], exact.ids[kept]):
        raise ValueError("the ids of the stored rows are not those of the exact ones")
    p, q = (rows.logprobs.astype(np.float64) for rows in (exact, stored))
    mass = np.exp(exact.log_tail.astype(np.float64)) + np.where(kept, 0, np.exp(p)).sum(1)
    with np.errstate(divide="ignore", invalid="ignore"):
        entries = np.where(kept & (p > -np.inf), np.exp(p) * (p - q) - np.exp(p) + np.exp(q), 0).sum(1)
        tail = mass * (np.log(mass) - stored.log_tail) - mass + np.exp(stored.log_tail.astype(np.float64))
    return np.maximum(entries + np.where(mass > 0, tail, 0), 0)  # below 0 by rounding only


def measure(exact: Rows, rows: int, folder: Path, *, vocab: int = VOCAB, **settings: Any) -> dict[str, Any]:
    """Size, divergence and speeds of one codec; `settings` as for `make_manifest`."""
    spent, writer = _seconds(lambda: write(folder, exact, rows, vocab=vocab, **settings), repeat=1)
    result: dict[str, Any] = {"bytes": writer.shard_path(0).stat().st_size / rows, "write": rows / spent / 1e6}
    reader = CacheReader(folder, wait_s=0)
    count = min(len(exact.tokens), rows)
    stored = reader.read(np.array([[0, count]]))
    distance = divergence(Rows(*(plane[:count] for plane in exact)), stored)
    result |= {
        "entries": float((stored.ids >= 0).sum(1).mean()),
        "tail": float(np.exp(stored.log_tail.astype(np.float64)).mean()),
        "kl_mean": float(distance.mean()),
        "kl_max": float(distance.max()),
    }
    result |= _speeds(reader, rows)
    digest = reader.manifest.digest()
    file = reader.store.open(shard_file(0))
    with Shard(file, reader.manifest.row_format, 0, rows, tile=0, manifest_digest=digest) as shard:
        result["verify"] = rows / _seconds(shard.verify_blocks)[0] / 1e6
    return result


def _speeds(reader: CacheReader, rows: int) -> dict[str, float]:
    rng, limit = np.random.default_rng(1), min(rows, _SPEED_ROWS)
    lengths = np.minimum(1 + rng.exponential(_DOCUMENT, max(1, limit // _DOCUMENT)).astype(np.int64), rows)
    starts = (rng.random(len(lengths)) * (rows - lengths)).astype(np.int64)
    result = {}
    for suffix, spans in (("", np.array([[0, limit]])), ("_1k", np.stack([starts, lengths], 1))):
        tokens = int(spans[:, 1].sum()) / 1e6
        planes, out = reader.read_planes(spans), reader.read(spans)
        result["gather" + suffix] = tokens / _seconds(partial(reader.read_planes, spans, out=planes))[0]
        result["read" + suffix] = tokens / _seconds(partial(reader.read, spans, out=out))[0]
    return result


def copy_speed(rows: int = 1 << 17) -> float:
    """Millions of tokens a second that this core copies in memory, at 433 bytes each: no gather can be faster."""
    source = np.ones((rows, 433), np.uint8)
    target = np.ones_like(source)
    return rows / _seconds(lambda: np.copyto(target, source))[0] / 1e6


def _seconds(work: Callable[[], Any], repeat: int = 9) -> tuple[float, Any]:
    """Least CPU time of some runs, and what the last one returned."""
    best = float("inf")
    for _ in range(repeat):
        start = time.process_time()
        result = work()
        best = min(best, time.process_time() - start)
    return best, result


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Options of `cache bench`."""
    parser.add_argument("--from", dest="source", type=Path, metavar="CACHE", help="take the rows of this cache")
    parser.add_argument(
        "--rows",
        type=int,
        metavar="N",
        help="tokens (default 262144; with --teacher 4096, or all of --corpus)",
    )
    parser.add_argument(
        "--folder", type=Path, help="where to write (default: the system's folder for temporary files)"
    )
    parser.add_argument("--codec", action="append", choices=list(CODECS), help="only this one; may be repeated")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_bench(args: argparse.Namespace) -> int:
    """`cache bench`."""
    args.rows = 1 << 18 if args.rows is None else args.rows
    if args.rows < 1:
        raise CacheError(f"--rows must be at least 1, found {args.rows}")
    vocab = CacheReader(args.source, wait_s=0).manifest.vocab_real if args.source else VOCAB
    exact = cached_rows(args.source, args.rows) if args.source else synthetic_rows(min(args.rows, _MADE_ROWS))
    results = {}
    for name in args.codec or CODECS:
        with tempfile.TemporaryDirectory(dir=args.folder, prefix="cache-bench-") as folder:
            results[name] = measure(exact, args.rows, Path(folder) / "cache", vocab=vocab, **CODECS[name])
        if not args.json:
            _print_line(name, results[name], header=len(results) == 1)
    copied = copy_speed()
    if args.json:
        print(json.dumps({"rows": args.rows, "vocab": vocab, "codecs": results, "copy": copied}, indent=1))
    else:
        print(f"{'memory copy':<68}{copied:>8.1f}")
    return 0


_COLUMNS = {
    "bytes": ("bytes/token", "11.1f"),
    "entries": ("entries", "9.1f"),
    "tail": ("tail", "8.4f"),
    "kl_mean": ("KL mean", "9.1e"),
    "kl_max": ("KL max", "9.1e"),
    "write": ("write", "7.2f"),
    "gather": ("gather", "8.1f"),
    "read": ("read", "6.1f"),
    "gather_1k": ("gather 1k", "11.1f"),
    "read_1k": ("read 1k", "9.1f"),
    "verify": ("verify", "8.1f"),
}


def _print_line(name: str, found: dict[str, Any], *, header: bool) -> None:
    widths = {key: int(form.partition(".")[0]) for key, (_, form) in _COLUMNS.items()}
    if header:
        print(" " * 15 + "".join(f"{title:>{widths[key]}}" for key, (title, _) in _COLUMNS.items()))
    print(f"{name:<15}" + "".join(f"{found[key]:{form}}" for key, (_, form) in _COLUMNS.items()), flush=True)
