# SPDX-License-Identifier: Apache-2.0
"""Tensors out of a file of `torch.save`, without torch and without running the program in it.

In: the bytes of a ZIP archive with `data.pkl` and `data/<n>`. Out: the dicts, lists and tensors it describes, tensors
as numpy arrays. The pickle inside is read, not run: a small interpreter knows dicts, lists, tuples, texts, numbers and
the two calls by which torch rebuilds a tensor from a stored storage. Whatever else it may say is refused.
"""

import io
import math
import struct
import zipfile
import zlib
from typing import Any, NamedTuple

import numpy as np

from megatron_kd.cache.errors import ImportRefused

_TYPES = {
    **{"HalfStorage": "<f2", "FloatStorage": "<f4", "DoubleStorage": "<f8", "BFloat16Storage": "bf16"},
    **{"BoolStorage": "|b1", "ByteStorage": "|u1", "CharStorage": "|i1", "ShortStorage": "<i2", "IntStorage": "<i4"},
    **{"LongStorage": "<i8", "UntypedStorage": ""},
    **{"uint16": "<u2", "uint32": "<u4", "uint64": "<u8"},
}
_MODULES = {"torch", "torch.storage"}
_REBUILD = {("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3")}
_DICT = ("collections", "OrderedDict")
_MARK = object()
_MAX_STEPS = 1 << 20


class _Name(NamedTuple):
    """A name the pickle mentions. It is never looked up."""

    module: str
    name: str


class _Storage(NamedTuple):
    dtype: str
    data: bytes


def read_tensors(data: bytes, where: str) -> Any:
    """The object of a torch file.

    Raises:
        ImportRefused: it is damaged, or holds anything but plain containers of tensors, texts and numbers.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {info.filename.partition("/")[2]: info for info in archive.infolist()}
            if sum(info.file_size for info in archive.infolist()) > len(data):
                raise ValueError("its members are larger than the whole file")
            if "byteorder" in members and archive.read(members["byteorder"]) != b"little":
                raise ValueError("it was written on a big-endian machine")
            storages = {name[5:]: archive.read(info) for name, info in members.items() if name.startswith("data/")}
            return _interpret(archive.read(members["data.pkl"]), storages)
    except (zipfile.BadZipFile, zlib.error, struct.error, ValueError, TypeError, KeyError, IndexError, OverflowError,
            AttributeError, NotImplementedError, RecursionError, RuntimeError, EOFError) as error:  # fmt: skip
        raise ImportRefused(f"{where} is no torch file of plain tensors: {error!r}") from error


def _interpret(program: bytes, storages: dict[str, bytes]) -> Any:
    """Follow the instructions that torch.save writes for containers of tensors."""
    stream, stack, memo = io.BytesIO(program), [], {}

    def number(form: str) -> int:
        return struct.unpack(form, stream.read(struct.calcsize(form)))[0]

    def since_mark() -> list[Any]:
        at = max(i for i, item in enumerate(stack) if item is _MARK)
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def tuple_of(count: int) -> None:
        items = tuple(stack[-count:])
        del stack[-count:]
        stack.append(items)

    constants = {
        b"}": dict,
        b"]": list,
        b")": tuple,
        b"N": lambda: None,
        b"\x88": lambda: True,
        b"\x89": lambda: False,
    }
    for _ in range(_MAX_STEPS):
        code = stream.read(1)
        if code == b".":
            return stack.pop()
        if code in constants:
            stack.append(constants[code]())
        elif code == b"\x80":
            stream.read(1)
        elif code in b"qr":
            memo[number("<B" if code == b"q" else "<I")] = stack[-1]
        elif code in b"hj":
            stack.append(memo[number("<B" if code == b"h" else "<I")])
        elif code in b"KMJ":
            stack.append(number({b"K": "<B", b"M": "<H", b"J": "<i"}[code]))
        elif code == b"\x8a":
            stack.append(int.from_bytes(stream.read(number("<B")), "little", signed=True))
        elif code == b"X":
            stack.append(stream.read(number("<I")).decode())
        elif code == b"G":
            stack.append(number(">d"))
        elif code == b"c":
            stack.append(_Name(stream.readline().decode().strip(), stream.readline().decode().strip()))
        elif code == b"(":
            stack.append(_MARK)
        elif code == b"t":
            stack.append(tuple(since_mark()))
        elif code in b"\x85\x86\x87":
            tuple_of(code[0] - 0x84)
        elif code == b"a":
            item = stack.pop()
            list.append(stack[-1], item)
        elif code == b"e":
            items = since_mark()
            list.extend(stack[-1], items)
        elif code == b"s":
            value, key = stack.pop(), stack.pop()
            dict.__setitem__(stack[-1], key, value)
        elif code == b"u":
            items = since_mark()
            dict.update(stack[-1], zip(items[::2], items[1::2], strict=True))
        elif code == b"Q":
            stack.append(_storage(stack.pop(), storages))
        elif code == b"R":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_call(function, arguments))
        else:
            raise ValueError(f"instruction {code!r} has no place in a file of plain tensors")
    raise ValueError("more instructions than such a file needs")


def _storage(reference: tuple[Any, ...], storages: dict[str, bytes]) -> _Storage:
    kind, name, key, _device, _count = reference
    if kind != "storage" or not isinstance(name, _Name) or name.module not in _MODULES:
        raise ValueError(f"unknown storage {reference!r}")
    return _Storage(_TYPES[name.name], storages[key])


def _call(function: Any, arguments: tuple[Any, ...]) -> Any:
    """What torch's two rebuilding functions make, as an array; an OrderedDict without content."""
    if function == _DICT and arguments == ():
        return {}
    if not isinstance(function, _Name) or tuple(function) not in _REBUILD:
        raise ValueError(f"it asks to call {function!r}, which is not done")
    storage, offset, shape, strides = arguments[:4]
    dtype = storage.dtype
    if function.name.endswith("v3"):
        dtype = _TYPES[arguments[6].name]
    return _array(storage.data, dtype, offset, shape, strides)


def _array(data: bytes, dtype: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """A contiguous tensor's content; bfloat16 as float32."""
    flat = np.frombuffer(data, "<u2" if dtype == "bf16" else dtype)
    size = math.prod(shape)
    wanted, step = [], 1
    for extent in reversed(shape):
        wanted.append(step)
        step *= extent
    contiguous = all(s == w or e == 1 for s, w, e in zip(strides, reversed(wanted), shape, strict=True))
    if min(shape, default=0) < 0 or offset < 0 or offset + size > len(flat) or (size and not contiguous):
        raise ValueError(
            f"a tensor of shape {shape}, strides {strides} at {offset} does not fit its {len(flat)} values"
        )
    flat = flat[offset : offset + size].reshape(shape)
    return (flat.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else flat
