"""A file of `sundog bench OP --link pcie` as a section of docs/measured.md."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

from sundog.tools.bench.results import problem_text
from sundog.tools.timing import Times

__all__ = ["Even", "even_shapes", "over_link"]

_GEMM = "cuBLAS alone"
_HEAD = ("problem", "variant", "median", "20 % to 80 %", "over the limit", "times as fast as")


def over_link(content: dict[str, Any]) -> tuple[str, str]:
    """Title and text. `over the limit` is time over limit: the goal of a fused op is 1.10."""
    rates = content["rates"]
    lines = [_line(list(_HEAD)), _line(["---"] * len(_HEAD))]
    for row in content["rows"]:
        beside = [r for r in content["rows"] if r["problem"] == row["problem"]]
        lines.append(_line(_cells(row, beside)))
    text = f"{content['note']}\n\n" if "note" in content else ""
    text += (
        f"Rank 0 of {content['world']}; the other ranks' data lies behind PCIe. The limit is the "
        f"larger of the bytes that cross, at the {rates['link'] / 1e9:.1f} GB/s of the copy engine "
        "in the same run, and cuBLAS on gathered data. Of each variant the fastest config; all are "
        "in the file.\n\n"
    )
    text += "".join(f"{_verdict(even)}\n\n" for even in even_shapes(content))
    title = f"{content['op']} over a PCIe link, {content['world']} ranks"
    return title, text + "\n".join(lines)


class Even(NamedTuple):
    """The shape of an M on which link and product are closest to equal: what the goal is for."""

    row: dict[str, Any]  # the fastest of ours
    crossing: float  # us, of what crosses the link
    alone: float  # us, of the product
    time: float  # us, of the row
    over_limit: float
    times_as_fast: float  # as gather, then product


def even_shapes(content: dict[str, Any]) -> list[Even]:
    """One for each M."""
    rows = [row for row in content["rows"] if row["times"] is not None]
    alone = {row["problem"]: _micros(row).median for row in rows if row["variant"] == _GEMM}
    crossing = {row["problem"]: row["link_bytes"] / content["rates"]["link"] * 1e6 for row in rows}
    heights: dict[str, list[str]] = {}
    for problem in alone:
        found = re.search(r"\bm=\d+", problem)
        heights.setdefault(found[0] if found else "", []).append(problem)
    evens = []
    for problems in heights.values():
        even = min(problems, key=lambda each: abs(math.log(alone[each] / crossing[each])))
        there = [row for row in rows if row["problem"] == even]
        evens.append(_even(there, crossing[even], alone[even]))
    return evens


def _even(rows: list[dict[str, Any]], crossing: float, alone: float) -> Even:
    ours = min((r for r in rows if r["config"]), key=lambda row: _micros(row).median)
    time = _micros(ours).median
    unfused = [r for r in rows if not r["config"] and r["variant"] != _GEMM]
    other = min(_micros(row).median for row in unfused)
    return Even(ours, crossing, alone, time, time / ours["limit_ns"] * 1e3, other / time)


def _verdict(even: Even) -> str:
    return (
        f"Closest to equal (link {even.crossing:.0f} us, product {even.alone:.0f} us) is "
        f"{problem_text(even.row['problem'])}: {even.row['variant']} takes {even.time:.0f} us, "
        f"{even.over_limit:.3f} times the limit (goal 1.10), and is {even.times_as_fast:.2f} times "
        "as fast as gather, then product (goal 1.5)."
    )


def _cells(row: dict[str, Any], beside: list[dict[str, Any]]) -> list[str]:
    problem = problem_text(row["problem"])
    name = f"{row['variant']} {row['config']}".strip()
    if row["times"] is None:
        return [problem, name, f"wrong: {row['wrong']}", "", "", ""]
    times = _micros(row)
    others = [
        f"{other['variant']} {_micros(other).median / times.median:.2f}"
        for other in beside
        if not other["config"] and other["times"] is not None
    ]
    return [
        problem,
        name,
        f"{times.median:.1f} us",
        f"{times.percentile(20):.1f} us to {times.percentile(80):.1f} us",
        f"{times.median / row['limit_ns'] * 1e3:.3f}",
        ", ".join(others) if row["config"] else "",
    ]


def _micros(row: dict[str, Any]) -> Times:
    """Rank 0's samples, in microseconds."""
    samples = [[1e-3 * ranks[0]] for ranks in row["times"]["samples_ns"]]
    return Times(row["variant"], samples)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
