"""Write and read the rows of `<base>.csv`. No cell holds a line break: a line is a row.

The reader lets pyarrow parse the file. If pyarrow finds as many rows as the file has lines, the
file is whole. Otherwise each line is checked on its own, and damaged ones are named and left out.
"""

from __future__ import annotations

import csv
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .files import MAX_LINE, Damage, lines_of, open_regular, torn_text, whole_size
from .schema import CSV_COLUMNS, CSV_FIELDS, SESSION, csv_header, is_sha256

if TYPE_CHECKING:
    import pandas

# Columns with few values for many rows, kept as pandas categories.
_REPEATED = frozenset({"run_id", "kernel_id", "status", "session", "timer", "ir_id"})
_BLOCK = 1 << 24
_INT = re.compile(r"-?[0-9]{1,19}")
_FLOAT = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_NUMBERS = {field.name: field.type for field in CSV_FIELDS if field.type in ("int", "float")}
# A row must have these; other cells may be empty.
_REQUIRED = ("timestamp_s", "config_index", "status", "config", "session", "repeat")
_LEAST = {**dict.fromkeys(_NUMBERS, 0), "world": 1, "generation": -(1 << 63)}
_MOST, _HUGE = (1 << 63) - 1, sys.float_info.max
_IDS = {"run_id": 1, "kernel_id": 1, "ir_id": None}  # how many a cell may hold


def load_rows(path: str, damage: list[Damage]) -> pandas.DataFrame:
    """Read all whole rows; the index is the line number. Raises ValueError for other columns."""
    import pyarrow as pa

    size, torn = _check_header(path)
    num_lines, longest = _measure_lines(path, size)
    num_lines = max(num_lines - 1, 0)
    numbers: Any = range(2, num_lines + 2)
    table = _empty_table()
    if num_lines:
        table = None
        if longest <= MAX_LINE:
            with pa.memory_map(path) as file:
                table = _parse(file.read_buffer(size))
        if table is None or table.num_rows != num_lines or not _is_possible(table):
            table, numbers = _parse_blocks(path, size, damage)
    if torn:
        damage.append(Damage(path, num_lines + (2 if size else 1), torn_text(torn)))
    return _to_frame(table, numbers)


def empty_rows() -> pandas.DataFrame:
    return _to_frame(_empty_table(), [])


def _empty_table() -> Any:
    import pyarrow as pa

    return _parse(pa.py_buffer(csv_header().encode()))


def _check_header(path: str) -> tuple[int, int]:
    with open_regular(path) as file:
        first = file.readline(1 << 16)
    if not first.endswith(b"\n") and csv_header().encode().startswith(first):
        return 0, len(first)  # new, or its writer died in the header
    if first != csv_header().encode():
        raise ValueError(
            f"{path}:1: other columns than this version of sundog reads "
            f"({first[:120].decode('utf-8', 'replace').strip()!r})"
        )
    return whole_size(path)


def _measure_lines(path: str, size: int) -> tuple[int, int]:
    """Return how many lines there are, and the length of the longest, or 16 MB if that is more."""
    count, longest, length = 0, _BLOCK, 0
    with open_regular(path) as file:
        while size > 0 and (data := file.read(min(size, _BLOCK))):
            size -= len(data)
            first = data.find(b"\n")
            longest = max(longest, length + (len(data) if first < 0 else first))
            length = length + len(data) if first < 0 else len(data) - data.rfind(b"\n") - 1
            count += data.count(b"\n")
    return count, longest


def _parse(data: Any, block_size: int = 1 << 24) -> Any:
    """Return the rows as a table, or None if any line does not fit."""
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
    except pa.ArrowException:
        return None


def _is_possible(table: Any) -> bool:
    """Return False if any row holds what `_wrong_cell` refuses."""
    import pyarrow.compute as pc

    for name, kind in _NUMBERS.items():
        column = table[name]
        if pc.any(pc.less(column, _LEAST[name])).as_py():
            return False
        if kind == "float" and pc.all(pc.is_finite(column)).as_py() is False:
            return False
        if name in _REQUIRED and column.null_count:
            return False
    for name in (*_IDS, "session", "status"):
        for chunk in table[name].chunks:
            if any(_wrong_cell(name, cell) for cell in chunk.dictionary.to_pylist()):
                return False
    return not pc.any(pc.equal(table["config"], "")).as_py()


def _parse_blocks(path: str, size: int, damage: list[Damage]) -> tuple[Any, list[int]]:
    """Read a file with damage: its rows, and their lines. Only blocks that have some are slow."""
    import pyarrow as pa

    tables, numbers = [_empty_table()], []
    for first, data in _blocks(path, size):
        if data is None:
            damage.append(Damage(path, first, f"a line of more than {MAX_LINE} bytes"))
            continue
        num_lines = data.count(b"\n")
        kept: Any = range(first, first + num_lines)
        table = _parse_all([data])
        if table is None or table.num_rows != num_lines or not _is_possible(table):
            kept = _whole_lines(path, first, data, damage)
            table = _parse_all(kept.values())
        if table is None or table.num_rows != len(kept):  # pyarrow takes less than csv
            kept = _readable(path, kept, damage)
            table = _parse_all(kept.values())
        assert table.num_rows == len(kept)
        tables.append(table)
        numbers.extend(kept)
    return pa.concat_tables(tables).unify_dictionaries(), numbers


def _parse_all(lines: Iterable[bytes]) -> Any:
    """Parse lines in one piece: a row may be longer than any block."""
    import pyarrow as pa

    data = b"".join([csv_header().encode(), *lines])
    return _parse(pa.py_buffer(data), len(data) + 1)


def _blocks(path: str, size: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the lines after the header, some megabytes at once, and the number of the first.

    A line of more than MAX_LINE bytes is yielded alone, as None.
    """
    lines: list[bytes] = []
    length = 0
    for line in lines_of(path, size):
        if line.number == 1:
            continue
        if lines and (line.data is None or length + line.length > _BLOCK):
            yield line.number - len(lines), b"".join(lines)
            lines, length = [], 0
        if line.data is None:
            yield line.number, None
        else:
            lines.append(line.data + b"\n")
            length += line.length
    if lines:
        yield line.number + 1 - len(lines), b"".join(lines)


def _whole_lines(path: str, first: int, data: bytes, damage: list[Damage]) -> dict[int, bytes]:
    """Return the lines that are rows, by number."""
    kept = {}
    for number, line in enumerate(data[:-1].split(b"\n"), first):
        wrong = _wrong(line)
        if wrong is None:
            kept[number] = line + b"\n"
        else:
            damage.append(Damage(path, number, wrong))
    return kept


def _readable(path: str, lines: dict[int, bytes], damage: list[Damage]) -> dict[int, bytes]:
    """Return the lines that pyarrow takes for one row each."""
    kept = {n: line for n, line in lines.items() if getattr(_parse_all([line]), "num_rows", 0) == 1}
    text = "not a CSV row as pyarrow reads them"
    damage.extend(Damage(path, number, text) for number in lines.keys() - kept.keys())
    return kept


def _wrong(data: bytes) -> str | None:
    """Return why a line is not a row, or None."""
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
    return next(filter(None, map(_wrong_cell, CSV_COLUMNS, cells)), None)


def _wrong_cell(column: str, cell: str) -> str | None:
    if not cell:
        return f"{column} is empty" if column in _REQUIRED else None
    shown, kind = cell[:40], _NUMBERS.get(column)
    if kind is not None:
        pattern = _INT if kind == "int" else _FLOAT
        if not pattern.fullmatch(cell):
            return f"{column} is not a number: {shown!r}"
        number = int(cell) if kind == "int" else float(cell)
        if not _LEAST[column] <= number <= (_MOST if kind == "int" else _HUGE):
            return f"{column} {shown} is not possible"
    if column == "session" and not SESSION.fullmatch(cell):
        return f"session {shown!r} is not possible"
    if column in _IDS:
        ids = cell.split(" ")
        if not all(map(is_sha256, ids)) or len(ids) > (_IDS[column] or len(ids)):
            return f"{column} {shown!r} is not a sha256 in hex"
    return None


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
    """Split a line without its newline into cells; csv.Error where it is torn inside one."""
    if len(line) > csv.field_size_limit():
        csv.field_size_limit(len(line))  # csv's default is 128 KB; an error's text may be longer
    return next(csv.reader([line], strict=True), [])


def _cell(column: str, value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return _float(value)
    text = str(value) if column in _JSON else _one_line(str(value))
    if "," in text or '"' in text:
        return '"' + text.replace('"', '""') + '"'
    return text


def _float(value: float) -> str:
    """Write six digits after the point, which is a nanosecond for ms, or all if that is too few."""
    if not math.isfinite(value):
        return ""
    return f"{value:.6f}" if value == 0 or 1e-3 <= abs(value) < 1e15 else repr(value)


def _one_line(text: str) -> str:
    """Escape line breaks, control characters, lone surrogates, and the backslash too."""
    text = text.replace("\\", "\\\\")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def percentiles(samples: Sequence[float]) -> dict[str, float | int]:
    """Return minimum, 10th, 50th and 90th percentile (linear, as numpy's) and maximum."""
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
