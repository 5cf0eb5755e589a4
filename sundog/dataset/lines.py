"""Reading files that a killed process may have left damaged: what is wrong, and on which line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .append import shared_lock

__all__ = ["Damage", "Line", "read_records", "whole_size"]


@dataclass(frozen=True)
class Damage:
    """What could not be read, or does not fit; the rest of the data is there."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Line:
    number: int
    offset: int
    length: int
    record: dict[str, Any]


def whole_size(path: str) -> tuple[int, bytes]:
    """Bytes up to the last whole line, and what follows it (torn by a crash, or nothing)."""
    with open(path, "rb") as file:
        with shared_lock(file.fileno()):  # so that no row is half-way at this moment
            end = size = os.fstat(file.fileno()).st_size
        tail = b""
        while end > 0 and b"\n" not in tail:
            step = min(end, 1 << 16)
            end -= step
            file.seek(end)
            tail = file.read(step) + tail
        torn = tail.rpartition(b"\n")[2][: size - end]
        return size - len(torn), torn


def read_records(
    path: str, newest: int, damage: list[Damage], advance: Callable[[int], None]
) -> Iterator[Line]:
    """The records of a `.jsonl` file; what cannot be read is added to `damage` and left out."""
    size, torn = whole_size(path)
    offset = number = 0
    with open(path, "rb") as file:
        while offset < size:
            data = file.readline()
            number += 1
            record, wrong = _parse(data, newest)
            if record is not None:
                yield Line(number, offset, len(data), record)
            else:
                damage.append(Damage(path, number, wrong))
            offset += len(data)
            advance(len(data))
    if torn:
        damage.append(Damage(path, number + 1, torn_text(torn)))


def torn_text(torn: bytes) -> str:
    return f"the last line is torn after {len(torn)} bytes (its writer died?); it is left out"


def _parse(data: bytes, newest: int) -> tuple[dict[str, Any] | None, str]:
    try:
        record = json.loads(data)
    except (ValueError, RecursionError) as error:
        return None, f"not a JSON record ({type(error).__name__}: {str(error)[:80]})"
    if not isinstance(record, dict):
        return None, f"not a record but {type(record).__name__}"
    version = record.get("schema_version", 0)
    if version == newest:
        return record, ""
    if isinstance(version, int) and version > newest:
        return None, f"schema_version {version} is newer than {newest}: read it with a newer sundog"
    return None, f"schema_version {version!r} is not one that this sundog reads ({newest})"
