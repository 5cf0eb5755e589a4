"""Encode values between ranks as bytes that hold nothing but data. docs/security.md says why.

A value is a tag of one byte and its content; whole numbers and lengths take eight bytes. Reading a
value runs no code of the sender's choice: a dataclass, a named tuple or an enum is looked up among
the classes that this process has imported, and gets its fields without a call of its methods.
Anything else needs pickle, which is refused unless the caller asked for it.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import pickle
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ..errors import BadValue

_HEADER = b"sundog1:"
_DEEPEST = 100
_WORD = struct.Struct("<Q")
_DTYPES = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
_SINGLE = {None: b"N", True: b"T", False: b"F"}
_SEQUENCES: dict[Any, bytes] = {
    tuple: b"(",
    list: b"[",
    set: b"{",
    frozenset: b"<",
    torch.Size: b"S",
}
_PLAIN = (
    "None, numbers, strings, bytes, tuples, lists, dicts, sets, tensors, arrays, dtypes, enums, "
    "dataclasses and named tuples of an imported module"
)


def encode(value: Any, what: str = "exchange", allow_pickle: bool = False) -> bytes:
    """Return the bytes of a value. Raise ValueError if it needs pickle and that is not allowed."""
    parts = [_HEADER]
    _Writer(parts.append, what, allow_pickle).write(value, 0)
    return b"".join(parts)


def decode(data: bytes, whose: str = "a value", allow_pickle: bool = False) -> Any:
    """Return the value of these bytes. Raise BadValue, which names `whose`, if they hold none."""
    reader = _Reader(data, allow_pickle)
    try:
        reader.expect(_HEADER)
        value = reader.read(0)
        reader.expect(b"")
    except (ValueError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise BadValue(
            f"{whose} is not data that sundog wrote: {error} (its {len(data):,} bytes begin with "
            f"{data[:8].hex(' ') or 'nothing'}). Nothing of it was run. Does something else write "
            "to the ranks' store? See docs/security.md."
        ) from None
    return value


class _Unreadable(ValueError):
    """What is wrong with the bytes."""


class _Writer:
    def __init__(self, put: Callable[[bytes], Any], what: str, allow_pickle: bool) -> None:
        self._put, self._what, self._allow_pickle = put, what, allow_pickle

    def write(self, value: Any, depth: int) -> None:
        if depth > _DEEPEST:
            raise ValueError(
                f"{self._what}: a value nested more than {_DEEPEST} deep, or one that holds itself"
            )
        kind = type(value)
        if value is None or kind is bool:
            self._put(_SINGLE[value])
        elif kind is int:
            self._block(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))
        elif kind in (float, complex):
            self._put(b"f" if kind is float else b"c")
            self._put(np.array(value, "<f8" if kind is float else "<c16").tobytes())
        elif kind is str:
            self._block(b"s", value.encode("utf-8", "surrogatepass"))
        elif kind in (bytes, bytearray):
            self._block(b"b" if kind is bytes else b"B", bytes(value))
        elif kind in _SEQUENCES:
            self._sequence(_SEQUENCES[kind], list(value), depth)
        elif kind is dict:
            self._sequence(b"d", [each for pair in value.items() for each in pair], depth)
        else:
            self._object(value, kind, depth)

    def _object(self, value: Any, kind: type, depth: int) -> None:
        if kind is torch.dtype:
            self._block(b"t", str(value).encode())
        elif kind is torch.Tensor and value.layout is torch.strided and not value.is_meta:
            self._tensor(value)
        elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            self._array(value)
        elif _found(kind) and isinstance(value, enum.Enum):
            self._sequence(b"e", [kind.__module__, kind.__qualname__, value.name], depth)
        elif _found(kind) and _names(kind) is not None and not _has_more(value):
            fields = [getattr(value, name) for name in _names(kind) or ()]
            self._sequence(b"o", [kind.__module__, kind.__qualname__, *fields], depth)
        elif self._allow_pickle:
            self._block(b"P", pickle.dumps(value))
        else:
            raise ValueError(
                f"{self._what}: a value of type {kind.__module__}.{kind.__qualname__} would need "
                f"pickle, and ranks exchange only data: {_PLAIN}. Send those; or, if you trust "
                "everybody who reaches the ranks' store (docs/security.md), pass pickle=True or "
                "set SUNDOG_ALLOW_PICKLE=1."
            )

    def _tensor(self, tensor: torch.Tensor) -> None:
        """Write only the elements, whatever storage the tensor is a view of."""
        on_gpu = tensor.device.type != "cpu"
        # The copy is ordered after what computes it, as any operation of torch on the host.
        host = tensor.detach().cpu() if on_gpu else tensor.detach().clone()
        about = [str(tensor.dtype), tuple(tensor.shape), on_gpu, tensor.requires_grad]
        self._sequence(b"x", about, 0)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # a copy of ours
            flat = host.resolve_conj().resolve_neg().contiguous().reshape(-1)
            self._block(b"b", flat.view(torch.uint8).numpy().tobytes())

    def _array(self, array: Any) -> None:
        is_scalar = isinstance(array, np.generic)
        self._sequence(b"a", [array.dtype.str, tuple(array.shape), is_scalar], 0)
        self._block(b"b", array.tobytes())

    def _sequence(self, tag: bytes, values: list, depth: int) -> None:
        self._put(tag + _WORD.pack(len(values)))
        for each in values:
            self.write(each, depth + 1)

    def _block(self, tag: bytes, data: bytes) -> None:
        self._put(tag + _WORD.pack(len(data)))
        self._put(data)


class _Reader:
    def __init__(self, data: bytes, allow_pickle: bool) -> None:
        self._data, self._at, self._allow_pickle = memoryview(data), 0, allow_pickle

    def expect(self, text: bytes) -> None:
        """Read this text, or raise. An empty text stands for the end."""
        length = len(text) or len(self._data) - self._at
        if self._bytes(length) != text:
            raise _Unreadable("it has no header" if text else f"{length} bytes are left over")

    def read(self, depth: int) -> Any:
        if depth > _DEEPEST:
            raise _Unreadable(f"it is nested more than {_DEEPEST} deep")
        tag = self._bytes(1)
        for value, single in _SINGLE.items():
            if tag == single:
                return value
        if tag in (b"f", b"c"):
            return self._floating("<f8" if tag == b"f" else "<c16")
        if tag in _BLOCKS:
            return _BLOCKS[tag](self._block())
        for kind, sequence in _SEQUENCES.items():
            if tag == sequence:
                return kind(self._sequence(depth))
        return self._other(tag, depth)

    def _other(self, tag: bytes, depth: int) -> Any:
        if tag == b"P":
            data = self._block()
            if not self._allow_pickle:
                raise _Unreadable(
                    "it is pickled, and this rank did not ask for that (pickle=True, or "
                    "SUNDOG_ALLOW_PICKLE=1, on every rank)"
                )
            return pickle.loads(data)
        readers = {b"d": _dict, b"e": _member, b"o": _instance}
        if tag in readers:
            return readers[tag](self._sequence(depth))
        if tag in (b"x", b"a"):
            about, content = self._sequence(depth), self.read(depth + 1)
            make: Callable[..., Any] = _tensor if tag == b"x" else _array
            return make(*about, content)
        raise _Unreadable(f"{tag!r} is not a known tag")

    def _floating(self, dtype: str) -> float | complex:
        value: float | complex = np.frombuffer(self._bytes(np.dtype(dtype).itemsize), dtype)[
            0
        ].item()
        return value

    def _sequence(self, depth: int) -> list:
        count = self._length()
        return [self.read(depth + 1) for _ in range(count)]

    def _block(self) -> bytes:
        return self._bytes(self._length())

    def _length(self) -> int:
        length: int = _WORD.unpack(self._bytes(_WORD.size))[0]
        if length > len(self._data) - self._at:  # an element takes at least a byte
            raise _Unreadable(f"{length:,} bytes or elements are announced, and it ends before")
        return length

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise _Unreadable("it ends in the middle of a value")
        self._at += count
        return bytes(self._data[self._at - count : self._at])


def _dtype(data: bytes) -> torch.dtype:
    name = data.decode()
    if name not in _DTYPES:
        raise _Unreadable(f"{name!r} is not a dtype of this torch")
    return _DTYPES[name]


_BLOCKS: dict[bytes, Callable[[bytes], Any]] = {
    b"i": lambda data: int.from_bytes(data, "little", signed=True),
    b"s": lambda data: data.decode("utf-8", "surrogatepass"),
    b"b": bytes,
    b"B": bytearray,
    b"t": _dtype,
}


def _dict(pairs: list) -> dict:
    return dict(zip(pairs[::2], pairs[1::2], strict=True))


def _tensor(name: str, shape: tuple, on_gpu: bool, requires_grad: bool, data: bytes) -> Any:
    dtype = _dtype(name.encode())
    with torch._C.DisableTorchFunction():  # new memory: there is nothing to wait for
        if data:
            with torch._C._DisableTorchDispatch():
                flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                tensor = flat.view(dtype).view(shape)
        else:
            tensor = torch.empty(shape, dtype=dtype)
        return (tensor.cuda() if on_gpu else tensor).requires_grad_(requires_grad)


def _array(dtype: str, shape: tuple, is_scalar: bool, data: bytes) -> Any:
    if np.dtype(dtype).hasobject:
        raise _Unreadable("an array of objects")
    array = np.frombuffer(bytearray(data), dtype).reshape(shape)
    return array[()] if is_scalar else array


def _class(module: str, name: str) -> Any:
    """Find a class among the imported modules; import nothing for it."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None
    return found


def _found(kind: type) -> bool:
    return _class(kind.__module__, kind.__qualname__) is kind


def _names(kind: type) -> list[str] | None:
    """Return the fields of a class that has only fields: a dataclass or a named tuple."""
    if issubclass(kind, tuple):
        return list(kind._fields) if hasattr(kind, "_fields") else None
    if not dataclasses.is_dataclass(kind) or kind.__new__ is not object.__new__:
        return None
    return [field.name for field in dataclasses.fields(kind)]


def _has_more(value: Any) -> bool:
    """Return whether it has attributes besides its fields that can't be computed from them."""
    kind = type(value)
    more = set(getattr(value, "__dict__", ())).difference(_names(kind) or ())
    return any(
        not isinstance(getattr(kind, name, None), functools.cached_property) for name in more
    )


def _member(about: list) -> enum.Enum:
    module, name, member = about
    kind = _class(module, name)
    if (
        not (isinstance(kind, type) and issubclass(kind, enum.Enum))
        or member not in kind._member_map_
    ):
        raise _Unreadable(f"{module}.{name}.{member} is not in an enum that is imported here")
    return kind._member_map_[member]


def _instance(about: list) -> Any:
    module, name, *values = about
    kind = _class(module, name)
    names = _names(kind) if isinstance(kind, type) else None
    if names is None or len(names) != len(values):
        raise _Unreadable(f"{module}.{name} is not a class of {len(values)} fields imported here")
    if issubclass(kind, tuple):
        return tuple.__new__(kind, values)
    made = object.__new__(kind)
    for field, value in zip(names, values, strict=True):
        object.__setattr__(made, field, value)
    return made
