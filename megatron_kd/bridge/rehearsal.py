# SPDX-License-Identifier: Apache-2.0
"""What `megatron-kd train` does on CPU ranks: print a configuration, check a run without a GPU, train a shrunk one.

In: what was asked on the command line. Out: plain values, as they travel back to a process without Megatron. Each rank
builds the same configuration for itself; nothing is sent to it but the request.
"""

import yaml
from megatron.bridge.training.callbacks import Callback, CallbackContext
from megatron.training.config.yaml_utils import safe_yaml_representers

from megatron_kd import dryrun
from megatron_kd.bridge.commands import Request
from megatron_kd.bridge.config import KDConfigContainer, check_final, finalise_preview, load_config
from megatron_kd.bridge.kd_values import CORPUS
from megatron_kd.bridge.online import teacher_provider
from megatron_kd.bridge.preflight import check_layout, check_settings, smallest_world_size
from megatron_kd.bridge.settings import SYNTHETIC
from megatron_kd.bridge.train import open_feed, train


def print_config(request: Request) -> str:
    """The configuration as YAML."""
    cfg, _ = load_config(**request._asdict())
    with safe_yaml_representers():
        return yaml.safe_dump(cfg.to_dict())


def check(request: Request, ranks: int | None, world_size: int | None) -> tuple[int, list[str]]:
    """Every check of the real run that needs no GPU.

    Returns:
        The ranks of the shrunk run, and what differs in it from the run that was asked for, a line each.

    Raises:
        UserError: the real run would be refused.
    """
    cfg, values = load_config(**request._asdict())
    world_size = world_size or smallest_world_size(cfg)
    check_settings(cfg, world_size=world_size)
    if cfg.kd is not None and (cfg.kd.cache or cfg.kd.teacher):
        open_feed(cfg)
        if cfg.kd.teacher:
            teacher_provider(cfg, dryrun.prepare_model)
    for change in [*without_cache(cfg), *dryrun.prepare(cfg)]:
        values.forget(change.key)
    check_final(finalise_preview(cfg, world_size=world_size), values, before=cfg)
    shrunk, changes = _shrunk(request, ranks)
    check_layout(shrunk, ranks or smallest_world_size(shrunk))
    return ranks or smallest_world_size(shrunk), [str(change) for change in changes]


def train_shrunk(request: Request, ranks: int | None) -> list[dict[str, float]]:
    """Trains; each step's losses, by name, on ranks of the last pipeline stage."""
    steps = _Steps()
    train(_shrunk(request, ranks)[0], callbacks=[steps])
    return steps.losses


def _shrunk(request: Request, ranks: int | None) -> tuple[KDConfigContainer, list[dryrun.Change]]:
    cfg, _ = load_config(**request._asdict())
    return cfg, [*without_cache(cfg), *dryrun.shrink(cfg, world_size=ranks), *dryrun.prepare(cfg)]


def without_cache(cfg: KDConfigContainer) -> list[dryrun.Change]:
    """Teacher rows that are made up, over the model's own vocabulary: any corpus will do with them.

    A teacher that would run beside the student is one of the student's own architecture, with random weights. A run
    that has yet to be given a cache may have yet to be given its corpus: then the documents are made up too.
    """
    if cfg.kd is None:
        return []
    changes = _without_corpus(cfg) if not (cfg.kd.cache or cfg.kd.teacher) else []
    name = "teacher" if cfg.kd.teacher else "cache"
    why = "made-up teacher rows fit the shrunk model"
    changes.append(dryrun.Change(f"kd.{name}", getattr(cfg.kd, name), SYNTHETIC, why))
    setattr(cfg.kd, name, SYNTHETIC)
    if cfg.tokenizer.use_tokenizer_vocab_size:
        changes.append(dryrun.Change("tokenizer.use_tokenizer_vocab_size", True, False, "the rows fit the model's"))
        cfg.tokenizer.use_tokenizer_vocab_size = False
    return changes


def _without_corpus(cfg: KDConfigContainer) -> list[dryrun.Change]:
    """Without a corpus Bridge makes documents up, and divides them evenly."""
    dataset, even = cfg.dataset, "1,1,1"
    if any(getattr(dataset, name, None) for name in CORPUS) or getattr(dataset, "split", None) in (None, even):
        return []
    change = dryrun.Change(
        "dataset.split", dataset.split, even, "no corpus is named, and made-up documents are divided so"
    )
    dataset.split = even
    return [change]


class _Steps(Callback):
    """Keeps the losses of each step."""

    def __init__(self) -> None:
        self.losses: list[dict[str, float]] = []

    def on_train_step_end(self, context: CallbackContext) -> None:
        self.losses.append({name: float(value) for name, value in (context.loss_dict or {}).items()})
