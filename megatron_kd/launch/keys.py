# SPDX-License-Identifier: Apache-2.0
"""Misspelt keys, found without importing Megatron: from a list of the tested Bridge release's keys, kept beside this.

In: settings as written. Out: nothing, or an error with the nearest key. Where another release is installed, or the
recipe brings a model or data of its own kind, what the list does not know is left to the full check. Milliseconds.

A test compares the list with the release that is installed, and says how to write it anew.
"""

import ast
import difflib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_kd.errors import ConfigError

PATH = Path(__file__).with_name("keys.json")
_BESIDE_SECTIONS = {"recipe", "student", "_target_"}
_OF_THE_RECIPE = {"model", "dataset", "mixed_precision", "comm_overlap"}
"""Sections whose keys depend on the recipe; those of our own recipes are on the list."""


def check_keys(tree: Mapping[str, Any]) -> None:
    """Looks for every section, and every key of a section, on the list.

    Raises:
        ConfigError: names the key and the nearest there is.
    """
    listed = json.loads(PATH.read_text())
    if _bridge_version() not in (None, listed["megatron-bridge"]):
        return
    sections, ours = {**listed["sections"], "kd": _kd_keys()}, tree.get("recipe") in listed["recipes"]
    for section, values in tree.items():
        if section in _BESIDE_SECTIONS:
            continue
        if section not in sections:
            raise ConfigError(_unknown(section, sections, sections))
        if not isinstance(values, Mapping) or "_target_" in values or not sections[section]:
            continue
        for name in values:
            if name not in sections[section] and (ours or section not in _OF_THE_RECIPE):
                raise ConfigError(_unknown(f"{section}.{name}", sections[section], sections))


def _kd_keys() -> list[str]:
    """The fields of `KDConfig`, read from its source: importing it takes Megatron."""
    source = Path(__file__).parents[1] / "bridge" / "config.py"
    classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    body = next(node.body for node in classes if node.name == "KDConfig")
    return [field.target.id for field in body if isinstance(field, ast.AnnAssign)]


def _unknown(key: str, names: Any, sections: Mapping[str, Any]) -> str:
    section, dot, name = key.rpartition(".")
    near = [section + dot + match for match in difflib.get_close_matches(name, names, n=2, cutoff=0.6)]
    same = [f"{other}.{name}" for other, keys in sections.items() if name in keys]
    hint = f" Did you mean {' or '.join([*near, *same][:4])}?" if near or same else ""
    return f"unknown key {key}.{hint} `megatron-kd train --print-config` shows every key."


def _bridge_version() -> str | None:
    try:
        return importlib.metadata.version("megatron-bridge")
    except importlib.metadata.PackageNotFoundError:
        return None


def collect() -> dict[str, Any]:
    """The list, from our recipes; runs where Bridge has been imported."""
    from megatron_kd.bridge.overrides import field_hints, known_keys
    from megatron_kd.bridge.recipes import _RECIPES, build_recipe

    sections: dict[str, set[str]] = {}
    for name in _RECIPES:
        cfg = build_recipe(name)
        for section in field_hints(type(cfg)):
            sections.setdefault(section, set())
        for section, *names in known_keys(cfg):
            sections[section].update(names[:1])
    sections.pop("kd")
    return {
        "megatron-bridge": _bridge_version(),
        "recipes": sorted(_RECIPES),
        "sections": {section: sorted(names) for section, names in sorted(sections.items())},
    }
