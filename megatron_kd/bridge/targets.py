# SPDX-License-Identifier: Apache-2.0
"""Which objects a YAML file or a checkpoint's saved configuration may build: data, no deeds.

In: a tree of plain values. Out: nothing, or an error that names the target. Bridge's own allow-list looks at how a
target is spelt; `torch.os.system` is spelt like one of torch's. Here what the name leads to must be at home in an
allowed package, and what is called must be a dataclass or an enumeration. Costs a look-up a target.
"""

import dataclasses
import enum
import pydoc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from megatron.bridge.utils.instantiate_utils import target_allowlist

from megatron_kd.errors import ConfigError

_BUILDERS = (
    "transformers.generation.configuration_utils.GenerationConfig.from_dict",
    "megatron.core.timers.Timers",
)
"""Called besides: what Bridge itself writes into its saved configurations."""

_PARTIALS = ("torch.nn.init.", "megatron.core.distributed.finalize_model_grads.finalize_model_grads")
"""How functions may begin that a configuration prepares for the model to call."""


class UnsafeTarget(ConfigError):
    """A `_target_` that is not built."""


def allowed_prefixes() -> list[str]:
    """How the name of a target may begin."""
    return sorted(target_allowlist.allowed_prefixes)


def check_targets(tree: Any, source: str) -> None:
    """Checks every `_target_` in a tree.

    Args:
        tree: as read from YAML.
        source: where it stands, for the message.

    Raises:
        UnsafeTarget: names the first that must not be built.
    """
    for node in _nodes(tree):
        called = node.get("_call_", True) is not False
        check_target(str(node["_target_"]), source, called=called, partial=node.get("_partial_") is True)


def check_target(name: str, source: str, *, called: bool, partial: bool = False) -> None:
    """Checks one target; `called` says whether it is to be called or only named.

    With `partial` it will be called later, by the model.

    Raises:
        UnsafeTarget: see the module.
    """
    found = pydoc.locate(name) if target_allowlist.is_allowed(name) else None
    if found is None:
        return  # not there, or not allowed by its spelling: Bridge says which, without importing it
    if isinstance(found, enum.Enum | torch.dtype | int | float | str):
        return
    real = f"{getattr(found, '__module__', None)}.{getattr(found, '__qualname__', name)}"
    if not target_allowlist.is_allowed(real):
        raise UnsafeTarget(f"{source}: _target_ {name} is {real}, which no configuration needs. It is not built.")
    data = isinstance(found, type) and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum))
    prepared = partial and real.startswith(_PARTIALS)
    if called and not (data or prepared or real in _BUILDERS):
        raise UnsafeTarget(
            f"{source}: _target_ {name} is no dataclass, so a configuration must not call it. To name a function "
            "without calling it add `_call_: false`."
        )


def check_checkpoint(path: str | Path) -> None:
    """Checks the configurations saved in a Megatron checkpoint, before anything of Bridge reads them.

    Bridge builds the sections `model` and `tokenizer` (training/model_load_save.py) and compares the others as text;
    a run's own dataset section names a tokenizer's class.

    Raises:
        UnsafeTarget: a checkpoint from somebody else that would run code.
    """
    for saved in sorted({*Path(path).glob("run_config.yaml"), *Path(path).glob("iter_*/run_config.yaml")}):
        try:
            tree = yaml.safe_load(saved.read_text()) or {}
            check_targets([tree.get("model"), tree.get("tokenizer")], str(saved))
        except yaml.YAMLError as error:
            raise UnsafeTarget(f"{saved} is not plain YAML: {error}") from error


def _nodes(tree: Any) -> Iterator[Mapping]:
    if isinstance(tree, Mapping):
        if "_target_" in tree:
            yield tree
        tree = list(tree.values())
    if isinstance(tree, list):
        for item in tree:
            yield from _nodes(item)
