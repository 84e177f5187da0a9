# SPDX-License-Identifier: Apache-2.0
"""`megatron-kd train`: a run as one task of a job sees it, or its rehearsal on CPU ranks of this machine.

In: a recipe's name, a YAML file, `key=value` arguments. Out: a run's folder, or on a dry run its printed account.
Megatron is imported only when a command runs (about 25 s), never to show help; in a dry run, by the ranks alone.
"""

import argparse
import importlib.util
import os
import re
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from megatron_kd.errors import UserError

_DESCRIPTION = """\
Train a student from a teacher's cache in the Megatron-Bridge loop. One process is one rank: start one per GPU with
srun or torchrun. --dry-run rehearses the same run on CPU ranks here, without a GPU, shrunk by stated rules.

Settings come from the recipe, then --config-file, then key=value arguments; the later wins. Keys are those of
--print-config, values follow hydra's grammar: train.train_iters=100  dataset.data_path=/data/corpus
"""

_EXAMPLES = """\
examples:
  megatron-kd train --config-file recipes/gpt_oss_20b_kd_8gpu_h200.yaml kd.cache=/data/cache --dry-run --world-size 8
  srun megatron-kd train --config-file recipes/gpt_oss_20b_kd_8gpu_h200.yaml kd.cache=/data/cache --run-dir runs/first
"""


class Request(NamedTuple):
    """What was asked for on the command line, as it travels to the ranks of a dry run."""

    recipe: str | None
    student: str | None
    config_file: Path | None
    overrides: tuple[str, ...]


class Rehearsal(NamedTuple):
    """What a dry run is going to do: on how many ranks, and what differs from the run that was asked for."""

    world_size: int
    changes: list[str]


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
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="folder of this run: checkpoints, logs, configuration; a run that finds its checkpoint there goes on "
        "from it; default: runs/NAME-JOB",
    )
    parser.add_argument("--print-config", action="store_true", help="print the configuration as YAML and stop")
    parser.add_argument("--dry-run", action="store_true", help="rehearse a few steps on CPU ranks of this machine")
    parser.add_argument("--ranks", type=int, metavar="N", help="CPU ranks of the dry run; default: as few as it needs")
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="GPUs of the run that a dry run rehearses; default: as few as fit"
    )
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    request = Request(args.recipe, args.student, args.config_file, tuple(args.overrides))
    if not args.dry_run and (args.ranks or args.world_size):
        raise UserError("--ranks and --world-size belong to --dry-run; a real run has as many ranks as were started.")
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.bridge") is None:
        raise UserError("training needs Megatron-Bridge, which is not installed: pip install 'megatron-kd[bridge]'")
    check_readable(request)
    if args.print_config:
        print(_on_cpu_ranks(_configuration, 1, request)[0], end="")
    elif args.dry_run:
        dry_run(request, ranks=args.ranks, world_size=args.world_size)
    else:
        train(request, args.run_dir)
    return 0


def check_readable(request: Request) -> None:
    """Whatever is wrong with the YAML or the arguments as such is said before Megatron is imported.

    Raises:
        ConfigError: not YAML, or not hydra's grammar.
    """
    from megatron_kd.bridge.settings import read_arguments, read_yaml

    read_arguments(request.overrides)
    if request.config_file is not None:
        read_yaml(request.config_file)


def train(request: Request, run_dir: Path | None) -> None:
    """The real run, on this process's rank.

    Raises:
        UserError: no GPU, no Transformer Engine, or a configuration that cannot run.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        raise UserError(
            "training needs Transformer Engine, which is not installed. Run it in NVIDIA's NeMo container, or "
            "rehearse it with --dry-run."
        )
    from megatron.core.utils import safe_get_world_size

    from megatron_kd.bridge.config import check_before_start, load_config
    from megatron_kd.bridge.train import train

    cfg, values = load_config(**request._asdict(), run_dir=run_dir or default_run_dir(request, safe_get_world_size()))
    check_before_start(cfg, values, world_size=safe_get_world_size())
    train(cfg, values)


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
    """
    print("dry run: loading Megatron-Bridge on CPU ranks (about half a minute)", flush=True)
    rehearsal = _on_cpu_ranks(_rehearse, 1, request, ranks, world_size)[0]
    print("the configuration is accepted; changed for the rehearsal:")
    print("".join(f"  {change}\n" for change in rehearsal.changes), end="")
    print(f"training on {rehearsal.world_size} CPU ranks", flush=True)
    with tempfile.TemporaryDirectory(prefix="megatron-kd-") as folder:
        _on_cpu_ranks(_train_shrunk, rehearsal.world_size, request, ranks, Path(folder) / "run", log_dir=Path(folder))
        log = (Path(folder) / "rank-0.log").read_text()
    print("".join(f"  {line.strip()}\n" for line in log.splitlines() if re.search(r"iteration +\d+/", line)), end="")
    print("dry run passed. The KD loss above is against made-up teacher rows, so its value means nothing.")


# ---- on CPU ranks ----


def _on_cpu_ranks(function, world_size: int, *args, log_dir: Path | None = None) -> list:
    """`dryrun.run_ranks`, with a rank's `UserError` raised here as it was raised there."""
    from megatron_kd import dryrun

    with tempfile.TemporaryDirectory(prefix="megatron-kd-") as folder:
        refusal = Path(folder) / "refusal"
        try:
            return dryrun.run_ranks(_guarded, world_size, args=(function, args, refusal), log_dir=log_dir)
        except dryrun.RankFailed as error:
            if refusal.exists():
                raise UserError(refusal.read_text()) from error
            raise


def _guarded(function, args: tuple, refusal: Path):
    """On a rank: leaves the text of a `UserError` where the parent finds it."""
    try:
        return function(*args)
    except UserError as error:
        refusal.write_text(str(error))
        raise


def _configuration(request: Request) -> str:
    import yaml
    from megatron.training.config.yaml_utils import safe_yaml_representers

    from megatron_kd.bridge.config import load_config

    cfg, _ = load_config(**request._asdict())
    with safe_yaml_representers():
        return yaml.safe_dump(cfg.to_dict(), sort_keys=True)


def _rehearse(request: Request, ranks: int | None, world_size: int | None) -> Rehearsal:
    """Every check of the real run that needs no GPU, then what the shrunk one will be."""
    from megatron_kd import dryrun
    from megatron_kd.bridge.config import check_final, finalise_preview, load_config
    from megatron_kd.bridge.preflight import check_settings, smallest_world_size
    from megatron_kd.bridge.train import open_feed

    cfg, values = load_config(**request._asdict())
    world_size = world_size or smallest_world_size(cfg)
    check_settings(cfg, world_size=world_size)
    if cfg.kd is not None and cfg.kd.cache:
        open_feed(cfg)
    for key in [*_stand_in_for_cache(cfg), *(change.key for change in dryrun.prepare(cfg))]:
        values.forget(key)
    check_final(finalise_preview(cfg, world_size=world_size), values, before=cfg)
    shrunk, changes = _shrunk(request, ranks, None)
    return Rehearsal(ranks or smallest_world_size(shrunk), changes)


def _train_shrunk(request: Request, ranks: int | None, run_dir: Path) -> None:
    from megatron_kd.bridge.train import train

    train(_shrunk(request, ranks, run_dir)[0])


def _shrunk(request: Request, ranks: int | None, run_dir: Path | None):
    """The same on every rank: the configuration that is trained, and the list of what differs."""
    from megatron_kd import dryrun
    from megatron_kd.bridge.config import load_config, use_run_dir

    cfg, _ = load_config(**request._asdict())
    changes = [str(change) for change in (*dryrun.shrink(cfg, world_size=ranks), *dryrun.prepare(cfg))]
    use_run_dir(cfg, run_dir)
    changes += [f"{key}: made-up teacher rows stand in for the cache" for key in _stand_in_for_cache(cfg)]
    return cfg, changes


def _stand_in_for_cache(cfg) -> list[str]:
    """Teacher rows that need no cache; returns the keys changed. Any corpus and vocabulary will do with them."""
    if cfg.kd is None:
        return []
    cfg.kd.cache = "synthetic"
    return ["kd.cache"]
