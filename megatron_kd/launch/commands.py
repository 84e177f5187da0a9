# SPDX-License-Identifier: Apache-2.0
"""`megatron-kd submit` and `megatron-kd doctor`: what is asked for, what is printed, what the exit status says."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from megatron_kd.errors import UserError

_SUBMIT = """\
Submit a recipe to Slurm: a run with slurm/train.sbatch, a cache (a YAML with `teacher:`) with slurm/cache.sbatch.
What can be checked here in a second is checked first. key=value arguments, and all that follows `--`, go to
`megatron-kd train`, `compare` or `cache build`.
"""
_SUBMIT_EXAMPLES = """\
examples:
  megatron-kd submit recipes/gpt_oss_20b_pretrain_16gpu_h200_bf16_kd_128k.yaml --nodes 2 --time 8:00:00 \\
      --run-dir runs/first --student /models/student kd.cache=/data/cache dataset.data_path=/data/corpus
  megatron-kd submit recipes/gpt_oss_120b_cache_8gpu_h200.yaml --array 0-7 --corpus /data/corpus --out /data/cache
  megatron-kd submit recipes/X.yaml --container /images/nemo.sqsh --mount /data:/data --sbatch=--qos=high --print

Tokens (HF_TOKEN, WANDB_API_KEY, ...) are exported, never given here: the job inherits them by name.
"""
_DOCTOR = """\
Look at this machine: versions, GPUs, NCCL, container, disks, file systems, clocks, Slurm, the hub; say what is missing
and how to get it. Exit status: 0 if all that the purpose needs is there, 1 if not.
"""


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Registers `submit` and `doctor`."""
    _add_submit(subparsers)
    parser = subparsers.add_parser(
        "doctor",
        help="look at this machine and say what is missing",
        description=_DOCTOR,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--for",
        dest="purpose",
        choices=("train", "cache", "dry-run", "submit"),
        help="what the machine is to do; default: train where there is a GPU, else dry-run",
    )
    parser.add_argument("--path", type=Path, default=Path.cwd(), metavar="DIR", help="where runs go; default: here")
    parser.add_argument("--quick", action="store_true", help="without torch and without the network: about a second")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run_doctor)


def _add_submit(subparsers: argparse._SubParsersAction) -> None:
    parser = subparsers.add_parser(
        "submit",
        help="submit a recipe to Slurm, or print the command that would",
        description=_SUBMIT,
        epilog=_SUBMIT_EXAMPLES,
        usage="megatron-kd submit RECIPE.yaml [options] [arguments of train or cache build ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config_file", type=Path, metavar="RECIPE.yaml", help="a file of recipes/, or one of yours")
    parser.add_argument("--compare", action="store_true", help="compare losses on it instead of training it once")
    parser.add_argument("--print", dest="print_only", action="store_true", help="print the command, submit nothing")
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="folder of the run; default: runs/NAME of the YAML"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder of the cache")
    parser.add_argument("--corpus", metavar="PREFIX", help="the corpus of a cache")
    parser.add_argument("--student", metavar="FOLDER", help="Hugging Face model that the student starts from")
    group = parser.add_argument_group("the allocation")
    group.add_argument("--nodes", type=int, default=None, metavar="N", help="default: as the recipe's name says, or 1")
    group.add_argument("--gpus-per-node", type=int, default=None, metavar="N", help="and tasks; default: 8")
    group.add_argument("--time", metavar="LIMIT", help="time limit; before it ends the run saves and is requeued")
    group.add_argument(
        "--grace", type=int, metavar="S", help="seconds before the limit at which it saves; default 300"
    )
    group.add_argument("--array", metavar="FROM-TO", help="several jobs for one cache")
    for name in ("account", "partition"):
        group.add_argument(f"--{name}", metavar="NAME", help=f"Slurm's {name}")
    group.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="any other option: --sbatch=--qos=high"
    )
    group = parser.add_argument_group("the software")
    group.add_argument("--container", metavar="IMAGE", help="image for pyxis; default: the clone's own environment")
    group.add_argument("--mount", action="append", default=[], metavar="HOST:CONTAINER", help="may be repeated")
    group.add_argument(
        "--srun", action="append", default=[], metavar="OPTION", help="option of srun: --srun=--mpi=pmix"
    )
    group.add_argument("--cpu", action="store_true", help="CPU ranks, to try a cluster with a small model")
    parser.set_defaults(run=run_submit, takes_overrides=True)


def run_submit(args: argparse.Namespace) -> int:
    """Prints or submits the job.

    Raises:
        UserError: what was asked cannot be submitted.
    """
    job = make_job(args)
    print(job.printed() if args.print_only else f"{job.submit()}\nlog: {job.logs}/latest")
    return 0


def make_job(args: argparse.Namespace) -> Any:
    """The job that was asked for.

    Raises:
        UserError: a mistake that can be seen from here.
    """
    from megatron_kd.bridge.settings import read_yaml
    from megatron_kd.launch.slurm import Job, find_scripts, refuse_secrets

    settings, further = _at_dashes(args.overrides)
    refuse_secrets([*settings, *further])
    _check_options(args)
    home, config_file = find_scripts(), args.config_file.absolute()
    written = read_yaml(config_file).tree
    is_cache = "teacher" in written
    gpus = args.gpus_per_node if args.gpus_per_node is not None else min(8, _gpus_in_name(config_file))
    nodes = args.nodes if args.nodes is not None else max(1, _gpus_in_name(config_file) // max(1, gpus))
    if nodes < 1 or gpus < 1:
        raise UserError(f"--nodes {nodes} --gpus-per-node {gpus}: expected at least 1 of each.")
    arguments = ["--config-file", str(config_file)]
    if is_cache:
        out = _wanted(args, "out", "a cache needs --out DIR.").absolute()
        logs, more = out.with_name(f"{out.name}.logs"), {"corpus": args.corpus, "out": out}
        _refuse(args, "run_dir", "student", why="is for a run; this recipe builds a cache.")
        if args.compare:
            raise UserError("--compare is for a run; this recipe builds a cache.")
        if args.corpus is None and not {"corpus", "sft"} & {*written, *(word.lstrip("-") for word in further)}:
            raise UserError("a cache needs --corpus PREFIX, an indexed dataset without .bin or .idx.")
        for setting in settings:
            if not setting.lstrip("+~").startswith("model."):
                raise UserError(f"{setting} is no setting of a teacher, which are model.*; options go after `--`.")
    else:
        name = f"{config_file.stem}-compare" if args.compare else config_file.stem
        run_dir = (args.run_dir or Path("runs") / name).absolute()
        logs, more = run_dir / "logs", {"student": args.student, "run-dir": run_dir}
        _refuse(args, "out", "corpus", "array", why="is for a cache; this recipe is a run.")
        _check_run(config_file, settings, further, args.student, nodes * gpus, compares=args.compare)
    for name, value in more.items():
        arguments += [] if value is None else [f"--{name}", str(value)]
    script = "cache.sbatch" if is_cache else "compare.sbatch" if args.compare else "train.sbatch"
    return Job(
        script=home / "slurm" / script,
        arguments=[*arguments, *further, *settings],
        logs=logs,
        name=re.sub(r"[^\w.-]", "-", config_file.stem),
        options=_allocation(args, nodes, gpus),
        environment=_software(args, home),
    )


def _check_options(args: argparse.Namespace) -> None:
    """What Slurm would say after the job has been waiting, or in words of its own."""
    if args.time is not None and not re.fullmatch(r"\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2}", args.time):
        raise UserError(f"--time {args.time}: expected minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS, such as 8:00:00.")
    if args.array is not None and not re.fullmatch(r"\d+-\d+(:\d+)?(%\d+)?", args.array):
        raise UserError(f"--array {args.array}: expected FROM-TO, such as 0-7, so that each job knows its share.")
    if args.array is not None and int(args.array.partition("-")[0]) > int(re.split("[-:%]", args.array)[1]):
        raise UserError(f"--array {args.array}: expected FROM-TO with FROM not above TO, such as 0-7.")
    for name in ("sbatch", "srun"):
        for option in getattr(args, name):
            if not option.startswith("-"):
                raise UserError(f"--{name}={option}: expected an option with its dashes, such as --{name}=--{option}.")
    for mount in args.mount:
        if ":" not in mount:
            raise UserError(f"--mount {mount}: expected HOST:CONTAINER, such as {mount}:{mount}.")


def _at_dashes(words: list[str]) -> tuple[list[str], list[str]]:
    """Settings before `--`, options of the command that the job runs after it."""
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


def _check_run(
    config_file: Path, settings: list[str], further: list[str], student: str | None, ranks: int, *, compares: bool
) -> None:
    """What needs neither Megatron nor the nodes."""
    from megatron_kd.launch.fit import check_fit
    from megatron_kd.launch.keys import check_corpus_named, check_teacher_named
    from megatron_kd.launch.node import settings_as_written

    tree = settings_as_written(config_file, settings, student)
    if "recipe" not in tree and not any(word.startswith("--recipe") for word in further):
        raise UserError(f"{config_file} names no recipe. Put `recipe: NAME` on top of it, or add -- --recipe NAME.")
    check_fit(tree, ranks)
    check_corpus_named(tree)
    if not compares:
        check_teacher_named(tree)


def _allocation(args: argparse.Namespace, nodes: int, gpus: int) -> list[str]:
    options = [f"--nodes={nodes}", f"--ntasks-per-node={gpus}", f"--gpus-per-node={gpus}"]
    for name in ("time", "account", "partition", "array"):
        value = getattr(args, name)
        options += [] if value is None else [f"--{name}={value}"]
    options += [] if args.grace is None else [f"--signal=B:USR1@{args.grace}"]
    return [*options, *args.sbatch]


def _software(args: argparse.Namespace, home: Path) -> dict[str, str]:
    if args.mount and not args.container:
        raise UserError("--mount is for a container; add --container IMAGE.")
    settings = {
        "MEGATRON_KD_HOME": str(home),
        "MEGATRON_KD_CONTAINER": args.container,
        "MEGATRON_KD_MOUNTS": ",".join(args.mount),
        "MEGATRON_KD_SRUN_ARGS": "\n".join(args.srun),
        "MEGATRON_KD_CPU": "1" if args.cpu else None,
    }
    return {name: value for name, value in settings.items() if value}


def _gpus_in_name(path: Path) -> int:
    """Bridge's grammar of recipe names: ..._16gpu_h200_..."""
    found = re.search(r"_(\d+)gpu_", path.name)
    return int(found[1]) if found else 8


def _wanted(args: argparse.Namespace, name: str, message: str) -> Any:
    value = getattr(args, name)
    if value is None:
        raise UserError(message)
    return value


def _refuse(args: argparse.Namespace, *names: str, why: str) -> None:
    for name in names:
        if getattr(args, name) is not None:
            raise UserError(f"--{name.replace('_', '-')} {why}")


def run_doctor(args: argparse.Namespace) -> int:
    """Prints what was found. Returns 1 if something is missing that the purpose needs."""
    from megatron_kd.launch.doctor import default_purpose, examine

    purpose = args.purpose or default_purpose()
    findings = examine(purpose, args.path, quick=args.quick)
    missing = [finding for finding in findings if finding.state == "missing"]
    if args.json:
        print(json.dumps({"for": purpose, "ok": not missing, "findings": [finding._asdict() for finding in findings]}))
        return int(bool(missing))
    for finding in findings:
        print(f"{finding.state:>8}  {finding.name}: {finding.found}")
        if finding.remedy:
            print(f"{'':>10}{finding.remedy}")
    print(f"For {purpose}: " + (f"{len(missing)} things are missing." if missing else "all that is needed is here."))
    return int(bool(missing))
