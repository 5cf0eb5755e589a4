"""Write and read the rows of `<base>.csv`. No cell holds a line break: a line is a row.

The reader lets pyarrow parse the file. If pyarrow finds as many rows as the file has lines, the
file is whole. Otherwise each line is checked on its own, and damaged ones are named and left out.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .files import Damage, torn_text, whole_size
from .schema import CSV_COLUMNS, CSV_FIELDS, csv_header

if TYPE_CHECKING:
    import pandas

__all__ = ["empty_rows", "format_row", "load_rows", "percentiles", "split_row"]

# Few values, many rows: kept as pandas categories.
_REPEATED = frozenset({"run_id", "kernel_id", "status", "session", "timer", "ir_id"})
_BLOCK = 1 << 24
# What pyarrow takes too; 18 digits fit into 64 bits.
_INT = re.compile(r"-?[0-9]{1,18}")
_FLOAT = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_NUMBERS = {field.name: field.type for field in CSV_FIELDS if field.type in ("int", "float")}


def load_rows(path: str, damage: list[Damage]) -> pandas.DataFrame:
    """All whole rows; the index is the line number. Raises ValueError for other columns."""
    import pyarrow as pa

    size, torn = _check_header(path)
    num_lines = max(_count_lines(path, size) - 1, 0)
    numbers: Any = range(2, num_lines + 2)
    table = _empty_table()
    if num_lines:
        with pa.memory_map(path) as file:
            table = _parse(file.read_buffer(size))
        if table is None or table.num_rows != num_lines:
            table, numbers = _parse_blocks(path, size, damage)
    if torn:
        damage.append(Damage(path, num_lines + (2 if size else 1), torn_text(torn)))
    return _to_frame(table, numbers)


def empty_rows() -> pandas.DataFrame:
    return _to_frame(_empty_table(), [])


def _empty_table() -> Any:
    import pyarrow as pa

    return _parse(pa.py_buffer(csv_header().encode()))


def _check_header(path: str) -> tuple[int, bytes]:
    with open(path, "rb") as file:
        first = file.readline(1 << 16)
    if not first.endswith(b"\n") and csv_header().encode().startswith(first):
        return 0, first  # new, or its writer died in the header
    if first != csv_header().encode():
        raise ValueError(
            f"{path}:1: other columns than this version of sundog reads "
            f"({first[:120].decode('utf-8', 'replace').strip()!r})"
        )
    return whole_size(path)


def _count_lines(path: str, size: int) -> int:
    with open(path, "rb") as file:
        count = 0
        while size > 0 and (data := file.read(min(size, 1 << 24))):
            size -= len(data)
            count += data.count(b"\n")
    return count


def _parse(data: Any, block_size: int = 1 << 24) -> Any:
    """The rows as a table, or None if any line does not fit."""
    import pyarrow as pa
    import pyarrow.csv as pacsv

    kinds = {name: pa.int64() if kind == "int" else pa.float64() for name, kind in _NUMBERS.items()}
    for name in CSV_COLUMNS:
        if name not in kinds:
            text = pa.string()
            kinds[name] = pa.dictionary(pa.int32(), text) if name in _REPEATED else text
    convert = pacsv.ConvertOptions(column_types=kinds, null_values=[""], strings_can_be_null=False)
    try:
        return pacsv.read_csv(
            pa.BufferReader(data),
            read_options=pacsv.ReadOptions(block_size=block_size),
            convert_options=convert,
        )
    except pa.ArrowInvalid:
        return None


def _parse_blocks(path: str, size: int, damage: list[Damage]) -> tuple[Any, list[int]]:
    """The rows of a file with damage, and their lines: only blocks that have some are slow."""
    import pyarrow as pa

    tables, numbers = [_empty_table()], []
    for first, data in _blocks(path, size):
        num_lines = data.count(b"\n")
        kept: Any = range(first, first + num_lines)
        # In one piece: a row may be longer than any block.
        table = _parse(
            pa.py_buffer(csv_header().encode() + data), len(data) + len(csv_header()) + 1
        )
        if table is None or table.num_rows != num_lines:
            kept = _whole_lines(path, first, data, damage)
            whole = b"".join([csv_header().encode(), *kept.values()])
            table = _parse(pa.py_buffer(whole), len(whole) + 1)
            assert table is not None
        assert table.num_rows == len(kept)
        tables.append(table)
        numbers.extend(kept)
    return pa.concat_tables(tables).unify_dictionaries(), numbers


def _blocks(path: str, size: int) -> Iterator[tuple[int, bytes]]:
    """(number of its first line, whole lines) of each few megabytes after the header."""
    with open(path, "rb") as file:
        offset = len(file.readline())
        number = 2
        while offset < size:
            data = file.read(min(_BLOCK, size - offset))
            if not data.endswith(b"\n"):
                data += file.readline()
            yield number, data
            offset += len(data)
            number += data.count(b"\n")


def _whole_lines(path: str, first: int, data: bytes, damage: list[Damage]) -> dict[int, bytes]:
    """The lines that are rows, by number."""
    kept = {}
    for number, line in enumerate(data[:-1].split(b"\n"), first):
        wrong = _wrong(line)
        if wrong is None:
            kept[number] = line + b"\n"
        else:
            damage.append(Damage(path, number, wrong))
    return kept


def _wrong(data: bytes) -> str | None:
    """None for a row, or why it is none."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "not UTF-8"
    if "\r" in text or "\0" in text:
        return "has control characters, which sundog never writes"
    try:
        cells = split_row(text)
    except csv.Error as error:
        return f"not a CSV row ({error}): torn by a crash?"
    if len(cells) != len(CSV_COLUMNS):
        return f"{len(cells)} cells instead of {len(CSV_COLUMNS)}: torn by a crash?"
    return next(filter(None, map(_wrong_number, CSV_COLUMNS, cells)), None)


def _wrong_number(column: str, cell: str) -> str | None:
    kind = _NUMBERS.get(column)
    if kind is None or not cell:
        return None
    pattern = _INT if kind == "int" else _FLOAT
    return None if pattern.fullmatch(cell) else f"{column} is not a number: {cell[:40]!r}"


def _to_frame(table: Any, numbers: Any) -> pandas.DataFrame:
    import pandas as pd
    import pyarrow as pa

    kinds = {pa.int64(): pd.Int64Dtype(), pa.string(): pd.StringDtype("pyarrow")}
    frame = table.to_pandas(types_mapper=kinds.get, split_blocks=True)
    frame.index = pd.Index(numbers, name="line")
    return frame


_COLUMN_SET = frozenset(CSV_COLUMNS)
_JSON = frozenset(field.name for field in CSV_FIELDS if field.type == "JSON")


def format_row(cells: Mapping[str, object]) -> str:
    unknown = cells.keys() - _COLUMN_SET
    assert not unknown, unknown
    return ",".join([_cell(column, cells.get(column)) for column in CSV_COLUMNS]) + "\n"


def split_row(line: str) -> list[str]:
    """The cells of a line without its end; csv.Error where it is torn inside one."""
    if len(line) > csv.field_size_limit():
        csv.field_size_limit(len(line))  # csv's own is 128 KB, an error's text may be longer
    return next(csv.reader([line], strict=True), [])


def _cell(column: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.6f}" if math.isfinite(value) else ""
    text = str(value) if column in _JSON else _one_line(str(value))
    if "," in text or '"' in text:
        return '"' + text.replace('"', '""') + '"'
    return text


def _one_line(text: str) -> str:
    """Line breaks, control characters and lone surrogates as escapes, and the backslash too."""
    text = text.replace("\\", "\\\\")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def percentiles(samples: Sequence[float]) -> dict[str, float | int]:
    """Minimum, 10th, 50th and 90th percentile (linear, as numpy's) and maximum."""
    if not samples:
        return {}
    ordered = sorted(samples)
    found: dict[str, float | int] = {"num_samples": len(ordered)}
    for name, q in (("min", 0.0), ("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("max", 1.0)):
        position = q * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        found[f"{name}_ms"] = ordered[low] + (ordered[high] - ordered[low]) * (position - low)
    return found
