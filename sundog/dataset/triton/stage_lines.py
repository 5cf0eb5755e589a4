"""Follow lines between a kernel's source and its stages: TTIR, TTGIR, LLIR, and PTX or AMDGCN.

    stages = describe_stages(compiled.asm)       # hashes and line maps, without the texts
    lines = StageLines(stages)
    lines.follow("ptx", 48, "ttgir")             # the TTGIR lines that PTX line 48 comes from
    lines.follow("kernel.py", 9, "ptx")          # the PTX lines that line 9 of the source becomes
    lines.sources("ptx", 48)                     # [("kernel.py", 9)]

Each stage says which places of the source its lines come from, and two stages are connected
by the places that they share. An inlined line has the place of the callee, then of its callers.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from .mlir_value import LocationReader, relative_files

STAGES = ("ttir", "ttgir", "llir", "ptx", "amdgcn")
Place = tuple[str, int, int]  # file, line, column

_PATH = re.compile(r'"((?:[^"\\]|\\.)*)":\d+:\d+')
_ALIAS = re.compile(r"^(#loc\d*) = (loc\(.*\))$")
_AT_END = re.compile(r"loc\((#loc\d*)\)$")
_DEBUG = re.compile(r"!dbg !(\d+)")
_NODE = re.compile(r"^!(\d+) = (?:distinct )?!DI(\w+)\((.*)\)$")
_FIELD = re.compile(r'(\w+): (?:"([^"]*)"|!?(\d+))')
_LOC = re.compile(r"^\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)(.*)")
_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?')
_INLINED = re.compile(r"inlined_at (\d+) (\d+) (\d+)")


def describe_stages(asm: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sha256, the number of lines and the line map of each stage that `asm` has."""
    texts = {name: asm[name] for name in STAGES if isinstance(asm.get(name), str)}
    paths = {path for name, text in texts.items() for path in _paths(name, text)}
    names = relative_files(paths)
    places: dict[Place, int] = {}
    found: dict[str, Any] = {}
    for stage, text in texts.items():
        lines = list(_READERS[stage](text, names))
        for place in (place for _, at in lines for place in at):
            places.setdefault(place, len(places))
        found[stage] = {
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "num_lines": text.count("\n") + (not text.endswith("\n")),
            "lines": _packed([(line, [places[p] for p in at]) for line, at in lines]),
        }
    files = list(dict.fromkeys(file for file, _, _ in places))
    shown = [[files.index(file), line, column] for file, line, column in places]
    return {"files": files, "places": shown, "stages": found}


def _packed(lines: list[tuple[int, list[int]]]) -> list[list[int]]:
    """Write runs of lines with the same places as [lines since the last run, lines, places...]."""
    runs: list[list[int]] = []
    end = 0
    for line, places in lines:
        if runs and line == end and runs[-1][2:] == places:
            runs[-1][1] += 1
        else:
            runs.append([line - end, 1, *places])
        end = line + 1
    return runs


class StageLines:
    """The line maps of `describe_stages`, in both directions."""

    def __init__(self, stages: Mapping[str, Any]) -> None:
        files = stages["files"]
        self._places = [(files[f], line, column) for f, line, column in stages["places"]]
        self._at: dict[str, dict[int, list[int]]] = {}
        for name, stage in stages["stages"].items():
            end, lines = 0, self._at.setdefault(name, {})
            for gap, count, *places in stage["lines"]:
                lines.update({end + gap + i: places for i in range(count)})
                end += gap + count

    def sources(self, name: str, line: int) -> list[tuple[str, int]]:
        """Return the source lines that a line of a stage comes from, innermost first."""
        return list(dict.fromkeys(self._places[p][:2] for p in self._places_of(name, line)))

    def follow(self, name: str, line: int, to: str) -> list[int]:
        """Return the lines of stage `to` that share a place with a line of a stage or source file.

        Where no line has the same column, those with the same source line are returned. ValueError
        if there is no such stage.
        """
        if to not in self._at:
            raise ValueError(f"there is no stage {to!r}: give one of {', '.join(self._at)}")
        wanted = set(self._places_of(name, line))
        found = [at for at, places in self._at[to].items() if wanted.intersection(places)]
        if not found:
            lines = {self._places[p][:2] for p in wanted}
            wanted = {i for i, place in enumerate(self._places) if place[:2] in lines}
            found = [at for at, places in self._at[to].items() if wanted.intersection(places)]
        return sorted(found)

    def _places_of(self, name: str, line: int) -> list[int]:
        if name in self._at:
            return self._at[name].get(line, [])
        return [i for i, (file, at, _) in enumerate(self._places) if (file, at) == (name, line)]


def _paths(stage: str, text: str) -> Iterator[str]:
    if stage in ("ttir", "ttgir"):
        yield from (match[1] for match in _PATH.finditer(text))
    elif stage == "llir":
        nodes = _debug_nodes(text)
        yield from (_path_of(fields) for kind, fields in nodes.values() if kind == "File")
    else:
        yield from _files(text).values()


def _mlir_lines(text: str, names: Mapping[str, str]) -> Iterator[tuple[int, list[Place]]]:
    reader = LocationReader(text, files=names)
    lines = text.splitlines()
    for alias in filter(None, map(_ALIAS.match, lines)):
        reader.define(alias[1], alias[2])
    for number, line in enumerate(lines, 1):
        if (match := _AT_END.search(line)) and not _ALIAS.match(line):
            places = list(dict.fromkeys(_in_location(reader.read(f"loc({match[1]})"))))
            if places:
                yield number, places


def _in_location(value: Any) -> Iterator[Place]:
    """Yield the places of a location: the callee's, then the caller's."""
    if value["kind"] == "file":
        yield value["file"], value["line"], value["column"]
    inner = {"name": ("child",), "callsite": ("callee", "caller")}.get(value["kind"], ())
    for part in (*(value[name] for name in inner), *value.get("parts", ())):
        yield from _in_location(part)


def _debug_nodes(text: str) -> dict[str, tuple[str, dict[str, str]]]:
    """Return LLVM's debug metadata by number: its kind, and its fields."""
    found = {}
    for match in filter(None, map(_NODE.match, text.splitlines())):
        fields = {name: quoted or number for name, quoted, number in _FIELD.findall(match[3])}
        found[match[1]] = match[2], fields
    return found


def _path_of(fields: Mapping[str, str]) -> str:
    return os.path.join(fields.get("directory", ""), fields.get("filename", ""))


def _llvm_lines(text: str, names: Mapping[str, str]) -> Iterator[tuple[int, list[Place]]]:
    nodes = _debug_nodes(text)

    def file_of(number: str) -> str:
        kind, fields = nodes[number]
        at = fields.get("file") or fields.get("scope") or ""
        return names[_path_of(fields)] if kind == "File" else file_of(at)

    def places(number: str) -> Iterator[Place]:
        while number in nodes:
            _, fields = nodes[number]
            scope = fields.get("scope") or fields.get("file") or ""
            yield file_of(scope), int(fields.get("line", 0)), int(fields.get("column", 0))
            number = fields.get("inlinedAt", "")

    for number, line in enumerate(text.splitlines(), 1):
        if match := _DEBUG.search(line):
            yield number, list(dict.fromkeys(places(match[1])))


def _files(text: str) -> dict[str, str]:
    found = {}
    for match in filter(None, map(_FILE.match, text.splitlines())):
        found[match[1]] = os.path.join(match[2], match[3]) if match[3] else match[2]
    return found


def _assembly_lines(text: str, names: Mapping[str, str]) -> Iterator[tuple[int, list[Place]]]:
    """Read assembly: a `.loc` holds until the next one, or until the function ends."""
    files = {number: names[path] for number, path in _files(text).items()}
    here: list[Place] = []
    for number, line in enumerate(text.splitlines(), 1):
        if match := _LOC.match(line):
            at = [match.groups()[:3], *_INLINED.findall(match[4])]
            here = [(files[f], int(row), int(column)) for f, row, column in at if f in files]
        elif line.startswith("}") or line.lstrip().startswith((".section", ".Lfunc_end")):
            here = []
        elif here and line.strip() and not line.lstrip().startswith(("//", ";", "$L", ".L")):
            yield number, here


_READERS = {"ttir": _mlir_lines, "ttgir": _mlir_lines, "llir": _llvm_lines}
_READERS |= {"ptx": _assembly_lines, "amdgcn": _assembly_lines}
