"""Pack a graph record into a few hundred bytes to a few kilobytes, and unpack it.

    rows = to_rows(record)                    # one line of text per node and link
    packed = pack(rows, reference)            # against the rows of a similar record, or None
    from_rows(unpack(packed, reference))      # the record

Graphs of one kernel differ little from config to config. A row therefore says how a node differs
from its neighbours: a list or object that was met before in this field is its rank among the most
recent ones, and a number at the end of a name (`op17`) counts from the last one. Rows that two
graphs share are then equal text, and a packed record copies them from its reference.
"""

from __future__ import annotations

import json
import lzma
import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, cast

from .ir_graph import IrGraphRecord

MAX_RECORD = 1 << 28  # bytes of a record's rows
MAX_VALUES = 1 << 24  # numbers, texts, lists and objects in a record
_KINDS = ("node_kind", "edge_kind")
_NUMBERED = re.compile(r"([^\d~][^~]*?)(0|[1-9]\d{0,8})")
_RELATIVE = re.compile(r"([^~]+)~(-?\d{1,10})")
_GRAM = 3  # rows that must be equal for a copy to start
_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False).encode
_WINDOW = 1 << 15  # of deflate: a longer dictionary has no effect
_LZMA = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 22, "lc": 4, "lp": 0, "pb": 0}]


def to_rows(record: IrGraphRecord) -> list[str]:
    """Return the record as lines: what is neither node nor link, then the nodes, then the links."""
    rest = {key: value for key, value in record.items() if key not in ("nodes", "links")}
    rows = [_encode([len(record["nodes"]), rest])]
    coder = _Encoder()
    for part in ("nodes", "links"):
        rows += [coder.row(part, item) for item in cast(Any, record)[part]]
    return rows


def from_rows(rows: Sequence[str]) -> IrGraphRecord:
    """Return the record of `to_rows`; ValueError where the rows describe none."""
    try:
        (num_nodes, record), *coded = json.loads(f"[{','.join(rows)}]")
        if not 0 <= num_nodes <= len(coded):
            raise ValueError(f"{len(coded)} rows are too few for {num_nodes} nodes")
        coder = _Decoder()
        nodes = [coder.row("nodes", row) for row in coded[:num_nodes]]
        links = [coder.row("links", row) for row in coded[num_nodes:]]
        return cast(IrGraphRecord, {**record, "nodes": nodes, "links": links})
    except (TypeError, LookupError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"the rows describe no record: {error!r}") from error


class _Fields:
    """What encoder and decoder remember: the last number and the recent values of each field."""

    def __init__(self) -> None:
        self.last: dict[tuple[str, str], int] = {}
        self.recent: dict[str, list[Any]] = {}


class _Encoder(_Fields):
    def row(self, part: str, item: dict[str, Any]) -> str:
        keys = sorted(item)
        coded, kind = [self._value(keys, f"{part}#")], part
        for key in _kind_first(keys):
            value, path = item[key], f"{kind}.{key}"
            number = type(value) is int
            coded.append(self._number(path, "", value) if number else self._value(value, path))
            kind = f"{part}.{value}" if key in _KINDS else kind
        return _encode(coded)

    def _number(self, path: str, prefix: str, value: int) -> int:
        """Return how far `value` is from the last number of this field, and remember it."""
        before = self.last.get((path, prefix), 0)
        self.last[path, prefix] = value
        return value - before

    def _value(self, value: Any, path: str) -> Any:
        """`[rank]` for a recent list or object; `[null, ...]` or `{...}` for a new one."""
        if isinstance(value, str):
            if match := _NUMBERED.fullmatch(value):
                return f"{match[1]}~{self._number(path, match[1], int(match[2]))}"
            return f"~{value}" if "~" in value else value
        if not isinstance(value, (dict, list)):
            return value
        text, recent = _encode(value), self.recent.setdefault(path, [])
        if text in recent:
            rank = recent.index(text)
            recent.insert(0, recent.pop(rank))
            return [rank]
        recent.insert(0, text)
        if isinstance(value, list):
            return [None, *(self._value(item, f"{path}[]") for item in value)]
        return {key: self._value(value[key], f"{path}.{key}") for key in sorted(value)}


class _Decoder(_Fields):
    def __init__(self) -> None:
        super().__init__()
        self.num_values = 0
        self._paths: dict[tuple[str, str], str] = {}

    def row(self, part: str, coded: list[Any]) -> dict[str, Any]:
        keys, _ = self._value(coded[0], f"{part}#")
        item, kind = {}, part
        for key, value in zip(_kind_first(keys), coded[1:], strict=True):
            path = self._paths.get((kind, key))
            if path is None:
                path = self._paths[kind, key] = f"{kind}.{key}"
            if type(value) is int:
                self.last[path, ""] = item[key] = self.last.get((path, ""), 0) + value
            else:
                item[key], size = self._value(value, path)
                self._count(size)
            kind = f"{part}.{item[key]}" if key in _KINDS else kind
        return item

    def _value(self, value: Any, path: str) -> tuple[Any, int]:
        """Return the value, and how many values it holds."""
        if isinstance(value, dict):
            pairs = {key: self._value(value[key], f"{path}.{key}") for key in sorted(value)}
            size = sum(size for _, size in pairs.values())
            return self._keep(path, {key: inner for key, (inner, _) in pairs.items()}, size)
        if isinstance(value, list):
            if value[0] is None:
                items = [self._value(item, f"{path}[]") for item in value[1:]]
                return self._keep(path, [i for i, _ in items], sum(size for _, size in items))
            recent = self.recent[path]
            recent.insert(0, recent.pop(value[0]))
            found, size = recent[0]
            self._count(size)
            return _copied(found), size  # a record has no object twice
        if isinstance(value, str) and "~" in value:
            return self._text(value, path), 1
        return value, 1

    def _text(self, value: str, path: str) -> str:
        if value[0] == "~":
            return value[1:]
        match = _RELATIVE.fullmatch(value)
        if match is None:
            raise ValueError(f"{value[:40]!r} is neither text nor a numbered name")
        number = self.last.get((path, match[1]), 0) + int(match[2])
        self.last[path, match[1]] = number
        return f"{match[1]}{number}"

    def _keep(self, path: str, value: Any, size: int) -> tuple[Any, int]:
        self.recent.setdefault(path, []).insert(0, (value, 1 + size))
        return value, 1 + size

    def _count(self, size: int) -> None:
        # A few bytes can name one value many times over: what they stand for is bounded too.
        self.num_values += size
        if self.num_values > MAX_VALUES:
            raise ValueError(f"a record of more than {MAX_VALUES} values")


def _kind_first(keys: list[str]) -> list[str]:
    """Sort keys, the kind first: it decides what the other fields are compared with."""
    found = sorted(keys)
    for kind in _KINDS:
        if kind in found:
            found.insert(0, found.pop(found.index(kind)))
    return found


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if isinstance(value, list) else value


def pack(rows: Sequence[str], reference: Sequence[str] | None = None) -> bytes:
    """Compress rows, against the rows of a similar record if there is one."""
    copies = list(_copies(reference, rows)) if reference else []
    new, unused = _outside(copies, rows, 1), _outside(copies, reference or (), 0)
    numbers, before = [], (0, 0)
    for start, at, length in copies:
        numbers += [start - before[0], at - before[1], length]
        before = start + length, at + length
    head = zlib.compress(_encode(numbers).encode(), 9)
    text = "\n".join(new).encode()
    # A new row is mostly like one that the reference has in its place: that is the dictionary. Of
    # many new rows most are like each other, and then LZMA, which takes no dictionary, is better.
    deflated = _deflate(text, "\n".join(unused).encode())
    body = min(b"D" + deflated, b"L" + lzma.compress(text, lzma.FORMAT_RAW, filters=_LZMA), key=len)
    return len(head).to_bytes(4, "big") + head + body


def unpack(packed: bytes, reference: Sequence[str] | None = None) -> list[str]:
    """Return the rows of `pack`; ValueError if they cannot be had."""
    size, known = 4 + int.from_bytes(packed[:4], "big"), reference or ()
    try:
        numbers = json.loads(_inflate(zlib.decompressobj(), packed[4:size]))
        copies, before = [], (0, 0)
        for start, at, length in zip(*[iter(numbers)] * 3, strict=True):
            copies.append((before[0] + start, before[1] + at, length))
            before = before[0] + start + length, before[1] + at + length
        if packed[size : size + 1] == b"L":
            decompressor: Any = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_LZMA)
        else:
            unused = "\n".join(_outside(copies, known, 0)).encode()
            decompressor = zlib.decompressobj(-15, zdict=unused[-_WINDOW:])
        text = _inflate(decompressor, packed[size + 1 :])
        return _assembled(copies, known, text.decode().split("\n") if text else [])
    except (zlib.error, lzma.LZMAError, EOFError) as error:
        raise ValueError(f"damaged: {error}") from error
    except (TypeError, LookupError, RecursionError, OverflowError) as error:
        raise ValueError(f"damaged: {type(error).__name__}: {error}") from error


Copy = tuple[int, int, int]  # row of the reference, row here, how many


def _copies(old: Sequence[str], new: Sequence[str]) -> Iterator[Copy]:
    """Yield runs of equal rows, greedily: where the last one ended, or where three are equal."""
    places: dict[tuple[str, ...], list[int]] = {}
    for i in range(len(old) - _GRAM + 1):
        places.setdefault(tuple(old[i : i + _GRAM]), []).append(i)
    at = start = 0
    while at < len(new):
        found = places.get(tuple(new[at : at + _GRAM]), [])
        if start < len(old) and old[start] == new[at]:
            begin = start
        elif found:
            begin = next((i for i in found if i >= start), found[-1])
        else:
            at += 1
            continue
        length = 1
        while (
            begin + length < len(old)
            and old[begin + length : begin + length + 1] == new[at + length : at + length + 1]
        ):
            length += 1
        yield begin, at, length
        at, start = at + length, begin + length


def _outside(copies: list[Copy], rows: Sequence[str], side: int) -> list[str]:
    """Return the rows that no copy covers: of the reference (side 0), or of the new record (1)."""
    covered = bytearray(len(rows))
    for copy in copies:
        covered[copy[side] : copy[side] + copy[2]] = b"\1" * copy[2]
    return [row for row, copied in zip(rows, covered, strict=True) if not copied]


def _assembled(copies: list[Copy], known: Sequence[str], new: list[str]) -> list[str]:
    rows: list[str] = []
    size = taken = 0
    for start, at, length in copies:
        fresh = new[taken : taken + at - len(rows)]
        copied = known[start : start + length]
        if start < 0 or length < 1 or len(copied) < length or at != len(rows) + len(fresh):
            raise ValueError("damaged: a copy of rows that are not there")
        taken += len(fresh)
        rows += [*fresh, *copied]
        size += sum(map(len, copied))
        if size > MAX_RECORD:
            raise ValueError(f"a record of more than {MAX_RECORD} bytes")
    return rows + new[taken:]


def _deflate(text: bytes, dictionary: bytes) -> bytes:
    compressor = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zdict=dictionary[-_WINDOW:])
    return compressor.compress(text) + compressor.flush()


def _inflate(decompressor: Any, data: bytes) -> bytes:
    text: bytes = decompressor.decompress(data, MAX_RECORD)
    if len(text) == MAX_RECORD:
        raise ValueError(f"a record of {MAX_RECORD} bytes or more")
    if not decompressor.eof:
        raise ValueError("damaged: its end is missing")
    return text
