# SPDX-License-Identifier: Apache-2.0
"""What `megatron-kd cache build` runs: options from a file and the command line, a teacher of any engine, a build.

In: parsed arguments. Out: the cache's folder, or a plan in words. A Megatron teacher runs on the ranks that were
started (srun, torchrun), or on CPU ranks that are started here.
"""

import argparse
import difflib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_kd.cache.corpus import Corpus, DocumentUnits, UnitSource
from megatron_kd.cache.errors import StoreError
from megatron_kd.cache.manifest import load_manifest
from megatron_kd.cache.sets import LaterUnits
from megatron_kd.cache.store import open_store
from megatron_kd.errors import ConfigError
from megatron_kd.folders import check_can_make
from megatron_kd.hub import check_on_hub

_TIMEOUT_S = 14 * 24 * 3600
_LOADING = {
    "transformers": ("gguf_file", "revision", "tokenizer", "vocab_size", "dtype", "device", "device_map"),
    "vllm": ("top_k", "revision", "tokenizer", "vocab_size", "dtype"),
    "megatron": ("checkpoint", "tokenizer", "vocab_size", "dtype"),
}
_BUILDING = (
    "top_k",
    "values",
    "codec",
    "top_p",
    "tile_tokens",
    "batch_tokens",
    "strip_tokens",
    "max_context",
    "window",
    "stride",
    "limit",
    "accept_teacher_loss",
)


def run_build(args: argparse.Namespace) -> Path | None:
    """Build a cache. Returns its folder, on the process that shall tell about it; None after a dry run.

    Raises:
        UserError: options that are missing or do not go together; see also `prepare_build`.
    """
    args, model = merged(args)
    if args.engine == "megatron":
        if args.cpu_ranks:
            return _on_cpu_ranks(args, model)
        first = build_on_this_rank(args, model, prepare=_cpu() if args.cpu else None)
        return args.out if first and not args.dry_run else None
    given = {"--cpu-ranks": args.cpu_ranks, "--cpu": args.cpu, "--checkpoint": args.checkpoint}
    given["model.*"] = model and args.engine != "vllm"
    if name := next((name for name, value in given.items() if value), None):
        raise ConfigError(f"{name} is for a Megatron teacher; add --engine megatron.")
    if args.engine == "vllm":
        from megatron_kd.teacher.vllm import VllmTeacher

        _build(args, VllmTeacher.load(args.teacher, settings=model, **_options(args, _LOADING["vllm"])), {})
    else:
        _build(args, args.teacher, _options(args, _LOADING["transformers"]))
    return None if args.dry_run else args.out


def merged(args: argparse.Namespace) -> tuple[argparse.Namespace, dict[str, Any]]:
    """The options of --config-file under those of the command line, and the model's settings.

    Raises:
        ConfigError: the file cannot be read or has a key that is no option; a required option is nowhere.
    """
    from megatron_kd.bridge.settings import read_arguments, read_yaml

    settings, overrides = {}, args.overrides
    if args.config_file is not None:
        tree, sources = read_yaml(args.config_file)
        settings = tree.pop("model", None) or {}
        words = [word for key, value in tree.items() for word in _words(args.parser, key, value, sources[(key,)])]
        given = args.argv[args.argv.index("build") + 1 :]
        args, overrides = args.parser.parse_known_args([*words, *given])
    tree = read_arguments(overrides).tree
    if wrong := sorted(set(tree) - {"model"}):
        raise ConfigError(f"{wrong[0]}= is no setting of a teacher: options start with --, others with model.")
    settings = {**settings, **tree.get("model", {})}
    for name in ("teacher", *([] if args.sft else ["corpus"]), "out"):
        if getattr(args, name) is None:
            raise ConfigError(f"--{name} is missing; give it on the command line, or `{name}:` in --config-file.")
    if args.sft and (args.corpus or args.continues):
        raise ConfigError("--sft takes the data of a fine-tuning run; --corpus and --continues are for pre-training.")
    if "://" not in str(args.out):
        check_can_make(Path(args.out), "--out")
    _check_folder(Path(args.teacher).expanduser(), args.top_k)
    for name in ("teacher", "tokenizer"):
        model = getattr(args, name)
        if model and not model.startswith(("/", ".", "~")):
            check_on_hub(f"--{name}", model, args.revision if name == "teacher" else None)
    return args, settings


def _check_folder(teacher: Path, top_k: int) -> None:
    """What the configuration in a teacher's folder says, without loading anything.

    Raises:
        ConfigError: no model in the folder, or fewer ids than entries asked for.
    """
    if not teacher.is_dir() or any(teacher.glob("*.gguf")):
        return
    file = teacher / "config.json"
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ConfigError(f"--teacher {teacher} holds no Hugging Face model: expected config.json in it.") from None
    except ValueError as error:
        raise ConfigError(f"--teacher: {file} is not JSON: {error}") from error
    ids = {**config, **(config.get("text_config") or {})}.get("vocab_size")
    if isinstance(ids, int) and top_k > ids:
        raise ConfigError(f"--top-k {top_k} is more than the {ids} ids of {teacher}.")


def _words(parser: argparse.ArgumentParser, key: str, value: Any, source: str) -> Iterator[str]:
    """A line of the file as words of a command line."""
    options = {name: action for action in parser._actions for name in action.option_strings}
    name = "--" + key.replace("_", "-")
    if name not in options:
        near = difflib.get_close_matches(name, options, n=1)
        hint = f" Did you mean {near[0].removeprefix('--').replace('-', '_')}?" if near else ""
        raise ConfigError(f"{source}: {key} is no option of `cache build`.{hint}")
    if options[name].nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{source}: {key} is true or false, found {value!r}.")
        if value:
            yield name
        return
    for item in value if isinstance(value, list) else [value]:
        if item is not None:
            yield f"{name}={item}"


def build_on_this_rank(args: argparse.Namespace, model: dict[str, Any], prepare: Any) -> bool:
    """This rank's part of a build by a Megatron teacher. Returns whether it is the first rank."""
    import torch.distributed as dist

    from megatron_kd.bridge.teacher import MegatronTeacher

    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ:
        _rendezvous_of_slurm()
    teacher = MegatronTeacher.load(
        args.teacher, settings=model, prepare=prepare, **_options(args, _LOADING["megatron"])
    )
    first = dist.get_rank() == 0
    _build(args, teacher, {}, on_rank=True, progress=args.progress and first, tell=first)
    dist.barrier()
    return first


def _build(
    args: argparse.Namespace,
    teacher: Any,
    loading: dict[str, Any],
    *,
    on_rank: bool = False,
    progress: bool | None = None,
    tell: bool = True,
) -> None:
    from megatron_kd.teacher.build import prepare_build

    build = prepare_build(
        teacher,
        _units(args, on_rank=on_rank, progress=args.progress if progress is None else progress),
        args.out,
        temperatures=args.temperature,
        **_options(args, _BUILDING),
        **loading,
    )
    if not args.dry_run:
        build.run(writer=args.writer, progress=args.progress if progress is None else progress)
        return
    plan = build.plan()
    rate = 3600 * plan.tokens_per_s
    if tell:
        print(
            f"The teacher's loss on a sample of the corpus is {plan.loss:.2f} nats.\n"
            f"The cache will have {plan.rows:,} tokens in {plan.tiles:,} tiles, {plan.bytes / 1e6:,.1f} MB before any "
            f"compression.\nA first forward pass made {plan.tokens_per_s:,.0f} tokens/s: {plan.rows / rate:,.1f} "
            "hours for one writer.\nNothing was written.",
            flush=True,
        )


def _units(args: argparse.Namespace, *, on_rank: bool, progress: bool) -> UnitSource:
    """What the teacher is to see: documents of --corpus, or the examples of the run that --sft configures."""
    if args.sft is not None:
        return _examples(args.sft, progress) if on_rank else _examples_read_apart(args.sft)
    units: UnitSource = DocumentUnits(Corpus(args.corpus))
    return units if args.continues is None else LaterUnits.after(units, load_manifest(args.continues))


def _examples(config_file: Path, progress: bool) -> UnitSource:
    """Where Megatron-Bridge is loaded."""
    from megatron_kd.bridge.config import load_config
    from megatron_kd.bridge.sft import example_units
    from megatron_kd.bridge.train import run_tokenizer

    cfg, _ = load_config(config_file=config_file)
    return example_units(cfg, run_tokenizer(cfg), progress=progress)


def _examples_read_apart(config_file: Path) -> UnitSource:
    """In a process of its own, on CPU: this one has a teacher to load, and needs no GPU to read data."""
    from megatron_kd import dryrun

    print("Loading Megatron-Bridge to read the run's fine-tuning data (half a minute).", flush=True)
    with dryrun.refusals_raised():
        return dryrun.run_ranks(_examples, 1, args=(config_file.absolute(), False), timeout_s=_TIMEOUT_S)[0]


def _options(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names}


def _rendezvous_of_slurm() -> None:
    """What torch.distributed wants to know, from what srun says."""
    from megatron.bridge.utils.common_utils import get_master_addr_safe, get_master_port_safe

    os.environ["RANK"], os.environ["WORLD_SIZE"] = os.environ["SLURM_PROCID"], os.environ["SLURM_NTASKS"]
    os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]
    os.environ.setdefault("MASTER_ADDR", get_master_addr_safe())
    os.environ.setdefault("MASTER_PORT", str(get_master_port_safe()))


def _cpu() -> Any:
    """Make this process a CPU rank; what makes a model's provider fit for it."""
    from megatron_kd import dryrun

    dryrun.enable()
    return dryrun.prepare_model


def _on_cpu_ranks(args: argparse.Namespace, model: dict[str, Any]) -> Path | None:
    from megatron_kd import dryrun

    print(f"Loading Megatron-Bridge on {args.cpu_ranks} CPU ranks (half a minute).", flush=True)
    vars(args).pop("parser")
    vars(args).pop("run")
    with _bar(args), dryrun.refusals_raised():
        said = dryrun.run_ranks(_on_cpu_rank, args.cpu_ranks, args=(args, model), timeout_s=_TIMEOUT_S)
    print(said[0], end="")
    return None if args.dry_run else args.out


def _on_cpu_rank(args: argparse.Namespace, model: dict[str, Any]) -> str:
    import contextlib
    import io

    from megatron_kd import dryrun

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        build_on_this_rank(args, model, dryrun.prepare_model)
    return said.getvalue()


@contextmanager
def _bar(args: argparse.Namespace) -> Iterator[None]:
    """A progress bar of the committed tiles, which is what can be seen of other processes."""
    from tqdm import tqdm

    finished, store = threading.Event(), open_store(args.out)

    def committed() -> int:
        try:
            return len(store.names("commits"))
        except (OSError, StoreError):  # not made yet, or does not answer; the ranks say which
            return 0

    def follow(bar: tqdm) -> None:
        while not finished.wait(1):
            bar.update(committed() - bar.n)

    with tqdm(unit="tile", desc="cache", disable=args.dry_run or not args.progress) as bar:
        thread = threading.Thread(target=follow, args=(bar,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            finished.set()
            thread.join()
            bar.update(committed() - bar.n)
