# SPDX-License-Identifier: Apache-2.0
"""Whether a run's sizes fit each other and the ranks, before Megatron is imported and before anything is queued.

In: the settings as written. Out: nothing, or an error that names the keys. What the settings leave open is taken from
our recipes' own values and the student's config.json; of what is not known there, nothing is said here.
"""

import json
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_kd.bridge import layout
from megatron_kd.bridge.settings import put
from megatron_kd.launch.keys import recipe_values

_UNKNOWN = object()
_NAMES = {
    "model.num_attention_heads": ("num_attention_heads", "n_head"),
    "model.num_layers": ("num_hidden_layers", "n_layer"),
    "model.num_moe_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
}
"""How Hugging Face configurations call them."""


def check_fit(tree: dict[str, Any], world_size: int | None) -> None:
    """Whether ranks, parallel sizes, batch, lengths and the model's parts fit each other, as far as they are known.

    Raises:
        LayoutError: they do not.
    """
    layout.check_fits(known_values(tree), world_size)


def known_values(tree: dict[str, Any]) -> dict[str, Any]:
    """What is known of `layout.KEYS`: the values of a recipe of ours, of the student, and what was written."""
    name = tree.get("recipe")
    known, student = recipe_values(name), tree.get("student")
    if isinstance(name, str) and name.startswith("hf:"):
        student = name.removeprefix("hf:")
    if student is not None:
        known = {key: value for key, value in known.items() if key not in layout.ARCHITECTURE}
        known |= _architecture(Path(str(student)).expanduser())
    whole: dict[str, Any] = {}
    for key, value in known.items():
        put(whole, tuple(key.split(".")), value)
    for section, value in tree.items():
        put(whole, (section,), value)
    config = OmegaConf.create(whole)
    found = {key: _plain(config, key) for key in layout.KEYS}
    return {key: value for key, value in found.items() if value is not _UNKNOWN}


def _architecture(folder: Path) -> dict[str, int]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}  # a name on the hub, or what check_models tells
    config = {**config, **(config.get("text_config") or {})} if isinstance(config, dict) else {}
    found = {key: config.get(name) for key, names in _NAMES.items() for name in names if type(config.get(name)) is int}
    return {key: value for key, value in found.items() if value}


def _plain(config: Any, key: str) -> Any:
    """A key's value, or _UNKNOWN: absent, a reference that leads nowhere, or no plain value."""
    try:
        value = OmegaConf.select(config, key, default=_UNKNOWN)
    except OmegaConfBaseException:
        return _UNKNOWN
    plain = (str,) if key == "dataset.split" else (int, float, bool)
    return value if value is None or type(value) in plain else _UNKNOWN
