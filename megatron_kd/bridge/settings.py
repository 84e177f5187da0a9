# SPDX-License-Identifier: Apache-2.0
"""What a user wrote, read but not yet applied: a tree of plain values, each with the place it was written.

In: a YAML file, or `key=value` arguments in hydra-core's grammar. Out: `Settings`. Knows nothing of which keys exist.
"""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from megatron_kd.errors import ConfigError

Key = tuple[str, ...]

SYNTHETIC = "synthetic"
"""Value of ``kd.cache`` that stands for made-up teacher rows. Only a dry run sets it."""


class Settings(NamedTuple):
    """A tree of plain values and, for the keys in it, where they were written."""

    tree: dict[str, Any]
    sources: Mapping[Key, str]

    def source(self, key: Key) -> str:
        """Where the key was written; or the nearest key above it, or else the first below."""
        for length in range(len(key), 0, -1):
            if key[:length] in self.sources:
                return self.sources[key[:length]]
        return next((source for known, source in self.sources.items() if known[: len(key)] == key), "configuration")


def dotted(key: Key) -> str:
    """The key as a user writes it."""
    return ".".join(key)


def put(tree: dict[str, Any], key: Key, value: Any) -> None:
    """Sets one key of a nested tree; a mapping joins the mapping that is there, unless it has a `_target_`."""
    for name in key[:-1]:
        if not isinstance(tree.get(name), dict):
            tree[name] = {}
        tree = tree[name]
    if isinstance(value, dict) and "_target_" not in value and isinstance(tree.get(key[-1]), dict):
        for name, item in value.items():
            put(tree[key[-1]], (str(name),), item)
    else:
        tree[key[-1]] = value


class _Loader(yaml.SafeLoader):
    """PyYAML's own rules, except that 1e-5 is a number, as it is in YAML 1.2 and on the command line."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: Path) -> Settings:
    """A YAML file, with the line of every key.

    Raises:
        ConfigError: it cannot be read, is not YAML, holds no sections, or gives a key twice.
    """
    try:
        loader = _Loader(path.read_text())
    except OSError as error:
        raise ConfigError(f"--config-file {path} cannot be read: {error.strerror}.") from error
    sources: dict[Key, str] = {}
    try:
        root = loader.get_single_node()
        if root is None:
            return Settings({}, {})
        _note_lines(root, (), path, sources)
        tree = loader.construct_document(root)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    finally:
        loader.dispose()
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} holds a {type(tree).__name__}, expected sections such as `train:` with keys below.")
    return Settings(tree, sources)


def _note_lines(node: yaml.Node, path: Key, file: Path, sources: dict[Key, str]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[str] = set()
    for name, value in node.value:
        key = (*path, str(name.value))
        if name.value in seen:
            raise ConfigError(
                f"{file}:{name.start_mark.line + 1}: {dotted(key)} is given twice in its section. Keep one."
            )
        seen.add(name.value)
        sources[key] = f"{file}:{name.start_mark.line + 1}"
        _note_lines(value, key, file, sources)


def read_arguments(arguments: Sequence[str]) -> Settings:
    """`key=value` arguments; of two for one key the later counts. `+key=` and `++key=` say the same as `key=`.

    Raises:
        ConfigError: not hydra-core's grammar; or a sweep, a deletion, or a config group, which one run has no use for.
    """
    parser = OverridesParser.create()
    tree: dict[str, Any] = {}
    sources: dict[Key, str] = {}
    for argument in arguments:
        source = f"argument {argument!r}"
        try:
            override = parser.parse_override(argument)
        except HydraException as error:
            raise ConfigError(f"{source} is not key=value in hydra's grammar: {error}") from error
        name = override.key_or_group
        if override.is_delete():
            raise ConfigError(f"{source}: a key cannot be deleted. To unset its value write {name}=null.")
        if override.is_sweep_override():
            raise ConfigError(
                f"{source} is a sweep, and a run takes one value. For a list write {name}=[1,2], for text with commas "
                f"""{name}="'1,2'", for several runs start one per value."""
            )
        if override.package is not None or "/" in name:
            raise ConfigError(
                f"{source}: config groups (group/name@package=...) do not exist here. Write section.key=value."
            )
        key = tuple(name.split("."))
        put(tree, key, override.value())
        sources[key] = source
    return Settings(tree, sources)


def split_references(tree: Mapping[str, Any], path: Key = ()) -> tuple[dict[str, Any], dict[Key, Any]]:
    """Parts the values with `${...}` in them, by key, from a tree of the others."""
    plain: dict[str, Any] = {}
    references: dict[Key, Any] = {}
    for name, value in tree.items():
        key = (*path, str(name))
        if isinstance(value, Mapping) and "_target_" not in value:
            plain[name], below = split_references(value, key)
            references |= below
        elif _refers(value):
            references[key] = value
        else:
            plain[name] = value
    return plain, references


def _refers(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(_refers(item) for item in value.values())
    if isinstance(value, list):
        return any(_refers(item) for item in value)
    return isinstance(value, str) and "${" in value


def unknown_recipe(name: str, ours: Iterable[str], known: Iterable[str]) -> str:
    """What to say of a recipe that is none of the known."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return (
        f"unknown recipe {name!r}. {hint}Ours: {', '.join(ours)}; besides, every function of megatron.bridge.recipes, "
        "hf:FOLDER, and package.module:function."
    )
