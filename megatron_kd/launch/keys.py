# SPDX-License-Identifier: Apache-2.0
"""Misspelt keys and values of another type, found without importing Megatron: from a list of the tested Bridge
release's keys and their plain types, kept beside this. It also has our recipes' own parallel sizes, batch and lengths.

In: settings as written. Out: nothing, or an error with the nearest key, or the type that is expected. Where another
release is installed, or the recipe brings a model or data of its own kind, what the list does not know is left to the
full check. Milliseconds.

A test compares the list with the release that is installed, and says how to write it anew.
"""

import ast
import dataclasses
import difflib
import functools
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from megatron_kd.bridge.settings import unknown_recipe
from megatron_kd.errors import ConfigError
from megatron_kd.versions import installed_versions

PATH = Path(__file__).with_name("keys.json")
_BESIDE_SECTIONS = {"recipe", "student", "_target_"}
_OF_THE_RECIPE = {"model", "dataset", "mixed_precision", "comm_overlap"}
"""Sections whose keys depend on the recipe; those of our own recipes are on the list."""
_PLAIN = {"bool": bool, "int": int, "float": float, "str": str, "list": list, "null": type(None)}
_POSITIVE = ("top_k", "temperature", "strip_tokens")


def check_keys(tree: Mapping[str, Any]) -> None:
    """Looks for every section, and every key of a section, on the list; values of plain types must be of them.

    Raises:
        ConfigError: names the key and the nearest there is, or what its value should be.
    """
    kd = _kd_hints()
    _check_kd(tree.get("kd") or {}, kd)
    check_recipe(tree.get("recipe"))
    if not _is_listed():
        return
    listed = _listed()
    sections, ours = {**listed["sections"], "kd": kd}, tree.get("recipe") in listed["recipes"]
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
            if section != "kd":
                _check_type(f"{section}.{name}", values[name], sections[section].get(name))


def check_recipe(name: Any) -> None:
    """Looks for a recipe's name on the list, unless it says itself where the recipe is, or there is none.

    Raises:
        ConfigError: has the nearest names.
    """
    listed = _listed()
    known = [*listed["recipes"], *listed["recipes of Bridge"]]
    if isinstance(name, str) and _is_listed() and not (":" in name or "${" in name or name in known):
        raise ConfigError(unknown_recipe(name, listed["recipes"], known))


def recipe_values(name: Any) -> dict[str, Any]:
    """What a recipe of ours sets of `layout.KEYS`; nothing for another recipe, or another release of Bridge."""
    return _listed()["values"].get(name, {}) if isinstance(name, str) and _is_listed() else {}


def known_models() -> list[str]:
    """Models whose architecture our recipes write down, so that they are had without the hub."""
    return _listed()["models"]


def _check_type(key: str, value: Any, kinds: str | None) -> None:
    """Refuses a value that is none of `kinds`, "int or null"; None: all may be."""
    taken = [_PLAIN[kind] for kind in kinds.split(" or ")] if kinds else []
    if not taken or isinstance(value, Mapping) or (isinstance(value, str) and "${" in value):
        return
    if type(value) not in taken and not (type(value) is int and float in taken):
        raise ConfigError(f"{key} expects {kinds}, found {value!r}.")


def _check_kd(kd: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """The values of our own section, as far as they need no cache and no Megatron."""
    for name, hint in hints.items():
        value = kd.get(name)
        if value is None or (isinstance(value, str) and "${" in value):
            continue
        if typing.get_origin(hint) is Literal:
            if value not in typing.get_args(hint):
                raise ConfigError(f"kd.{name} expects {' or '.join(typing.get_args(hint))}, found {value!r}.")
            continue
        _check_type(f"kd.{name}", value, _kinds(hint))
        if name in _POSITIVE and value <= 0:
            raise ConfigError(f"kd.{name} expects more than 0, found {value!r}.")


def _kd_hints() -> dict[str, Any]:
    """The fields of `KDConfig` with their annotations, read from its source: importing it takes Megatron."""
    source = Path(__file__).parents[1] / "bridge" / "config.py"
    classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    body = next(node.body for node in classes if node.name == "KDConfig")
    fields = [field for field in body if isinstance(field, ast.AnnAssign)]
    return {field.target.id: eval(ast.unparse(field.annotation), {"Literal": Literal}) for field in fields}


def _kinds(hint: Any) -> str | None:
    """The plain types that make up an annotation, "int or null"; None if there is anything else in it."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    plain = {typing.get_origin(member) or member for member in members}
    plain = {str if kind is Literal else kind for kind in plain}
    named = [name for name, kind in _PLAIN.items() if kind in plain]
    return " or ".join(named) if len(named) == len(plain) else None


def _unknown(key: str, names: Any, sections: Mapping[str, Any]) -> str:
    section, dot, name = key.rpartition(".")
    near = [section + dot + match for match in difflib.get_close_matches(name, names, n=2, cutoff=0.6)]
    same = [f"{other}.{name}" for other, keys in sections.items() if name in keys]
    hint = f" Did you mean {' or '.join([*near, *same][:4])}?" if near or same else ""
    return f"unknown key {key}.{hint} `megatron-kd train --print-config` shows every key."


def _bridge_version() -> str | None:
    return installed_versions(["megatron-bridge"]).get("megatron-bridge")


@functools.cache
def _listed() -> dict[str, Any]:
    return json.loads(PATH.read_text())


def _is_listed() -> bool:
    """Whether the list is that of the Bridge that is installed; without any it is what there is."""
    return _bridge_version() in (None, _listed()["megatron-bridge"])


def collect() -> dict[str, Any]:
    """The list, from our recipes; runs where Bridge has been imported."""
    from megatron_kd.bridge.overrides import field_hints
    from megatron_kd.bridge.preflight import known_values
    from megatron_kd.bridge.recipes import _ARCHITECTURES, _RECIPES, build_recipe, recipe_names

    sections: dict[str, dict[str, str | None]] = {}
    values: dict[str, Any] = {}
    for recipe in sorted(_RECIPES):
        cfg = build_recipe(recipe)
        values[recipe] = known_values(cfg)
        for section in field_hints(type(cfg)):
            listed, node = sections.setdefault(section, {}), getattr(cfg, section)
            for name, hint in field_hints(type(node)).items() if dataclasses.is_dataclass(node) else ():
                # Recipes go against annotations here and there: what they hold is right as well.
                kinds = _kinds(hint | type(getattr(node, name))) if _kinds(hint) else None
                listed[name] = kinds if listed.get(name, kinds) == kinds else None
    sections.pop("kd")
    return {
        "megatron-bridge": _bridge_version(),
        "recipes": sorted(_RECIPES),
        "recipes of Bridge": sorted(set(recipe_names()) - set(_RECIPES)),
        "models": sorted(_ARCHITECTURES),
        "values": values,
        "sections": {section: dict(sorted(names.items())) for section, names in sorted(sections.items())},
    }
