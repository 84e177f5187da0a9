# SPDX-License-Identifier: Apache-2.0
"""`megatron-kd train`: a run as one task of a job sees it, or its rehearsal on CPU ranks of this machine.

In: a recipe's name, a YAML file, `key=value` arguments. Out: a run's folder, or on a dry run its printed account.
Megatron is imported only when a command runs (about 25 s), never to show help; in a dry run, by the ranks alone.
"""

import argparse
import importlib.util
import os
import re
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from megatron_kd import dryrun
from megatron_kd.errors import UserError
from megatron_kd.folders import make_folder

_DESCRIPTION = """\
Train a student from a teacher's cache in the Megatron-Bridge loop. One process is one rank: start one per GPU with
srun or torchrun. --dry-run rehearses the same run on CPU ranks here, without a GPU, shrunk by stated rules.

Settings come from the recipe, then --config-file, then key=value arguments; the later wins. Keys are those of
--print-config, values follow hydra's grammar: train.train_iters=5000  dataset.data_path=/data/corpus
"""

_EXAMPLES = """\
examples:
  megatron-kd train --dry-run --config-file recipes/gpt_oss_20b_pretrain_8gpu_h200_bf16_kd_32k.yaml
  srun megatron-kd train --config-file recipes/gpt_oss_20b_pretrain_8gpu_h200_bf16_kd_32k.yaml \\
      --student /my/gpt-oss-20b kd.cache=/my/cache dataset.data_path=/my/corpus
  megatron-kd submit recipes/gpt_oss_20b_pretrain_8gpu_h200_bf16_kd_32k.yaml --run-dir runs/first \\
      --student /my/gpt-oss-20b kd.cache=/my/cache dataset.data_path=/my/corpus
"""


class Request(NamedTuple):
    """What was asked for on the command line, as it travels to the ranks of a dry run."""

    recipe: str | None
    student: str | None
    config_file: Path | None
    overrides: tuple[str, ...]


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Registers `train`."""
    parser = subparsers.add_parser(
        "train",
        help="train a student from a teacher's cache; --dry-run rehearses on CPU",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        usage="megatron-kd train [options] [key=value ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_request(parser)
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="folder of this run: checkpoints, logs, configuration; a run that finds its checkpoint there goes on "
        "from it; default: runs/NAME-JOB",
    )
    parser.add_argument("--print-config", action="store_true", help="print the configuration as YAML and stop")
    parser.add_argument("--dry-run", action="store_true", help="rehearse a few steps on CPU ranks of this machine")
    parser.add_argument(
        "--check-only",
        action="store_true",
        help="check in two seconds, without Megatron, that this node can run it; in a Slurm job also that all nodes "
        "are alike and share the run's folder",
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="this rank is a CPU over gloo: the whole run, of a small model, without GPUs",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="CPU ranks of the dry run; default: as few as it needs")
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="ranks of the run that --dry-run or --check-only looks at; default: as few as fit",
    )
    parser.set_defaults(run=run, takes_overrides=True)


def add_request(parser: argparse.ArgumentParser) -> None:
    """The options that say what is trained: --recipe, --config-file, --student."""
    parser.add_argument(
        "--recipe",
        metavar="NAME",
        help="a recipe of ours or of Megatron-Bridge, hf:FOLDER for any model that Bridge imports, or "
        "package.module:function; default: `recipe:` in the YAML file",
    )
    parser.add_argument("--config-file", type=Path, metavar="YAML", help="settings on top of the recipe's")
    parser.add_argument(
        "--student",
        metavar="FOLDER",
        help="Hugging Face model that gives the student's architecture, tokenizer and first weights",
    )


def request_of(args: argparse.Namespace, overrides: Iterable[str] | None = None) -> Request:
    """What these options and the `key=value` arguments ask for."""
    return Request(
        args.recipe, args.student, args.config_file, tuple(args.overrides if overrides is None else overrides)
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns 0, or 1 if a dry run broke down."""
    request = request_of(args)
    if not (args.dry_run or args.check_only) and (args.ranks is not None or args.world_size is not None):
        raise UserError("--ranks and --world-size belong to --dry-run; a real run has as many ranks as were started.")
    for name in ("ranks", "world_size"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: expected at least 1.")
    if args.check_only:
        return check_only(request, args)
    from megatron_kd.launch.keys import check_teacher_named

    require_bridge("training needs Megatron-Bridge")
    real = not (args.dry_run or args.print_config)
    runs_here = args.cpu or importlib.util.find_spec("transformer_engine") is not None
    ranks = _ranks() if real and runs_here else args.world_size
    tree = check_readable(request, inputs=not args.print_config, world_size=ranks)
    if real:
        check_teacher_named(tree)
        if not runs_here:
            raise UserError(
                "training needs Transformer Engine, which is not installed. Run it in NVIDIA's NeMo container, "
                "rehearse it with --dry-run, or train a small model with --cpu."
            )
        args.run_dir = make_folder((args.run_dir or default_run_dir(request, _ranks())).absolute(), "--run-dir")
    try:
        if args.print_config:
            print(_on_cpu_ranks("print_config", 1, request)[0], end="")
        elif args.dry_run:
            dry_run(request, ranks=args.ranks, world_size=args.world_size)
        else:
            train(request, args.run_dir, cpu=args.cpu)
    except dryrun.RankFailed as error:
        print(f"megatron-kd: a CPU rank broke down. {error}", file=sys.stderr)
        return 1
    return 0


def require_bridge(why: str) -> None:
    """Raise UserError unless Megatron-Bridge is installed; `why` begins the sentence. Imports nothing."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.bridge") is None:
        raise UserError(f"{why}, which is not installed: pip install 'megatron-kd[bridge]'")


def check_readable(
    request: Request, *, inputs: bool = False, world_size: int | None = None, known: Collection[str] = ()
) -> dict[str, Any]:
    """Whatever can be found wrong with what was asked is said before Megatron is imported.

    Args:
        request: what was asked for.
        inputs: caches, corpora and checkpoints are looked for as well as models.
        world_size: ranks of the run; None if unknown.
        known: without `inputs`, names of models that need not be on the hub.

    Returns:
        The settings as written.

    Raises:
        ConfigError: not YAML, not hydra's grammar, no known key or recipe, a value of another type, sizes that do not
            fit each other.
        UserError: nothing usable at a path.
    """
    from megatron_kd.launch.fit import check_fit
    from megatron_kd.launch.node import check_inputs, check_models, settings_as_written

    tree = settings_as_written(request.config_file, request.overrides, request.student, request.recipe)
    if tree.get("recipe") is None:
        raise UserError("no recipe: give --recipe NAME, or put `recipe: NAME` on top of the YAML file.")
    if inputs:
        check_inputs(tree)
    else:
        check_models(tree, known)
    check_fit(tree, world_size)
    return tree


def _ranks() -> int:
    """Ranks that torchrun or srun has started; 1 if neither has."""
    found = os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or ""
    return int(found) if found.isdigit() else 1


def check_only(request: Request, args: argparse.Namespace) -> int:
    """The check that train.sbatch makes on every node.

    Raises:
        UserError: this node cannot run it.
    """
    from megatron_kd.launch.node import check_node, settings_as_written

    tree = settings_as_written(request.config_file, request.overrides, request.student, request.recipe)
    if "recipe" not in tree:
        raise UserError("no recipe: give --recipe NAME, or put `recipe: NAME` on top of the YAML file.")
    run_dir = args.run_dir or default_run_dir(request, args.world_size or 1)
    print(check_node(tree, run_dir.absolute(), world_size=args.world_size, cpu=args.cpu))
    return 0


def train(request: Request, run_dir: Path, *, cpu: bool = False) -> None:
    """The real run, on this process's rank. When it is through, rank 0 writes the file `finished` into its folder.

    Raises:
        UserError: a configuration that cannot run.
    """
    if cpu:
        dryrun.enable()
    from megatron.bridge.utils.common_utils import get_world_size_safe

    from megatron_kd.bridge.config import check_before_start, load_config
    from megatron_kd.bridge.history import StepHistory
    from megatron_kd.bridge.train import leave_on_signal, train

    cfg, values = load_config(**request._asdict(), run_dir=run_dir)
    for change in dryrun.prepare(cfg) if cpu else ():
        values.forget(change.key)
    leave_on_signal(cfg, values)
    check_before_start(cfg, values, world_size=get_world_size_safe())
    train(
        cfg,
        values,
        callbacks=[StepHistory(run_dir / "history.jsonl")],
        prepare_teacher=dryrun.prepare_model if cpu else None,
    )
    if os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0":
        (run_dir / "finished").touch()


def default_run_dir(request: Request, world_size: int) -> Path:
    """runs/NAME-JOB: the job's number, which a requeued job keeps, or for a single process the time.

    Raises:
        UserError: several ranks and no job number, so the ranks could not agree.
    """
    name = request.config_file.stem if request.config_file else re.sub(r"\W+", "-", request.recipe or "run").strip("-")
    job = os.environ.get("SLURM_JOB_ID")
    if job is None and world_size > 1:
        raise UserError("--run-dir is needed: several ranks outside Slurm have no job number to agree on a folder by.")
    return Path("runs") / f"{name}-{job or time.strftime('%Y%m%d-%H%M%S')}"


def dry_run(request: Request, *, ranks: int | None, world_size: int | None) -> None:
    """Checks the run that was asked for, then trains a shrunk one for a few steps, and says what it did.

    Raises:
        UserError: the run would be refused.
        RankFailed: the shrunk run broke down.
    """
    print("Loading Megatron-Bridge on a CPU rank (half a minute).", flush=True)
    world_size, changes = _on_cpu_ranks("check", 1, request, ranks, world_size)[0]
    print("The configuration is accepted. Changed for the dry run:", *changes, sep="\n  ")
    print(f"Training on {world_size} CPU ranks.", flush=True)
    losses = max(_on_cpu_ranks("train_shrunk", world_size, request, ranks), key=lambda steps: len(steps[0]))
    for number, step in enumerate(losses, start=1):
        print(f"  step {number}: " + ", ".join(f"{name} {value:.4f}" for name, value in step.items()))
    print("Dry run passed.")


def _on_cpu_ranks(name: str, world_size: int, *args: Any) -> list[Any]:
    """Runs a function of `rehearsal` on CPU ranks; a rank's `UserError` is raised here as it was raised there."""
    with dryrun.refusals_raised():
        return dryrun.run_ranks(_on_rank, world_size, args=(name, args))


def _on_rank(name: str, args: tuple) -> Any:
    from megatron_kd.bridge import rehearsal

    return getattr(rehearsal, name)(*args)
