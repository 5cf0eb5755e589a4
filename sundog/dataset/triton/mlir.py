"""A small reader and writer of MLIR modules in generic form.

    module = parse_module(text)      # "tt.load"(%1, %2) <{...}> ({regions}) {...} : (...) -> ...
    print_module(module)             # the same module, with names of its own for SSA values

Only the shape is known here (operations, regions, blocks, values), no dialect. The reader is one
pass over the text; attributes, types and locations that repeat are read once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .mlir_spell import Value, escape, spell, spell_entries, spell_location
from .mlir_value import Cursor, LocationReader, MlirSyntaxError

_ALIAS_LINE = re.compile(r"^([#!][A-Za-z_]\w*) = (.*)\n", re.MULTILINE)
_FIRST_OP = re.compile(r'^(?:%.* = )?"', re.MULTILINE)
_OP = re.compile(r' *(?:(%[^"=]+) = )?"([^"]+)"\(([^)]*)\)(?:\[([^\]]*)\])?')
_BLOCK = re.compile(r" *\^(\w+)(\(|:)")
_REGION_END = re.compile(r" *\}")
_LINE_END = re.compile(r"(?: *//[^\n]*)?\n")
_PROPERTIES = re.compile(r" <(\{[^{}\"]*\})>")
_RESULTS = re.compile(r"%([^:,]+)(?::(\d+))?")


@dataclass(slots=True, eq=False)
class MlirBlock:
    arg_types: list[Value] = field(default_factory=list)
    arg_locations: list[Value] = field(default_factory=list)
    operations: list[MlirOperation] = field(default_factory=list)


@dataclass(slots=True, frozen=True)
class MlirOperand:
    """The value that an operation uses: a result of `owner`, or an argument of it."""

    owner: MlirOperation | MlirBlock
    number: int

    @property
    def type(self) -> Value:
        owner = self.owner
        types = owner.arg_types if isinstance(owner, MlirBlock) else owner.result_types
        return types[self.number]


@dataclass(slots=True, eq=False)
class MlirOperation:
    name: str
    operands: list[MlirOperand]
    successors: list[MlirBlock]
    properties: dict[str, Value]
    attributes: dict[str, Value]
    regions: list[list[MlirBlock]]
    result_types: list[Value]
    location: Value


@dataclass(slots=True)
class MlirModule:
    operation: MlirOperation
    aliases: list[tuple[str, Value]]  # of attributes and types, each before its first use


def parse_module(text: str, *, inferred_from: str | None = None) -> MlirModule:
    """Read generic-form text with locations, as MLIR prints it.

    Locations in the file `inferred_from` are not the program's (see LocationReader): unknown.
    """
    reader = _ModuleReader(text, inferred_from)
    return MlirModule(reader.operation(), reader.aliases)


@dataclass(slots=True)
class _Scope:
    """What has a name in one region. Sibling regions may use one name for two values."""

    values: dict[str, MlirOperand] = field(default_factory=dict)
    blocks: dict[str, MlirBlock] = field(default_factory=dict)
    # Uses before the definition: of a block that dominates but is printed later.
    pending: list[tuple[str, MlirOperation, int]] = field(default_factory=list)


class _ModuleReader:
    def __init__(self, text: str, inferred_from: str | None) -> None:
        self._locations = LocationReader(text, inferred_from)
        self.aliases: list[tuple[str, Value]] = []
        for match in _ALIAS_LINE.finditer(text):
            if match[2].startswith("loc("):
                self._locations.define(match[1], match[2])
            else:
                self.aliases.append((match[1], Cursor(match[2]).whole()))
        first = _FIRST_OP.search(text)
        self._cursor = Cursor(text, first.start() if first else 0)
        if "\n{-#" in text:
            raise MlirSyntaxError("the module has resources (dense_resource), which are not kept")
        self._scopes = [_Scope()]
        self._seen: dict[str, Value] = {}  # text to what it means

    def operation(self) -> MlirOperation:
        cursor = self._cursor
        match = cursor.take(_OP)
        if not match:
            raise cursor.error("an operation in generic form")
        results, name, uses, successors = match.groups()
        labels = [self._label(s[1:]) for s in successors.split(", ")] if successors else []
        op = MlirOperation(name, [], labels, self._properties(), {}, [], [], None)
        if cursor.skip(" ({"):
            op.regions = self._regions()
        if cursor.skip(" {"):
            op.attributes = cursor.entries("}")
        op.result_types, num_operands, op.location = self._tail()
        for use in uses.split(", ") if uses else []:
            self._use(use[1:], op)
        if num_operands != len(op.operands):
            raise cursor.error(f"{num_operands} operands of {name}")
        if results:
            self._define_results(results, op)
        return op

    def _properties(self) -> dict[str, Value]:
        cursor = self._cursor
        match = cursor.take(_PROPERTIES)
        if not match:
            if not cursor.skip(" <{"):
                return {}
            found = cursor.entries("}")
            cursor.expect(">")
            return found
        if match[1] not in self._seen:
            self._seen[match[1]] = Cursor(match[1], 1).entries("}")
        return dict(self._seen[match[1]])

    def _tail(self) -> tuple[list[Value], int, Value]:
        """` : (T, T) -> T loc(...)` and the end of the line: result types, #operands, location."""
        cursor = self._cursor
        cursor.expect(" : ")
        split = cursor.text.find(" loc(", cursor.pos)
        end = cursor.text.find("\n", split)
        types, location = cursor.text[cursor.pos : split], cursor.text[split + 1 : end]
        if types not in self._seen:
            self._seen[types] = Cursor(types).function_type()
        if location not in self._seen:
            self._seen[location] = self._locations.read(location)
        cursor.pos = end + 1
        function = self._seen[types]
        return function["outputs"], len(function["inputs"]), self._seen[location]

    def _regions(self) -> list[list[MlirBlock]]:
        """Read regions up to `})`; the first `({` is already read."""
        cursor = self._cursor
        regions = [self._region()]
        while cursor.skip(", {"):
            regions.append(self._region())
        cursor.expect(")")
        return regions

    def _region(self) -> list[MlirBlock]:
        cursor = self._cursor
        cursor.expect("\n")
        self._scopes.append(_Scope())
        blocks: list[MlirBlock] = []
        while not cursor.take(_REGION_END):
            if match := cursor.take(_BLOCK):
                blocks.append(self._block_head(match))
            else:
                if not blocks:
                    blocks.append(MlirBlock())  # an entry block without arguments has no label
                blocks[-1].operations.append(self.operation())
        self._close_scope(blocks)
        return blocks

    def _close_scope(self, blocks: list[MlirBlock]) -> None:
        scope = self._scopes.pop()
        for label, block in scope.blocks.items():
            if block not in blocks:
                raise self._cursor.error(f"block ^{label} before the end of its region")
        for use, op, number in scope.pending:
            if found := _resolve(use, scope):
                op.operands[number] = found
            elif len(self._scopes) > 1:
                self._scopes[-1].pending.append((use, op, number))
            else:
                raise self._cursor.error(f"a definition of {use}, which {op.name} uses")

    def _block_head(self, match: re.Match[str]) -> MlirBlock:
        cursor = self._cursor
        block = self._label(match[1])
        if match[2] == "(":
            while not cursor.skip("):"):
                if block.arg_types:
                    cursor.expect(", ")
                cursor.expect("%")
                end = cursor.text.index(": ", cursor.pos)
                name = cursor.text[cursor.pos : end]
                cursor.pos = end + 2
                self._scopes[-1].values[name] = MlirOperand(block, len(block.arg_types))
                block.arg_types.append(cursor.value())
                cursor.expect(" ")
                block.arg_locations.append(self._locations.take(cursor))
        if not cursor.take(_LINE_END):
            raise cursor.error("the end of the block's label")
        return block

    def _label(self, name: str) -> MlirBlock:
        """Return the block of this name in the current region, which may come later in the text."""
        return self._scopes[-1].blocks.setdefault(name, MlirBlock())

    def _use(self, use: str, op: MlirOperation) -> None:
        for scope in reversed(self._scopes):
            if found := _resolve(use, scope):
                op.operands.append(found)
                return
        self._scopes[-1].pending.append((use, op, len(op.operands)))
        op.operands.append(MlirOperand(op, -1))  # replaced when its region ends

    def _define_results(self, names: str, op: MlirOperation) -> None:
        number = 0
        for name, count in _RESULTS.findall(names):
            self._scopes[-1].values[name] = MlirOperand(op, number)
            number += int(count or 1)
        if number != len(op.result_types):
            raise self._cursor.error(f"{len(op.result_types)} results of {op.name}")


def _resolve(use: str, scope: _Scope) -> MlirOperand | None:
    name, _, result = use.partition("#")
    found = scope.values.get(name)
    return MlirOperand(found.owner, found.number + int(result)) if found and result else found


def print_module(module: MlirModule) -> str:
    """Return generic-form text that MLIR parses back to the same module, locations included."""
    writer = _ModuleWriter()
    writer.name_values(module.operation)
    aliases = [f"{name} = {spell(value)}" for name, value in module.aliases]
    writer.operation(module.operation, 0)
    return "\n".join(aliases + writer.lines) + "\n"


class _ModuleWriter:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._names: dict[tuple[int, int], str] = {}  # (id of the owner, number)
        self._labels: dict[int, str] = {}

    def name_values(self, op: MlirOperation) -> None:
        for number in range(len(op.result_types)):
            self._names[id(op), number] = f"%{len(self._names)}"
        for block in (block for region in op.regions for block in region):
            self._labels[id(block)] = f"^bb{len(self._labels)}"
            for number in range(len(block.arg_types)):
                self._names[id(block), number] = f"%{len(self._names)}"
            for inner in block.operations:
                self.name_values(inner)

    def operation(self, op: MlirOperation, depth: int) -> None:
        indent = "  " * depth
        names = [self._names[id(op), number] for number in range(len(op.result_types))]
        head = f"{', '.join(names)} = " if names else ""
        uses = ", ".join(self._names[id(use.owner), use.number] for use in op.operands)
        head += f"{escape(op.name)}({uses})"
        if op.successors:
            head += f"[{', '.join(self._labels[id(block)] for block in op.successors)}]"
        if op.properties:
            head += f" <{spell_entries(op.properties)}>"
        self.lines.append(indent + head)
        if op.regions:
            self.lines[-1] += " ("
            for number, region in enumerate(op.regions):
                self.lines[-1] += ", {" if number else "{"
                self._region(region, depth + 1)
                self.lines.append(indent + "}")
            self.lines[-1] += ")"
        self.lines[-1] += self._tail(op)

    def _tail(self, op: MlirOperation) -> str:
        inputs = [use.type for use in op.operands]
        types = spell({"kind": "function", "inputs": inputs, "outputs": op.result_types})
        attributes = f" {spell_entries(op.attributes)}" if op.attributes else ""
        return f"{attributes} : {types} loc({spell_location(op.location)})"

    def _region(self, region: list[MlirBlock], depth: int) -> None:
        for block in region:
            args = []
            for number, (kind, location) in enumerate(
                zip(block.arg_types, block.arg_locations, strict=True)
            ):
                name = self._names[id(block), number]
                args.append(f"{name}: {spell(kind)} loc({spell_location(location)})")
            head = f"({', '.join(args)})" if args else ""
            self.lines.append("  " * (depth - 1) + f"{self._labels[id(block)]}{head}:")
            for op in block.operations:
                self.operation(op, depth)
