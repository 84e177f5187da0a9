# SPDX-License-Identifier: Apache-2.0
"""YAML files and command-line arguments put onto a tree of Bridge dataclasses, strictly.

In: a configuration tree, and layers of settings as read from YAML and arguments. Out: the same tree, changed in place,
and `UserValues`: what was set, to what, and where that stands. Nothing is skipped: an unknown key or a wrong type is
an error with the full key, its file and line or argument, and the nearest key there is. Costs milliseconds.
"""

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.bridge.training.config import ConfigContainer
from megatron.bridge.training.mixed_precision import MixedPrecisionConfig, get_mixed_precision_config
from megatron.bridge.training.utils.config_utils import apply_run_config_backward_compat
from megatron.bridge.utils.instantiate_utils import InstantiationMode, instantiate
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_kd.bridge.conform import Mismatch, accepts, conform, describe, members
from megatron_kd.bridge.settings import Key, Settings, dotted, put, split_references
from megatron_kd.bridge.targets import check_targets
from megatron_kd.errors import ConfigError


class UserValue(NamedTuple):
    """One thing the user set: the full key, the value as the field holds it, and where it was written."""

    key: str
    value: Any
    source: str


class UserValues:
    """Everything the user set. A later value replaces what was said of its key before, and of all above or below."""

    def __init__(self) -> None:
        self._values: dict[str, UserValue] = {}

    def forget(self, key: str) -> None:
        """Drops what is known of the key, of anything below it, and of a section above it that was set as a whole."""
        for known in list(self._values):
            if f"{known}.".startswith(f"{key}.") or f"{key}.".startswith(f"{known}."):
                del self._values[known]

    def record(self, key: str, value: Any, source: str) -> None:
        """Remembers one value."""
        self.forget(key)
        self._values[key] = UserValue(key, value, source)

    def __iter__(self) -> Iterator[UserValue]:
        return iter(self._values.values())


class _Reference(NamedTuple):
    """A value with `${...}` in it, set when all else is; and what later layers set inside, if it is an object."""

    value: Any
    source: str
    inside: list[Settings]

    @property
    def is_object(self) -> bool:
        """Whether it has a `_target_`."""
        return isinstance(self.value, Mapping)


def apply_settings(root: Any, layers: Sequence[Settings]) -> UserValues:
    """Puts each layer onto the tree `root`; then `${key}` and `${oc.env:NAME}`, which see the values of all layers.

    Raises:
        ConfigError: an unknown key, a wrong type, a `_target_` that must not be built, a reference that leads nowhere.
    """
    values = UserValues()
    references: dict[Key, _Reference] = {}
    for layer in layers:
        plain, found = split_references(layer.tree)
        for key, reference in list(references.items()):
            part = _take(plain, key) if reference.is_object else None
            if part is not None:
                reference.inside.append(Settings(_nested(key, part), layer.sources))
            elif _covers(plain, key) or any(key[: len(new)] == new for new in found):
                del references[key]
        references |= {key: _Reference(value, layer.source(key), []) for key, value in found.items()}
        _Applier(root, layer, values).section(root, plain, ())
    for key in sorted(references, key=lambda key: not references[key].is_object):
        reference = references[key]
        value = _resolve(root, references, key)
        for settings in (Settings(_nested(key, value), {key: reference.source}), *reference.inside):
            _Applier(root, settings, values).section(root, settings.tree, ())
        if reference.is_object:
            del references[key]  # what is asked of it is answered by the object itself from now on
    return values


class _Applier:
    """Walks a tree of plain values and a tree of dataclasses side by side."""

    def __init__(self, root: Any, settings: Settings, values: UserValues):
        self.root = root
        self.source = settings.source
        self.values = values

    def section(self, node: Any, tree: Mapping[str, Any], path: Key) -> None:
        """Sets the fields of one dataclass."""
        hints = field_hints(type(node))
        for name, value in tree.items():
            key = (*path, str(name))
            if name not in hints:
                raise ConfigError(f"{self.source(key)}: {_unknown(self.root, key, hints)}")
            setattr(node, name, self._new(getattr(node, name), value, hints[name], key))

    def _new(self, current: Any, value: Any, hint: Any, key: Key) -> Any:
        """What a field becomes: the same section, changed inside; a new section; or a plain value."""
        if isinstance(value, Mapping):
            if "_target_" in value:
                return self._built(current, value, hint, key)
            if current is None or isinstance(current, str):
                current = self._opened(current, value, hint, key)
            if dataclasses.is_dataclass(current):
                self.section(current, value, key)
                return current
            if isinstance(current, dict) or accepts(hint, dict):
                return self._mapping(current or {}, value, hint, key)
        if value is not None or current is not None:
            value = self._conform(value, hint, key, current)
        self.values.record(dotted(key), value, self.source(key))
        return value

    def _conform(self, value: Any, hint: Any, key: Key, current: Any = None) -> Any:
        try:
            return conform(value, hint)
        except Mismatch:
            # Recipes go against annotations: model.rotary_base=150000.0 is int there, train.manual_gc_eval=100 bool.
            if isinstance(current, float) and type(value) in (int, float):
                return float(value)
            if type(value) is type(current) and value == current:
                return value
            kind = type(value).__name__
            found = "null" if value is None else kind if dataclasses.is_dataclass(value) else f"{value!r} ({kind})"
            text = f"{self.source(key)}: {dotted(key)} expects {describe(hint)}, found {found}."
            raise ConfigError(f"{text} Quote it to make it text." if accepts(hint, str) else text) from None

    def _mapping(self, current: Mapping, value: Mapping, hint: Any, key: Key) -> dict:
        """A field that is a dict: its keys are the user's own, so new ones are welcome."""
        merged = self._conform({**current, **value}, hint, key)
        for name in value:
            self.values.record(dotted((*key, str(name))), merged[name], self.source((*key, str(name))))
        return merged

    def _opened(self, current: str | None, value: Mapping, hint: Any, key: Key) -> Any:
        """A section that was off (null) or, for mixed precision, only a name: now an object whose keys can be set."""
        if isinstance(current, str):
            return get_mixed_precision_config(current) if accepts(hint, MixedPrecisionConfig) else current
        kinds = [kind for kind in members(hint) if dataclasses.is_dataclass(kind)]
        if len(kinds) != 1:
            return current
        needed = [
            field.name
            for field in dataclasses.fields(kinds[0])
            if field.init and field.default is field.default_factory is dataclasses.MISSING
        ]
        if missing := [dotted((*key, name)) for name in needed if name not in value]:
            raise ConfigError(f"{self.source(key)}: {dotted(key)} was off; to use it set {', '.join(missing)} too.")
        return kinds[0](**{name: value[name] for name in needed})

    def _built(self, current: Any, value: Mapping, hint: Any, key: Key) -> Any:
        """An object named by an allow-listed `_target_`. Not recorded: what is inside is finalised as Bridge likes."""
        check_targets(value, f"{self.source(key)}: {dotted(key)}")
        try:
            # A saved configuration also holds fields that the constructor computes: Bridge's own reader drops them so.
            built = instantiate(apply_run_config_backward_compat(dict(value)), mode=InstantiationMode.STRICT)
        except Exception as error:  # a target may raise anything
            raise ConfigError(
                f"{self.source(key)}: {dotted(key)} cannot be built from its _target_: {error}"
            ) from error
        if dataclasses.is_dataclass(built):
            hints = field_hints(type(built))
            for name, item in value.items():
                if name in hints and not isinstance(item, Mapping) and item is not None:
                    self._conform(item, hints[name], (*key, name), getattr(current, name, None))
        self.values.forget(dotted(key))
        # Recipes hold Megatron's own classes where annotations name Bridge's: the class that is there will do too.
        return built if isinstance(built, type(current)) else self._conform(built, hint, key)


def field_hints(kind: type) -> dict[str, Any]:
    """The fields of a dataclass that may be set, with their annotations."""
    hints = typing.get_type_hints(kind)
    return {
        field.name: hints[field.name]
        for field in dataclasses.fields(kind)
        if field.init and not field.name.startswith("_")
    }


def known_keys(node: Any, path: Key = ()) -> Iterator[Key]:
    """Every key of a tree of dataclasses, sections included."""
    for name in field_hints(type(node)):
        yield (*path, name)
        if dataclasses.is_dataclass(getattr(node, name, None)):
            yield from known_keys(getattr(node, name), (*path, name))


def _unknown(root: Any, key: Key, hints: Mapping[str, Any]) -> str:
    """Names the nearest keys of the section, and the same name in other sections."""
    name, keys = key[-1], [dotted(known) for known in known_keys(root)]
    text = f"unknown key {dotted(key)}."
    if name in keys and "." in name:
        return f"{text} YAML nests sections: write {name.replace('.', ': {')}: ...{'}' * name.count('.')}."
    same = [known for known in keys if known.rpartition(".")[2] == name]
    near = difflib.get_close_matches(name, hints, n=2, cutoff=0.6)
    near = near or (() if same else difflib.get_close_matches(name, hints, n=1, cutoff=0))
    candidates = [*dict.fromkeys([*(dotted((*key[:-1], match)) for match in near), *same])]
    more = " `--print-config` shows every key." if isinstance(root, ConfigContainer) else ""
    return f"{text} Did you mean {' or '.join(candidates[:4])}?{more}"


def _nested(key: Key, value: Any) -> dict[str, Any]:
    """The tree that sets one key alone."""
    tree: dict[str, Any] = {}
    put(tree, key, value)
    return tree


def _take(tree: dict[str, Any], key: Key) -> dict[str, Any] | None:
    """Takes the settings below the key out of a tree; None if there are none, or an object that replaces all."""
    for name in key[:-1]:
        tree = tree.get(name)
        if not isinstance(tree, dict):
            return None
    part = tree.get(key[-1])
    if not isinstance(part, dict) or "_target_" in part:
        return None
    return tree.pop(key[-1])


def _covers(tree: Mapping[str, Any], key: Key) -> bool:
    """Whether a tree of values sets the key, or replaces a section above it."""
    for name in key:
        if not isinstance(tree, Mapping):
            return True
        if name not in tree:
            return False
        tree = tree[name]
    return True


def _resolve(root: Any, references: Mapping[Key, _Reference], key: Key) -> Any:
    """A value with `${...}` inside, resolved by OmegaConf against the configuration as it stands."""
    tree, own = _plain(root), references[key]
    for known, reference in references.items():
        put(tree, known, reference.value)
    try:
        resolved = OmegaConf.select(OmegaConf.create(tree), dotted(key))
        return OmegaConf.to_container(resolved, resolve=True) if OmegaConf.is_config(resolved) else resolved
    except OmegaConfBaseException as error:
        raise ConfigError(f"{own.source}: {dotted(key)}={own.value!r} cannot be resolved: {error}") from error


def _plain(node: Any) -> dict[str, Any]:
    """The scalars of a tree of dataclasses."""
    tree = {}
    for name in field_hints(type(node)):
        value = getattr(node, name)
        if dataclasses.is_dataclass(value):
            tree[name] = _plain(value)
        elif value is None or isinstance(value, str | int | float | bool):
            tree[name] = value
    return tree
