"""The fx graphs of Helion's device IR, rebuilt from a record, and compared with the originals.

    graphs = rebuild(record)                     # graph id -> torch.fx.Graph
    assert differences(device_ir, record, env=bound.env) == []

`rebuild` reads the nodes' own fields and the `data` edges. `differences` is the proof that the
record is lossless: operation by operation, argument by argument, then every other field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ir_graph import IrGraphRecord, canonical_json
from .device_ir import extract_ir_graph
from .node_values import Path, SymValue, decode, expr_tree, resolve_target, sym_expr

Slot = tuple[str, str | None, Path]  # node id, keyword or None, path in the argument


def rebuild(record: IrGraphRecord) -> dict[int, Graph]:
    """Graph id -> fx graph. Raises ValueError where the record is damaged, and says where."""
    sources = {_slot(edge): edge["source"] for edge in record["links"] if _is_data(edge)}
    graphs = {entry["graph_id"]: Graph() for entry in record["graph"]["graphs"]}
    made: dict[str, Node] = {}
    for entry in sorted(record["nodes"], key=_order):
        try:
            made[entry["id"]] = _make(graphs[entry["graph_id"]], entry, sources, made)
        except (KeyError, AttributeError, ImportError, TypeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise ValueError(f"node {entry.get('id')} cannot be rebuilt: {what}") from error
    unused = [slot for slot, source in sources.items() if source not in made]
    if unused:
        raise ValueError(f"edges from nodes that are not there: {unused[:3]}")
    return graphs


def _order(entry: dict[str, Any]) -> tuple[int, int]:
    try:
        return entry["graph_id"], entry["position"]
    except KeyError as error:
        raise ValueError(f"node {entry.get('id')} has no {error}") from error


def _is_data(edge: dict[str, Any]) -> bool:
    return bool(edge["edge_kind"] == "data")


def _slot(edge: dict[str, Any]) -> Slot:
    return edge["target"], edge["kwarg"], tuple(edge["arg_positions"])


def _make(
    graph: Graph, entry: dict[str, Any], sources: dict[Slot, str], made: dict[str, Node]
) -> Node:
    def node_at(path: Path) -> Node:
        keyword = path[0] if path and isinstance(path[0], str) else None
        rest = path if keyword is None else path[1:]
        return made[sources[entry["id"], keyword, rest]]

    target = entry["target"]
    if entry["op_kind"] == "call_function":
        target = resolve_target(target)
    args = decode(entry["args"], node_at)
    kwargs = decode(entry["kwargs"], node_at)
    node = graph.create_node(entry["op_kind"], target, args, kwargs, name=entry["name"])
    node.meta["attribute"] = decode(entry["attribute"], node_at)
    return node


def differences(device_ir: Any, record: IrGraphRecord, *, env: Any = None) -> list[str]:
    """List what of the device IR the record does not give back; [] if it is lossless."""
    return graph_differences(device_ir, record) or list(_features(device_ir, record, env))


def graph_differences(device_ir: Any, record: IrGraphRecord) -> list[str]:
    """Compare rebuilt fx graphs only: names, operations, targets, arguments."""
    try:
        graphs = rebuild(record)
    except ValueError as error:
        return [str(error)]
    found = []
    originals = {info.graph_id: info.graph for info in device_ir.graphs}
    if sorted(originals) != sorted(graphs):
        found.append(f"graphs {sorted(graphs)} instead of {sorted(originals)}")
    for graph_id in sorted(originals.keys() & graphs.keys()):
        found += [f"g{graph_id}: {d}" for d in _graph(originals[graph_id], graphs[graph_id])]
    return found


def _graph(original: Graph, built: Graph) -> Iterator[str]:
    olds, news = list(original.nodes), list(built.nodes)
    if [n.name for n in olds] != [n.name for n in news]:
        yield f"nodes {[n.name for n in news]} instead of {[n.name for n in olds]}"
        return
    pair = dict(zip(olds, news, strict=True))
    for old, new in pair.items():
        if (old.op, old.target) != (new.op, new.target):
            yield f"{old.name}: {new.op} {new.target} instead of {old.op} {old.target}"
        for what, a, b in (("args", old.args, new.args), ("kwargs", old.kwargs, new.kwargs)):
            if not _same(a, b, lambda n: pair[n]):
                yield f"{old.name}: {what} {b} instead of {a}"
        if old.op == "get_attr":
            module = original.owning_module
            value = getattr(module, str(old.target), None)
            if not _same(value, new.meta["attribute"], lambda n: pair[n]):
                yield f"{old.name}: another constant"


def _same(old: Any, new: Any, built: Callable[[Node], Node]) -> bool:
    """Equal in kind and value; written against fx's values, not against their encoding."""
    if isinstance(old, Node):
        return built(old) is new
    for kind in (torch.Size, list, tuple):
        if isinstance(old, kind):
            same = isinstance(new, kind) and len(old) == len(new)
            return same and all(_same(a, b, built) for a, b in zip(old, new, strict=True))
    if isinstance(old, dict):
        same = isinstance(new, dict) and list(old) == list(new)
        return same and all(_same(old[k], new[k], built) for k in old)
    if isinstance(old, slice):
        old_parts, new_parts = (old.start, old.stop, old.step), new
        if isinstance(new, slice):
            new_parts = (new.start, new.stop, new.step)
        return _same(old_parts, new_parts, built)
    if isinstance(old, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        tree = canonical_json(expr_tree(sym_expr(old)))
        return isinstance(new, SymValue) and (new.kind, new.expr) == (type(old).__name__, tree)
    if isinstance(old, torch.Tensor):
        return isinstance(new, torch.Tensor) and old.dtype == new.dtype and torch.equal(old, new)
    return _same_scalar(old, new)


def _same_scalar(old: Any, new: Any) -> bool:
    if type(old) is not type(new):
        return False
    if isinstance(old, float):
        signs = math.copysign(1, old) == math.copysign(1, new)
        return signs and (old == new or (math.isnan(old) and math.isnan(new)))
    return bool(old == new)


def _features(device_ir: Any, record: IrGraphRecord, env: Any) -> Iterator[str]:
    """Return every field that is not an argument: shapes, lowering, edges, block map."""
    graph = record["graph"]
    identity = {k: graph.get(k) for k in ("run_id", "kernel_id", "kernel_name", "input_shapes")}
    fresh = extract_ir_graph(device_ir, env=env, **identity)
    for key in fresh["graph"]:
        if graph.get(key) != fresh["graph"][key]:
            yield f"graph.{key} differs"
    for old, new in zip(fresh["nodes"], record["nodes"], strict=True):
        wrong = [k for k in old if canonical_json(old[k]) != _field(new, k)]
        yield from (f"{old['id']}: {k} differs" for k in wrong)
    edges = [canonical_json(edge) for edge in record["links"]]
    missing = [e for e in fresh["links"] if canonical_json(e) not in set(edges)]
    yield from (f"no {e['edge_kind']} edge {e['source']} -> {e['target']}" for e in missing)
    if len(edges) != len(fresh["links"]):
        yield f"{len(edges)} edges instead of {len(fresh['links'])}"


def _field(node: dict[str, Any], key: str) -> str:
    """Return a field; one that is absent is not the same as one that is null."""
    return canonical_json(node[key]) if key in node else "absent"
