"""A file of `sundog bench OP --link pcie` as a section of docs/measured.md."""

from __future__ import annotations

import statistics
from typing import Any

__all__ = ["over_link"]

_HEAD = ("problem", "variant", "median", "20 % to 80 %", "over the limit", "times as fast as")


def over_link(content: dict[str, Any]) -> tuple[str, str]:
    """Title and text. `over the limit` is time over limit: the goal of a fused op is 1.10."""
    rates = content["rates"]
    lines = [_line(list(_HEAD)), _line(["---"] * len(_HEAD))]
    for row in content["rows"]:
        beside = [r for r in content["rows"] if r["problem"] == row["problem"]]
        lines.append(_line(_cells(row, beside)))
    text = (
        f"Rank 0 of {content['world']}; the other ranks' data lies behind PCIe. Rates of the same "
        f"run: the link {rates['link'] / 1e9:.1f} GB/s by the copy engine, bf16 matrix product "
        f"{rates['gemm'] / 1e12:.0f} TFLOP/s. The limit is the larger of the bytes that cross at "
        "that rate and cuBLAS on gathered data.\n\n"
    )
    if content.get("plot"):
        text += f"![time over N](measured/{content['plot']})\n\n"
    title = f"{content['op']} over a PCIe link, {content['world']} ranks"
    return title, text + "\n".join(lines)


def _cells(row: dict[str, Any], beside: list[dict[str, Any]]) -> list[str]:
    problem = row["problem"].removeprefix("Problem(").removesuffix(")").replace("torch.", "")
    name = f"{row['variant']} {row['config']}".strip()
    if row["times"] is None:
        return [problem, name, f"wrong: {row['wrong']}", "", "", ""]
    times = sorted(_micros(row))
    ends = [times[round(part * (len(times) - 1))] for part in (0.2, 0.8)]
    median = statistics.median(times)
    others = [
        f"{other['variant']} {statistics.median(_micros(other)) / median:.2f}"
        for other in beside
        if not other["config"] and other["times"] is not None
    ]
    return [
        problem,
        name,
        f"{median:.1f} us",
        f"{ends[0]:.1f} us to {ends[1]:.1f} us",
        f"{median / row['limit_ns'] * 1e3:.3f}",
        ", ".join(others) if row["config"] else "",
    ]


def _micros(row: dict[str, Any]) -> list[float]:
    """Rank 0's samples."""
    return [1e-3 * ranks[0] for ranks in row["times"]["samples_ns"]]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
