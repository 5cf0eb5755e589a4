"""Any Python value as plain JSON, with no address and no machine's path in it."""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import re
import sys
import types
from collections.abc import Mapping
from typing import Any

__all__ = ["is_tensor", "plain", "relative_path", "relative_text", "type_name"]

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
# The folders of an absolute path: two components or more, not the middle of a word, URL or path.
_FOLDERS = re.compile(r"(?<![\w.:/*~)\]])/(?:[^\s/'\"`,;:()<>|]+/)+")


def plain(value: object) -> Any:
    """`value` as JSON: the same on every machine, and never an error."""
    if value is None or isinstance(value, (bool, int)):
        return _number(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(float(value))
    if isinstance(value, str):
        return relative_text(str(value))
    if _is_numpy_number(value):
        inner = value.item()  # type: ignore[attr-defined]
        return str(value) if _is_numpy_number(inner) else plain(inner)  # a long double has no other
    if is_tensor(value):
        return {"tensor": str(value.dtype), "shape": plain(tuple(value.shape))}  # type: ignore[attr-defined]
    return _plain_container(value)


def _number(value: bool | int | None) -> Any:
    # An IntEnum or numpy-like subclass prints as its name, which is not JSON.
    if value is None or isinstance(value, bool):
        return value
    return int(value)


def _plain_container(value: object) -> Any:
    if isinstance(value, Mapping):
        return {str(plain(k)): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=repr)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.name
    if type(value).__name__ == "constexpr":  # triton's, met without importing triton
        return plain(getattr(value, "value", None))
    if callable(value) or isinstance(value, types.ModuleType):
        return getattr(value, "__qualname__", None) or getattr(value, "__name__", type_name(value))
    return relative_text(_ADDRESS.sub("", _safe_str(value)))


def _safe_str(value: object) -> str:
    try:
        return str(value)
    except Exception:  # a broken __str__ is the user's, and must not end a tuning run
        return type_name(value)


def is_tensor(value: object) -> bool:
    """True for torch tensors, fake ones too, and whatever looks like one."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and not _is_numpy_number(value)


def _is_numpy_number(value: object) -> bool:
    """numpy.int64(64): it has a shape and a dtype, but what counts is its value."""
    return isinstance(value, getattr(sys.modules.get("numpy"), "generic", ()))


def type_name(value: object) -> str:
    cls = type(value)
    return cls.__name__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def relative_path(path: str) -> str:
    """`path` from the folder that holds its outermost package; a script's is its name alone."""
    if not os.path.isabs(path):
        return path
    folder, name = os.path.split(path)
    while os.path.isfile(os.path.join(folder, "__init__.py")):
        folder, package = os.path.split(folder)
        name = f"{package}/{name}"
    return name


def relative_text(text: str) -> str:
    """`text` with the folders of absolute paths left out: records hold no machine's paths."""
    return _FOLDERS.sub("", text)
