# SPDX-License-Identifier: Apache-2.0
"""`megatron-kd compare`: one recipe with several losses, one after the other, and the tables of what came of it.

In: what `train` takes, and which methods. Out: a folder with one folder a run, `compare.json`, `compare.csv`, and
tables on the console. Each run has processes of its own, so that one that runs out of memory leaves the others alone.
A run that has its result is not run again.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_kd import dryrun
from megatron_kd.bridge.commands import Request, add_request, check_readable, request_of
from megatron_kd.compare import results
from megatron_kd.compare.methods import METHODS, Run, is_sweep, plan
from megatron_kd.errors import UserError
from megatron_kd.folders import make_folder

_DESCRIPTION = """\
Train one recipe with several losses, on the same data from the same seed, and put the figures side by side: losses,
gradient norm, held-out KL, agreement and perplexity (where dataset.split has a validation part and
validation.eval_iters is not 0), time, tokens/s, TFLOP/s, and on GPUs memory.
"""

_EXAMPLES = """\
methods:
{methods}

examples:
  megatron-kd compare --dry-run --recipe gpt_oss_20b_pretrain_8gpu_h200_bf16_kd_config
  megatron-kd compare --cpu-ranks 3 --run-dir cmp --recipe smollm2_135m_pretrain_3cpu_fp32_kd_config \\
      --student demo-run/student/hf kd.cache=demo-run/cache/cache dataset.data_path=demo-run/corpus/train \\
      'dataset.split="75,25,0"' validation.eval_iters=2 train.train_iters=20 --assert-equal
  megatron-kd compare --gpus 8 --run-dir cmp --config-file recipes/X.yaml --student /models/s --teacher /models/t \\
      kd.cache=/data/cache dataset.data_path=/data/corpus
  megatron-kd compare ... --sweep kd.divergence=forward_kl,reverse_kl,jsd kd.top_k=20,50,100
  megatron-kd compare ... --methods megatron,fused --sweep dataset.enable_offline_packing=false,true
  megatron-kd submit recipes/X.yaml --compare --student /models/s kd.cache=/data/cache dataset.data_path=/data/corpus
"""

_VERSIONS = ("megatron-kd", "torch", "megatron-core", "megatron-bridge", "transformer-engine", "nvidia-modelopt")
_HOURS = 3600


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Registers `compare`."""
    methods = "\n".join(f"  {name:<16} {method.says}" for name, method in METHODS.items())
    parser = subparsers.add_parser(
        "compare",
        help="train one recipe with several losses, and show the figures side by side",
        description=_DESCRIPTION,
        epilog=_EXAMPLES.format(methods=methods),
        usage="megatron-kd compare [options] [key=value ...]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_request(parser)
    parser.add_argument("--teacher", metavar="FOLDER", help="Hugging Face model for the methods that run the teacher")
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="folder of the comparison; default: runs/compare-TIME"
    )
    parser.add_argument(
        "--methods", metavar="A,B", help="which, with commas; default: all that can be had; with --sweep: fused"
    )
    parser.add_argument(
        "--sweep", nargs="+", action="extend", default=[], metavar="KEY=A,B", help="every combination of these values"
    )
    parser.add_argument(
        "--assert-equal",
        nargs="?",
        const="1e-4",
        metavar="TOLERANCE",
        help="exit with 1 unless dense, forward-chunked, fused and fused-recompute (and online, if --methods names "
        "it) have the same losses and gradient norms at every step; default 1e-4",
    )
    parser.add_argument("--cpu-ranks", type=int, metavar="N", help="run on N CPU ranks of this machine: small models")
    parser.add_argument("--gpus", type=int, metavar="N", help="run on N GPUs of this machine, by torchrun")
    parser.add_argument(
        "--dry-run", action="store_true", help="shrink the model as train --dry-run does; on --cpu-ranks, or fewest"
    )
    group = parser.add_argument_group("for a job script, which starts the ranks itself (slurm/compare.sbatch)")
    group.add_argument("--list", action="store_true", help="print the runs that have no result yet, one a line")
    group.add_argument("--world-size", type=int, metavar="N", help="with --list: ranks of the job, which must fit")
    group.add_argument("--run", metavar="NAME", dest="only", help="this process is a rank of that run")
    group.add_argument("--cpu", action="store_true", help="with --run: the rank is a CPU")
    group.add_argument("--summary", action="store_true", help="write the tables of what there is")
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    """Runs the command; 1 if a method failed, or --assert-equal found a difference."""
    sweep, overrides, tolerance = _sort(args)
    request = request_of(args, overrides)
    real = not (args.dry_run or args.summary)
    ranks = args.world_size or args.cpu_ranks or args.gpus
    tree = check_readable(request, inputs=real, world_size=ranks if real else None)
    if args.teacher and real:
        from megatron_kd.launch.node import check_model

        check_model("--teacher", args.teacher)
    runs, left_out = _plan(args, tree, sweep)
    folder = (args.run_dir or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    if args.only:
        return _one_rank(args, request, runs, folder)
    _remember(folder, _settings(args, request))
    for name, why in {} if args.list else left_out.items():
        print(f"left out: {name} ({why})")
    if args.list:
        print(*(run.name for run in _unfinished(runs, folder)), sep="\n")
        return 0
    failed = {} if args.summary else _run_all(runs, folder, _starter(args, request))
    return _report(args, runs, left_out, failed, folder, tolerance)


def _sort(args: argparse.Namespace) -> tuple[list[str], list[str], float | None]:
    """The sweep, the settings, the tolerance of --assert-equal: settings may follow --sweep and --assert-equal.

    Raises:
        UserError: a tolerance that is no number.
    """
    swept = [argument for argument in args.sweep if is_sweep(argument)]
    settings = [*args.overrides, *(argument for argument in args.sweep if argument not in swept)]
    tolerance = args.assert_equal
    if tolerance is not None and "=" in tolerance:
        settings.append(tolerance)
        tolerance = "1e-4"
    try:
        return swept, settings, None if tolerance is None else float(tolerance)
    except ValueError:
        raise UserError(f"--assert-equal {tolerance}: expected a number, such as 1e-4.") from None


def _plan(args: argparse.Namespace, tree: dict[str, Any], sweep: list[str]) -> tuple[list[Run], dict[str, str]]:
    has_cache = args.dry_run or bool((tree.get("kd") or {}).get("cache"))
    teacher = "synthetic" if args.dry_run else args.teacher
    names = args.methods.split(",") if args.methods else None
    return plan(names, sweep, has_cache=has_cache, teacher=teacher)


def _settings(args: argparse.Namespace, request: Request) -> dict[str, Any]:
    """What all runs of one folder share."""
    return {
        "recipe": request.recipe,
        "config file": None if request.config_file is None else request.config_file.read_text(),
        "student": request.student,
        "teacher": args.teacher,
        "settings": sorted(request.overrides),
        "cpu ranks": args.cpu_ranks,
        "gpus": args.gpus,
        "dry run": args.dry_run,
    }


def _remember(folder: Path, settings: dict[str, Any]) -> None:
    """A folder holds runs of the same settings, so that figures in one table belong together.

    Raises:
        UserError: its runs were made with other settings; names which.
    """
    path = folder / "settings.json"
    if path.exists():
        before = results.read_json(path)
        changed = [name for name, value in settings.items() if before.get(name) != value]
        if changed:
            what = "; ".join(f"{name}: {before.get(name)!r}, now {settings[name]!r}" for name in changed)
            raise UserError(
                f"{folder} is a comparison with other settings. {what}. Go on with the same settings, or name another "
                "--run-dir. Methods and sweeps may be added."
            )
        return
    make_folder(folder, "--run-dir")
    results.write_json(path, settings)


def _unfinished(runs: list[Run], folder: Path) -> list[Run]:
    return [run for run in runs if results.read_result(folder / run.folder) is None]


def _run_all(runs: list[Run], folder: Path, start: Callable[[Run, Path], None]) -> dict[str, str]:
    """Run what has no result. Returns the failed, with the reason."""
    failed = {}
    for number, run in enumerate(runs, start=1):
        if results.read_result(folder / run.folder) is not None:
            print(f"[{number}/{len(runs)}] {run.name}: done before")
            continue
        print(f"[{number}/{len(runs)}] {run.name} ...", flush=True)
        begin = time.monotonic()
        try:
            start(run, folder / run.folder)
            print(f"      {time.monotonic() - begin:.0f} s", flush=True)
        except (dryrun.RankFailed, UserError) as error:
            failed[run.name] = str(error)
            print("      failed:", *str(error).strip().splitlines()[-2:], sep="\n      ", flush=True)
    return failed


def _starter(args: argparse.Namespace, request: Request) -> Callable[[Run, Path], None]:
    """What runs one method on ranks of this machine and returns when it is through.

    Raises:
        UserError: it was not said on what.
    """
    if args.cpu_ranks or args.dry_run:
        from megatron_kd.compare.on_rank import Where, ranks_needed, run_on_rank

        where = Where(cpu=True, shrink=args.dry_run, ranks=args.cpu_ranks)
        ranks = args.cpu_ranks
        if ranks is None:
            with dryrun.refusals_raised():
                ranks = dryrun.run_ranks(ranks_needed, 1, args=(request, where))[0]

        def on_cpu(run: Run, folder: Path) -> None:
            work = request, run, folder, args.teacher, where
            with dryrun.refusals_raised():
                dryrun.run_ranks(run_on_rank, ranks, args=work, log_dir=folder / "logs", timeout_s=24 * _HOURS)

        return on_cpu
    if not args.gpus:
        raise UserError(
            "on what? Give --cpu-ranks N or --gpus N, --dry-run, or submit it: megatron-kd submit --compare"
        )

    def on_gpus(run: Run, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.gpus}"]
        command += ["-m", "megatron_kd.cli", *args.argv, "--run", run.name, "--run-dir", str(folder.parent)]
        with (folder / "log.txt").open("w") as log:
            status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode
        if status:
            raise UserError(f"exit status {status}; its log: {folder / 'log.txt'}")

    return on_gpus


def _one_rank(args: argparse.Namespace, request: Request, runs: list[Run], folder: Path) -> int:
    """This process is one rank of one run, started by srun or torchrun."""
    found = [run for run in runs if run.name == args.only]
    if not found:
        raise UserError(f"--run {args.only}: expected one of {', '.join(run.name for run in runs)}.")
    if args.cpu:
        dryrun.enable()
    from megatron_kd.compare.on_rank import Where, run_on_rank

    ranks = int(os.environ.get("WORLD_SIZE", os.environ.get("SLURM_NTASKS", "1")))
    where = Where(cpu=args.cpu, shrink=args.dry_run, ranks=ranks)
    run_on_rank(request, found[0], folder / found[0].folder, args.teacher, where)
    return 0


def _report(
    args: argparse.Namespace,
    runs: list[Run],
    left_out: dict[str, str],
    failed: dict[str, str],
    folder: Path,
    tolerance: float | None,
) -> int:
    from megatron_kd.report.pages import compare_page
    from megatron_kd.versions import installed_versions

    found = [result for run in runs if (result := results.read_result(folder / run.folder)) is not None]
    missing = {run.name: failed.get(run.name, "not run yet") for run in runs}
    missing = {name: why for name, why in missing.items() if name not in {result["name"] for result in found}}
    whole = {
        "settings": results.read_json(folder / "settings.json"),
        "versions": dict.fromkeys(_VERSIONS) | installed_versions(_VERSIONS),
        "left_out": {**left_out, **missing},
        "methods": found,
    }
    results.write_json(folder / "compare.json", whole)
    results.write_csv(folder / "compare.csv", found)
    compare_page(folder / "compare.html", whole, ["megatron-kd", *args.argv])
    if found:
        print("", results.step_table(found), "", results.summary_table(found), "", *results.absent(found), sep="\n")
    print(f"{folder / 'compare.json'}, compare.csv and compare.html")
    difference = None if tolerance is None else _difference(args, found, tolerance)
    if difference:
        print(f"megatron-kd: not equal: {difference}", file=sys.stderr)
    return int(bool(difference or missing))


def _difference(args: argparse.Namespace, found: list[dict[str, Any]], tolerance: float) -> str | None:
    """The first difference among the methods that compute the same loss, for each combination of a sweep."""
    named = (args.methods or "").split(",")
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for result in found:
        if METHODS[result["method"]].same or (result["method"] == "online" and "online" in named):
            groups.setdefault(tuple(result["name"].split()[1:]), []).append(result)
    if not any(len(group) > 1 for group in groups.values()):
        raise UserError("--assert-equal: fewer than two methods that compute the same loss have a result.")
    for reference, *others in groups.values():
        for other in others:
            if difference := results.first_difference(reference, other, tolerance):
                return difference
    return None
