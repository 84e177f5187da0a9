# SPDX-License-Identifier: Apache-2.0
"""`megatron-kd export`: a run's checkpoint becomes a Hugging Face folder.

In: a run's folder. Out: a folder that transformers loads. It runs on the CPU, with or without a GPU. Megatron is
imported only when the command runs (half a minute), never to show help.
"""

import argparse
import importlib.util
import sys
from pathlib import Path

from megatron_kd import dryrun
from megatron_kd.bridge.commands import require_bridge
from megatron_kd.bridge.iterations import iteration_folder
from megatron_kd.errors import UserError
from megatron_kd.folders import check_can_make
from megatron_kd.hub import check_on_hub

_DESCRIPTION = """\
Write a run's checkpoint as a Hugging Face folder, whatever its parallel layout was: weights, configuration, tokenizer,
and a model card (README.md) that states teacher, cache and settings.
"""
_EXAMPLES = """\
examples:
  megatron-kd export --run-dir runs/first --out exported/first
  megatron-kd export --run-dir runs/first --iteration 500 --reference /models/student --out exported/first-500
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Registers `export`."""
    parser = subparsers.add_parser(
        "export",
        help="write a run's checkpoint as a Hugging Face folder",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--run-dir", type=Path, required=True, metavar="DIR", help="the run's folder, or a folder of checkpoints"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to write")
    parser.add_argument("--iteration", type=int, metavar="N", help="which checkpoint; default: the newest")
    parser.add_argument(
        "--reference",
        metavar="FOLDER",
        help="Hugging Face model that gives architecture and tokenizer; default: the one the run started from",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Exports; 1 if Megatron broke down.

    Raises:
        UserError: what was asked for is not there.
    """
    if not args.run_dir.exists():
        raise UserError(f"--run-dir {args.run_dir} does not exist. Give the folder that `train --run-dir` named.")
    if any(args.out.glob("*.safetensors")):
        raise UserError(f"--out {args.out} already holds a model. Give another folder, or remove it.")
    iteration_folder(args.run_dir, args.iteration)
    check_can_make(args.out, "--out")
    if args.reference is not None:
        check_on_hub("--reference", args.reference)
    require_bridge("export needs Megatron-Bridge")
    words = (args.run_dir.absolute(), args.reference, args.out.absolute(), args.iteration)
    print("Loading Megatron-Bridge (half a minute).", flush=True)
    if importlib.util.find_spec("transformer_engine") is not None:
        print(_on_rank(*words))
        return 0
    try:
        with dryrun.refusals_raised():
            print(dryrun.run_ranks(_on_rank, 1, args=words)[0])
    except dryrun.RankFailed as error:
        print(f"megatron-kd: the export broke down. {error}", file=sys.stderr)
        return 1
    return 0


def _on_rank(run_dir: Path, reference: str | None, out: Path, iteration: int | None) -> str:
    from megatron_kd.bridge.export import export_hf, exported

    return exported(export_hf(run_dir, reference, out, iteration=iteration))
