# SPDX-License-Identifier: Apache-2.0
"""`megatron-kd evaluate`: lm-evaluation-harness on teacher, pruned and healed students, in one table.

In: Hugging Face folders by name, and the harness's tasks. Out: a table on the console, `evaluation.json` and
`evaluation.csv`. The harness does all the measuring, one model after the other; it is imported only when the command
runs. Cost: that of the harness, one copy of a model at a time.
"""

import argparse
import difflib
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

from megatron_kd.errors import UserError
from megatron_kd.folders import make_folder
from megatron_kd.hub import check_on_hub
from megatron_kd.report.evaluation import Evaluation, Score, files_digest
from megatron_kd.versions import installed_versions

_DESCRIPTION = """\
Measure several models on the same tasks with lm-evaluation-harness, and put their scores into one table. Needs
pip install 'megatron-kd[evaluate]'. A task's data comes from the hub, or from where a task of your own says.
Scores are written after each model: called again with the same settings and --out, it measures only models that are
not in there yet. Other settings need another --out.
"""
_EXAMPLES = """\
examples:
  megatron-kd evaluate teacher=/models/gpt-oss-20b pruned=./student healed=exported/first \\
      --tasks boolq,hellaswag,mmlu --out evaluation
  megatron-kd evaluate healed=exported/first --task-folder ./tasks --limit 100
"""
_DEFAULT_TASKS = "boolq,hellaswag,mmlu"
_DTYPES = ("auto", "float32", "bfloat16", "float16")
_VERSIONS = ("megatron-kd", "torch", "transformers", "datasets")


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Registers `evaluate`."""
    parser = subparsers.add_parser(
        "evaluate",
        help="compare models on benchmarks with lm-evaluation-harness",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER", help="a model's name in the table, and its folder")
    parser.add_argument(
        "--tasks", metavar="A,B", help=f"default: all of --task-folder if that is given, else {_DEFAULT_TASKS}"
    )
    parser.add_argument("--task-folder", type=Path, metavar="DIR", help="folder with YAML tasks of your own")
    parser.add_argument("--shots", type=int, metavar="N", help="examples before the question; default: the task's")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N examples of each task: a try")
    parser.add_argument("--batch-size", type=int, metavar="N", help="default: as many as fit on a GPU; 4 on the CPU")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda:0; default: cuda where there is a GPU")
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="auto",
        help="of weights and arithmetic; default: auto, as the folder's are",
    )
    parser.add_argument("--out", type=Path, default=Path("evaluation"), metavar="DIR", help="default: evaluation")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measures, prints, writes.

    Raises:
        UserError: no harness, no such model or task, data that cannot be had, or results of other settings in --out.
    """
    models = _models(args.models)
    if args.task_folder and not args.task_folder.is_dir():
        raise UserError(f"--task-folder {args.task_folder} is no folder.")
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError(
            "evaluate needs lm-evaluation-harness, which is not installed: pip install 'megatron-kd[evaluate]'"
        )
    for name, folder in models.items():
        check_on_hub(f"{name}:", folder)
    make_folder(args.out, "--out")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    manager, tasks = _tasks(args)
    evaluation = Evaluation(args.out, _settings(args, tasks), installed_versions(_VERSIONS))
    missing = {name: folder for name, folder in models.items() if not evaluation.finished(name, folder)}
    for number, (name, folder) in enumerate(models.items(), start=1):
        if name not in missing:
            print(f"{name} ({number} of {len(models)}): measured already, see {args.out}", flush=True)
            continue
        print(f"{name} ({number} of {len(models)}): {folder}", flush=True)
        evaluation.add(name, folder, _scores(name, _measure(folder, tasks, manager, args), tasks, manager))
        print(evaluation.table([name]), flush=True)
    print(f"\n{evaluation.table([*evaluation.models])}")
    print(f"written: {args.out}/evaluation.json, {args.out}/evaluation.csv")
    return 0


def _models(words: list[str]) -> dict[str, str]:
    models: dict[str, str] = {}
    for word in words:
        name, separator, folder = word.partition("=")
        if not (name and separator and folder):
            raise UserError(f"{word!r} is not NAME=FOLDER, such as healed=exported/first.")
        if name in models:
            raise UserError(f"two models are called {name}. Give each a name of its own.")
        if folder.startswith(("/", ".", "~")) or Path(folder).exists():
            if not (Path(folder) / "config.json").is_file():
                raise UserError(
                    f"{name}: {folder} holds no Hugging Face model: expected config.json in it. A run's checkpoint "
                    "becomes one by `megatron-kd export`."
                )
        models[name] = folder
    return models


def _tasks(args: argparse.Namespace) -> tuple[Any, list[str]]:
    """The harness's list of tasks, and the names of those asked for."""
    from lm_eval.tasks import TaskManager

    folder = None if args.task_folder is None else str(args.task_folder)
    if folder and args.tasks is None:
        manager = TaskManager(include_path=folder, include_defaults=False)
        if not manager.all_subtasks:
            raise UserError(f"--task-folder {folder} holds no task: expected a YAML file with `task: NAME` in it.")
        return manager, manager.all_subtasks
    manager = TaskManager(include_path=folder)
    tasks = [name for name in (_DEFAULT_TASKS if args.tasks is None else args.tasks).split(",") if name]
    if not tasks:
        raise UserError("--tasks names no task.")
    for name in tasks:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=2)
            hint = f" Did you mean {' or '.join(near)}?" if near else " `lm-eval ls tasks` lists them."
            raise UserError(f"--tasks: the harness has no task {name!r}.{hint}")
    return manager, tasks


def _settings(args: argparse.Namespace, tasks: list[str]) -> dict[str, Any]:
    """All that a model's scores depend on. Of --task-folder the tasks' files count, not the data they name."""
    own = args.task_folder.rglob("*") if args.task_folder else ()
    return {
        "--tasks": ",".join(sorted(tasks)),
        "--shots": args.shots,
        "--limit": args.limit,
        "--dtype": args.dtype,
        "contents of --task-folder": args.task_folder
        and files_digest((path for path in own if path.suffix in (".yaml", ".yml", ".py")), content=True),
        "lm-eval": importlib.metadata.version("lm-eval"),
    }


def _measure(folder: str, tasks: list[str], manager: Any, args: argparse.Namespace) -> dict[str, Any]:
    import torch
    from datasets.exceptions import DatasetsError
    from huggingface_hub.errors import HfHubHTTPError
    from lm_eval import simple_evaluate

    on_cpu = args.device == "cpu" or not (args.device or torch.cuda.is_available())
    try:
        return simple_evaluate(
            model="hf",
            model_args={"pretrained": folder, "dtype": args.dtype},
            tasks=tasks,
            num_fewshot=args.shots,
            batch_size=args.batch_size or (4 if on_cpu else "auto"),
            device=args.device,
            limit=args.limit,
            log_samples=False,
            task_manager=manager,
        )
    except (DatasetsError, HfHubHTTPError, ConnectionError, FileNotFoundError) as error:
        raise UserError(
            f"the data of {', '.join(tasks)}, or the model {folder}, cannot be had: {error} Where the hub cannot be "
            "reached, fill its cache on a machine that reaches it (HF_HOME), or give tasks with local data by "
            "--task-folder."
        ) from error


def _scores(model: str, found: dict[str, Any], tasks: list[str], manager: Any) -> list[Score]:
    """Of the tasks asked for: of a group such as mmlu its mean, not its members; of a tag, which has none, these."""
    scores = []
    for asked in tasks:
        names = [name for name in found["results"] if name == asked] or [
            name for name in found["results"] if asked in manager.task_index[name].tags
        ]
        for task in names:
            samples = found.get("n-samples", {}).get(task, {}).get("effective")
            scores += _scores_of_task(model, task, found["results"][task], samples)
    return scores


def _scores_of_task(model: str, task: str, result: dict[str, Any], samples: int | None) -> list[Score]:
    scores = []
    for key, value in result.items():
        metric, _, how = key.partition(",")
        if how and not metric.endswith("_stderr") and isinstance(value, int | float):
            stderr = result.get(f"{metric}_stderr,{how}")
            stderr = float(stderr) if isinstance(stderr, int | float) else None
            name = metric if how == "none" else f"{metric}, {how}"
            scores.append(Score(task, name, model, float(value), stderr, samples))
    return scores
