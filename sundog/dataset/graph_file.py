"""Keep each distinct IR graph once in `<base>.ir.jsonl`, packed, and find it again by its id.

A line is a JSON record with a summary and the packed graph (graph_pack.py). A graph may be packed
against another one of the same kernel, its `reference`, which stands before it in the file; at most
MAX_DEPTH more lines are read for one graph. Lines of version 1 hold the graph itself.
"""

from __future__ import annotations

import base64
import json
import os
import re
from typing import Any, NamedTuple, cast

from .files import AppendFile, open_regular, parse_record
from .graph_pack import from_rows, pack, to_rows, unpack
from .ir_graph import IrGraphRecord, ir_id_of
from .schema import is_sha256

IR_LINE_VERSIONS = (1, 2)
MAX_DEPTH = 8  # references of a reference
_CANDIDATES = 2  # that are tried as a reference, of the most alike
_CACHED = 64  # graphs whose rows are kept in memory

# A line starts with version and id, so that looking for an id does not parse a whole graph.
_START = re.compile(rb'\{"schema_version":1,"ir_id":"([0-9a-f]{64})",')
_CHUNK = 1 << 22


def why_no_graph(record: dict[str, Any]) -> str | None:
    """Return what is wrong with a line's record, or None: it can be looked up by its id."""
    ir_id = record.get("ir_id")
    if record["schema_version"] == 1:
        parts = (("graph", dict), ("nodes", list), ("links", list))
        wrong = any(not isinstance(record.get(name), kind) for name, kind in parts)
        if wrong or not all(isinstance(i, dict) for i in record["nodes"] + record["links"]):
            return "an IR record without graph, nodes or links"
    elif wrong_fields := [name for name, check in _LINE_FIELDS if not check(record.get(name, ...))]:
        return f"an IR record with no usable {', '.join(wrong_fields)}"
    if record.get("run_id") is not None and not isinstance(record["run_id"], str):
        return f"run_id {str(record['run_id'])[:40]!r} is not text"
    if not is_sha256(ir_id):
        return f"ir_id {ir_id if ir_id is None else str(ir_id)[:40]!r} is missing or no sha256"
    return None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


_LINE_FIELDS = (
    ("packed", lambda v: isinstance(v, str)),
    ("reference", lambda v: v is None or is_sha256(v)),
    ("depth", lambda v: _is_count(v) and v <= MAX_DEPTH),
    ("num_nodes", _is_count),
    ("num_links", _is_count),
)


class Place(NamedTuple):
    """Where a graph's line is, and what a writer must know of it."""

    offset: int
    length: int
    kernel: object = None
    depth: int = MAX_DEPTH


class EncodedGraph(NamedTuple):
    """A graph as rows, with what its line says of it. Another process may make it."""

    ir_id: str
    run_id: str | None
    frontend: str | None
    kernel_name: str | None
    num_nodes: int
    num_links: int
    rows: list[str]


def encode(record: IrGraphRecord) -> EncodedGraph:
    """Make the rows of a graph: most of what adding one takes."""
    graph = record["graph"]
    content = {k: v for k, v in record.items() if k not in ("ir_id", "run_id")}
    return EncodedGraph(
        record.get("ir_id") or ir_id_of(record), record.get("run_id"), graph.get("frontend"),
        graph.get("kernel_name"), len(record["nodes"]), len(record["links"]),
        to_rows(cast(Any, content)),
    )  # fmt: skip


class GraphReader:
    """The graphs of one file by id. `places` says where their lines are."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.places: dict[str, Place] = {}
        self._rows: dict[str, list[str]] = {}

    def record(self, ir_id: str) -> IrGraphRecord:
        """Return the graph as it was added; ValueError if its line is damaged."""
        line = self._line(ir_id)
        if line["schema_version"] == 1:
            return cast(IrGraphRecord, line)
        ids = {"ir_id": ir_id, "run_id": line.get("run_id")}
        return cast(IrGraphRecord, {**from_rows(self.rows(ir_id)), **ids})

    def rows(self, ir_id: str, depth: int = MAX_DEPTH) -> list[str]:
        """Return the rows of a graph, unpacked with those of its reference."""
        if ir_id not in self._rows:
            line = self._line(ir_id)
            if line["schema_version"] == 1:
                raise ValueError(f"graph {ir_id[:12]} is not packed, so nothing can refer to it")
            reference = line["reference"]
            if reference is not None and (depth == 0 or not self._is_before(reference, ir_id)):
                raise ValueError(f"no graph {reference[:12]} before it, which it refers to")
            known = None if reference is None else self.rows(reference, depth - 1)
            rows = unpack(base64.b85decode(line["packed"]), known)
            self.keep(ir_id, rows)
        return self._rows[ir_id]

    def keep(self, ir_id: str, rows: list[str]) -> None:
        while len(self._rows) >= _CACHED:
            del self._rows[next(iter(self._rows))]
        self._rows[ir_id] = rows

    def _is_before(self, reference: str, ir_id: str) -> bool:
        return reference in self.places and (
            self.places[reference].offset < self.places[ir_id].offset
        )

    def _line(self, ir_id: str) -> dict[str, Any]:
        place = self.places[ir_id]
        with open_regular(self.path) as file:
            file.seek(place.offset)
            record, wrong = parse_record(file.read(place.length), IR_LINE_VERSIONS)
        wrong = wrong or why_no_graph(record or {}) or ""
        if record is None or wrong or record["ir_id"] != ir_id:
            raise ValueError(f"graph {ir_id[:12]} is not where it was: {wrong or 'another graph'}")
        record.pop("chain", None)
        return record


class IrFile:
    """Adds graphs to a file. Several processes may, each with an object of its own.

    `window` is how many of the latest graphs of a kernel are compared with a new one.
    """

    def __init__(self, path: str, window: int = 16) -> None:
        self.file = AppendFile(path, chained=True)
        self._window = window
        self._reader = GraphReader(path)
        self._scanned = 0  # bytes of the file whose ids are known
        self._inode = -1

    def look(self) -> None:
        """Read which ids the file has, once before a fork instead of in every child."""
        with self.file.locked() as fd:
            self._scan(fd)

    def add(self, record: IrGraphRecord) -> str:
        """Append the record unless the file has its id; raises OSError if it cannot."""
        ir_id = record.get("ir_id") or ir_id_of(record)
        if self._has(ir_id):
            return ir_id
        return self.add_encoded(encode(cast(IrGraphRecord, {**record, "ir_id": ir_id})))

    def add_encoded(self, graph: EncodedGraph) -> str:
        """Do as `add`, for a graph whose rows are made."""
        ir_id = graph.ir_id
        if self._has(ir_id):
            return ir_id
        self.look()
        if ir_id not in self._reader.places:
            # Outside of the lock, since it takes a while, and what is in the file stays there.
            line, inode = self._packed(graph), self._inode
            with self.file.locked() as fd:
                self._scan(fd)
                if self._inode != inode:
                    line = _line(graph, None, 0, pack(graph.rows))
                if ir_id not in self._reader.places:
                    self.file.append_locked(fd, line)
                    self._scan(fd)
        self._reader.keep(ir_id, graph.rows)
        return ir_id

    def _has(self, ir_id: str) -> bool:
        return ir_id in self._reader.places and self._is_same_file()

    def _packed(self, graph: EncodedGraph) -> str:
        """Return the shortest line: of the graph alone, or against one that is much like it."""
        best = _line(graph, None, 0, pack(graph.rows))
        for reference in self._alike(graph.kernel_name, graph.rows):
            depth = self._reader.places[reference].depth + 1
            packed = pack(graph.rows, self._reader.rows(reference))
            best = min(best, _line(graph, reference, depth, packed), key=len)
        return best

    def _alike(self, kernel: object, rows: list[str]) -> list[str]:
        """Return the ids of the graphs of this kernel that share the most rows with `rows`."""
        wanted, shared = set(rows), {}
        places = self._reader.places
        same = [i for i, at in places.items() if at.kernel == kernel and at.depth < MAX_DEPTH]
        for ir_id in same[-self._window :]:
            try:
                shared[ir_id] = len(wanted.intersection(self._reader.rows(ir_id)))
            except (ValueError, OSError):
                continue  # a damaged line is no reference
        return sorted(shared, key=lambda ir_id: -shared[ir_id])[:_CANDIDATES]

    def _is_same_file(self) -> bool:
        try:
            return os.stat(self.file.path).st_ino == self._inode
        except OSError:
            return False

    def _scan(self, fd: int) -> None:
        """Learn the ids that other writers appended since the last look."""
        status = os.fstat(fd)
        if status.st_ino != self._inode or status.st_size < self._scanned:
            self._reader = GraphReader(self.file.path)
            self._scanned, self._inode = 0, status.st_ino
        tail = b""
        while self._scanned + len(tail) < status.st_size:
            data = os.pread(fd, _CHUNK, self._scanned + len(tail))
            *lines, tail = (tail + data).split(b"\n")
            for line in lines:
                if found := _known(line, self._scanned):
                    self._reader.places.setdefault(*found)
                self._scanned += len(line) + 1


def _line(graph: EncodedGraph, reference: str | None, depth: int, packed: bytes) -> str:
    fields = {
        "schema_version": 2,
        "ir_id": graph.ir_id,
        "run_id": graph.run_id,
        "frontend": graph.frontend,
        "kernel_name": graph.kernel_name,
        "num_nodes": graph.num_nodes,
        "num_links": graph.num_links,
        "reference": reference,
        "depth": depth,
        "packed": base64.b85encode(packed).decode(),
    }
    return json.dumps(fields, separators=(",", ":"), allow_nan=False) + "\n"


def _known(line: bytes, offset: int) -> tuple[str, Place] | None:
    match = _START.match(line)
    # A torn line has an open brace, also where it is torn after a closing one.
    if match and line.endswith(b"}") and line.count(b"{") == line.count(b"}"):
        return match.group(1).decode(), Place(offset, len(line) + 1)
    record, _ = parse_record(line, IR_LINE_VERSIONS)
    if record is None or why_no_graph(record) is not None:
        return None  # damaged, so the graph will be written again
    depth = record.get("depth", MAX_DEPTH)
    return record["ir_id"], Place(offset, len(line) + 1, record.get("kernel_name"), depth)
