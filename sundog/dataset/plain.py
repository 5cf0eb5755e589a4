"""Turn any Python value into plain JSON, with no address and no machine's path in it."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import math
import os
import re
import sys
import types
from collections.abc import Mapping
from typing import Any

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# The folders of an absolute path: two components or more, not the middle of a word, URL or path.
_FOLDERS = re.compile(r"(?<![\w.:/*~)\]])/(?:[^\s/'\"`,;:()<>|]+/)+")


_MARKED = re.compile(r" \([\w.]+\)$")  # text that looks as if marked by `exact`
_MAX_LEVELS = 90  # of lists and objects; a reader takes 100 in a whole record
_MAX_VALUES = 100_000
_MAX_BITS = 13_000  # of an integer that JSON holds: Python reads no more than 4,300 digits


def plain(value: object, *, exact: bool = False) -> Any:
    """Return `value` as JSON, the same on every machine.

    Raises ValueError for what JSON cannot hold: a list in itself, or 100,000 values. If `exact`,
    different values stay different: a key that is no text has its type beside it, and a path has a
    hash in place of its folders.
    """
    return _Walk(exact).value(value)


class _Walk:
    def __init__(self, exact: bool) -> None:
        self._exact = exact
        self._above: list[int] = []  # the containers that we are in, by id()
        self._count = 0

    def value(self, value: Any) -> Any:
        self._count += 1
        if self._count > _MAX_VALUES:
            raise ValueError(f"more than {_MAX_VALUES} values are too many for a record")
        if value is None or isinstance(value, (bool, int)):
            return _number(value)
        if isinstance(value, float):
            return value if math.isfinite(value) else repr(float(value))
        if isinstance(value, str):
            return self._text(str(value))
        if _is_numpy_number(value):
            inner = value.item()
            # Text is the only form of a long double.
            return str(value) if _is_numpy_number(inner) else self.value(inner)
        if is_tensor(value):
            return {"tensor": str(value.dtype), "shape": self.value(tuple(value.shape))}
        if id(value) in self._above or len(self._above) >= _MAX_LEVELS:
            raise ValueError(f"{type_name(value)} is in itself, or {_MAX_LEVELS} levels deep")
        self._above.append(id(value))
        found = self._container(value)
        self._above.pop()
        return found

    def _container(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {self._key(key): self.value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        if isinstance(value, (set, frozenset)):
            return sorted((self.value(item) for item in value), key=repr)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f.name: self.value(getattr(value, f.name)) for f in dataclasses.fields(value)}
        if isinstance(value, enum.Enum):
            return value.name
        if type(value).__name__ == "constexpr":  # triton's, met without importing triton
            return self.value(getattr(value, "value", None))
        if callable(value) or isinstance(value, types.ModuleType):
            name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
            return name or type_name(value)
        return self._text(_ADDRESS.sub("", safe_str(value)))

    def _key(self, key: object) -> str:
        name = str(self.value(key))
        marked = not isinstance(key, str) or _MARKED.search(key)
        return f"{name} ({type_name(key)})" if self._exact and marked else name

    def _text(self, text: str) -> str:
        short = relative_text(text)
        if not self._exact or (short == text and not _MARKED.search(text)):
            return short
        return f"{short} ({hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:8]})"


def _number(value: bool | int | None) -> Any:
    # An IntEnum or numpy-like subclass prints as its name, which is not JSON.
    if value is None or isinstance(value, bool):
        return value
    return int(value) if value.bit_length() <= _MAX_BITS else hex(value)


def safe_str(value: object) -> str:
    """Return str(value), or the name of its type if that fails."""
    try:
        return str(value)
    except Exception:  # a user's broken __str__ must not end a tuning run
        return type_name(value)


def is_tensor(value: object) -> bool:
    """Return True for torch tensors, fake ones too, and whatever looks like one."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and not _is_numpy_number(value)


def _is_numpy_number(value: object) -> bool:
    """numpy.int64(64): it has a shape and a dtype, but what counts is its value."""
    return isinstance(value, getattr(sys.modules.get("numpy"), "generic", ()))


def type_name(value: object) -> str:
    cls = type(value)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def relative_path(path: str) -> str:
    """Return `path` from the folder of its outermost package; a script's is its name alone."""
    if not os.path.isabs(path):
        return path
    folder, name = os.path.split(path)
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder, package = os.path.split(folder)
        name = f"{package}/{name}"
    return name


def relative_text(text: str) -> str:
    """Leave out the folders of absolute paths: records hold no machine's paths."""
    return _FOLDERS.sub("", text)
