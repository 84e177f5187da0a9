# SPDX-License-Identifier: Apache-2.0
"""One picture of a comparison: held-out figures, training curves, and the memory of the loss.

In: the content of a results.json. Out: a PNG. Costs about two seconds.
"""

from pathlib import Path
from typing import Any

from megatron_kd.report.table import format_bytes

GREY, ORANGE, BLUE, DARK = "#9aa5b1", "#e07b39", "#2a6fbb", "#3e4c59"
COLOURS = (GREY, ORANGE, BLUE)
TEACHER = "teacher"
SMOOTHING = 3


def draw(path: Path, found: dict[str, Any]) -> None:
    """Draw `found` (keys held_out, training, loss_memory) to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(2, 3, figsize=(12, 6.6), layout="constrained")
        students = {name: figures for name, figures in found["held_out"].items() if name != TEACHER}
        _bars(axes[0, 0], "KL to the teacher, nats (lower is better)", students, "kl", "{:.2f}")
        _bars(axes[0, 1], "Same most likely token as the teacher", students, "agreement", "{:.1%}")
        _bars(axes[0, 2], "Perplexity (lower is better; dashed: teacher)", students, "perplexity", "{:.1f}")
        axes[0, 2].axhline(found["held_out"][TEACHER]["perplexity"], color=DARK, linestyle="--", linewidth=1)
        _curves(axes[1, 0], "Cross entropy while training, nats", found["training"], "lm loss")
        _curves(axes[1, 1], "KL to the cached teacher while training, nats", found["training"], "kd loss")
        _memory(axes[1, 2], found["loss_memory"][-1])
        figure.suptitle("Held-out text (top) and training (bottom)", fontsize=12)
        figure.savefig(path, dpi=130)
        pyplot.close(figure)


def _bars(axis, title: str, students: dict[str, Any], key: str, label: str) -> None:
    values = [figures[key] for figures in students.values()]
    bars = axis.bar([name.replace(", ", "\n") for name in students], values, color=COLOURS, width=0.62)
    axis.bar_label(bars, [label.format(value) for value in values], padding=2)
    axis.set_title(title, loc="left")
    axis.set_yticks([])
    axis.spines["left"].set_visible(False)
    axis.margins(y=0.15)


def _curves(axis, title: str, runs: dict[str, list[dict[str, float]]], key: str) -> None:
    for (name, steps), colour in zip(runs.items(), COLOURS[1:], strict=True):
        if key in steps[0]:
            numbers, values = [step["step"] for step in steps], [step[key] for step in steps]
            axis.plot(numbers, values, color=colour, alpha=0.25, linewidth=1)
            axis.plot(numbers, _running_mean(values), color=colour, label=name)
    axis.set_title(title, loc="left")
    axis.set_xlabel("step")
    axis.grid(axis="y", color="#e4e7eb")
    axis.legend(frameon=False)


def _running_mean(values: list[float]) -> list[float]:
    """Mean of up to `SMOOTHING` values before and after each, for batches differ more than steps do."""
    windows = (values[max(0, at - SMOOTHING) : at + SMOOTHING + 1] for at in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _memory(axis, shape: dict[str, Any]) -> None:
    names, values = list(shape["bytes"]), list(shape["bytes"].values())
    bars = axis.barh([name.replace("_", "-") for name in names], values, color=COLOURS, height=0.6)
    axis.bar_label(bars, [format_bytes(value) for value in values], padding=3)
    axis.invert_yaxis()
    axis.set_xticks([])
    axis.spines["bottom"].set_visible(False)
    axis.margins(x=0.2)
    axis.set_title(f"Peak memory of the loss, counted\n{shape['shape']}", loc="left")
