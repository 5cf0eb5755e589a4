"""What a benchmark leaves: a table for people and a JSON file with every sample for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .._console import write_json
from ..timing import machine, times_json, times_of
from .run import Row

__all__ = [
    "fastest", "machine", "print_rows", "problem_text", "row_json", "times_json", "times_of",
    "write",
]  # fmt: skip


def fastest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Select from rows of `row_json`: the fastest config of each variant on each problem, and all
    that could not be timed."""
    best: dict[tuple[str, str], float] = {}
    for row in rows:
        if row["times"] is not None:
            place, median = (row["problem"], row["variant"]), times_of(row["times"]).median
            best[place] = min(median, best.get(place, median))
    return [
        row
        for row in rows
        if row["times"] is None
        or times_of(row["times"]).median == best[row["problem"], row["variant"]]
    ]


def problem_text(problem: str) -> str:
    """Write a row's problem for people."""
    return problem.removeprefix("Problem(").removesuffix(")").replace("torch.", "")


def row_json(row: Row) -> dict[str, Any]:
    return {
        "variant": row.variant,
        "problem": row.problem,
        "config": row.config,
        "programs": row.programs,
        "flops": row.cost.flops,
        "hbm_bytes": row.cost.hbm_bytes,
        "link_bytes": row.cost.link_bytes,
        "limit_ns": round(row.limit * 1e9, 1),
        "stored_ns": round(row.stored * 1e9, 1),
        "expected_ns": round(row.expected * 1e9, 1),
        "wrong": row.wrong,
        "times": times_json(row.times) if row.times else None,
    }


def write(path: str, content: dict[str, Any]) -> None:
    """Write a file of measurements, and make its folder."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_json(path, content)


def print_rows(rows: list[Row], size: int) -> None:
    """Print, per problem, the op's own variants, then the baselines; times of the slowest rank.

    "Over stored": the time over the one that `auto` knows of this config, where it knows one.
    """
    table = Table(title=f"{size} ranks; time of the slowest")
    columns = ("problem", "variant", "median", "20 %", "80 %", "skew", "GB/s", "TFLOP/s", "limit")
    for column in (*columns, "over stored", "times as fast as"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, _cells(row, rows, size)))
    Console(width=200).print(table)


def _cells(row: Row, rows: list[Row], size: int) -> list[str]:
    name = f"{row.variant} {row.config}".strip()
    if row.times is None:
        return [row.problem, name, f"wrong: {row.wrong}", *[""] * 8]
    times = row.times
    micro = [times.median, times.percentile(20), times.percentile(80), times.skew]
    others = [
        f"{other.variant} {other.times.median / times.median:.2f}"
        for other in rows
        if other.problem == row.problem and not other.config and other.times is not None
    ]
    return [
        row.problem,
        name,
        *[f"{1e6 * t:.1f} us" for t in micro],
        f"{row.cost.hbm_bytes * size / times.median / 1e9:.0f}",
        f"{row.cost.flops * size / times.median / 1e12:.1f}",
        f"{row.limit / times.median:.2f}",
        f"{times.median / row.stored:.2f}" if row.stored else "",
        ", ".join(others) if row.config else "",
    ]
