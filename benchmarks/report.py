"""docs/measured.md, made from the files in docs/measured: no figure on that page is typed by hand.

`python -m benchmarks report` writes the page.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from sundog.tools.baselines import GEMM_ALONE
from sundog.tools.bench.bench_command import problem_text
from sundog.tools.timing import times_of
from sundog.tools.trace.timeline import Summary

from .fault_programs import GRACE, TIMEOUT
from .fault_verdicts import COLUMNS, rows_of
from .goals import Even, even_shapes, goal_rows, micros_of_rank_0
from .result_files import fastest, name_of, read_result, result_paths

_HEAD = """# What was measured

`python -m benchmarks report` makes this page from the files in `measured/`. Those of a GPU hold
every sample; `xz -dc NAME.json.xz` prints one. Times there are medians over samples of the slowest
rank. "Limit" is the least time that the rates measured in the same run allow
(`sundog/tools/bench/limits.py` has the formula), over the time taken: 1.00 is as fast as the GPU
can go. The configs are in the files.
"""


def write_page(docs: Path) -> None:
    (docs / "measured.md").write_text(render(docs / "measured"))


def render(folder: Path) -> str:
    """Return the whole page, from all files of the folder in the order of their names."""
    files = {path: read_result(path) for path in result_paths(folder)}
    sections = [_HEAD, _worst_first(list(files.values()))]
    sections.append(_goals({name_of(path): content for path, content in files.items()}))
    for path, content in files.items():
        if content.get("kind") in _SECTIONS:
            picture = f"{name_of(path)}.png"
            shown = picture if (folder / picture).exists() else ""
            sections.append(_section(path.name, content, shown))
    return "\n".join(each for each in sections if each)


_NO_OTHER = ("A gathered", GEMM_ALONE)  # parts of an op: nobody could call them instead
_CLASSES = ((1 << 20, "to 1 MB"), (64 << 20, "to 64 MB"), (1 << 62, "above 64 MB"))
_ROWS = ((256, "to 256 rows"), (2048, "to 2,048 rows"), (1 << 62, "more rows"))


class _Duel(NamedTuple):
    """Ours and the best other on one problem."""

    ratio: float  # our time over the other's
    where: str


def _worst_first(contents: list[dict[str, Any]]) -> str:
    """Our fastest over the fastest of what a user would call instead: op, backend, size class."""
    found: dict[tuple[str, str, str], list[_Duel]] = {}
    for content in contents:
        if content.get("kind") == "op":
            for place, duel in _duels(content):
                found.setdefault(place, []).append(duel)
    worst = sorted(((max(d), len(d), place) for place, d in found.items()), reverse=True)
    lines = [[*place, str(count), f"{duel.ratio:.2f}", duel.where] for duel, count, place in worst]
    head = ["op", "backend", "size", "problems", "ours over the best other", "worst at"]
    text = (
        "The time of our fastest algorithm over that of the fastest of what a user would call "
        "instead, in the same run; below 1 is faster. The worst problem of each class, the worst "
        "class first. A size is that of the bytes that a rank reads and writes. torch.cat, copy_ "
        "and add_ read the peers' tensors and wait for nobody: with small ones that saves them a "
        "barrier or two."
    )
    return f"## Ours over the best other\n\n{text}\n\n{_grid(head, lines)}\n" if lines else ""


def _duels(content: dict[str, Any]) -> Iterator[tuple[tuple[str, str, str], _Duel]]:
    """Yield every problem of a file that was timed with ours and with another."""
    link = content.get("link", "")
    by_problem: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for row in content["rows"]:
        if row["times"] is not None and not any(part in row["variant"] for part in _NO_OTHER):
            times = micros_of_rank_0(row) if link else times_of(row["times"])
            by_problem.setdefault(row["problem"], []).append((times.median, row))
    where = f"virtual, over {link}" if link else content["backend"]
    for timed in by_problem.values():
        ours = [each for each in timed if each[1]["config"]]
        others = [each for each in timed if not each[1]["config"]]
        if ours and others:
            (mine, row), (theirs, other) = (min(each, key=_first) for each in (ours, others))
            text = f"{_problem(row)}: {row['variant']} against {other['variant']}"
            place = content["op"].partition(".")[0], where, _size_class(row)
            yield place, _Duel(mine / theirs, text)


def _first(item: tuple[float, Any]) -> float:
    return item[0]


def _size_class(row: dict[str, Any]) -> str:
    """Class products by rows of A, others by bytes."""
    rows = re.search(r"\bm=(\d+)", row["problem"])
    size, classes = (int(rows[1]), _ROWS) if rows else (row["hbm_bytes"], _CLASSES)
    return next(name for most, name in classes if size <= most)


def _goals(files: dict[str, dict[str, Any]]) -> str:
    head = ["goal, on one H200", "wanted", "worst of all", "", "where"]
    rows = goal_rows(files)
    return f"## Goals\n\n{_grid(head, rows)}\n" if rows else ""


def _section(name: str, content: dict[str, Any], picture: str) -> str:
    known = content["machine"]
    title, body = _SECTIONS[content["kind"]](content)
    source = (
        f"`{known['command']}`, {known['date'][:10]}, {known['gpu']}, torch {known['torch']}, "
        f"Triton {known['triton']}, commit {known['commit']} ([{name}](measured/{name}))"
    )
    image = f"![{title}](measured/{picture})\n\n" if picture else ""
    return f"## {title}\n\n{image}{body}\n\n{source}\n"


_OP_HEAD = [
    "problem", "variant", "median", "20 % to 80 %", "skew", "TB/s", "limit", "times as fast",
]  # fmt: skip


def _op(content: dict[str, Any]) -> tuple[str, str]:
    rows = fastest(content["rows"])
    if content.get("link"):
        return _over_link(content | {"rows": rows})
    ranks = content["world"]
    lines = []
    for row in rows:
        others = [r for r in rows if not r["config"] and r["problem"] == row["problem"]]
        lines.append(_op_cells(row, ranks, others if row["config"] else []))
    text = _note_before(content) + _rates(content["rates"]) + _grid(_OP_HEAD, lines)
    if left_out := len(content["rows"]) - len(rows):
        text += f"\n\nOf each variant the fastest config; {left_out} slower ones are in the file."
    return f"{content['op']}, {ranks} ranks on `{content['backend']}`", text


def _problem(row: dict[str, Any]) -> str:
    """Return the problem without what is as usual."""
    text = problem_text(row["problem"])
    for usual in ("has_bias=False", "activation=None", "out_dtype=None"):
        text = text.replace(f", {usual}", "")
    return text


def _variant(row: dict[str, Any]) -> str:
    """Return the name, and how many programs ran; the whole config is in the file."""
    programs = row.get("programs")
    return f"{row['variant']}, {programs} programs" if programs else row["variant"]


def _note_before(content: dict[str, Any]) -> str:
    return f"{content['note']}\n\n" if "note" in content else ""


def _rates(rates: dict[str, float]) -> str:
    return (
        f"Rates of the same run: copy {rates['copy'] / 1e12:.2f} TB/s read plus written, fill "
        f"{rates['fill'] / 1e12:.2f}, read {rates['read'] / 1e12:.2f}, bf16 matrix product "
        f"{rates['gemm'] / 1e12:.0f} TFLOP/s.\n\n"
    )


def _op_cells(row: dict[str, Any], ranks: int, others: list[dict[str, Any]]) -> list[str]:
    problem, name = _problem(row), _variant(row)
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


_LINK_HEAD = ["problem", "variant", "median", "20 % to 80 %", "over the limit", "times as fast as"]


def _over_link(content: dict[str, Any]) -> tuple[str, str]:
    """Render a file of `sundog bench OP --link pcie`. The goal is 1.10 x the limit."""
    lines = []
    for row in content["rows"]:
        beside = [r for r in content["rows"] if r["problem"] == row["problem"]]
        lines.append(_link_cells(row, beside))
    text = (
        f"Rank 0 of {content['world']}; the other ranks' data lies across PCIe. The limit is the "
        f"larger of the bytes that cross, at the {content['rates']['link'] / 1e9:.1f} GB/s of the "
        "copy engine in the same run, and cuBLAS on gathered data. Each variant is shown with "
        "its fastest config; all are in the file.\n\n"
    )
    text += "".join(f"{_verdict(even)}\n\n" for even in even_shapes(content))
    title = f"{content['op']} over a PCIe link, {content['world']} ranks"
    return title, _note_before(content) + text + _grid(_LINK_HEAD, lines)


def _verdict(even: Even) -> str:
    return (
        f"Closest to equal (link {even.crossing:.0f} us, product {even.alone:.0f} us) is "
        f"{problem_text(even.row['problem'])}: {even.row['variant']} takes {even.time:.0f} us, "
        f"{even.over_limit:.3f} times the limit (goal 1.10), and is {even.times_as_fast:.2f} times "
        "as fast as gather, then product (goal 1.5)."
    )


def _link_cells(row: dict[str, Any], beside: list[dict[str, Any]]) -> list[str]:
    problem, name = _problem(row), _variant(row)
    if row["times"] is None:
        return [problem, name, f"wrong: {row['wrong']}", "", "", ""]
    times = micros_of_rank_0(row)
    others = [
        f"{other['variant']} {micros_of_rank_0(other).median / times.median:.2f}"
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


def _bound(content: dict[str, Any]) -> tuple[str, str]:
    lines = []
    for row in content["rows"]:
        bounded, unbounded = (times_of(each).median for each in row["times"])
        ratio = f"{bounded / unbounded:.3f}"
        lines.append([str(row["world"]), _micro(bounded), _micro(unbounded), ratio])
    text = "A kernel with 200 barriers of all ranks and nothing else, the worst case:\n\n"
    text += _grid(["ranks", "bounded", "unbounded", "ratio"], lines)
    return f"What the bound on waits costs (`{content['backend']}`)", text


def _checks(content: dict[str, Any]) -> tuple[str, str]:
    outcomes = ["passed", "failed", "hung", "unfinished", "skipped"]
    lines = []
    for part in content["parts"]:
        counts = Counter(test["outcome"] for test in part["tests"])
        cells = [str(counts[name]) for name in outcomes]
        lines.append([part["name"], part["backend"], *cells, str(part["seconds"])])
    table = _grid(["part", "backend", *outcomes, "seconds"], lines)
    return "Tests on the GPU", _noted(table, content)


def _faults(content: dict[str, Any]) -> tuple[str, str]:
    """Render a campaign of `benchmarks.faults`."""
    backend = content["backend"]
    cases = [case for case in content["cases"] if case["struck"]]
    slowest = max((case["seconds"] for case in cases if case["named"]), default=0.0)
    text = (
        f"{len(cases)} random programs on `{backend}` with one fault each, all waits bounded by "
        f"{TIMEOUT:g} s. A fault is named by all if every other rank ends with a sentence of "
        f"sundog's, and in time if that takes at most {TIMEOUT + GRACE:g} s (the slowest took "
        f"{slowest:.1f} s). Culprit named: every sentence has the rank with the fault. Exit "
        "status: not 0 on any rank. Clean: no process, nothing in /dev/shm and no memory of the "
        "GPU is left.\n\n"
    )
    return f"Injected faults on `{backend}`", text + _noted(_grid(COLUMNS, rows_of(cases)), content)


def _table(content: dict[str, Any]) -> tuple[str, str]:
    return content["title"], f"{content['text']}\n\n{_grid(content['head'], content['rows'])}"


def _trace(content: dict[str, Any]) -> tuple[str, str]:
    head = ["rank", f"length [{content['unit']}]", "waited", "most for", "fetching hidden"]
    lines = []
    for rank in content["ranks"]:
        by_peer = {int(peer): time for peer, time in rank["waited_for"].items()}
        lines.append(Summary(**{**rank, "waited_for": by_peer}).cells())
    return f"Trace of {content['title']}", _noted(_grid(head, lines), content)


def _trace_cost(content: dict[str, Any]) -> tuple[str, str]:
    off, on = (times_of(each).median for each in content["times"])
    cells = [_micro(off), _micro(on), f"{100 * (on / off - 1):+.1f} %"]
    place = f"{content['world']} ranks on `{content['backend']}`"
    title = f"What trace points cost: {content['title']}, {place}"
    return title, _grid(["off", "on", "cost"], [cells])


def _capture(content: dict[str, Any]) -> tuple[str, str]:
    """Over empty kernels: what an op costs a graph besides being one more kernel."""
    ranks = content["world"]
    graphs = {each["name"]: times_of(each).median for each in content["graphs"]}
    cells = [
        [name, _micro(time, 2), _micro(time - graphs["empty"], 2)] for name, time in graphs.items()
    ]
    wall = [[times.name, _micro(times.median)] for times in map(times_of, content["wall"])]
    note = "`host`: until the host is free again; `end`: until the GPU is done."
    if content["backend"] == "virtual":
        note += f" One host makes the calls of all {ranks} ranks."
    tables = (
        _grid(["in a graph of 50", "median per call", "over empty"], cells),
        _grid(["by the clock on the wall", "median per call"], wall),
    )
    title = f"All-reduce of {content['nbytes']:,} bytes in graphs, {ranks} ranks"
    return f"{title} on `{content['backend']}`", "\n\n".join([note, *tables])


def _probe(content: dict[str, Any]) -> tuple[str, str]:
    """Show a probe; `expected` is CAPTURABLE, or the label of an op that is known to be wrong."""
    rows = content["rows"]
    columns = list(dict.fromkeys(column for row in rows for column in row["columns"]))
    lines = []
    for row in rows:
        marks = [_mark(row["columns"].get(column)) for column in columns]
        lines.append([row["name"], row["expected"], row["verdict"], *marks])
    good = sum(row["verdict"] == row["expected"] for row in rows)
    text = (
        f"{good} of {len(rows)} verdicts as expected. {content['replays']} replays in the "
        "first column, a quarter of that in the others, each with new data; every bit compared.\n\n"
    )
    body = text + _noted(_grid(["op", "expected", "verdict", *columns], lines), content)
    labelled = sum(row["expected"] != "CAPTURABLE" for row in rows)
    what = "wrong ops" if labelled > len(rows) / 2 else "ops"
    where = f"{content['world']} ranks on `{content['backend']}`"
    return f"Probe of {what} in graphs, {where}", body


def _mark(cell: dict[str, Any] | None) -> str:
    return "" if cell is None else {"CAPTURABLE": "ok"}.get(cell["verdict"], cell["verdict"])


_TIMES_OVER_NODES = ("hierarchical_s", "gloo_on_host_s")


def _nodes(content: dict[str, Any]) -> tuple[str, str]:
    """Show groups of processes on one GPU that stand for machines: equal to gloo, and times."""
    rows = [
        [f"{each['numel']:,}", *(f"{1e3 * each[name]:.2f}" for name in _TIMES_OVER_NODES)]
        for each in content["times"]
    ]
    wrong = ", ".join(content["wrong"]) or "none"
    text = (
        f"{content['nodes']} groups of {content['ranks']} processes stand for machines, with "
        f"{content['between']} between them. Bit by bit as {content['between']} on the host: "
        f"{', '.join(content['same'])}. Others: {wrong}. One GPU and one host do the work of all, "
        "so the times say nothing about a network.\n\n"
    )
    head = ["all_reduce of bfloat16 elements", "ms", "ms of gloo on the host"]
    return f"Several machines, on `{content['backend']}`", text + _grid(head, rows)


_SECTIONS: dict[str, Callable[[dict[str, Any]], tuple[str, str]]] = {
    "op": _op, "bound": _bound, "checks": _checks, "table": _table, "trace": _trace,
    "trace_cost": _trace_cost, "capture": _capture, "probe": _probe, "faults": _faults,
    "nodes": _nodes,
}  # fmt: skip


def _noted(table: str, content: dict[str, Any]) -> str:
    """Return a table, and what was added by hand: why something failed, how it was made."""
    note = content.get("note", "")
    return f"{table}\n\n{note}" if note else table


def _micro(seconds: float, digits: int = 1) -> str:
    return f"{1e6 * seconds:.{digits}f} us"


def _grid(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
