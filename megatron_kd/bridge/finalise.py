# SPDX-License-Identifier: Apache-2.0
"""Whether what the user asked for is what Bridge will run.

In: a configuration and what the user set in it. Bridge writes into it once more when a run starts: mixed precision and
communication overlap set fields of other sections, validation fills in and synchronises. Out: the finalised copy, or
an error with every value that did not stay. Costs some milliseconds.
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.bridge.training.config import ConfigContainer, runtime_config_update
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig, get_mixed_precision_config

from megatron_kd.bridge.overrides import UserValue, UserValues
from megatron_kd.errors import ConfigError


class OverwrittenValue(ConfigError):
    """Bridge changed a value after the user set it."""


def finalise_preview(cfg: ConfigContainer, *, world_size: int) -> ConfigContainer:
    """The configuration as Bridge will finalise it, on a copy. Environment variables the recipe sets are taken back.

    Raises:
        ConfigError: Bridge refuses it.
    """
    final = copy.deepcopy(cfg)
    with _environment(WORLD_SIZE=str(world_size)):
        try:
            runtime_config_update(final)
        except (AssertionError, ValueError, TypeError, AttributeError, RuntimeError, FileNotFoundError) as error:
            raise ConfigError(
                f"Megatron refuses this configuration: {str(error).strip() or type(error).__name__}"
            ) from error
    return final


@contextmanager
def _environment(**changes: str) -> Iterator[None]:
    before = dict(os.environ)
    deterministic = torch.are_deterministic_algorithms_enabled()
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        torch.use_deterministic_algorithms(deterministic)


def check_final(cfg: ConfigContainer, user_values: UserValues, *, before: ConfigContainer | None = None) -> None:
    """Each value the user set is still what they asked, after Bridge finalised `cfg`.

    Args:
        cfg: the finalised configuration.
        user_values: what was asked.
        before: the configuration before, if at hand, to find out which part of Bridge changed the value.

    Raises:
        OverwrittenValue: names every such key, the asked and the final value, and what changes it.
    """
    changed = []
    for asked in user_values:
        final = _look_up(cfg, asked.key)
        if not _same(asked, final):
            changed.append(
                f"{asked.source}: {asked.key}={_show(asked.value)} would become {_show(final)}. "
                f"{_culprit(before, asked) if before is not None else ''}{_remedy(asked.key)}".rstrip()
            )
    if changed:
        raise OverwrittenValue("\n".join(changed))


def _look_up(cfg: Any, key: str) -> Any:
    for name in key.split("."):
        cfg = cfg.get(name) if isinstance(cfg, dict) else getattr(cfg, name, None)
    return cfg


def _same(asked: UserValue, final: Any) -> bool:
    value = asked.value
    if isinstance(value, str) and isinstance(final, MixedPrecisionConfig):
        value = get_mixed_precision_config(value)
        value.finalize()
    if isinstance(value, list | tuple) and isinstance(final, list | tuple):
        return list(value) == list(final)
    return value is final or value == final


def _show(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)


def _culprit(cfg: ConfigContainer, asked: UserValue) -> str:
    """Which of the two sections that write into others does it."""
    for section in ("mixed_precision", "comm_overlap"):
        trial = copy.deepcopy(cfg)
        part = getattr(trial, section)
        part = get_mixed_precision_config(part) if isinstance(part, str) else part
        if part is None:
            continue
        if section == "comm_overlap":
            part.data_parallel_size = getattr(part, "data_parallel_size", None) or 1
        part.finalize()
        part.setup(trial.model, trial.optimizer, trial.ddp)
        name = asked.key.rpartition(".")[2]
        if not _same(asked, _look_up(trial, asked.key)) and hasattr(part, name):
            return f"`{section}` sets it: write {section}.{name}={_show(asked.value)} instead. "
    return ""


_REMEDIES = {
    "dataset.sequence_length": "Bridge copies dataset.seq_length into it: set that.",
    "dataset.blend": "Bridge makes it from dataset.data_path: set one of the two.",
    "train.train_iters": "It follows from train.train_samples: set one of the two.",
    "scheduler.lr_decay_iters": "It follows from scheduler.max_steps: set one of the two.",
    "optimizer.use_distributed_optimizer": "ddp.use_distributed_optimizer must be the same.",
    "ddp.use_distributed_optimizer": "optimizer.use_distributed_optimizer must be the same.",
    "optimizer.overlap_param_gather": "ddp.overlap_param_gather must be the same.",
    "ddp.overlap_param_gather": "optimizer.overlap_param_gather must be the same.",
    "validation.eval_iters": "The deprecated train.eval_iters wins over it.",
    "validation.eval_interval": "The deprecated train.eval_interval wins over it.",
}


def _remedy(key: str) -> str:
    return _REMEDIES.get(key, "")
