# SPDX-License-Identifier: Apache-2.0
"""The cheap check of a run on one node of its job: before 25 seconds of imports, and before any GPU is touched.

In: the settings as written, the run's folder. Out: a line of text, or an error that names node, thing and remedy. In a
Slurm job each node writes what it has into the run's folder and reads what the others wrote, so a folder that is not
shared and nodes that differ are found too. Imports neither torch nor Megatron: about two seconds.

What needs the recipe is checked by every rank once it has loaded Bridge; of recipes of ours the sizes are known here.
"""

import json
import os
import socket
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from megatron_kd.bridge.settings import SYNTHETIC, put, read_arguments, read_yaml
from megatron_kd.bridge.splits import check_split
from megatron_kd.cache import CacheReader, Corpus
from megatron_kd.errors import UserError
from megatron_kd.hub import check_on_hub
from megatron_kd.launch import machine
from megatron_kd.launch.fit import check_fit, known_values
from megatron_kd.launch.keys import check_corpus_named, check_keys, check_teacher_named

WAIT_S = 60
CLOCK_SKEW_S = 5
VISIBLE_S = 3  # for a cache that another job has just sealed


class NodeError(UserError):
    """This node cannot take part in the run."""


def settings_as_written(
    config_file: Path | None, overrides: Sequence[str], student: str | None, recipe: str | None = None
) -> dict[str, Any]:
    """The YAML file's tree with the arguments on top, `student` and `recipe`. References (`${...}`) stand as they are.

    Raises:
        ConfigError: not YAML, not hydra's grammar, or a key that does not exist.
    """
    tree = dict(read_yaml(config_file).tree) if config_file else {}
    for name, value in read_arguments(overrides).tree.items():
        put(tree, (name,), value)
    if recipe is not None:
        tree["recipe"] = recipe
    check_keys(tree)
    return tree | ({"student": student} if student else {})


def check_node(tree: dict[str, Any], run_dir: Path, *, world_size: int | None, cpu: bool) -> str:
    """Checks this node, and against the job's others.

    Args:
        tree: see `settings_as_written`.
        run_dir: the run's folder.
        world_size: ranks of the run; None if unknown.
        cpu: no GPU is needed.

    Returns:
        What was found good, as one line.

    Raises:
        UserError: the first thing that is not.
    """
    node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    check_fit(tree, world_size)
    try:
        check_teacher_named(tree)
        rows, caches = check_inputs(tree), _texts((tree.get("kd") or {}).get("cache"))
        found = {"versions": machine.versions(), "gpus": [] if cpu else _gpus()}
        folder = run_dir / "logs" / _attempt()
        _write_report(folder, node, found)
    except UserError as error:
        raise NodeError(f"node {node}: {error}") from error
    others = _compare(folder, node, found)
    cache = f"{len(caches)} caches with {rows:,} rows readable" if caches else "no cache named"
    return f"node {node}: {cache}, {run_dir} writable, {len(found['gpus'])} GPUs, {others}"


def check_inputs(tree: dict[str, Any]) -> int:
    """Models, caches, corpora and checkpoints that are named can be read from here. Returns the caches' rows.

    Raises:
        UserError: the first that cannot.
    """
    check_models(tree)
    rows = _check_caches(tree)
    check_corpus_named(tree)
    _check_corpora(tree)
    _check_checkpoints(tree)
    return rows


def _check_caches(tree: dict[str, Any]) -> int:
    """The caches that are named can be opened from here. Returns their rows."""
    kd = tree.get("kd") or {}
    readers = [CacheReader(path, wait_s=VISIBLE_S) for path in _texts(kd.get("cache")) if path != SYNTHETIC]
    top_k, temperature = kd.get("top_k"), kd.get("temperature", 1.0)
    for reader in readers if isinstance(top_k, int | None) and isinstance(temperature, int | float) else ():
        if not kd.get("cache_weights"):
            reader.check_serves(top_k=top_k, temperature=temperature)
    return sum(reader.n_rows for reader in readers)


def check_models(tree: dict[str, Any], known: Collection[str] = ()) -> None:
    """The student, and a teacher beside it, are here or on the hub, or among the `known`.

    Raises:
        NodeError: a folder without a model.
        ConfigError: a name that the hub does not have.
    """
    recipe = tree.get("recipe") or ""
    named = {
        "student": tree.get("student"),
        "recipe hf:": recipe.removeprefix("hf:") if str(recipe).startswith("hf:") else None,
        "kd.teacher": (tree.get("kd") or {}).get("teacher"),
    }
    for what, model in named.items():
        if isinstance(model, str) and not (model == SYNTHETIC or "${" in model or model in known):
            check_model(what, model)


def check_model(what: str, model: str) -> None:
    """A folder with a model in it, or a model that the hub or its cache on this machine has.

    Raises:
        NodeError: a folder without a model.
        ConfigError: a name that the hub does not have.
    """
    path = Path(model).expanduser()
    if not (path.exists() or model.startswith(("/", ".", "~"))):
        check_on_hub(what, model)
    elif not (path / "config.json").exists():
        raise NodeError(f"{what} {model} holds no config.json. Expected a Hugging Face folder, or a hub name.")


def _check_checkpoints(tree: dict[str, Any]) -> None:
    """Checkpoints that are named are there; only what is also saved to may be empty."""
    checkpoint = tree.get("checkpoint") or {}
    for name in ("load", "pretrained_checkpoint"):
        for path in _texts(checkpoint.get(name)):
            if name == "load" and path == checkpoint.get("save"):
                continue
            if "://" not in path and not Path(path).expanduser().exists():
                raise NodeError(
                    f"checkpoint.{name}={path} is a path that does not exist. Expected a Megatron checkpoint, or a "
                    "Hugging Face folder with config.json and weights."
                )


def _check_corpora(tree: dict[str, Any]) -> None:
    """The corpora that are named can be opened from here, and are large enough for their parts."""
    dataset = tree.get("dataset") or {}
    words = [word for text in _texts(dataset.get("data_path")) for word in text.split()]
    prefixes = [word for word in words if not word.replace(".", "").isdigit()]
    for prefix in prefixes:
        Corpus(prefix)
    split = known_values(tree).get("dataset.split")
    if split and "_target_" not in dataset:
        check_split(split, prefixes)


def _texts(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str) and "${" not in text]


def _gpus() -> list[str]:
    found = machine.gpus()
    tasks = int(os.environ.get("SLURM_NTASKS", "1")) // int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    tasks = int(os.environ.get("KD_TASKS_PER_NODE", tasks))
    if len(found) < tasks:
        raise NodeError(
            f"{len(found)} GPUs for {tasks} ranks. Expected one a rank: check `nvidia-smi`, --gpus-per-node, and that "
            "the container sees them; or set MEGATRON_KD_CPU=1 to try the job on CPU ranks."
        )
    return sorted(f"{gpu['name']}, driver {gpu['driver_version']}" for gpu in found)


def _attempt() -> str:
    return f"nodes-{os.environ.get('SLURM_JOB_ID', 'local')}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"


def _write_report(folder: Path, node: str, found: dict[str, Any]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{node}"
        draft.write_text(json.dumps({**found, "clock": time.time()}))
        skew = abs(draft.stat().st_mtime - time.time())
        draft.rename(folder / f"{node}.json")
    except OSError as error:
        raise NodeError(
            f"{folder} cannot be written: {error.strerror}. Choose a --run-dir that this node may write, on a file "
            "system that all nodes share."
        ) from error
    if skew > CLOCK_SKEW_S:
        raise NodeError(
            f"its clock is {skew:.0f} s from that of {folder}'s file system. Let both follow one NTP server."
        )


def _compare(folder: Path, node: str, found: dict[str, Any]) -> str:
    """Waits for the other nodes' reports; each must say what this one says."""
    count = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    deadline = time.monotonic() + WAIT_S
    while len(reports := sorted(folder.glob("*.json"))) < count:
        if time.monotonic() > deadline:
            seen = ", ".join(report.stem for report in reports)
            raise NodeError(
                f"node {node} sees reports of {len(reports)} of {count} nodes in {folder} ({seen}) after {WAIT_S} s. "
                "The folder is not on a file system that all nodes share, or a node hangs."
            )
        time.sleep(0.2)
    first = json.loads(reports[0].read_text())
    for kind in ("versions", "gpus"):
        if first[kind] != found[kind]:
            theirs, ours = (_difference(a, b) for a, b in ((first[kind], found[kind]), (found[kind], first[kind])))
            raise NodeError(
                f"{kind} differ: node {reports[0].stem} has {theirs}, node {node} has {ours}. All nodes of a run need "
                "the same; a container or one shared environment gives it."
            )
    return "alone" if count == 1 else f"versions as on the other {count - 1}"


def _difference(one: Any, other: Any) -> str:
    if isinstance(one, dict):
        return ", ".join(f"{key} {value}" for key, value in one.items() if other.get(key) != value) or "none of these"
    return f"{len(one)}: {', '.join(sorted(set(one)))}"
