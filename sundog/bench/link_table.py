"""A file of `sundog bench OP --link pcie` as a section of docs/measured.md."""

from __future__ import annotations

from typing import Any

from .timing import Times

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
