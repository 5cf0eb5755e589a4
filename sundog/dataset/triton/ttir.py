"""Triton's TTIR and TTGIR as a graph record, and back: nothing of the module is lost.

    record = extract_ttir_graph(module)              # of compile.lower, triton.compile, or text
    text = rebuild_module_text(record)               # generic-form MLIR that Triton parses

Operations, blocks and block arguments are nodes; SSA values, nesting, order, successors and calls
are edges. The module is rebuilt from nodes and edges alone, and no field holds printed operations.
docs/ir_graph.md describes every field.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, TypedDict

from ..ir_graph import IR_SCHEMA_VERSION, IrGraphRecord, canonical_json, ir_id_of
from .mlir import Block, MlirModule, Operation, print_module
from .mlir_spell import Value
from .triton_module import read_module
from .ttir_rebuild import rebuild_module, symbol_edges

__all__ = ["extract_ttir_graph", "rebuild_module_text"]


class TtirGraph(TypedDict):
    """`record["graph"]`."""

    frontend: str  # always "triton"
    stage: str  # "ttir" or "ttgir"
    run_id: str | None
    kernel_id: str | None
    kernel_name: str | None
    input_shapes: Any


class OpNode(TypedDict):
    """An operation. The module itself is `op0`."""

    id: str
    node_kind: str  # "op"
    op: str  # its name with the dialect: "tt.load"
    properties: dict[str, Value]  # attributes that the operation's definition names
    attributes: dict[str, Value]  # attributes that anyone may add
    result_types: list[Value]
    num_regions: int
    location: Value


class ModuleNode(OpNode):
    """`op0`: also what the module's text abbreviates."""

    aliases: list[Alias]


class Alias(TypedDict):
    name: str  # "#blocked"
    value: Value


class BlockNode(TypedDict):
    """A block of a region."""

    id: str
    node_kind: str  # "block"


class ArgumentNode(TypedDict):
    """A block's argument: a kernel's parameter, a loop's induction or carried variable, ..."""

    id: str
    node_kind: str  # "argument"
    type: Value
    location: Value


class Edge(TypedDict):
    source: str
    target: str
    key: int  # counts the edges from this source to this target
    edge_kind: str


class DataEdge(Edge):
    """From the op or argument that makes a value to an op that uses it."""

    result: int  # which result of the source; 0 for an argument
    operand: int  # which operand of the target


class RegionEdge(Edge):
    """From an op to a block of one of its regions."""

    region: int
    position: int  # of the block in the region


class ArgumentEdge(Edge):
    """From a block to an argument of it."""

    position: int


class ContainsEdge(Edge):
    """From a block to an operation in it."""

    position: int


class SuccessorEdge(Edge):
    """From a terminator to a block that it may jump to."""

    position: int


class SymbolEdge(Edge):
    """From an op to the function that one of its properties names; follows from them."""

    attribute: str


EDGE_KINDS = {
    "data": DataEdge,
    "region": RegionEdge,
    "argument": ArgumentEdge,
    "contains": ContainsEdge,
    "successor": SuccessorEdge,
    "symbol": SymbolEdge,
}
NODE_KINDS = {"op": OpNode, "block": BlockNode, "argument": ArgumentNode}


def extract_ttir_graph(
    module_or_kernel: Any,
    *,
    run_id: str | None = None,
    kernel_id: str | None = None,
    kernel_name: str | None = None,
    input_shapes: Any = None,
) -> IrGraphRecord:
    """The record of a Triton module, of a compiled kernel's TTGIR, or of TTIR or TTGIR text.

    From text the locations that the pretty form does not print (of a loop's variables) are
    unknown; a module from `sundog.dataset.triton.compile.lower` still has them.
    """
    module = read_module(module_or_kernel)
    graph: TtirGraph = {
        "frontend": "triton",
        "stage": _stage(module.operation),
        "run_id": run_id,
        "kernel_id": kernel_id,
        "kernel_name": kernel_name or _kernel_name(module.operation),
        "input_shapes": input_shapes,
    }
    builder = _RecordBuilder(module)
    # Through JSON: equal types and locations are one object in the reader, here each has its own.
    content = json.loads(canonical_json([graph, builder.nodes, builder.links]))
    record: IrGraphRecord = {
        "schema_version": IR_SCHEMA_VERSION,
        "ir_id": "",
        "run_id": run_id,
        "directed": True,
        "multigraph": True,
        "graph": content[0],
        "nodes": content[1],
        "links": content[2],
    }
    record["ir_id"] = ir_id_of(record)
    return record


def rebuild_module_text(record: IrGraphRecord) -> str:
    """Generic-form MLIR of the module that the record's nodes and edges describe.

    ValueError where they do not describe one. Files in locations have the record's names.
    """
    try:
        return print_module(rebuild_module(record))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the record lacks a node or a field, or has it wrong: {error!r}"
        ) from error


def _stage(module: Operation) -> str:
    return "ttgir" if any(name.startswith("ttg.") for name in module.attributes) else "ttir"


def _kernel_name(module: Operation) -> str | None:
    """The public function's name."""
    for op in (op for block in module.regions[0] for op in block.operations):
        if op.properties.get("sym_visibility") == {"kind": "string", "value": "public"}:
            return str(op.properties["sym_name"]["value"])
    return None


class _RecordBuilder:
    """Numbers operations, blocks and arguments in the order of the text and links them."""

    def __init__(self, module: MlirModule) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.links: list[dict[str, Any]] = []
        self._counts: Counter[str] = Counter()
        self._keys: Counter[tuple[str, str]] = Counter()
        self._ids: dict[int, str] = {}  # id() of an operation or a block
        self._args: dict[tuple[int, int], str] = {}
        self._add_op(module.operation)
        aliases = [{"name": name, "value": value} for name, value in module.aliases]
        self.nodes[0]["aliases"] = aliases
        self._link_uses(module.operation)
        for source, target, attribute in symbol_edges(module.operation):
            self._link(self._ids[id(source)], self._ids[id(target)], "symbol", attribute=attribute)

    def _node(self, prefix: str, kind: str, **fields: Any) -> str:
        name = f"{prefix}{self._counts[prefix]}"
        self._counts[prefix] += 1
        self.nodes.append({"id": name, "node_kind": kind, **fields})
        return name

    def _link(self, source: str, target: str, kind: str, **fields: Any) -> None:
        key = self._keys[source, target]
        self._keys[source, target] += 1
        link = {"source": source, "target": target, "key": key, "edge_kind": kind, **fields}
        self.links.append(link)

    def _add_op(self, op: Operation) -> str:
        name = self._node(
            "op",
            "op",
            op=op.name,
            properties=op.properties,
            attributes=op.attributes,
            result_types=op.result_types,
            num_regions=len(op.regions),
            location=op.location,
        )
        self._ids[id(op)] = name
        for number, region in enumerate(op.regions):
            for position, block in enumerate(region):
                inner = self._add_block(block)
                self._link(name, inner, "region", region=number, position=position)
        return name

    def _add_block(self, block: Block) -> str:
        name = self._node("block", "block")
        self._ids[id(block)] = name
        for position, kind in enumerate(block.arg_types):
            location = block.arg_locations[position]
            arg = self._node("arg", "argument", type=kind, location=location)
            self._args[id(block), position] = arg
            self._link(name, arg, "argument", position=position)
        for position, op in enumerate(block.operations):
            self._link(name, self._add_op(op), "contains", position=position)
        return name

    def _link_uses(self, op: Operation) -> None:
        name = self._ids[id(op)]
        for number, use in enumerate(op.operands):
            arg = self._args.get((id(use.owner), use.number))
            result = use.number if arg is None else 0
            source = self._ids[id(use.owner)] if arg is None else arg
            self._link(source, name, "data", result=result, operand=number)
        for position, block in enumerate(op.successors):
            self._link(name, self._ids[id(block)], "successor", position=position)
        for inner in (o for region in op.regions for block in region for o in block.operations):
            self._link_uses(inner)
