# SPDX-License-Identifier: Apache-2.0
"""The bench of the loss for a reader: a table for a terminal, and a chart.

In: what megatron_kd.loss.bench found, or its JSON. The chart costs about two seconds.
"""

from pathlib import Path
from typing import Any

from megatron_kd.report.charts import BLUE, DARK, GREY
from megatron_kd.report.table import format_bytes, format_table

HEAD = (
    "method",
    "forward",
    "backward",
    "total",
    "x limit",
    "of limit",
    "products",
    "FLOP/s",
    "memory",
    "of dense",
    "error",
)
ABSENT = "absent"
OURS = "fused"


def bench_table(found: dict[str, Any]) -> str:
    """Where it ran, a row for each method that is there, and what a reader has to know about them."""
    entries = [entry for entry in found["methods"] if entry["status"] != ABSENT]
    parts = [shape_line(found["shape"]), environment_line(found["environment"])]
    parts += ["", format_table(HEAD, [_row(entry) for entry in entries]), "", *_legend(found)]
    for entry in found["methods"]:
        if entry["status"] == ABSENT:
            parts.append(f"{entry['method']}: left out, absent: {entry['message']}")
        elif entry["message"] or entry.get("note"):
            parts.append(f"{entry['method']}: {entry['message'] or entry['note']}")
    return "\n".join(parts)


def shape_line(shape: dict[str, Any]) -> str:
    """The shape in words."""
    columns = f"vocabulary {shape.get('vocabulary', shape['columns']):,}"
    if shape.get("tensor_parallel", 1) > 1:
        columns += f" / {shape['tensor_parallel']} = {shape['columns']:,} columns of one rank"
    return (
        f"{shape['tokens']:,} tokens, hidden {shape['hidden']:,}, {columns}, top {shape['top_k']}, {shape['dtype']}, "
        f"strips of {shape['strip_tokens']:,} tokens"
    )


def environment_line(environment: dict[str, Any]) -> str:
    """The machine and the versions in words."""
    if not environment:
        return "no process lived to say where it ran"
    where = environment["device"] + ("" if environment["cuda"] else f", {environment['threads']} threads")
    cuda = f", CUDA {environment['cuda']}" if environment["cuda"] else ""
    return f"{where}; torch {environment['torch']}{cuda}; {environment['row_kernels']} kernels; {environment['date']}"


def format_seconds(seconds: float) -> str:
    """Three figures and a unit: 2.31 s, 14.2 ms."""
    value, unit = (seconds, "s") if seconds >= 1 else (seconds * 1000, "ms")
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def format_rate(flops: float) -> str:
    """FLOP/s with three figures: 272 G, 1.31 T."""
    value, unit = (flops / 1e12, "T") if flops >= 1e12 else (flops / 1e9, "G")
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def _row(entry: dict[str, Any]) -> list[str]:
    if "figures" not in entry:
        return [entry["method"], entry["status"], *["-"] * (len(HEAD) - 2)]
    figures = entry["figures"]
    of_dense = figures["peak_of_dense"]
    return [
        entry["method"],
        *(format_seconds(figures[part]) for part in ("forward_s", "backward_s", "total_s")),
        f"{figures['x_limit']:.2f}",
        f"{figures['limit_share']:.0%}",
        f"{figures['gemms']:.2f}",
        format_rate(figures["flops_per_s"]),
        "-" if entry["peak_bytes"] is None else format_bytes(entry["peak_bytes"]),
        "-" if of_dense is None else f"{of_dense:.1%}",
        f"{figures['error']:.1e}",
    ]


def _legend(found: dict[str, Any]) -> list[str]:
    measured = [entry for entry in found["methods"] if "figures" in entry]
    if not measured:
        return []
    fastest = min(measured, key=lambda entry: entry["figures"]["limit_s"])["figures"]
    limit, rate = format_seconds(fastest["limit_s"]), format_rate(fastest["limit_flops_per_s"])
    return [
        f"limit: the three products alone, before each repeat of each method; at its best {limit}, {rate}FLOP/s",
        "products: FLOPs counted, over those of one product. memory: peak beyond the inputs, gradients included",
        f"error: of the worse gradient against float64, relative, on {measured[0]['error']['tokens']:,} tokens",
    ]


def draw_bench(path: Path, found: dict[str, Any]) -> None:
    """Two bars a method: time in units of the limit, and peak memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    entries = [entry for entry in found["methods"] if "figures" in entry]
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10}
    with pyplot.rc_context(style):
        figure, (times, memory) = pyplot.subplots(1, 2, figsize=(11, 1.8 + 0.42 * len(entries)), layout="constrained")
        ratios = [entry["figures"]["x_limit"] for entry in entries]
        _bars(times, "Time, in units of three bare matrix products", entries, ratios, [f"{r:.2f}" for r in ratios])
        times.axvline(1, color=DARK, linestyle="--", linewidth=1)
        peaks = [entry["peak_bytes"] or 0 for entry in entries]
        _bars(memory, "Peak memory beyond the inputs", entries, peaks, [format_bytes(peak) for peak in peaks])
        where = environment_line(found["environment"])
        figure.suptitle(f"{shape_line(found['shape'])}\n{where}", fontsize=9, x=0.01, ha="left")
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


def _bars(axis, title: str, entries: list[dict[str, Any]], values: list[float], labels: list[str]) -> None:
    names = [entry["method"] for entry in entries]
    colours = [BLUE if name.startswith(OURS) else GREY for name in names]
    axis.bar_label(axis.barh(names, values, color=colours, height=0.6), labels, padding=3)
    axis.set_title(title, loc="left")
    axis.invert_yaxis()
    axis.set_xticks([])
    axis.spines["bottom"].set_visible(False)
    axis.margins(x=0.2)
