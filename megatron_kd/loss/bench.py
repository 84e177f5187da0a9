# SPDX-License-Identifier: Apache-2.0
"""Time, work, memory and error of the ways to compute a distillation loss, one process each.

    python -m megatron_kd.loss.bench --help

In: a shape and names of methods. Out: a dict, ready for JSON, with what each process measured (bench_worker.py) and
the figures that follow. A method whose library is absent, that runs out of memory or that fails says so in its own
entry; the others are measured all the same. Costs, per method, about 3 + 2 * repeats calls and the start of a process.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from json import loads
from pathlib import Path
from typing import Any

from megatron_kd.loss.bench_methods import METHODS, BenchShape, check_shape
from megatron_kd.loss.bench_worker import FAILED, OK, OUT_OF_MEMORY, BenchRequest
from megatron_kd.loss.errors import require

GEMMS = 3
"""Products that any loss with these gradients needs."""

_KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 36)}
"""For glibc: a process keeps large memory it has freed, as torch does on CUDA, so a call pays for no page faults."""


def run_bench(
    shape: BenchShape,
    methods: Sequence[str] = tuple(METHODS),
    *,
    repeats: int = 5,
    error_tokens: int = 256,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure the methods one after the other.

    Args:
        shape: Of the call.
        methods: Names in METHODS, or "module:function" as bench_methods.py describes it.
        repeats: Timed calls of each method, and of the limit.
        error_tokens: Tokens, at most those of the shape, on which gradients are compared with float64.
        threads: Of torch on CPU; None: as torch chooses.
        progress: Called with a line before and after each method.

    Returns:
        `shape`, `environment`, and `methods`: an entry per name with status, message, raw seconds and `figures`.

    Raises:
        LossArgumentError: For a shape that cannot be, or a method without a name.
    """
    check_shape(shape)
    for name in methods:
        near = get_close_matches(name, METHODS, n=1, cutoff=0)[0]
        require(
            name in METHODS or ":" in name,
            f"methods: expected among {', '.join(METHODS)}, or module:function; found {name!r}. Is it {near!r}?",
        )
    require(repeats > 0, f"repeats: expected at least 1, found {repeats}.")
    require(error_tokens > 0, f"error_tokens: expected at least 1, found {error_tokens}.")
    entries = []
    for name in methods:
        progress(f"{name} ...")
        request = BenchRequest(name, shape, repeats, min(error_tokens, shape.tokens), threads)
        entry = {"method": name} | measure_apart(request)
        entries.append(entry)
        progress(f"{name}: {entry['status']}{'. ' if entry['message'] else ''}{entry['message']}")
    environments = [entry.pop("environment", {}) for entry in entries]
    add_figures(entries, shape)
    return {
        "shape": asdict(shape) | {"strip_tokens": shape.strip},
        "environment": next(filter(None, environments), {}),
        "methods": entries,
    }


def measure_apart(request: BenchRequest) -> dict[str, Any]:
    """What a fresh process found, or how it ended without a word."""
    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder) / "request.json", Path(folder) / "result.json"
        files[0].write_text(request.to_json())
        command = [sys.executable, "-m", "megatron_kd.loss.bench_worker", *map(str, files)]
        environment = os.environ | _KEEP_MEMORY
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment)
        if files[1].exists():
            return loads(files[1].read_text())
    if done.returncode == -9:
        return {"status": OUT_OF_MEMORY, "message": "killed, as is a process that takes more memory than there is"}
    last = next(iter(reversed(done.stderr.strip().splitlines())), "no message")
    return {"status": FAILED, "message": f"exit code {done.returncode}: {last}"}


def add_figures(entries: list[dict[str, Any]], shape: BenchShape) -> None:
    """Give each measured entry its `figures`: medians, and ratios to the limit and to the dense method.

    x_limit is the median, over the repeats, of a call's time over that of the limit just before it.
    """
    measured = {entry["method"]: entry for entry in entries if entry["status"] == OK}
    dense_peak = measured.get("dense", {}).get("peak_bytes")
    for entry in measured.values():
        totals = [sum(pair) for pair in zip(entry["forward_s"], entry["backward_s"], strict=True)]
        ratios = [total / limit for total, limit in zip(totals, entry["limit_s"], strict=True)]
        limit, total, x_limit = (statistics.median(values) for values in (entry["limit_s"], totals, ratios))
        peak = entry["peak_bytes"]
        entry["figures"] = {
            "forward_s": statistics.median(entry["forward_s"]),
            "backward_s": statistics.median(entry["backward_s"]),
            "total_s": total,
            "limit_s": limit,
            "x_limit": x_limit,
            "limit_share": 1 / x_limit,
            "gemms": entry["flops"] / shape.gemm_flops,
            "flops_per_s": entry["flops"] / total,
            "limit_flops_per_s": GEMMS * shape.gemm_flops / limit,
            "peak_of_dense": peak / dense_peak if peak and dense_peak else None,
            "error": max(entry["error"]["hidden"], entry["error"]["weight"]),
        }


if __name__ == "__main__":
    from megatron_kd.bench_commands import main

    sys.exit(main())
