"""An IR graph as arrays, for models: operations by number, types, and edges.

    known = vocabulary(texts)                       # "tt.load" -> 17; 0 is what is not in it
    arrays = graph_arrays(record, known)
    arrays["node"]                                  # (nodes, 5): see NODE
    arrays["edge"], arrays["edge_kind"]             # (2, edges) and (edges,), kinds as in EDGES

Everything is an integer but a tile's size, which is the logarithm of its elements to the base 2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy

from .ir_graph import IrGraphRecord

__all__ = ["EDGES", "ELEMENTS", "NODE", "graph_arrays", "vocabulary"]

NODE = ("kind", "operation", "element", "rank", "log2_size")  # the columns of "node"
KINDS = ("op", "block", "argument")
EDGES = ("data", "region", "argument", "contains", "successor", "symbol")
ELEMENTS = (
    "", "i1", "i8", "i16", "i32", "i64", "f8E4M3FN", "f8E5M2", "f16", "bf16", "f32", "f64", "ptr",
)  # fmt: skip
_OPERATION = re.compile(r'(?:^|= )\s*"?([a-z_]+\.[a-z_0-9.]+)', re.M)


def vocabulary(texts: Iterable[str]) -> dict[str, int]:
    """Number the operations that modules have, from 1, in the order of their names."""
    found = {"builtin.module"}
    for text in texts:
        found.update(_OPERATION.findall(text))
    return {name: number for number, name in enumerate(sorted(found), start=1)}


def graph_arrays(record: IrGraphRecord, known: Mapping[str, int]) -> dict[str, numpy.ndarray]:
    """Return the nodes and edges of a Triton graph record as arrays."""
    places = {node["id"]: number for number, node in enumerate(record["nodes"])}
    nodes = [_node(node, known) for node in record["nodes"]]
    links = record["links"]
    edges = [[places[link["source"]], places[link["target"]]] for link in links]
    return {
        "node": numpy.array(nodes, dtype=numpy.float32).reshape(-1, len(NODE)),
        "edge": numpy.array(edges, dtype=numpy.int64).reshape(-1, 2).T,
        "edge_kind": numpy.array(
            [EDGES.index(link["edge_kind"]) for link in links], dtype=numpy.int64
        ),
    }


def _node(node: Mapping[str, Any], known: Mapping[str, int]) -> list[float]:
    kind = KINDS.index(node["node_kind"])
    types = node.get("result_types") or [node.get("type")]
    element, shape = _type(types[0])
    number = ELEMENTS.index(element) if element in ELEMENTS else 0
    size = math.log2(max(math.prod(shape), 1))
    return [kind, known.get(node.get("op", ""), 0), number, len(shape), size]


def _type(value: Any) -> tuple[str, list[int]]:
    """Return the element of a type and its shape: ("f16", [128, 64]); pointers are "ptr"."""
    if isinstance(value, str):
        return value, []
    if not isinstance(value, Mapping):
        return "", []
    if value.get("kind") == "tensor":
        return _type(value["element"])[0], list(value["shape"] or [])
    if value.get("kind") == "dialect" and str(value.get("name", "")).endswith("tt.ptr"):
        return "ptr", []
    shaped = [each for each in value.get("params", []) if isinstance(each, Mapping)]
    if shaped and shaped[0].get("kind") == "shaped":  # a buffer in shared memory
        return _type(shaped[0]["element"])[0], list(shaped[0]["shape"])
    return "", []
