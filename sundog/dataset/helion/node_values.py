"""Encode the values and features of torch.fx nodes as JSON, and decode the values again.

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
from typing import Any, TypedDict, cast

import sympy
import torch
from torch.fx import Node

from ..plain import relative_path

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
    """Warn once per message and process; `warn_once.cache_clear()` forgets them."""
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def display(value: object) -> str:
    """Return text for people, not for the rebuild: cut to MAX_DISPLAY characters."""
    text = str(value)
    return text if len(text) <= MAX_DISPLAY else text[: MAX_DISPLAY - 3] + "..."


def expr_tree(expr: Any) -> Any:
    """Encode a sympy expression as JSON: numbers, `symbol`s, and functions with arguments."""
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
    """Return the sympy expression of a symbolic scalar, without adding a guard."""
    expr = getattr(value.node, "_expr", None)
    return value.node.expr if expr is None else expr


def encode(value: object, path: Path = (), uses: Uses | None = None) -> Any:
    """Encode `value` as JSON; every fx node in it becomes a hole, and is appended to `uses`."""
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
    """Decode what `encode` made; `node_at` fills the holes, and raises where it cannot."""
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
    """Return a name for `resolve_target`: `aten.amax.default`, or `_operator:getitem`."""
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
    """Find the function that `encode_target` named: `module:name`, or an operator of torch.ops."""
    module, colon, name_in_module = name.partition(":")
    found: Any = importlib.import_module(module) if colon else torch.ops
    parts = (name_in_module if colon else name).split(".")
    for part in parts:
        found = getattr(found, part)
    return found


class ValFeatures(TypedDict):
    dtype: str | None
    shape: list[str] | None
    concrete_shape: list[int | None] | None
    stride: list[str] | None
    concrete_stride: list[int | None] | None
    device: str | None
    value: str | None
    literal: Any
    items: list[Any] | None


class LoweringFeatures(TypedDict):
    lowering_class: str | None
    reduction_type: str | None
    reduction_ranges: list[str] | None
    reduction_block_id: int | None
    pointwise_ranges: list[str] | None
    input_dtypes: list[str] | None
    input_shapes: list[list[str]] | None
    lowering_ops: list[dict[str, Any]] | None


class SourceFeatures(TypedDict):
    source_loc: str | None
    source_span: list[int | None] | None


def val_features(val: object) -> ValFeatures:
    """Return what fx knows about a node's value; of a list, each value's features in `items`."""
    features: ValFeatures = dict.fromkeys(ValFeatures.__annotations__)  # type: ignore[assignment]
    if isinstance(val, torch.Tensor):
        features["dtype"] = str(val.dtype)
        features["shape"] = [str(d) for d in val.shape]
        features["concrete_shape"] = [_concrete(d) for d in val.shape]
        features["stride"] = [str(s) for s in val.stride()]
        features["concrete_stride"] = [_concrete(s) for s in val.stride()]
        features["device"] = str(val.device)
    elif isinstance(val, (list, tuple)):
        features["dtype"] = type(val).__name__
        features["items"] = [val_features(v) for v in val]
    elif val is not None:
        features["dtype"] = type(val).__name__
        features["value"] = display(val)
        features["literal"] = encode(val)
    return features


def _concrete(size: Any) -> int | None:
    """Return the number that a size stands for; None for block sizes, which the config chooses."""
    if isinstance(size, int):
        return size
    try:
        hint = size.node.hint  # None for unbacked symbols, and reading it adds no guard
        return None if hint is None else int(hint)
    except Exception:
        return None


def source_features(node: Node) -> SourceFeatures:
    at = node.meta.get("location")
    if at is None:
        return {"source_loc": None, "source_span": None}
    span = [getattr(at, k, None) for k in ("lineno", "colno", "end_lineno", "end_colno")]
    return {"source_loc": display(f"{relative_path(at.filename)}:{at.lineno}"), "source_span": span}


def lowering_features(node: Node) -> LoweringFeatures:
    """Describe a node's lowering; all None if Helion does not lower it (placeholder, output)."""
    lowering: Any = node.meta.get("lowering") if node.op == "call_function" else None
    data = getattr(getattr(lowering, "buffer", None), "data", None)
    reduction = getattr(data, "reduction_type", None)
    fakes = _guarded("input_fake_tensors", lambda: type(lowering).input_fake_tensors(node), data)
    return {
        "lowering_class": None if lowering is None else type(lowering).__name__,
        "reduction_type": None if reduction is None else str(reduction),
        "reduction_ranges": _texts(getattr(data, "reduction_ranges", None)),
        "reduction_block_id": getattr(lowering, "block_index", None) if data else None,
        "pointwise_ranges": _texts(getattr(data, "ranges", None)),
        "input_dtypes": None if fakes is None else [str(t.dtype) for t in fakes],
        "input_shapes": None if fakes is None else [[str(d) for d in t.shape] for t in fakes],
        "lowering_ops": _guarded("body", lambda: _body(lowering, data), data),
    }


def _guarded(what: str, read: Any, data: object) -> Any:
    """`read()`, or None and one warning: Inductor's inside is not ours to rely on."""
    if data is None:
        return None
    try:
        return read()
    except Exception as error:
        warn_once(f"no {what} of an Inductor lowering: {type(error).__name__}: {error}")
        return None


def _texts(values: Any) -> list[str] | None:
    return None if values is None else [str(v) for v in values]


class _Ref:
    """The result of a recorded operation."""

    def __init__(self, index: int) -> None:
        self.index = index


def _body(lowering: Any, data: Any) -> list[dict[str, Any]]:
    from torch._inductor.ops_handler import DefaultHandler
    from torch._inductor.virtualized import OpsValue, V

    inputs = {name: i for i, name in enumerate(lowering.input_names)}
    ops: list[dict[str, Any]] = []

    def value(item: Any) -> Any:
        item = item.value if isinstance(item, OpsValue) else item
        if isinstance(item, _Ref):
            return {"t": "op", "v": item.index}
        if isinstance(item, sympy.Basic):
            return {"t": "index", "v": expr_tree(item)}
        if isinstance(item, str) and item in inputs:
            return {"t": "input", "v": inputs[item]}
        if isinstance(item, (list, tuple)):
            return {"t": "tuple", "v": [value(v) for v in item]}
        if callable(item):  # the body of ops.masked
            return value(item())
        return encode(item)

    class BodyHandler(DefaultHandler):
        def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = [value(a) for a in args]
            named = {k: value(v) for k, v in kwargs.items()}
            ops.append({"op": name, "args": given, "kwargs": named})
            if name == "indirect_indexing":
                return sympy.Symbol(f"indirect{len(ops) - 1}", integer=True)
            return _Ref(len(ops) - 1)

    with V.set_ops_handler(BodyHandler()):
        result = data.inner_fn(*data.inner_fn_args())
    ops.append({"op": "return", "args": [value(result)], "kwargs": {}})
    return ops
