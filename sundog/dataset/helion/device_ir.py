"""Helion's device IR as one graph record, from which the fx graphs can be rebuilt exactly.

    bound = kernel.bind(args)
    record = extract_ir_graph(bound.host_function.device_ir, run_id=..., kernel_id=...,
                              kernel_name="softmax", input_shapes=..., env=bound.env)

A node is an fx node: its arguments are a template whose holes the `data` edges fill, one edge per
use. Graphs that no root reaches (Helion keeps rolled reductions as alternatives) are marked
`live: false`. docs/helion.md describes every field; `helion_rebuild` reads the record back.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any, TypedDict

from torch.fx import Node

from ..ir_graph import IR_SCHEMA_VERSION, IrGraphRecord, ir_id_of
from .device_regions import (
    KNOWN_REGION_KINDS,
    RegionLink,
    block_map,
    links_of,
    live_graphs,
    memory_slots,
    symbol_map,
)
from .node_values import (
    LoweringFeatures,
    SourceFeatures,
    Uses,
    ValFeatures,
    display,
    encode,
    encode_target,
    lowering_features,
    source_features,
    val_features,
    warn_once,
)


class _NodeCore(TypedDict):
    id: str
    graph_id: int
    region_kind: str
    block_ids: list[int]
    live: bool
    position: int
    name: str
    op_kind: str
    target: str | None
    args: Any
    kwargs: Any
    attribute: Any
    original_node: str | None
    config_slots: dict[str, list[int]] | None


class IrNode(_NodeCore, SourceFeatures, ValFeatures, LoweringFeatures):
    """One fx node."""


class IrEdge(TypedDict):
    """One use of a value, or one connection between graphs."""

    source: str
    target: str
    key: int
    edge_kind: str
    kwarg: str | None
    arg_positions: list[int | str] | None
    call: str | None
    role: str | None
    output_index: int | None
    exact: bool | None
    dtype: str | None
    shape: list[str] | None


class IrGraphMeta(TypedDict):
    frontend: str
    run_id: str | None
    kernel_id: str | None
    kernel_name: str | None
    input_shapes: Any
    num_graphs: int
    root_ids: list[int]
    grid_block_ids: list[list[int]]
    graphs: list[dict[str, Any]]
    rolled_reductions: list[dict[str, Any]]
    blocks: list[dict[str, Any]] | None
    symbols: list[dict[str, Any]]


def extract_ir_graph(
    device_ir: Any,
    *,
    run_id: str | None,
    kernel_id: str | None,
    kernel_name: str | None,
    input_shapes: Any,
    env: Any = None,
) -> IrGraphRecord:
    """Record one bound kernel. `env` is `bound.env`: without it, and outside of an active
    one, `blocks` is None, because Helion keeps block sizes there and not in the device IR."""
    ids = _Ids(device_ir)
    nodes = [_node(ids, info, i, n) for info in ids.infos for i, n in enumerate(info.graph.nodes)]
    meta: IrGraphMeta = {
        "frontend": "helion",
        "run_id": run_id,
        "kernel_id": kernel_id,
        "kernel_name": kernel_name,
        "input_shapes": input_shapes,
        "num_graphs": len(ids.infos),
        "root_ids": ids.root_ids,
        "grid_block_ids": [list(b) for b in getattr(device_ir, "grid_block_ids", None) or []],
        "graphs": [_graph_entry(ids, info) for info in ids.infos],
        "rolled_reductions": ids.rolled,
        "blocks": block_map(env),
        "symbols": symbol_map(device_ir),
    }
    record: IrGraphRecord = {
        "schema_version": IR_SCHEMA_VERSION,
        "ir_id": "",
        "run_id": run_id,
        "directed": True,
        "multigraph": True,
        "graph": dict(meta),
        "nodes": [dict(n) for n in nodes],
        "links": [dict(e) for e in _edges(ids)],
    }
    record["ir_id"] = ir_id_of(record)
    return record


class _Ids:
    """The device IR with what every node needs to know: its id, its liveness, its original."""

    def __init__(self, device_ir: Any) -> None:
        self.infos = list(getattr(device_ir, "graphs", None) or [])
        self.root_ids = list(getattr(device_ir, "root_ids", None) or [])
        by_id = {info.graph_id: info for info in self.infos}
        self.calls = live_graphs(by_id, self.root_ids)
        self.node = {n: f"g{i.graph_id}:{n.name}" for i in self.infos for n in i.graph.nodes}
        self.slots = memory_slots(by_id, self.root_ids, self.calls)
        self.rolled = [_rolled(r) for r in getattr(device_ir, "rolled_reductions", None) or []]
        self.original = self._originals()
        self.values = {n: val_features(n.meta.get("val")) for n in self.node}

    def _originals(self) -> dict[Node, Node]:
        """Node of an alternative -> the live node it was copied from: they share the lowering."""
        found: dict[int, Node] = {}
        copies: list[Node] = []
        for info in self.infos:
            nodes = [n for n in info.graph.nodes if n.meta.get("lowering") is not None]
            if info.graph_id in self.calls:
                found.update((id(n.meta["lowering"]), n) for n in nodes)
            else:
                copies += nodes
        originals = {n: found.get(id(n.meta["lowering"])) for n in copies}
        return {n: original for n, original in originals.items() if original is not None}


def _rolled(info: Any) -> dict[str, Any]:
    return {
        "original_graph_id": info.original_graph_id,
        "rolled_block_ids": list(info.rolled_block_ids),
        "used_rdim": bool(info.used_rdim),
        "can_be_rolled_by_caller": bool(info.can_be_rolled_by_caller),
    }


def _graph_entry(ids: _Ids, info: Any) -> dict[str, Any]:
    kind = type(info).__name__
    if kind not in KNOWN_REGION_KINDS:
        warn_once(f"unknown region kind {kind}: recorded, but this sundog does not know its edges")
    return {
        "graph_id": info.graph_id,
        "region_kind": kind,
        "block_ids": _block_ids(info),
        "live": info.graph_id in ids.calls,
        "alternate_of": _alternate_of(ids, info),
        "info": _info_fields(info),
    }


def _alternate_of(ids: _Ids, info: Any) -> int | None:
    """Return the graph that this one would replace: where most of its nodes come from."""
    found = [ids.original[n].graph for n in info.graph.nodes if n in ids.original]
    owners = Counter(i.graph_id for g in found for i in ids.infos if i.graph is g)
    return min(owners, key=lambda g: (-owners[g], g)) if owners else None


def _info_fields(info: Any) -> dict[str, Any]:
    """Return the region's own fields; `node_args` are the region edges, `graph` the nodes."""
    if not dataclasses.is_dataclass(info):
        return {}
    skipped = {"graph_id", "graph", "node_args", "block_ids"}
    names = [f.name for f in dataclasses.fields(info) if f.name not in skipped]
    return {name: encode(getattr(info, name)) for name in names}


def _block_ids(info: Any) -> list[int]:
    return list(getattr(info, "block_ids", None) or [])


def _node(ids: _Ids, info: Any, position: int, node: Node) -> IrNode:
    uses: Uses = []
    original = ids.original.get(node)
    core: _NodeCore = {
        "id": ids.node[node],
        "graph_id": info.graph_id,
        "region_kind": type(info).__name__,
        "block_ids": _block_ids(info),
        "live": info.graph_id in ids.calls,
        "position": position,
        "name": node.name,
        "op_kind": node.op,
        "target": _target(node),
        "args": encode(node.args, (), uses),
        "kwargs": encode(node.kwargs, (), uses),
        "attribute": _attribute(node),
        "original_node": None if original is None else ids.node[original],
        "config_slots": ids.slots.get(node),
    }
    return {**core, **source_features(node), **ids.values[node], **lowering_features(node)}


def _target(node: Node) -> str | None:
    if not callable(node.target):
        return node.target
    name = encode_target(node.target)
    if name is None:
        warn_once(f"the target {display(node.target)} cannot be named: the record leaves it out")
    return name


def _attribute(node: Node) -> Any:
    """Return the constant that a get_attr node reads from the graph's module."""
    if node.op != "get_attr":
        return None
    value: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return encode(value)


def _edges(ids: _Ids) -> list[IrEdge]:
    found: list[IrEdge] = []
    for info in ids.infos:
        for node in info.graph.nodes:
            found += _data_edges(ids, node)
        found += [_link_edge(ids, link) for link in links_of(ids.calls.get(info.graph_id, []))]
    seen: Counter[tuple[str, str]] = Counter()
    for edge in found:
        ends = edge["source"], edge["target"]
        edge["key"] = seen[ends]
        seen[ends] += 1
    return found


def _edge(ids: _Ids, kind: str, source: Node, target: Node, value: Node | None) -> IrEdge:
    edge: IrEdge = dict.fromkeys(IrEdge.__annotations__)  # type: ignore[assignment]
    edge["source"], edge["target"] = ids.node[source], ids.node[target]
    edge["edge_kind"] = kind
    if value is not None:
        edge["dtype"], edge["shape"] = ids.values[value]["dtype"], ids.values[value]["shape"]
    return edge


def _data_edges(ids: _Ids, node: Node) -> list[IrEdge]:
    uses: Uses = []
    encode(node.args, (), uses)
    positional = len(uses)
    encode(node.kwargs, (), uses)
    edges = []
    for i, (producer, path) in enumerate(uses):
        edge = _edge(ids, "data", producer, node, producer)
        edge["kwarg"] = None if i < positional else str(path[0])
        edge["arg_positions"] = list(path if i < positional else path[1:])
        edges.append(edge)
    return edges


def _link_edge(ids: _Ids, link: RegionLink) -> IrEdge:
    edge = _edge(ids, link.kind, link.source, link.target, link.value)
    edge["arg_positions"] = None if link.arg_positions is None else list(link.arg_positions)
    edge["call"], edge["role"] = ids.node[link.call.node], link.call.role
    edge["output_index"], edge["exact"] = link.output_index, link.exact
    return edge
