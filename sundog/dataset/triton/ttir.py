"""Turn Triton's TTIR and TTGIR into a graph record, and the record back into the module.

    record = extract_ttir_graph(module)              # of compile.lower, triton.compile, or text
    text = rebuild_module_text(record)               # generic-form MLIR that Triton parses

Operations, blocks and block arguments are nodes; SSA values, nesting, order, successors and calls
are edges. The module is rebuilt from nodes and edges alone, and no field holds printed operations.
docs/ir_graph.md describes every field.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, TypedDict

from ..ir_graph import IR_SCHEMA_VERSION, IrGraphRecord, canonical_json, ir_id_of
from .mlir import MlirBlock, MlirModule, MlirOperand, MlirOperation, print_module
from .mlir_spell import Value
from .stage_lines import describe_stages
from .triton_module import read_module


class TtirGraph(TypedDict):
    """`record["graph"]`."""

    frontend: str  # always "triton"
    stage: str  # "ttir" or "ttgir"
    run_id: str | None
    kernel_id: str | None
    kernel_name: str | None
    input_shapes: Any
    stages: dict[str, Any] | None  # hashes and line maps, see stage_lines.py; no part of ir_id


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
    """Record a Triton module, a compiled kernel's TTGIR, or TTIR or TTGIR text.

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
        "stages": _stages_of(module_or_kernel),
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
    """Return generic-form MLIR of the module that the record's nodes and edges describe.

    ValueError where they do not describe one. Files in locations have the record's names.
    """
    try:
        return print_module(rebuild_module(record))
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"the record lacks a node or a field, or has it wrong: {error!r}"
        ) from error


def _stages_of(module_or_kernel: Any) -> dict[str, Any] | None:
    """Return the line maps of a compiled kernel; None for what was not compiled to the end."""
    asm = getattr(module_or_kernel, "asm", None)
    return None if asm is None else describe_stages(asm)


def _stage(module: MlirOperation) -> str:
    return "ttgir" if any(name.startswith("ttg.") for name in module.attributes) else "ttir"


def _kernel_name(module: MlirOperation) -> str | None:
    """Return the public function's name."""
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

    def _add_op(self, op: MlirOperation) -> str:
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

    def _add_block(self, block: MlirBlock) -> str:
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

    def _link_uses(self, op: MlirOperation) -> None:
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


Link = dict[str, Any]


def rebuild_module(record: IrGraphRecord) -> MlirModule:
    """Raise ValueError or LookupError, with the node, where nodes and edges make no module."""
    return _Rebuilder(record).module()


def symbol_edges(module: MlirOperation) -> Iterator[tuple[MlirOperation, MlirOperation, str]]:
    """(op, function, property) for each property that names a function of the module."""
    functions = {}
    for op in _children(module):
        name = op.properties.get("sym_name")
        if name is not None:
            functions[name["value"]] = op
    stack = [module]
    while stack:
        op = stack.pop()
        stack.extend(_children(op))
        for attribute, value in op.properties.items():
            named = isinstance(value, dict) and value["kind"] == "symbol"
            if named and value["path"][0] in functions:
                yield op, functions[value["path"][0]], attribute


def _children(op: MlirOperation) -> list[MlirOperation]:
    return [inner for region in op.regions for block in region for inner in block.operations]


class _Rebuilder:
    def __init__(self, record: IrGraphRecord) -> None:
        self._nodes = {node["id"]: node for node in record["nodes"]}
        if len(self._nodes) != len(record["nodes"]):
            raise ValueError("two nodes of the record have one id")
        # Edges by kind and by the node whose lists they fill.
        self._from: dict[tuple[str, str], list[Link]] = defaultdict(list)
        self._uses: dict[str, list[Link]] = defaultdict(list)
        self._symbols = []
        for link in record["links"]:
            kind = link["edge_kind"]
            if kind == "data":
                self._uses[link["target"]].append(link)
            elif kind == "symbol":
                self._symbols.append((link["source"], link["target"], link["attribute"]))
            else:
                self._from[kind, link["source"]].append(link)
        self._built: dict[str, MlirOperation | MlirBlock | MlirOperand] = {}

    def module(self) -> MlirModule:
        inner = {link["target"] for (kind, _), links in self._from.items()
                 if kind != "successor" for link in links}  # fmt: skip
        roots = [name for name in self._nodes if name not in inner]
        if len(roots) != 1:
            raise ValueError(f"{len(roots)} nodes are in no block or region, not one: {roots[:5]}")
        module = self._operation(roots[0])
        if lost := [name for name in self._nodes if name not in self._built]:
            raise ValueError(f"{len(lost)} nodes are not part of the module: {lost[:5]}")
        for name, built in self._built.items():
            if isinstance(built, MlirOperation):
                self._connect(name, built)
        self._check_symbols(module)
        aliases = [(a["name"], a["value"]) for a in self._nodes[roots[0]]["aliases"]]
        return MlirModule(module, aliases)

    def _ordered(self, links: list[Link], field: str, name: str) -> list[Link]:
        """Sort edges by number, and check that each number from 0 up occurs once."""
        ordered = sorted(links, key=lambda link: int(link[field]))
        if [link[field] for link in ordered] != list(range(len(ordered))):
            numbers = [link[field] for link in ordered]
            raise ValueError(f"the {field}s of {name} are {numbers}, not 0 to {len(ordered) - 1}")
        return ordered

    def _node(self, name: str, kind: str) -> dict[str, Any]:
        node = self._nodes[name]
        if node["node_kind"] != kind:
            raise ValueError(f"{name} is a node of kind {node['node_kind']}, not {kind}")
        return node

    def _operation(self, name: str) -> MlirOperation:
        node = self._node(name, "op")
        regions: list[list[MlirBlock]] = []
        links = self._from["region", name]
        for number in range(node["num_regions"]):
            blocks = [link for link in links if link["region"] == number]
            ordered = self._ordered(blocks, "position", name)
            regions.append([self._block(link["target"]) for link in ordered])
        fields = (node["properties"], node["attributes"], regions, node["result_types"])
        op = MlirOperation(node["op"], [], [], *fields, node["location"])
        return self._keep(name, op)

    def _block(self, name: str) -> MlirBlock:
        self._node(name, "block")
        block = MlirBlock()
        for link in self._ordered(self._from["argument", name], "position", name):
            node = self._node(link["target"], "argument")
            self._keep(link["target"], MlirOperand(block, len(block.arg_types)))
            block.arg_types.append(node["type"])
            block.arg_locations.append(node["location"])
        for link in self._ordered(self._from["contains", name], "position", name):
            block.operations.append(self._operation(link["target"]))
        return self._keep(name, block)

    def _keep(self, name: str, built: Any) -> Any:
        if name in self._built:
            raise ValueError(f"{name} is in two places")
        self._built[name] = built
        return built

    def _connect(self, name: str, op: MlirOperation) -> None:
        for link in self._ordered(self._uses[name], "operand", name):
            op.operands.append(self._value(link["source"], link["result"]))
        for link in self._ordered(self._from["successor", name], "position", name):
            block = self._built[link["target"]]
            if not isinstance(block, MlirBlock):
                raise ValueError(f"a successor of {name} is not a block")
            op.successors.append(block)

    def _value(self, name: str, result: int) -> MlirOperand:
        source = self._built[name]
        if isinstance(source, MlirOperation) and 0 <= result < len(source.result_types):
            return MlirOperand(source, result)
        if isinstance(source, MlirOperand) and result == 0:
            return source
        raise ValueError(f"{name} has no result {result}")

    def _check_symbols(self, module: MlirOperation) -> None:
        names = {id(built): name for name, built in self._built.items()}
        implied = [(names[id(a)], names[id(b)], c) for a, b, c in symbol_edges(module)]
        if sorted(implied) != sorted(self._symbols):
            raise ValueError(f"symbol edges {self._symbols} do not follow from the ops: {implied}")
