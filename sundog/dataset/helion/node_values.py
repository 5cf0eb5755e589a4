"""Python values of a torch.fx graph as JSON and back: arguments, targets, symbolic expressions.

JSON scalars stand for themselves; everything else is an object with a tag `"t"`:
`node` is a hole that a `data` edge fills, `list`, `tuple`, `dict`, `slice`, `float` (not finite),
`complex`, `dtype`, `device`, `layout`, `memory_format`, `ellipsis`, `size`, `function`, `tensor`,
`sym` (a symbolic scalar, its expression as a tree), and `opaque` for what none of these can hold:
it is reported once and makes the rebuilt graph differ, so a loss is never silent.
"""

from __future__ import annotations

import functools
import importlib
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.fx import Node

MAX_DISPLAY = 256  # display strings only; nothing that the rebuild needs is ever cut
_MAX_TENSOR = 4096  # elements of a constant tensor; a larger one is opaque

Path = tuple[int | str, ...]
Uses = list[tuple[Node, Path]]


@dataclass(frozen=True)
class SymValue:
    """A symbolic scalar read back from a record: there is no shape environment to live in."""

    kind: str  # "SymInt", "SymFloat" or "SymBool"
    expr: str  # the expression tree, as canonical JSON


@dataclass(frozen=True)
class Opaque:
    """A value the record could not hold."""

    type: str


@functools.cache
def warn_once(message: str) -> None:
    """One warning per message and process; `warn_once.cache_clear()` forgets them."""
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def display(value: object) -> str:
    """For people, not for the rebuild: cut to MAX_DISPLAY characters."""
    text = str(value)
    return text if len(text) <= MAX_DISPLAY else text[: MAX_DISPLAY - 3] + "..."


def expr_tree(expr: Any) -> Any:
    """A sympy expression as JSON: numbers, `symbol`s, and functions with arguments."""
    if isinstance(expr, (bool, int, float)):
        return expr
    if expr.is_Symbol:
        return {"t": "symbol", "name": str(expr.name)}
    if expr.is_Integer:
        return int(expr)
    if expr.is_Float:
        return encode(float(expr))
    if expr.is_Rational:
        return {"t": "fn", "name": "Rational", "args": [int(expr.p), int(expr.q)]}
    return {"t": "fn", "name": type(expr).__name__, "args": [expr_tree(a) for a in expr.args]}


def sym_expr(value: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """The sympy expression of a symbolic scalar, read without adding a guard."""
    expr = getattr(value.node, "_expr", None)
    return value.node.expr if expr is None else expr


def encode(value: object, path: Path = (), uses: Uses | None = None) -> Any:
    """`value` as JSON; every fx node in it becomes a hole, and is appended to `uses`."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, Node):
        assert uses is not None, "a node outside of arguments"
        uses.append((value, path))
        return {"t": "node"}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"t": "float", "v": repr(value)}
    if isinstance(value, (list, tuple)):
        tag = "list" if isinstance(value, list) else "tuple"
        tag = "size" if isinstance(value, torch.Size) else tag
        return {"t": tag, "v": [encode(v, (*path, i), uses) for i, v in enumerate(value)]}
    if isinstance(value, slice):
        parts = (("start", value.start), ("stop", value.stop), ("step", value.step))
        return {"t": "slice", "v": [encode(v, (*path, name), uses) for name, v in parts]}
    if isinstance(value, dict) and all(type(k) is str for k in value):
        return {"t": "dict", "v": [[k, encode(v, (*path, k), uses)] for k, v in value.items()]}
    return _encode_leaf(value)


def _encode_leaf(value: object) -> Any:
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return {"t": "sym", "type": type(value).__name__, "v": expr_tree(sym_expr(value))}
    for tag, cls in _NAMED_IN_TORCH.items():
        if isinstance(value, cls):
            return {"t": tag, "v": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"t": "device", "v": str(value)}
    if isinstance(value, complex):
        return {"t": "complex", "v": [encode(value.real), encode(value.imag)]}
    if value is Ellipsis:
        return {"t": "ellipsis"}
    if isinstance(value, torch.Tensor) and not _is_fake(value) and value.numel() <= _MAX_TENSOR:
        data = [encode(v) for v in value.detach().cpu().reshape(-1).tolist()]
        dtype = str(value.dtype).removeprefix("torch.")
        return {"t": "tensor", "dtype": dtype, "shape": list(value.shape), "v": data}
    if callable(value) and (name := encode_target(value)) is not None:
        return {"t": "function", "v": name}
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    warn_once(f"the IR record cannot hold a value of type {kind}: it is marked opaque")
    return {"t": "opaque", "type": kind}


_NAMED_IN_TORCH: dict[str, type] = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "memory_format": torch.memory_format,
}


def _is_fake(value: torch.Tensor) -> bool:
    return type(value) is not torch.Tensor and type(value) is not torch.nn.Parameter


def decode(value: Any, node_at: Callable[[Path], Node], path: Path = ()) -> Any:
    """The inverse of `encode`; `node_at` fills the holes, and raises where it cannot."""
    if not isinstance(value, dict):
        return value
    tag, inner = value["t"], cast(Any, value.get("v"))
    if tag == "node":
        return node_at(path)
    if tag in ("list", "tuple", "size"):
        items = [decode(v, node_at, (*path, i)) for i, v in enumerate(inner)]
        return {"list": list, "tuple": tuple, "size": torch.Size}[tag](items)
    if tag == "slice":
        names = ("start", "stop", "step")
        return slice(*(decode(v, node_at, (*path, n)) for n, v in zip(names, inner, strict=True)))
    if tag == "dict":
        return {k: decode(v, node_at, (*path, k)) for k, v in inner}
    return _decode_leaf(tag, inner, value)


def _decode_leaf(tag: str, inner: Any, value: dict[str, Any]) -> Any:
    if tag == "float":
        return float(inner)
    if tag in _NAMED_IN_TORCH:
        return getattr(torch, inner)
    if tag == "device":
        return torch.device(inner)
    if tag == "complex":
        return complex(*(decode(v, _no_node) for v in inner))
    if tag == "ellipsis":
        return Ellipsis
    if tag == "tensor":
        data = [decode(v, _no_node) for v in inner]
        return torch.tensor(data, dtype=getattr(torch, value["dtype"])).reshape(value["shape"])
    if tag == "function":
        return resolve_target(inner)
    if tag == "sym":
        from ..ir_graph import canonical_json

        return SymValue(value["type"], canonical_json(inner))
    if tag == "opaque":
        return Opaque(value["type"])
    raise ValueError(f"unknown tag {tag!r} in an IR record: written by a newer sundog?")


def _no_node(path: Path) -> Node:
    raise ValueError(f"a node where none can be, at {path}")


def encode_target(target: Callable[..., Any]) -> str | None:
    """A name that `resolve_target` finds again: `aten.amax.default`, or `_operator:getitem`."""
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order.{target.name()}"
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if module is None or name is None or "<" in name:
        return None
    full = f"{module}:{name}"
    try:
        return full if resolve_target(full) is target else None
    except (ImportError, AttributeError):
        return None


@functools.cache
def resolve_target(name: str) -> Any:
    """The function that `encode_target` named: `module:name`, or an operator of torch.ops."""
    module, colon, name_in_module = name.partition(":")
    found: Any = importlib.import_module(module) if colon else torch.ops
    parts = (name_in_module if colon else name).split(".")
    for part in parts:
        found = getattr(found, part)
    return found
