"""docs/measured.md, made from the JSON files beside it: no figure on that page is typed by hand.

python -m benchmarks.measured [docs]
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sundog.tools.bench.results import fastest, problem_text, times_of
from sundog.tools.trace.timeline import Summary

from .goals import goal_rows
from .link_table import over_link

__all__ = ["render"]

_HEAD = """# What was measured

This page is made from the files in `measured/` by `python -m benchmarks.measured`; those of a GPU
have every sample. Times there are medians over samples of the slowest rank. "Limit" is the least
time that the rates measured in the same run allow (`sundog/tools/bench/limits.py` has the formula),
over the time taken: 1.00 is as fast as the GPU can.
"""


def render(folder: Path) -> str:
    """The whole page, from all files of the folder in the order of their names."""
    files = {path: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    sections = [_HEAD, _goals({path.stem: content for path, content in files.items()})]
    for path, content in files.items():
        if content.get("kind") in _SECTIONS:
            picture = path.with_suffix(".png").name if path.with_suffix(".png").exists() else ""
            sections.append(_section(path.name, content, picture))
    return "\n".join(each for each in sections if each)


def _goals(files: dict[str, dict[str, Any]]) -> str:
    head = ["goal, on one H200", "wanted", "worst of all", "", "where"]
    rows = goal_rows(files)
    lines = [_row(head), _row(["---"] * len(head)), *map(_row, rows)]
    return "## Goals\n\n" + "\n".join(lines) + "\n" if rows else ""


def _section(name: str, content: dict[str, Any], picture: str) -> str:
    known = content["machine"]
    title, body = _SECTIONS[content["kind"]](content)
    source = (
        f"`{known['command']}`, {known['date'][:10]}, {known['gpu']}, torch {known['torch']}, "
        f"Triton {known['triton']}, commit {known['commit']} ([{name}](measured/{name}))"
    )
    image = f"![{title}](measured/{picture})\n\n" if picture else ""
    return f"## {title}\n\n{image}{body}\n\n{source}\n"


def _op(content: dict[str, Any]) -> tuple[str, str]:
    rows = fastest(content["rows"])
    if content.get("link"):
        return over_link(content | {"rows": rows})
    ranks = content["world"]
    rates = content["rates"]
    head = [
        "problem",
        "variant",
        "median",
        "20 % to 80 %",
        "skew",
        "TB/s",
        "limit",
        "times as fast",
    ]
    lines = [_row(head), _row(["---"] * len(head))]
    for row in rows:
        others = [r for r in rows if not r["config"] and r["problem"] == row["problem"]]
        lines.append(_row(_op_cells(row, ranks, others if row["config"] else [])))
    left_out = len(content["rows"]) - len(rows)
    if left_out:
        lines.append(
            f"\nOf each variant the fastest config; {left_out} slower ones are in the file."
        )
    text = f"{content['note']}\n\n" if "note" in content else ""
    text += (
        f"Rates of the same run: copy {rates['copy'] / 1e12:.2f} TB/s read plus written, fill "
        f"{rates['fill'] / 1e12:.2f}, read {rates['read'] / 1e12:.2f}, bf16 matrix product "
        f"{rates['gemm'] / 1e12:.0f} TFLOP/s.\n\n"
    )
    return f"{content['op']}, {ranks} ranks on `{content['backend']}`", text + "\n".join(lines)


def _op_cells(row: dict[str, Any], ranks: int, others: list[dict[str, Any]]) -> list[str]:
    problem = problem_text(row["problem"])
    name = f"{row['variant']} {row['config']}".strip().removeprefix("sundog ")
    if row["times"] is None:
        return [problem, name, f"wrong: {row['wrong']}", *[""] * 5]
    times = times_of(row["times"])
    faster = [
        f"{each['variant']} {times_of(each['times']).median / times.median:.2f}"
        for each in others
        if each["times"] is not None
    ]
    return [
        problem,
        name,
        _micro(times.median),
        f"{_micro(times.percentile(20))} to {_micro(times.percentile(80))}",
        _micro(times.skew),
        f"{row['hbm_bytes'] * ranks / times.median / 1e12:.2f}",
        f"{row['limit_ns'] * 1e-9 / times.median:.2f}",
        ", ".join(faster),
    ]


def _bound(content: dict[str, Any]) -> tuple[str, str]:
    lines = [_row(["ranks", "bounded", "unbounded", "ratio"]), _row(["---"] * 4)]
    for row in content["rows"]:
        bounded, unbounded = (times_of(each) for each in row["times"])
        ratio = f"{bounded.median / unbounded.median:.3f}"
        cells = [str(row["world"]), _micro(bounded.median), _micro(unbounded.median), ratio]
        lines.append(_row(cells))
    text = "A kernel with 200 barriers of all ranks and nothing else, the worst case:\n\n"
    return f"What the bound on waits costs (`{content['backend']}`)", text + "\n".join(lines)


def _checks(content: dict[str, Any]) -> tuple[str, str]:
    head = ["part", "backend", "passed", "failed", "hung", "unfinished", "skipped", "seconds"]
    lines = [_row(head), _row(["---"] * len(head))]
    for part in content["parts"]:
        counts = Counter(test["outcome"] for test in part["tests"])
        cells = [str(counts[name]) for name in head[2:-1]]
        lines.append(_row([part["name"], part["backend"], *cells, str(part["seconds"])]))
    return "Tests on the GPU", _noted(lines, content)


def _table(content: dict[str, Any]) -> tuple[str, str]:
    head = content["head"]
    lines = [_row(head), _row(["---"] * len(head)), *(_row(cells) for cells in content["rows"])]
    return content["title"], f"{content['text']}\n\n" + "\n".join(lines)


def _trace(content: dict[str, Any]) -> tuple[str, str]:
    head = ["rank", f"length [{content['unit']}]", "waited", "most for", "fetching hidden"]
    lines = [_row(head), _row(["---"] * len(head))]
    for rank in content["ranks"]:
        by_peer = {int(peer): time for peer, time in rank["waited_for"].items()}
        lines.append(_row(Summary(**{**rank, "waited_for": by_peer}).cells()))
    return f"Trace of {content['title']}", _noted(lines, content)


def _trace_cost(content: dict[str, Any]) -> tuple[str, str]:
    off, on = (times_of(each) for each in content["times"])
    cost = f"{100 * (on.median / off.median - 1):+.1f} %"
    lines = [_row(["off", "on", "cost"]), _row(["---"] * 3)]
    lines.append(_row([_micro(off.median), _micro(on.median), cost]))
    place = f"{content['world']} ranks on `{content['backend']}`"
    return f"What trace points cost: {content['title']}, {place}", "\n".join(lines)


def _capture(content: dict[str, Any]) -> tuple[str, str]:
    """Over empty kernels: what an op costs a graph besides being one more kernel."""
    ranks = content["world"]
    graphs = [times_of(each) for each in content["graphs"]]
    empty = next(times.median for times in graphs if times.name == "empty")
    lines = [_row(["in a graph of 50", "median per call", "over empty"]), _row(["---"] * 3)]
    for times in graphs:
        over = times.median - empty
        lines.append(_row([times.name, _micro(times.median, 2), _micro(over, 2)]))
    lines += ["", _row(["by the clock on the wall", "median per call"]), _row(["---"] * 2)]
    for times in map(times_of, content["wall"]):
        lines.append(_row([times.name, _micro(times.median)]))
    title = f"All-reduce of {content['nbytes']:,} bytes in graphs, {ranks} ranks"
    note = "`host`: until the host is free again; `end`: until the GPU is done."
    if content["backend"] == "virtual":
        note += f" One host makes the calls of all {ranks} ranks."
    return f"{title} on `{content['backend']}`", f"{note}\n\n" + "\n".join(lines)


def _probe(content: dict[str, Any]) -> tuple[str, str]:
    """`expected` is CAPTURABLE, or the label that a wrong op had before it was probed."""
    rows = content["rows"]
    columns = list(dict.fromkeys(column for row in rows for column in row["columns"]))
    head = ["op", "expected", "verdict", *columns]
    lines = [_row(head), _row(["---"] * len(head))]
    for row in rows:
        marks = [_mark(row["columns"].get(column)) for column in columns]
        lines.append(_row([row["name"], row["expected"], row["verdict"], *marks]))
    good = sum(row["verdict"] == row["expected"] for row in rows)
    text = (
        f"{good} of {len(rows)} verdicts as expected. {content['replays']} replays in the "
        "first column, a quarter of that in the others, each with new data; every bit compared.\n\n"
    )
    where = f"{content['world']} ranks on `{content['backend']}`"
    body = text + _noted(lines, content)
    labelled = sum(row["expected"] != "CAPTURABLE" for row in rows)
    what = "wrong ops" if labelled > len(rows) / 2 else "ops"
    return f"Probe of {what} in graphs, {where}", body


def _mark(cell: dict[str, Any] | None) -> str:
    return "" if cell is None else {"CAPTURABLE": "ok"}.get(cell["verdict"], cell["verdict"])


_SECTIONS: dict[str, Callable[[dict[str, Any]], tuple[str, str]]] = {
    "op": _op, "bound": _bound, "checks": _checks, "table": _table, "trace": _trace,
    "trace_cost": _trace_cost, "capture": _capture, "probe": _probe,
}  # fmt: skip


def _noted(lines: list[str], content: dict[str, Any]) -> str:
    """A table, and what was added by hand: why something failed, how it was made."""
    note = content.get("note", "")
    return "\n".join(lines) + (f"\n\n{note}" if note else "")


def _micro(seconds: float, digits: int = 1) -> str:
    return f"{1e6 * seconds:.{digits}f} us"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    docs = Path(sys.argv[1] if len(sys.argv) > 1 else "docs")
    (docs / "measured.md").write_text(render(docs / "measured"))
