"""Read MLIR locations, and name their files without the machine's paths.

Files are named so that the same kernel in another checkout gives the same record: a file of a
package from the package's parent ("triton/language/standard.py"), any other by its own name.
Where two files of one module would get one name, both get as many folders in front as tell them
apart.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from ..plain import relative_path
from .mlir_spell import Value, unescape
from .mlir_value import Cursor

__all__ = ["LocationReader", "relative_files"]

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
    """Reads `loc(...)` in one module's text; every alias is read once."""

    def __init__(self, text: str, inferred_from: str | None = None) -> None:
        # Parsing pretty-printed text gives what has no printed location the place in that text.
        self._inferred_from = inferred_from
        paths = {unescape(match[1]) for match in _FILE.finditer(text)}
        self._files = relative_files(paths - {inferred_from or ""})
        self._aliases: dict[str, Value] = {}
        self._definitions: dict[str, str] = {}

    def define(self, alias: str, text: str) -> None:
        self._definitions[alias] = text

    def read(self, text: str) -> Value:
        """The location spelled `loc(...)`."""
        cursor = Cursor(text)
        found = self.take(cursor)
        if cursor.pos != len(text):
            raise cursor.error("the end of the location")
        return found

    def take(self, cursor: Cursor) -> Value:
        """The location `loc(...)` at the cursor."""
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
