# SPDX-License-Identifier: Apache-2.0
"""A value as YAML or the command line gives it, turned into what a field's annotation asks for, or refused.

In: a plain value, and the annotation of a field of a Bridge or Megatron class. Out: the value, converted only where
nothing is lost: an int for a float, a list for a tuple, a name for a dtype, an enumeration or an activation.
"""

import enum
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import torch
from megatron.bridge.utils.activation_map import str_to_callable, str_to_dtype


class Mismatch(Exception):
    """The value is not what the annotation asks for. Carries no text: the caller knows the key and the source."""


def conform(value: Any, hint: Any) -> Any:
    """The value as `hint` wants it.

    Raises:
        Mismatch: it cannot be that. A bool is no int, an int no string, 2.0 no int; None only where the hint says so.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _first_that_takes(value, arguments)
    if origin is Literal:
        return _member(value, arguments)
    if hint in (None, type(None)):
        return _exactly(value, type(None))
    if (origin or hint) in _CONTAINERS:
        return _CONTAINERS[origin or hint](value, arguments)
    if origin is Callable or hint is Callable:
        return _function(value)
    kind = origin or hint
    return _SCALARS[kind](value) if kind in _SCALARS else _instance(value, kind)


def members(hint: Any) -> tuple[Any, ...]:
    """The alternatives of a union; any other annotation alone."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def accepts(hint: Any, kind: type) -> bool:
    """Whether `hint`, or a member of it if it is a union, is `kind` or a kind of it."""
    kinds = [get_origin(member) or member for member in members(hint)]
    return any(isinstance(member, type) and issubclass(member, kind) for member in kinds)


def describe(hint: Any) -> str:
    """The annotation in words, for an error."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(describe(argument) for argument in arguments)
    if origin is Literal:
        return " or ".join(repr(argument) for argument in arguments)
    if hint in (None, type(None)):
        return "null"
    if arguments and (origin in _CONTAINERS):
        return f"{origin.__name__} of {', '.join('...' if a is Ellipsis else describe(a) for a in arguments)}"
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return " or ".join(repr(member.name) for member in hint)
    return getattr(origin or hint, "__name__", str(hint))


def _first_that_takes(value: Any, hints: Sequence[Any]) -> Any:
    exact = [hint for hint in hints if type(value) is hint]
    for hint in (*exact, *hints):
        try:
            return conform(value, hint)
        except Mismatch:
            continue
    raise Mismatch


def _member(value: Any, allowed: Sequence[Any]) -> Any:
    for member in allowed:
        if type(value) is type(member) and value == member:
            return value
    raise Mismatch


def _exactly(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise Mismatch
    return value


def _instance(value: Any, kind: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, enum.Enum) and isinstance(value, str):
        named = {member.name.lower(): member for member in kind}
        named |= {str(member.value).lower(): member for member in kind}
        value = named.get(value.lower())
    if not isinstance(kind, type) or not isinstance(value, kind):
        raise Mismatch
    return value


def _float(value: Any) -> float:
    if type(value) not in (int, float):
        raise Mismatch
    return float(value)


def _path(value: Any) -> Path:
    if not isinstance(value, str | Path):
        raise Mismatch
    return Path(value)


def _dtype(value: Any) -> torch.dtype:
    if isinstance(value, torch.dtype):
        return value
    try:
        return str_to_dtype(value)
    except (ValueError, TypeError, AttributeError):
        named = getattr(torch, str(value).removeprefix("torch."), None)
        return _instance(named, torch.dtype)


def _function(value: Any) -> Callable:
    """Activations have names in Bridge; any other function comes by an allow-listed `_target_`."""
    if isinstance(value, str):
        try:
            return str_to_callable(value)
        except ValueError:
            raise Mismatch from None
    if not callable(value):
        raise Mismatch
    return value


def _list(value: Any, arguments: Sequence[Any]) -> list:
    if not isinstance(value, list | tuple):
        raise Mismatch
    return [conform(item, arguments[0]) if arguments else item for item in value]


def _tuple(value: Any, arguments: Sequence[Any]) -> tuple:
    if not isinstance(value, list | tuple):
        raise Mismatch
    if not arguments:
        return tuple(value)
    if arguments[-1] is Ellipsis:
        return tuple(conform(item, arguments[0]) for item in value)
    if len(arguments) != len(value):
        raise Mismatch
    return tuple(conform(item, argument) for item, argument in zip(value, arguments, strict=True))


def _dict(value: Any, arguments: Sequence[Any]) -> dict:
    if not isinstance(value, Mapping):
        raise Mismatch
    key_hint, value_hint = arguments or (Any, Any)
    return {conform(key, key_hint): conform(item, value_hint) for key, item in value.items()}


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    bool: lambda value: _exactly(value, bool),
    int: lambda value: _exactly(value, int),
    str: lambda value: _exactly(value, str),
    float: _float,
    Path: _path,
    torch.dtype: _dtype,
}
_CONTAINERS: dict[Any, Callable[[Any, Sequence[Any]], Any]] = {list: _list, tuple: _tuple, dict: _dict}
