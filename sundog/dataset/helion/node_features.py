"""What is known of one fx node beside its arguments: its value, its source, and its lowering.

Helion hands element-wise operations and reductions to Inductor, and then drops the arguments
that Inductor no longer reads: `x * x` is left as `mul(x, None)` in the fx graph. The operation
that is compiled lives in the lowering's body, so the body is recorded too, as a list of
operations: `{"t": "input", "v": 0}` is the node's first input node, `{"t": "op", "v": 3}` the
result of operation 3 of the same list.
"""

from __future__ import annotations

from typing import Any, TypedDict

import sympy
import torch
from torch.fx import Node

from ..plain import relative_path
from .node_values import display, encode, expr_tree, warn_once


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
    """What fx knows about a node's value; a list of values has its own features in `items`."""
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
    """The number behind a size; None for block sizes, which the config chooses."""
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
    """All None for a node that Helion does not lower (placeholder, output)."""
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

    class Recorder(DefaultHandler):
        def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            given = [value(a) for a in args]
            named = {k: value(v) for k, v in kwargs.items()}
            ops.append({"op": name, "args": given, "kwargs": named})
            if name == "indirect_indexing":
                return sympy.Symbol(f"indirect{len(ops) - 1}", integer=True)
            return _Ref(len(ops) - 1)

    with V.set_ops_handler(Recorder()):
        result = data.inner_fn(*data.inner_fn_args())
    ops.append({"op": "return", "args": [value(result)], "kwargs": {}})
    return ops
