# SPDX-License-Identifier: Apache-2.0
"""How much of the teacher a cache holds: mass in the top K, tail, entropy, ties, entries and bytes.

In: a sealed cache. Out: figures over a sample of blocks, as a dictionary, a table and a picture. Costs the memory of
one block and about 2 microseconds a sampled row.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.cache.layout import BLOCK_ROWS
from megatron_kd.cache.reader import CacheReader, Rows

SAMPLE_ROWS = 1 << 16
_BINS = 40
_QUANTILES = (0.01, 0.1, 0.5)


def coverage(path: str | Path, *, sample_rows: int = SAMPLE_ROWS) -> dict[str, Any]:
    """Figures of a cache over blocks spread evenly over its axis; all of them if there are few.

    Args:
        path: a sealed cache.
        sample_rows: rows to look at.

    Returns:
        `rows` looked at; `stored`, the share of them that say anything of the teacher, which all that follows is over;
        `mass`, mean and quantiles of the mass of the entries; `mass_of_first`, the mean mass of the first k of them by
        k; `tail`, the mean mass outside; `entropy` in nats of entries and tail as one more outcome, at most the
        teacher's, mean and histogram (`counts` between `edges`); `tail_histogram` of the mass outside; `ties_at_cut`,
        the share of rows whose last two entries are equal as stored, so that which id was kept is the tie rule's
        choice; `entries` a row; `bytes` a row.

    Raises:
        CacheError: the cache cannot be read.
    """
    reader = CacheReader(path, wait_s=0)
    top_k = reader.manifest.top_k
    blocks = -(-reader.n_rows // BLOCK_ROWS)
    chosen = np.unique(np.linspace(0, blocks - 1, min(blocks, -(-sample_rows // BLOCK_ROWS))).astype(np.int64))
    masses, entropies, tails, running = [], [], [], np.zeros(top_k)
    rows = entries = ties = 0
    for start in (chosen * BLOCK_ROWS).tolist():
        part = reader.read(np.array([[start, min(BLOCK_ROWS, reader.n_rows - start)]]))
        rows += len(part.tokens)
        part = Rows(*(plane[part.stored] for plane in part))
        mass, tail = np.exp(part.logprobs.astype(np.float64)), np.exp(part.log_tail.astype(np.float64))
        finite = part.logprobs > -np.inf
        entries += int(np.count_nonzero(finite))
        ties += _ties(part.logprobs, finite)
        running += mass.cumsum(1).sum(0)
        masses.append(mass.sum(1))
        tails.append(tail)
        entropies.append(-_plogp(mass).sum(1) - _plogp(tail))
    mass, tail, entropy = (np.concatenate(parts) for parts in (masses, tails, entropies))
    count = max(len(mass), 1)
    return {
        "rows": rows,
        "stored": len(mass) / rows,
        "mass": _summary(mass),
        "mass_of_first": {k: float(running[k - 1] / count) for k in _steps(top_k)},
        "tail": float(tail.sum() / count),
        "tail_histogram": _histogram(tail, 1.0),
        "entropy": {"mean": float(entropy.sum() / count), **_histogram(entropy, np.log(top_k + 1))},
        "ties_at_cut": ties / count,
        "entries": entries / count,
        "bytes": _stored_bytes(reader),
    }


def _plogp(mass: np.ndarray) -> np.ndarray:
    return mass * np.log(np.where(mass > 0, mass, 1))


def _ties(logprobs: np.ndarray, finite: np.ndarray) -> int:
    """Rows whose last two entries are equal."""
    last = finite.sum(1) - 1
    rows = np.flatnonzero(last > 0)
    return int(np.count_nonzero(logprobs[rows, last[rows]] == logprobs[rows, last[rows] - 1]))


def _steps(top_k: int) -> list[int]:
    steps = [k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if k < top_k]
    return [*steps, top_k]


def _summary(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {"mean": 0.0, **{f"p{quantile:.0%}"[:-1]: 0.0 for quantile in _QUANTILES}}
    quantiles = np.quantile(values, _QUANTILES)
    return {"mean": float(values.mean())} | {
        f"p{quantile:.0%}"[:-1]: float(value) for quantile, value in zip(_QUANTILES, quantiles, strict=True)
    }


def _histogram(values: np.ndarray, largest: float) -> dict[str, list]:
    counts, edges = np.histogram(values.clip(0, largest), _BINS, (0, largest))
    return {"counts": counts.tolist(), "edges": edges.tolist()}


def _stored_bytes(reader: CacheReader) -> float:
    """Mean bytes a row over at most 64 shards."""
    count = len(reader.tiles) - 1
    sizes = rows = 0
    for tile in np.unique(np.linspace(0, count - 1, min(count, 64)).astype(int)).tolist():
        sizes += reader.shard_size(tile)
        rows += int(reader.tiles[tile + 1, 0] - reader.tiles[tile, 0])
    return sizes / rows


def table(found: dict[str, Any]) -> str:
    """The figures as lines of text."""
    mass, first = found["mass"], found["mass_of_first"]
    lines = {
        "sample": f"{found['rows']:,} rows, {found['stored']:.1%} of them stored",
        "mass": f"mean {mass['mean']:.4f}; 1 row in 2 has {mass['p50']:.4f}, 9 in 10 {mass['p10']:.4f}, 99 in 100 "
        f"{mass['p1']:.4f} or more",
        "of the first": ", ".join(f"{k}: {value:.3f}" for k, value in first.items()),
        "tail": f"mean {found['tail']:.4f}",
        "entropy": f"mean {found['entropy']['mean']:.3f} nats, the tail as one outcome",
        "ties": f"{found['ties_at_cut']:.1%} of the rows tie at the cut",
        "entries": f"{found['entries']:.1f} a row",
        "bytes": f"{found['bytes']:.1f} a row",
    }
    return "\n".join(f"{name + ':':<14}{text}" for name, text in lines.items())


def draw(path: Path, caches: dict[str, dict[str, Any]]) -> None:
    """Draw the figures of caches, by name, to a PNG: mass of the first k, histograms of tail and entropy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
        for name, found in caches.items():
            first = found["mass_of_first"]
            axes[0].plot(list(first), list(first.values()), marker="o", markersize=3, label=name)
            for axis, histogram in ((axes[1], found["tail_histogram"]), (axes[2], found["entropy"])):
                counts = np.array(histogram["counts"]) / max(sum(histogram["counts"]), 1)
                axis.stairs(counts, histogram["edges"], fill=True, alpha=0.5)
        axes[0].set_xscale("log", base=2)
        axes[0].legend(frameon=False)
        titles = {"Mass of the first k entries": "k", "Mass outside": "tail", "Entropy": "nats"}
        for axis, (title, label) in zip(axes, titles.items(), strict=True):
            axis.set_title(title, loc="left")
            axis.set_xlabel(label)
        axes[1].set_yscale("log")
        for axis in axes[1:]:
            axis.set_ylabel("share of rows")
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options of `cache info` that ask for coverage."""
    parser.add_argument(
        "--coverage", action="store_true", help="show mass, tail, entropy and ties of a sample of rows"
    )
    parser.add_argument("--chart", type=Path, metavar="PNG", help="draw the coverage")
