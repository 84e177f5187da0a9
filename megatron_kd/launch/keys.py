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
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from megatron_kd.bridge.kd_values import check_bounds, check_corpus, check_teacher, check_together
from megatron_kd.bridge.settings import unknown_recipe
from megatron_kd.errors import ConfigError
from megatron_kd.versions import installed_versions

PATH = Path(__file__).with_name("keys.json")
_BESIDE_SECTIONS = {"recipe", "student", "_target_"}
_OF_THE_RECIPE = {"model", "dataset", "mixed_precision", "comm_overlap"}
"""Sections whose keys depend on the recipe; those of our own recipes are on the list."""
_BY_NAME = {"mixed_precision"}
"""Sections that a name may stand for."""
_PLAIN = {"bool": bool, "int": int, "float": float, "str": str, "list": list, "null": type(None)}
_REFERENCE = re.compile(r"\$\{(\w+)\.(\w+)\}")


def check_keys(tree: Mapping[str, Any]) -> None:
    """Looks for every section, and every key of a section, on the list; values of plain types must be of them.

    Raises:
        ConfigError: names the key and the nearest there is, or what its value should be.
    """
    for name in ("recipe", "student"):
        if not isinstance(tree.get(name), str | None):
            raise ConfigError(f"{name} expects text, found {tree[name]!r}.")
    kd = _kd_fields()
    if isinstance(tree.get("kd"), Mapping):
        _check_kd(tree, kd)
    check_recipe(tree.get("recipe"))
    if not _is_listed():
        return
    listed = _listed()
    sections, ours = {**listed["sections"], "kd": kd}, tree.get("recipe") in listed["recipes"]
    recipe = tree.get("recipe") or ""
    own_code = ":" in recipe and not recipe.startswith("hf:")  # which may allow more to be built
    for section, values in tree.items():
        if section in _BESIDE_SECTIONS:
            continue
        if section not in sections:
            raise ConfigError(_unknown(section, sections, sections))
        if not own_code:
            _check_targets(section, values, listed["targets"])
        _check_references(section, values, tree, sections, ours)
        if not isinstance(values, Mapping | None) and not (section in _BY_NAME and isinstance(values, str)):
            raise ConfigError(f"{section} is a section: expected keys below it, found {values!r}.")
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


def _check_targets(section: str, value: Any, allowed: Sequence[str]) -> None:
    """Every `_target_` begins as one that is allowed does; what it leads to is the full check's."""
    for node in _below(value):
        target = node.get("_target_") if isinstance(node, Mapping) else None
        if isinstance(target, str) and not target.startswith(tuple(allowed)):
            raise ConfigError(
                f"{section}: _target_ {target} is not built: a configuration builds only what begins with one of "
                f"{', '.join(allowed)}."
            )


def _check_references(section: str, value: Any, tree: Mapping, sections: Mapping, ours: bool) -> None:
    """`${section.key}` leads to a key that is written here, or is on the list."""
    for node in _below(value):
        for there, name in _REFERENCE.findall(node) if isinstance(node, str) else ():
            keys, written = sections.get(there), tree.get(there)
            if keys is None:
                unknown = _unknown(there, sections, sections)
            elif (isinstance(written, Mapping) and name in written) or name in keys or not keys:
                continue
            elif there in _OF_THE_RECIPE and not ours:
                continue
            else:
                unknown = _unknown(f"{there}.{name}", keys, sections)
            raise ConfigError(f"{section}: ${{{there}.{name}}} leads nowhere: {unknown}")


def _below(value: Any) -> Iterator[Any]:
    """The value and everything in it."""
    yield value
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _below(item)


def _check_kd(tree: Mapping[str, Any], fields: Mapping[str, tuple[Any, Any]]) -> None:
    """The values of our own section, as far as they need no cache and no Megatron."""
    kd = {name: value for name, value in tree["kd"].items() if not (isinstance(value, str) and "${" in value)}
    for name, (hint, _) in fields.items():
        value = kd.get(name)
        if value is None:
            continue
        if typing.get_origin(hint) is Literal:
            if value not in typing.get_args(hint):
                raise ConfigError(f"kd.{name} expects {' or '.join(typing.get_args(hint))}, found {value!r}.")
            continue
        _check_type(f"kd.{name}", value, _kinds(hint))
    check_bounds(kd)
    divergence = kd.get("divergence")
    if isinstance(divergence, str) and ":" not in divergence and divergence not in _listed()["divergences"]:
        from megatron_kd.loss import LossArgumentError  # which takes torch, two seconds
        from megatron_kd.loss.divergence import find_divergence

        try:
            find_divergence(divergence)
        except LossArgumentError as error:
            raise ConfigError(f"kd.{error} A function is package.module:function.") from error
    if _has_default_kd(tree):
        check_together({name: default for name, (_, default) in fields.items()} | tree["kd"])


def check_teacher_named(tree: Mapping[str, Any]) -> None:
    """A run that distils has a cache or a teacher, if the recipe is known not to name one itself.

    Raises:
        ConfigError: it has neither.
    """
    kd = tree.get("kd", {})
    if _has_default_kd(tree) and kd is not None:
        check_teacher(kd)


def check_corpus_named(tree: Mapping[str, Any]) -> None:
    """A cache comes with its corpus, if the recipe is known to name none itself and to read one: ours do, and `hf:`.

    Raises:
        ConfigError: it has none.
    """
    name, kd, dataset = tree.get("recipe"), tree.get("kd") or {}, tree.get("dataset") or {}
    ours = isinstance(name, str) and (name.startswith("hf:") or name in _listed()["recipes"])
    if ours and "_target_" not in dataset:
        check_corpus(kd, dataset)


def _has_default_kd(tree: Mapping[str, Any]) -> bool:
    """Whether the recipe leaves `kd` as it is by default: ours do, and `hf:`; of Bridge's those that are given one."""
    name = tree.get("recipe")
    if not isinstance(name, str):
        return False
    ours = name.startswith("hf:") or name in _listed()["recipes"]
    return ours or (name in _listed()["recipes of Bridge"] and "kd" in tree)


def _kd_fields() -> dict[str, tuple[Any, Any]]:
    """The fields of `KDConfig`, annotation and default, read from its source: importing it takes Megatron."""
    source = Path(__file__).parents[1] / "bridge" / "config.py"
    classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    body = next(node.body for node in classes if node.name == "KDConfig")
    return {
        field.target.id: (eval(ast.unparse(field.annotation), {"Literal": Literal}), ast.literal_eval(field.value))
        for field in body
        if isinstance(field, ast.AnnAssign)
    }


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
    from megatron_kd.bridge.targets import allowed_prefixes
    from megatron_kd.loss.divergence import DIVERGENCES

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
        "divergences": sorted(DIVERGENCES),
        "targets": allowed_prefixes(),
        "models": sorted(_ARCHITECTURES),
        "values": values,
        "sections": {section: dict(sorted(names.items())) for section, names in sorted(sections.items())},
    }
