# SPDX-License-Identifier: Apache-2.0
"""`megatron-kd report`: the HTML page of a finished or running run, or of a comparison, made afterwards.

In: a run's folder with history.jsonl, or a compare.json or plan.json. Out: one self-contained page beside it; for a
run also report.json and report.csv. Needs neither torch nor Megatron; costs well under a second.
"""

import argparse
import csv
import json
import statistics
from pathlib import Path
from typing import Any

from megatron_kd.bridge.steps import read_steps
from megatron_kd.errors import UserError
from megatron_kd.folders import make_folder
from megatron_kd.versions import installed_versions

_DESCRIPTION = """\
Make one self-contained HTML page (no network, for screen and print) of a run's folder, a compare.json or a plan.json:
curves, memory, tail mass and coverage, settings, versions, how to reproduce. JSON and CSV of a run lie beside it.
"""
_EXAMPLES = """\
examples:
  megatron-kd report runs/first
  megatron-kd report comparison/compare.json --out comparison.html
"""
_VERSIONS = ("megatron-kd", "megatron-core", "megatron-bridge", "torch", "transformers", "transformer-engine", "numpy")
_MODEL_KEYS = (
    "num_layers",
    "hidden_size",
    "vocab_size",
    "seq_length",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
    "recompute_granularity",
)
_SECTION_KEYS = {
    "train": ("train_iters", "global_batch_size", "micro_batch_size"),
    "optimizer": ("optimizer", "lr", "min_lr", "weight_decay", "clip_grad", "use_distributed_optimizer"),
    "dataset": ("data_path", "random_seed", "split", "seq_length"),
}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Registers `report`."""
    parser = subparsers.add_parser(
        "report",
        help="an HTML page of a run, a comparison or a plan",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, metavar="RUN_DIR|compare.json|plan.json")
    parser.add_argument("--out", type=Path, metavar="HTML", help="default: report.html, compare.html, plan.html there")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Raises:
        UserError: the source is nothing a page can be made of.
    """
    from megatron_kd.report import pages

    command = ["megatron-kd", *args.argv]
    if args.source.is_dir():
        folder, out = args.source, args.out or args.source / "report.html"
        found = read_run(folder)
        make_folder(out.parent, "--out")
        write_run(folder, found)
        pages.run_page(out, folder.resolve().name, found, command)
    else:
        found = read_json(args.source)
        out = args.out or args.source.with_suffix(".html")
        make_folder(out.parent, "--out")
        if "methods" in found:
            pages.compare_page(out, found, found.get("command", command))
        elif found.get("kind") == "modelled":
            pages.plan_page(out, found, found.get("command", command))
        else:
            raise UserError(f"{args.source} is neither a compare.json (with `methods`) nor a plan.json.")
    print(f"Written: {out}")
    return 0


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file with an object in it.

    Raises:
        UserError: there is none.
    """
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}. Expected a run's folder or a JSON file.") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds a {type(found).__name__}, expected a compare.json or plan.json.")
    return found


def read_run(folder: Path) -> dict[str, Any]:
    """A run's steps, their summary, its main settings and the versions installed here.

    Raises:
        UserError: the folder has no history.
    """
    history = folder / "history.jsonl"
    if not history.exists():
        raise UserError(f"{folder} has no history.jsonl: expected the --run-dir of `megatron-kd train`.")
    steps = read_steps(history)
    if not steps:
        raise UserError(f"{history} has no step in it yet.")
    settings = settings_of(folder / "config.yaml")
    planned = settings.get("train", {}).get("train_iters")
    return {
        "steps": steps,
        "summary": summary_of(steps),
        "settings": settings,
        "versions": installed_versions(_VERSIONS),
        "finished": (folder / "finished").exists() or (planned is not None and steps[-1]["step"] >= planned),
    }


def summary_of(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The last step's figures, and the median of the steps' seconds."""
    last = {name: value for name, value in steps[-1].items() if name not in ("step", "seconds")}
    seconds = [step["seconds"] for step in steps if "seconds" in step]
    return {"steps": len(steps), **last, **({"step seconds": statistics.median(seconds)} if seconds else {})}


def settings_of(path: Path) -> dict[str, Any]:
    """The part of a run's saved configuration that a reader looks for; empty without the file."""
    if not path.exists():
        return {}
    import yaml

    tree = yaml.safe_load(path.read_text())
    kept = {"kd": {key: value for key, value in (tree.get("kd") or {}).items() if not key.startswith("_")}}
    for section, keys in {"model": _MODEL_KEYS, **_SECTION_KEYS}.items():
        values = tree.get(section) or {}
        kept[section] = {key: values[key] for key in keys if values.get(key) is not None}
    return {section: values for section, values in kept.items() if values}


def write_run(folder: Path, found: dict[str, Any]) -> None:
    """report.json, and report.csv with a line a step."""
    (folder / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    names = dict.fromkeys(name for step in found["steps"] for name in step)
    with (folder / "report.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(names))
        writer.writeheader()
        writer.writerows(found["steps"])
