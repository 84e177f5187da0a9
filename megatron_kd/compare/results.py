# SPDX-License-Identifier: Apache-2.0
"""What a comparison found: one JSON, one CSV, tables for a terminal, and whether methods trained alike.

In: the folders of finished runs, each with a `result.json`. Out: `compare.json` ({"settings", "versions", "left_out",
"methods": [{"name", "method", "steps": [...], "summary": {...}}]}), `compare.csv` (a line a method and step). Plain
values throughout; needs no torch.
"""

import csv
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_kd.report.table import format_bytes, format_table

RESULT = "result.json"
COMPARED = ("lm loss", "kd loss", "total loss", "grad norm")
"""The figures of a step that --assert-equal looks at."""

SUMMARY = {
    "lm loss": ("lm loss", ".4f"),
    "kd loss": ("kd loss", ".4f"),
    "total loss": ("total", ".4f"),
    "grad norm": ("grad norm", ".3f"),
    "held-out kl": ("held-out KL", ".4f"),
    "held-out agreement": ("agreement", ".1%"),
    "held-out perplexity": ("perplexity", ".2f"),
    "step seconds": ("s/step", ".3f"),
    "tokens per second": ("tokens/s", ",.0f"),
    "tflops per rank": ("TFLOP/s/GPU", ".3g"),
    "peak bytes": ("peak memory", "bytes"),
    "peak bytes in loss": ("in the loss", "bytes"),
}
"""Columns of the table: the summary's figure, its heading and its format."""

Result = dict[str, Any]


def write_json(path: Path, value: Any) -> None:
    """The whole file or none of it."""
    scratch = path.with_name(f".{path.name}.new")
    scratch.write_text(json.dumps(value, indent=1) + "\n")
    os.replace(scratch, path)


def read_json(path: Path) -> Any:
    """What write_json wrote."""
    return json.loads(path.read_text())


def read_result(folder: Path) -> Result | None:
    """What a finished run left; None if it has not finished."""
    path = folder / RESULT
    return read_json(path) if path.exists() else None


def write_csv(path: Path, results: Sequence[Result]) -> None:
    """A line a method and step; a figure that a method does not have stays empty."""
    names = dict.fromkeys(name for result in results for step in result["steps"] for name in step)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["name", *names])
        writer.writeheader()
        writer.writerows({"name": result["name"], **step} for result in results for step in result["steps"])


def summary_table(results: Sequence[Result]) -> str:
    """A line a method: losses of the last step, held-out figures, speed, memory. Only columns that some method has."""
    columns = [key for key in SUMMARY if any(result["summary"].get(key) is not None for result in results)]
    rows = [
        [result["name"], *(_cell(result["summary"].get(key), SUMMARY[key][1]) for key in columns)]
        for result in results
    ]
    return format_table(["method", *(SUMMARY[key][0] for key in columns)], rows)


def absent(results: Sequence[Result]) -> list[str]:
    """Which figures no method has, and why, a line each."""
    reasons = {
        "peak bytes": "Peak memory is measured on CUDA alone.",
        "held-out kl": "No held-out KL and agreement: they need kd.cache of the corpus, a validation part in "
        "dataset.split, and validation.eval_iters above 0.",
    }
    return [why for key, why in reasons.items() if not any(key in result["summary"] for result in results)]


def step_table(results: Sequence[Result], *, most: int = 12) -> str:
    """Steps down, methods across: the loss that was minimised and the gradient norm. At most `most` steps, spread."""
    by_step = [{step["step"]: step for step in result["steps"]} for result in results]
    steps = sorted({number for steps in by_step for number in steps})
    if len(steps) > most:
        steps = [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]
    rows = [[str(number), *(_loss_and_norm(found.get(number)) for found in by_step)] for number in steps]
    return format_table(["step: loss | grad norm", *(result["name"] for result in results)], rows)


def _loss_and_norm(step: Mapping[str, float] | None) -> str:
    if step is None:
        return ""
    loss = step.get("total loss", step.get("lm loss"))
    return f"{_cell(loss, '.4f')} | {_cell(step.get('grad norm'), '.3f')}"


def _cell(value: float | None, spec: str) -> str:
    if value is None:
        return ""
    return format_bytes(value) if spec == "bytes" else format(value, spec)


def first_difference(reference: Result, other: Result, tolerance: float) -> str | None:
    """The first step and figure of `other` that is further from `reference` than `tolerance`, as a sentence.

    The distance is absolute for figures up to 1, else relative. A step or figure that only one of them has differs.
    """
    if len(reference["steps"]) != len(other["steps"]):
        counts = f"{len(other['steps'])} steps, {reference['name']} {len(reference['steps'])}"
        return f"{other['name']} has {counts}."
    for ours, theirs in zip(other["steps"], reference["steps"], strict=True):
        for name in COMPARED:
            if name not in ours and name not in theirs:
                continue
            found, expected = ours.get(name, float("nan")), theirs.get(name, float("nan"))
            distance = abs(found - expected) / max(1.0, abs(expected))
            if not distance <= tolerance:
                return (
                    f"step {ours['step']}: {name} of {other['name']} is {found:.6g}, of {reference['name']} "
                    f"{expected:.6g}; they differ by {distance:.2g}, allowed is {tolerance:g}."
                )
    return None
