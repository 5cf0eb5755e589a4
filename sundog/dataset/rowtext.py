"""One CSV row as one line of text: no cell ever holds a line break, so a line is a row."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence

from .schema import CSV_COLUMNS, CSV_FIELDS

__all__ = ["format_row", "header", "percentiles", "split_row"]

_COLUMN_SET = frozenset(CSV_COLUMNS)
_JSON = frozenset(field.name for field in CSV_FIELDS if field.type == "JSON")


def header() -> str:
    return ",".join(CSV_COLUMNS) + "\n"


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
