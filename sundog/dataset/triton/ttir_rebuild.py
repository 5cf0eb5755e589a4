"""The MLIR module that a Triton graph record describes, from its nodes and edges alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from ..ir_graph import IrGraphRecord
from .mlir import Block, MlirModule, Operand, Operation

__all__ = ["rebuild_module", "symbol_edges"]

Link = dict[str, Any]


def rebuild_module(record: IrGraphRecord) -> MlirModule:
    """ValueError or LookupError, with the node concerned, where nodes and edges make no module."""
    return _Rebuilder(record).module()


def symbol_edges(module: Operation) -> Iterator[tuple[Operation, Operation, str]]:
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


def _children(op: Operation) -> list[Operation]:
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
        self._built: dict[str, Operation | Block | Operand] = {}

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
            if isinstance(built, Operation):
                self._connect(name, built)
        self._check_symbols(module)
        aliases = [(a["name"], a["value"]) for a in self._nodes[roots[0]]["aliases"]]
        return MlirModule(module, aliases)

    def _ordered(self, links: list[Link], field: str, name: str) -> list[Link]:
        """The edges by number; each number from 0 up once."""
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

    def _operation(self, name: str) -> Operation:
        node = self._node(name, "op")
        regions: list[list[Block]] = []
        links = self._from["region", name]
        for number in range(node["num_regions"]):
            blocks = [link for link in links if link["region"] == number]
            ordered = self._ordered(blocks, "position", name)
            regions.append([self._block(link["target"]) for link in ordered])
        fields = (node["properties"], node["attributes"], regions, node["result_types"])
        op = Operation(node["op"], [], [], *fields, node["location"])
        return self._keep(name, op)

    def _block(self, name: str) -> Block:
        self._node(name, "block")
        block = Block()
        for link in self._ordered(self._from["argument", name], "position", name):
            node = self._node(link["target"], "argument")
            self._keep(link["target"], Operand(block, len(block.arg_types)))
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

    def _connect(self, name: str, op: Operation) -> None:
        for link in self._ordered(self._uses[name], "operand", name):
            op.operands.append(self._value(link["source"], link["result"]))
        for link in self._ordered(self._from["successor", name], "position", name):
            block = self._built[link["target"]]
            if not isinstance(block, Block):
                raise ValueError(f"a successor of {name} is not a block")
            op.successors.append(block)

    def _value(self, name: str, result: int) -> Operand:
        source = self._built[name]
        if isinstance(source, Operation) and 0 <= result < len(source.result_types):
            return Operand(source, result)
        if isinstance(source, Operand) and result == 0:
            return source
        raise ValueError(f"{name} has no result {result}")

    def _check_symbols(self, module: Operation) -> None:
        names = {id(built): name for name, built in self._built.items()}
        implied = [(names[id(a)], names[id(b)], c) for a, b, c in symbol_edges(module)]
        if sorted(implied) != sorted(self._symbols):
            raise ValueError(f"symbol edges {self._symbols} do not follow from the ops: {implied}")
