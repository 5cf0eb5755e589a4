"""Read MLIR attributes, types and locations into JSON values; mlir_spell.py writes them back.

    "f32", "none"        a bare word: a builtin type or a keyword
    true, 8, [..]        a bool, an integer without a type, an array
    {"kind": ...}        everything else, see docs/ir_graph.md

Floats keep MLIR's own spelling, which is exact. If the body of a dialect's attribute or type has
none of the usual forms, it keeps its spelling (kind "opaque"). Locations name files without the
machine's paths, so the same kernel in another checkout gives the same record: see relative_files.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from ..plain import relative_path
from .mlir_spell import Value, unescape

_WORD = re.compile(r"[A-Za-z_][\w$.]*")
_SIGIL = re.compile(r"[#!][A-Za-z_][\w$]*(?:\.[\w$.]+)?")
_KEY = re.compile(r'([A-Za-z_][\w$.]*|"(?:[^"\\]|\\.)*")(?:( = )|(?=[,}]))')
_FIELD = re.compile(r"([A-Za-z_]\w*) = ")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_FLOAT = re.compile(r"-?(?:0x[0-9A-Fa-f]+|\d+\.\d*(?:[eE][-+]?\d+)?)")
_INT = re.compile(r"-?\d+")
_SYMBOL = re.compile(r'@([\w$.-]+|"(?:[^"\\]|\\.)*")')
_DIMS = re.compile(r"(?:(?:\d+|\?)x)+(?=[A-Za-z!])")
_SHAPE = re.compile(r"[1-9]\d*(?:x\d+)+(?=[,>])")
_PADDINGS = re.compile(r"\[(\d+:\+\d+(?:, \d+:\+\d+)*)\] ?")
_BRACKETS = re.compile(r'->|[<>]|"(?:[^"\\]|\\.)*"')


class MlirSyntaxError(ValueError):
    """The text is not generic-form MLIR as this reader knows it."""


class Cursor:
    """A position in a text; each method reads one thing there and moves past it."""

    __slots__ = ("pos", "text")

    def __init__(self, text: str, pos: int = 0) -> None:
        self.text = text
        self.pos = pos

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self.text, self.pos)
        if match:
            self.pos = match.end()
        return match

    def skip(self, literal: str) -> bool:
        if self.text.startswith(literal, self.pos):
            self.pos += len(literal)
            return True
        return False

    def expect(self, literal: str) -> None:
        if not self.skip(literal):
            raise self.error(f"{literal!r}")

    def error(self, wanted: str) -> MlirSyntaxError:
        line = self.text.count("\n", 0, self.pos) + 1
        seen = self.text[self.pos : self.pos + 40]
        return MlirSyntaxError(f"line {line}: expected {wanted}, found {seen!r}")

    def items(self, close: str) -> list[Value]:
        """Read comma-separated values up to `close`; the opening bracket is already read."""
        found: list[Value] = []
        while not self.skip(close):
            if found:
                self.expect(", ")
            found.append(self.value())
        return found

    def whole(self) -> Value:
        """Read the value that is all of the rest of the text."""
        found = self.value()
        if self.pos != len(self.text):
            raise self.error("the end")
        return found

    def value(self) -> Value:
        char = self.text[self.pos : self.pos + 1]
        if char == "#" or char == "!":
            return self._sigil()
        if char.isalpha() or char == "_":
            return self._word()
        if char.isdigit() or char == "-":
            return self._number()
        if char == '"':
            return self._typed({"kind": "string", "value": self.string()})
        if self.skip("["):
            return self.items("]")
        if self.skip("{"):
            return {"kind": "dict", "entries": self.entries("}")}
        if char == "@":
            return {"kind": "symbol", "path": self._symbol()}
        if char == "(":
            return self.function_type()
        raise self.error("an attribute or a type")

    def entries(self, close: str) -> dict[str, Value]:
        """`name = value` pairs up to `close`; a name alone is a unit attribute."""
        found: dict[str, Value] = {}
        while not self.skip(close):
            if found:
                self.expect(", ")
            match = self.take(_KEY)
            if not match:
                raise self.error("an attribute's name")
            name = match[1]
            name = unescape(name[1:-1]) if name[0] == '"' else name
            found[name] = self.value() if match[2] else "unit"
        return found

    def string(self) -> str:
        match = self.take(_STRING)
        if not match:
            raise self.error("a string")
        return unescape(match[1])

    def function_type(self) -> Value:
        self.expect("(")
        inputs = self.items(")")
        self.expect(" -> ")
        outputs = self.items(")") if self.skip("(") else [self.value()]
        return {"kind": "function", "inputs": inputs, "outputs": outputs}

    def _typed(self, value: dict[str, Value]) -> dict[str, Value]:
        if self.skip(" : "):
            value["type"] = self.value()
        return value

    def _number(self) -> Value:
        if match := self.take(_FLOAT):
            return self._typed({"kind": "float", "value": match[0]})
        match = self.take(_INT)
        if not match:
            raise self.error("a number")
        if self.skip(" : "):
            return {"kind": "int", "value": int(match[0]), "type": self.value()}
        return int(match[0])

    def _symbol(self) -> list[str]:
        path: list[str] = []
        while match := self.take(_SYMBOL):
            path.append(unescape(match[1][1:-1]) if match[1][0] == '"' else match[1])
            if not self.skip("::"):
                return path
        raise self.error("a symbol")

    def _word(self) -> Value:
        start = self.pos
        match = self.take(_WORD)
        word = match[0] if match else ""
        if word in ("true", "false"):
            return word == "true"
        if not self.text.startswith("<", self.pos):
            return word
        if word == "tensor":
            return self._tensor()
        if word == "array":
            return self._dense_array()
        if word == "dense":
            return self._dense()
        return self._opaque(start)

    def _tensor(self) -> Value:
        self.expect("<")
        found = {"kind": "tensor", **self._shaped()}
        if self.skip(", "):
            found["encoding"] = self.value()
        self.expect(">")
        return found

    def _shaped(self) -> dict[str, Value]:
        dims = self.take(_DIMS)
        sizes = dims[0][:-1].split("x") if dims else []
        shape = [None if size == "?" else int(size) for size in sizes]
        return {"shape": shape, "element": self.value()}

    def _dense_array(self) -> Value:
        self.expect("<")
        element = self.value()
        values: list[Value] = []
        if self.skip(": "):
            values = self._literals(">")
        else:
            self.expect(">")
        return {"kind": "dense_array", "element": element, "values": values}

    def _dense(self) -> Value:
        start = self.pos - len("dense")
        self.expect("<")
        try:
            values = self._literals(">")
        except MlirSyntaxError:  # complex numbers
            self.pos = start + len("dense")
            return self._typed(self._opaque(start))
        self.expect(" : ")
        # A splat is one literal, anything else one list; an empty tensor has none.
        found = values[0] if values else None
        return {"kind": "dense", "values": found, "type": self.value()}

    def _literals(self, close: str) -> list[Value]:
        """Read numbers as dense attributes hold them: integers and bools, floats as spelled."""
        found: list[Value] = []
        while not self.skip(close):
            if found:
                self.expect(", ")
            if self.skip("["):
                found.append(self._literals("]"))
            elif match := self.take(_FLOAT) or self.take(_INT):
                text = match[0]
                found.append(int(text) if _INT.fullmatch(text) else text)
            elif self.text.startswith('"', self.pos):
                found.append({"kind": "string", "value": self.string()})
            elif self.skip("true") or self.skip("false"):
                found.append(self.text[self.pos - 4 : self.pos] == "true")
            else:
                raise self.error("a literal")
        return found

    def _sigil(self) -> Value:
        start = self.pos
        match = self.take(_SIGIL)
        if not match:
            raise self.error("an attribute or a type of a dialect")
        if "." not in match[0] and not self.text.startswith("<", self.pos):
            return {"kind": "alias", "name": match[0]}
        found: dict[str, Value] = {"kind": "dialect", "name": match[0]}
        if not self.skip("<"):
            return found
        try:
            if self.skip("{"):
                found["fields"] = self.entries("}")
                self.expect(">")
            else:
                found["params"] = self._params()
        except MlirSyntaxError:
            self.pos = match.end()
            return self._opaque(start)
        return found

    def _params(self) -> list[Value]:
        found: list[Value] = []
        if match := self.take(_PADDINGS):  # of #ttg.padded_shared, a space after
            pairs = [[int(n) for n in pair.split(":+")] for pair in match[1].split(", ")]
            return [{"kind": "paddings", "pairs": pairs}, *self._params()]
        while not self.skip(">"):
            if found:
                self.expect(", ")
            if match := _DIMS.match(self.text, self.pos):
                found.append({"kind": "shaped", **self._shaped()})
            elif match := self.take(_SHAPE):
                found.append({"kind": "shape", "shape": [int(n) for n in match[0].split("x")]})
            elif match := self.take(_FIELD):
                found.append({"kind": "field", "name": match[1], "value": self.value()})
            else:
                found.append(self.value())
        return found

    def _opaque(self, start: int) -> dict[str, Value]:
        """Return the spelling from `start` to the bracket that closes the one here."""
        depth = 0
        for match in _BRACKETS.finditer(self.text, self.pos):
            depth += {"<": 1, ">": -1}.get(match[0], 0)
            if depth == 0 and match[0] == ">":
                self.pos = match.end()
                return {"kind": "opaque", "spelling": self.text[start : self.pos]}
        raise self.error("a closing '>'")


_FILE = re.compile(r'"((?:[^"\\]|\\.)*)":(\d+):(\d+)(?: to (\d*):(\d+))?')
_ALIAS = re.compile(r"#[A-Za-z_]\w*")


def relative_files(paths: Iterable[str]) -> dict[str, str]:
    """`relative_path` of each path, lengthened where two different files would share a name."""
    names = {path: relative_path(path) for path in sorted(set(paths))}
    deepest = max((path.count("/") for path in names), default=0)
    for depth in range(2, deepest + 1):
        shared = {name for name, count in Counter(names.values()).items() if count > 1}
        if not shared:
            break
        for path, name in names.items():
            if name in shared:
                names[path] = "/".join(path.split("/")[-depth:])
    return names


class LocationReader:
    """Reads `loc(...)` in one module's text; every alias is read once.

    `files` are the names that files get; by default those of `relative_files`.
    """

    def __init__(
        self, text: str, inferred_from: str | None = None, files: Mapping[str, str] | None = None
    ) -> None:
        # Parsing pretty-printed text gives what has no printed location the place in that text.
        self._inferred_from = inferred_from
        paths = {unescape(match[1]) for match in _FILE.finditer(text)}
        self._files = relative_files(paths - {inferred_from or ""}) if files is None else files
        self._aliases: dict[str, Value] = {}
        self._definitions: dict[str, str] = {}

    def define(self, alias: str, text: str) -> None:
        self._definitions[alias] = text

    def read(self, text: str) -> Value:
        """Read the location spelled `loc(...)`."""
        cursor = Cursor(text)
        found = self.take(cursor)
        if cursor.pos != len(text):
            raise cursor.error("the end of the location")
        return found

    def take(self, cursor: Cursor) -> Value:
        """Read the location `loc(...)` at the cursor."""
        cursor.expect("loc(")
        found = self._body(cursor)
        cursor.expect(")")
        return found

    def _body(self, cursor: Cursor) -> Value:
        if match := cursor.take(_ALIAS):
            return self._alias(match[0])
        if match := cursor.take(_FILE):
            return self._file(match)
        if cursor.text.startswith('"', cursor.pos):
            name = cursor.string()
            child = {"kind": "unknown"}
            if cursor.skip("("):
                child = self._body(cursor)
                cursor.expect(")")
            return {"kind": "name", "name": name, "child": child}
        if cursor.skip("callsite("):
            callee = self._body(cursor)
            cursor.expect(" at ")
            caller = self._body(cursor)
            cursor.expect(")")
            return {"kind": "callsite", "callee": callee, "caller": caller}
        if cursor.skip("fused"):
            return self._fused(cursor)
        cursor.expect("unknown")
        return {"kind": "unknown"}

    def _alias(self, name: str) -> Value:
        if name not in self._aliases:
            if name not in self._definitions:
                raise ValueError(f"location {name} is used but not defined in the module's text")
            self._aliases[name] = self.read(self._definitions[name])
        return self._aliases[name]

    def _file(self, match: re.Match[str]) -> Value:
        path = unescape(match[1])
        if path == self._inferred_from:
            return {"kind": "unknown"}
        found: dict[str, Value] = {"kind": "file", "file": self._files[path]}
        found |= {"line": int(match[2]), "column": int(match[3])}
        if match[4]:
            found["end_line"] = int(match[4])
        if match[5]:
            found["end_column"] = int(match[5])
        return found

    def _fused(self, cursor: Cursor) -> Value:
        found: dict[str, Value] = {"kind": "fused"}
        if cursor.skip("<"):
            found["metadata"] = cursor.value()
            cursor.expect(">")
        cursor.expect("[")
        parts: list[Value] = []
        while not cursor.skip("]"):
            if parts:
                cursor.expect(", ")
            parts.append(self._body(cursor))
        found["parts"] = parts
        return found
