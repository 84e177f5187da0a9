# SPDX-License-Identifier: Apache-2.0
"""The pages of a plan, a comparison and a run: which tables and charts they have, and in what order.

In: the content of a plan.json, of a compare.json, or a run's steps. Out: one HTML file by `page.write_page`. A figure
that a run does not have leaves its chart out. Costs milliseconds.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_kd.report import plan as plans
from megatron_kd.report.page import Chart, Section, Table, write_page
from megatron_kd.report.plan_shape import GB
from megatron_kd.report.svg import line_chart, stacked_bars
from megatron_kd.report.table import format_bytes

Steps = Sequence[Mapping[str, float]]

CURVES = {
    "kd loss": "Divergence from the teacher",
    "lm loss": "Cross entropy",
    "total loss": "Total loss",
    "grad norm": "Norm of the gradient",
}
WATCHED = {
    "teacher tail": "Teacher's mass outside the stored entries",
    "student tail": "Student's mass outside the stored entries",
    "top-1 agreement": "Same most likely token as the teacher",
    "kd masked": "Tokens left out because of bad blocks",
    "kd cut": "Tokens whose context was cut",
    "kd absent": "Tokens without a stored row",
    "kd read seconds": "Seconds a step waited for the cache",
    "kd loss seconds": "Seconds a step spent in the loss",
    "seconds": "Seconds a step",
}
FREQUENCY = "agreement by token frequency"
"""In a summary: a mapping of how often a token occurs, as text, to the share of agreement."""

_SPECS = {"seconds": ",.3f", "norm": ",.3f", "agreement": ".1%", "tail": ".2%", "perplexity": ",.2f"}


def plan_page(path: Path, plan: dict[str, Any], command: Sequence[str]) -> None:
    """Write the page of a plan."""
    run, machine, own = plan["run"], plan["machine"], plan["loss"]
    total = sum(plan["memory"][own].values())
    fits = "Fits" if plan["fits"] else "Does not fit"
    memory = stacked_bars(
        "Modelled memory of the fullest rank by way to compute the loss, in GB",
        {name: {part: parts[part] / GB for part in plans.parts_of(plan)} for name, parts in plan["memory"].items()},
        labels={name: f"{sum(parts.values()) / GB:.1f} GB" for name, parts in plan["memory"].items()},
        limit=plan["room"] / GB,
        limit_label=f"may be filled: {plan['room'] / GB:.0f} GB",
    )
    seconds = stacked_bars(
        "Modelled seconds of a step by what takes them",
        {name: step["parts"] for name, step in plan["step"].items()},
        labels={name: f"{step['seconds']:.2f} s, MFU {step['mfu']:.0%}" for name, step in plan["step"].items()},
    )
    changes = [
        [one["change"], f"{one['bytes'] / GB:.1f} GB", "fits" if one["fits"] else "does not fit"]
        for one in plan["changes"]
    ]
    sections = [
        Section(
            "Memory of the fullest rank (modelled)",
            charts=[Chart("By part, GB", memory, wide=True)],
            tables=[Table(plans.memory_head(plan), plans.memory_rows(plan), "GB; * is the recipe's own loss")],
        ),
        Section(
            f"A step (modelled): {plan['step_flops'] / 1e15:.3g} PFLOP",
            charts=[Chart("By what takes the time, seconds", seconds, wide=True)],
            tables=[Table(plans.STEP_HEAD, plans.step_rows(plan))],
        ),
        Section("Cache and nodes (modelled)", text=_cache_and_nodes(plan)),
        Section(
            "What could be changed (modelled)" if plan["fits"] else "What to change (modelled)",
            tables=[Table(["change", "fullest rank", ""], changes, words=True)],
        ),
        Section("What the figures rest on", text=[f"On {machine['name']}."], notes=plan["assumptions"]),
    ]
    shown = {key: run[key] for key in ("layout", "training", "loss")}
    write_page(
        path,
        f"Plan: {run['model']['name']} on {run['layout']['gpus']} {machine['name']}",
        sections,
        lead=plans.title(plan),
        verdict=(
            plan["fits"],
            f"{fits} (modelled): {total / GB:.1f} GB on the fullest rank, of {plan['room'] / GB:.1f} GB that may be "
            "filled",
        ),
        settings=shown | {"machine": machine},
        command=command,
        files=["plan.json", "plan.csv"],
    )


def _cache_and_nodes(plan: dict[str, Any]) -> list[str]:
    cache = "A cache instead: " if plan["run"]["loss"]["online"] else "The cache: "
    beside = [f"Without a cache {plans.beside_text(plan['beside'])}."] if plan["beside"] else []
    return [f"{cache}{plans.cache_text(plan['cache'])}.", *beside, f"Fewest nodes: {plans.nodes_text(plan)}."]


def compare_page(path: Path, found: dict[str, Any], command: Sequence[str] = ()) -> None:
    """Write the page of a comparison.

    Args:
        path: The file.
        found: {"settings", "versions", "methods": [{"name", "steps": [{...}], "summary": {...}}]}, and where methods
            were left out "left_out": {name: why}.
        command: What makes it again.
    """
    methods = found["methods"]
    runs = {method["name"]: method["steps"] for method in methods}
    summaries = {method["name"]: method["summary"] for method in methods}
    notes = [f"{name}: {why}" for name, why in found.get("left_out", {}).items()]
    write_page(
        path,
        "Comparison of losses",
        [
            Section("In sum", tables=[summary_table(summaries)]),
            Section("Memory", charts=memory_charts(summaries)),
            *curve_sections(runs),
            Section("Agreement by token frequency", charts=frequency_charts(summaries)),
            Section("Left out", text=["Known, but without a result here:"] if notes else (), notes=notes),
        ],
        lead=f"{len(methods)} runs on the same data from the same seed.",
        settings=found.get("settings"),
        versions=found.get("versions"),
        command=command,
        files=["compare.json", "compare.csv"],
    )


def run_page(path: Path, name: str, found: dict[str, Any], command: Sequence[str] = ()) -> None:
    """Write the page of one run: {"steps", "summary", "settings", "versions", "finished"}."""
    steps = found["steps"]
    state = "finished" if found["finished"] else "not finished"
    write_page(
        path,
        f"Run: {name}",
        [
            Section("In sum", tables=[summary_table({name: found["summary"]})]),
            *curve_sections({name: steps}),
            Section("Agreement by token frequency", charts=frequency_charts({name: found["summary"]})),
        ],
        lead=f"{len(steps)} steps, {state}.\nThe whole configuration is config.yaml in the run's folder.",
        settings=found["settings"],
        versions=found["versions"],
        command=command,
        files=["report.json", "report.csv"],
    )


def curve_sections(runs: Mapping[str, Steps]) -> list[Section]:
    """Curves of training, and of what was watched; a chart a figure, a line a run."""
    watched = [_chart(runs, key, title) for key, title in WATCHED.items()]
    title = "Coverage: teacher's mass in the stored entries"
    covered = _series(runs, "teacher tail", lambda tail: 1 - tail)
    watched.insert(1, Chart(title, line_chart(title, covered)))
    return [
        Section("Training", charts=_drawn([_chart(runs, key, title) for key, title in CURVES.items()])),
        Section("Watched", charts=_drawn(watched)),
    ]


def _chart(runs: Mapping[str, Steps], key: str, title: str) -> Chart:
    named = title if title.lower() == key else f"{title} ({key})"
    return Chart(named, line_chart(title, _series(runs, key)))


def _series(
    runs: Mapping[str, Steps], key: str, change: Callable[[float], float] = float
) -> dict[str, list[tuple[float, float]]]:
    """(step, figure) of every run, also of one without the figure."""
    return {
        name: [(step["step"], change(step[key])) for step in steps if step.get(key) is not None]
        for name, steps in runs.items()
    }


def _drawn(charts: Sequence[Chart]) -> list[Chart]:
    return [chart for chart in charts if chart.svg]


def memory_charts(summaries: Mapping[str, Mapping[str, Any]]) -> list[Chart]:
    """Peak memory by phase, a bar a method."""
    bars, labels = {}, {}
    for name, summary in summaries.items():
        before, inside = summary.get("peak bytes before loss"), summary.get("peak bytes in loss")
        whole = summary.get("peak bytes", inside)
        if not whole:
            continue
        parts = {"before the loss": min(before or whole, whole), "in the loss": max(0, (inside or 0) - (before or 0))}
        parts["elsewhere"] = max(0, whole - sum(parts.values()))
        bars[name], labels[name] = parts, format_bytes(whole)
    title = "Peak memory of the fullest rank by phase"
    return [Chart(title, stacked_bars(title, bars, labels=labels), wide=True)] if bars else []


def frequency_charts(summaries: Mapping[str, Mapping[str, Any]]) -> list[Chart]:
    """Agreement with the teacher over classes of token frequency, where a summary has it."""
    charts = []
    for name, summary in summaries.items():
        if classes := summary.get(FREQUENCY):
            labels = {label: f"{share:.1%}" for label, share in classes.items()}
            bars = {label: {"agreement": share} for label, share in classes.items()}
            charts.append(Chart(name, stacked_bars(f"Agreement by token frequency, {name}", bars, labels=labels)))
    return charts


def summary_table(summaries: Mapping[str, Mapping[str, Any]]) -> Table:
    """Figures down, runs across: there are more figures than runs."""
    keys = list(dict.fromkeys(key for summary in summaries.values() for key in summary if key != FREQUENCY))
    rows = [[key, *(shown(key, summary.get(key)) for summary in summaries.values())] for key in keys]
    return Table(["", *summaries], rows)


def shown(key: str, value: Any) -> str:
    """A summary's figure for a reader, by its name."""
    if not isinstance(value, int | float):
        return "" if value is None else str(value)
    if "bytes" in key:
        return format_bytes(value)
    spec = next((spec for part, spec in _SPECS.items() if part in key), None)
    if spec is None:
        spec = ",.0f" if isinstance(value, int) or abs(value) >= 1000 else ".4g"
    return format(value, spec)
