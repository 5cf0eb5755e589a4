"""`<base>.ir.jsonl`: each distinct IR graph once, however many processes and runs find it."""

from __future__ import annotations

import json
import os
import re

from .files import AppendFile
from .ir_graph import IrGraphRecord, canonical_json, ir_id_of

__all__ = ["IrFile"]

# A line starts with version and id, so that looking for an id does not parse the whole graph.
_START = re.compile(rb'\{"schema_version":\d+,"ir_id":"([0-9a-f]{64})",')
_CHUNK = 1 << 22


class IrFile:
    def __init__(self, path: str) -> None:
        self.file = AppendFile(path)
        self._known: set[str] = set()
        self._scanned = 0  # bytes of the file whose ids are known
        self._inode = -1

    def look(self) -> None:
        """Learns which ids the file has: once, before a fork, instead of in every child."""
        with self.file.locked() as fd:
            self._scan(fd)

    def add(self, record: IrGraphRecord) -> str:
        """Appends the record unless the file has its id; raises OSError if it cannot."""
        ir_id = record.get("ir_id") or ir_id_of(record)
        if ir_id in self._known and self._is_same_file():
            return ir_id
        rest = {k: v for k, v in record.items() if k not in ("schema_version", "ir_id")}
        head = {"schema_version": record["schema_version"], "ir_id": ir_id}
        start = json.dumps(head, separators=(",", ":"))[:-1]
        line = f"{start},{canonical_json(rest)[1:]}\n"
        with self.file.locked() as fd:
            self._scan(fd)
            if ir_id not in self._known:
                self.file.append_locked(fd, line)
                self._known.add(ir_id)
        return ir_id

    def _is_same_file(self) -> bool:
        try:
            return os.stat(self.file.path).st_ino == self._inode
        except OSError:
            return False

    def _scan(self, fd: int) -> None:
        """Learns the ids that other writers appended since the last look."""
        status = os.fstat(fd)
        if status.st_ino != self._inode or status.st_size < self._scanned:
            self._known, self._scanned, self._inode = set(), 0, status.st_ino
        tail = b""
        while self._scanned < status.st_size:
            data = os.pread(fd, _CHUNK, self._scanned)
            self._scanned += len(data)
            *lines, tail = (tail + data).split(b"\n")
            self._known.update(filter(None, map(_id_of, lines)))
        self._scanned -= len(tail)  # a torn line is looked at again


def _id_of(line: bytes) -> str | None:
    match = _START.match(line)
    # One that is torn has an open brace, also where it is torn behind a closing one.
    if match and line.endswith(b"}") and line.count(b"{") == line.count(b"}"):
        return match.group(1).decode()
    try:
        found = json.loads(line).get("ir_id")
    except (ValueError, AttributeError):
        return None  # damaged: the graph will be written anew
    return found if isinstance(found, str) else None
