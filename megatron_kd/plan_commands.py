# SPDX-License-Identifier: Apache-2.0
"""`megatron-kd plan`: memory, step time and cache of a run, modelled; `--published` the method's points.

In: a recipe as `train` takes it, and a machine. Out: tables, and with --out plan.json, plan.csv and plan.html. The
recipe is read on a CPU rank, which loads Megatron-Bridge (half a minute); the arithmetic takes milliseconds.
"""

import argparse
import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_kd.bridge.commands import add_request
from megatron_kd.errors import UserError
from megatron_kd.folders import make_folder

_DESCRIPTION = """\
Say before anything is spent whether a run fits, on how few nodes, how long a step takes and what the cache takes.
Memory per GPU by part, for the dense, the forward-chunked and the fused loss; FLOPs, step time and MFU by a roofline;
the cache's size, build time and read rate; what to change. Needs no GPU and no network. Every figure is modelled from
the configuration, not measured.

Settings come from the recipe, then --config-file, then key=value arguments, as in `megatron-kd train`.
"""

_EXAMPLES = """\
examples:
  megatron-kd plan --config-file recipes/gpt_oss_20b_pretrain_8gpu_h200_bf16_kd_32k.yaml
  megatron-kd plan --config-file recipes/gpt_oss_120b_pretrain_32gpu_b200_bf16_kd_32k.yaml --machine b200 --gpus 64 \\
    --teacher openai/gpt-oss-120b --out plan model.seq_length=65536
  megatron-kd plan --recipe hf:/models/my-model --memory 80 --flops 312 --bandwidth 2.0 --nvlink 300 --network 25
  megatron-kd plan --published
"""

_OWN_FIGURES = {
    "memory": ("GB", 1e9, "memory of a GPU"),
    "flops": ("TFLOP/s", 1e12, "dense bf16 rate of a GPU"),
    "bandwidth": ("TB/s", 1e12, "between a GPU and its memory"),
    "nvlink": ("GB/s", 1e9, "one way between GPUs of a node"),
    "network": ("GB/s", 1e9, "one way of a GPU to other nodes"),
}


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Registers `plan`."""
    parser = subparsers.add_parser(
        "plan",
        help="memory, step time and cache of a run, modelled before it starts",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        usage="megatron-kd plan [options] [key=value ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_request(parser)
    parser.add_argument(
        "--teacher",
        metavar="NAME",
        help="whose forward builds the cache: a Hugging Face folder, or openai/gpt-oss-120b and others that recipes "
        "name; default: a model like the student. With kd.teacher=NAME it runs beside the student instead",
    )
    parser.add_argument("--machine", choices=("h200", "b200"), help="default: what the recipe's name says, else h200")
    for name, (unit, _, says) in _OWN_FIGURES.items():
        parser.add_argument(f"--{name}", type=float, metavar=unit, help=f"own figure: {says}")
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="own figure; default 8")
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="GPUs of the run; default: what the recipe's name says, else as few as fit",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write plan.json, plan.csv and plan.html there")
    parser.add_argument("--published", action="store_true", help="the published points beside what the model says")
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    if args.published:
        from megatron_kd.report.plan_published import published_table

        print(published_table())
        return 0
    from megatron_kd.report.plan import make_plan, plan_text
    from megatron_kd.report.plan_shape import Run

    machine = machine_of(args)
    if args.out:
        make_folder(args.out, "--out")
    plan = make_plan(Run.from_dict(describe(args)), machine)
    print(plan_text(plan))
    if args.out:
        write_plan(args.out, plan, args.argv)
    return 0


def machine_of(args: argparse.Namespace) -> Any:
    """The machine that was named, with the figures that were given in place of its own.

    Raises:
        UserError: a figure is not above 0.
    """
    from megatron_kd.report.plan_shape import MACHINES

    machine = MACHINES[args.machine or ("b200" if "b200" in _name(args) else "h200")]
    own: dict[str, Any] = {}
    for name, (unit, factor, _) in _OWN_FIGURES.items():
        value = getattr(args, name)
        if value is not None:
            if not value > 0:
                raise UserError(f"--{name} {value}: expected {unit} above 0.")
            own[name] = value * factor
    if args.gpus_per_node is not None:
        if args.gpus_per_node < 1:
            raise UserError(f"--gpus-per-node {args.gpus_per_node}: expected at least 1.")
        own["gpus_per_node"] = args.gpus_per_node
    return replace(machine, **own, name=machine.name if not own else f"GPU of own figures (rest: {machine.name})")


def describe(args: argparse.Namespace) -> dict[str, Any]:
    """The recipe as plain figures, read on a CPU rank of this machine.

    Raises:
        UserError: the recipe cannot be read, or Megatron-Bridge is not installed.
    """
    import re

    from megatron_kd import dryrun
    from megatron_kd.bridge.commands import check_readable, request_of, require_bridge
    from megatron_kd.launch.keys import known_models
    from megatron_kd.launch.node import check_model

    require_bridge("a recipe is Megatron-Bridge's")
    request = request_of(args)
    in_name = re.search(r"_(\d+)gpu_", _name(args))
    gpus = args.gpus or (int(in_name[1]) if in_name else None)
    check_readable(request, world_size=gpus, known=known_models())
    if args.teacher and args.teacher not in known_models():
        check_model("--teacher", args.teacher)
    print("Loading Megatron-Bridge to read the recipe (half a minute).", flush=True)
    with dryrun.refusals_raised():
        return dryrun.run_ranks(describe_on_rank, 1, args=(request._asdict(), gpus, args.teacher))[0]


def describe_on_rank(request: dict[str, Any], gpus: int | None, teacher: str | None) -> dict[str, Any]:
    """`planning.describe`, imported where Megatron is."""
    from megatron_kd.bridge.planning import describe

    return describe(request, gpus, teacher)


def _name(args: argparse.Namespace) -> str:
    """The recipe's name, in which machine and number of GPUs stand."""
    return args.config_file.name if args.config_file else args.recipe or ""


def write_plan(folder: Path, plan: dict[str, Any], argv: list[str]) -> None:
    """plan.json, plan.csv and plan.html."""
    from megatron_kd.report.pages import plan_page
    from megatron_kd.report.plan import csv_rows

    (folder / "plan.json").write_text(json.dumps({**plan, "command": ["megatron-kd", *argv]}, indent=1) + "\n")
    with (folder / "plan.csv").open("w", newline="") as file:
        csv.writer(file).writerows(csv_rows(plan))
    plan_page(folder / "plan.html", plan, ["megatron-kd", *argv])
    print(f"\nWritten: {', '.join(str(folder / name) for name in ('plan.json', 'plan.csv', 'plan.html'))}")
