"""The table of goals on docs/measured.md: what was wanted, what was measured, where it was worst.

Figures come from the files in docs/measured. The case furthest from the goal counts,
so "reached" says that all of them did.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from sundog.tools.timing import Times, times_of

from .result_files import fastest

Files = dict[str, dict[str, Any]]  # by name, without .json
Figures = dict[str, float]  # by case
_LARGE = 64 << 20  # bytes
_GEMM = "our GEMM, A gathered"
_CUBLAS = "cuBLAS alone"
_LARGE_M = r"\bm=(?!(16|64|256),)"  # small products have no goal but that of `auto`


@dataclass(frozen=True)
class Goal:
    what: str
    wanted: float
    at_least: bool  # or at most
    figures: Callable[[Files], Figures]
    unit: str = ""

    def row(self, files: Files) -> list[str]:
        """Cells of the table; none if nothing was measured."""
        found = self.figures(files)
        if not found:
            return []
        missed = sum(not self._is_reached(figure) for figure in found.values())
        verdict = f"missed in {missed} of {len(found)}" if missed else "reached"
        case = (min if self.at_least else max)(found, key=lambda each: found[each])
        wanted = f"{'at least' if self.at_least else 'at most'} {self.wanted:g}{self.unit}"
        return [self.what, wanted, f"{found[case]:.4g}{self.unit}", verdict, case]

    def _is_reached(self, figure: float) -> bool:
        return figure >= self.wanted if self.at_least else figure <= self.wanted


def goal_rows(files: Files) -> list[list[str]]:
    """Return the rows of every goal for which there is a file."""
    return [cells for cells in (goal.row(files) for goal in _GOALS) if cells]


# the shapes over a link for which there is a goal


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
    alone = {
        row["problem"]: micros_of_rank_0(row).median for row in rows if row["variant"] == _CUBLAS
    }
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
    ours = min((r for r in rows if r["config"]), key=lambda row: micros_of_rank_0(row).median)
    time = micros_of_rank_0(ours).median
    unfused = [r for r in rows if not r["config"] and r["variant"] != _CUBLAS]
    other = min(micros_of_rank_0(row).median for row in unfused)
    return Even(ours, crossing, alone, time, time / ours["limit_ns"] * 1e3, other / time)


def micros_of_rank_0(row: dict[str, Any]) -> Times:
    """Rank 0's samples, in microseconds."""
    samples = [[1e-3 * ranks[0]] for ranks in row["times"]["samples_ns"]]
    return Times(row["variant"], samples)


# figures


def _tables(files: Files, pattern: str) -> list[tuple[str, dict[str, dict[str, Any]]]]:
    """Return each variant's fastest row, for all problems in all files with such a name."""
    tables: list[tuple[str, dict[str, dict[str, Any]]]] = []
    for name in sorted(each for each in files if re.fullmatch(pattern, each)):
        by_problem: dict[str, dict[str, Any]] = {}
        for row in fastest(files[name]["rows"]):
            if row["times"] is not None:
                by_problem.setdefault(row["problem"], {})[row["variant"]] = row
        tables += by_problem.items()
    return tables


def _seconds(row: dict[str, Any]) -> float:
    return times_of(row["times"]).median


def _of_limit(
    pattern: str, nbytes: Callable[[str], int], *variants: str
) -> Callable[[Files], Figures]:
    """Part of the limit that the fastest of these has, for 64 MB and more a rank."""

    def figures(files: Files) -> Figures:
        found: Figures = {}
        for problem, best in _tables(files, pattern):
            rows = [best[name] for name in variants if name in best]
            if rows and nbytes(problem) >= _LARGE:
                part = max(row["limit_ns"] * 1e-9 / _seconds(row) for row in rows)
                found[_named(problem)] = max(part, found.get(_named(problem), 0.0))
        return found

    return figures


def _whole(problem: str) -> int:
    """Count the bytes of a rank's input, of 16-bit elements."""
    return 2 * int(_field(problem, "numel"))


def _slices(problem: str) -> int:
    """Do the same, where `numel` counts one rank's part."""
    return _whole(problem) * int(_field(problem, "size"))


def _ratio(
    pattern: str, above: tuple[str, ...], below: tuple[str, ...], only: str = ""
) -> Callable[[Files], Figures]:
    """Time of the fastest of `above` over that of the fastest of `below`, by problem."""

    def figures(files: Files) -> Figures:
        return {
            _named(problem): _fastest(best, above) / _fastest(best, below)
            for problem, best in _tables(files, pattern)
            if re.search(only, problem) and {*above} & {*best} and {*below} & {*best}
        }

    return figures


def _fastest(best: dict[str, dict[str, Any]], variants: tuple[str, ...]) -> float:
    return min(_seconds(best[name]) for name in variants if name in best)


def _host(files: Files) -> Figures:
    samples = files.get("h200-host-symm", {"samples": []})["samples"]
    return {
        f"{times['name']}, {each['world']} ranks": 1e6 * times_of(times).median
        for each in samples
        for times in each["times"]
    }


def _graph(files: Files) -> Figures:
    """Microseconds over empty kernels."""
    medians = _graphs(files, "h200-capture-virtual")
    return {"low_latency": 1e6 * (medians["low_latency"] - medians["empty"])} if medians else {}


def _graph_of_torch(files: Files) -> Figures:
    medians = _graphs(files, "h200-capture-symm")
    return {"low_latency": medians["symm_mem.one_shot"] / medians["low_latency"]} if medians else {}


def _graphs(files: Files, name: str) -> Figures:
    graphs = files.get(name, {"graphs": []})["graphs"]
    return {each["name"]: times_of(each).median for each in graphs}


def _over_link(field: str) -> Callable[[Files], Figures]:
    def figures(files: Files) -> Figures:
        names = [name for name in files if re.fullmatch(r"h200-pcie-\d", name)]
        evens = [even for name in sorted(names) for even in even_shapes(files[name])]
        return {_named(even.row["problem"]): getattr(even, field) for even in evens}

    return figures


def _trace(files: Files) -> Figures:
    content = files.get("h200-trace-cost-all-gather-matmul")
    if content is None:
        return {}
    off, on = (times_of(each).median for each in content["times"])
    return {content["title"]: on / off}


def _tuning(column: str) -> Callable[[Files], Figures]:
    def figures(files: Files) -> Figures:
        """By op and search: of several runs the last."""
        table = files.get("h200-tune-cost", {"head": ["op", "search", column], "rows": []})
        op, search, place = (table["head"].index(name) for name in ("op", "search", column))
        return {f"{r[op]}, {r[search]}": float(r[place].rstrip("%")) for r in table["rows"]}

    return figures


def _tuned(column: str, ops: str = "") -> Callable[[Files], Figures]:
    """By op and problem, where the column says something."""

    def figures(files: Files) -> Figures:
        table = files.get("h200-tune", {"head": [column], "rows": []})
        place = table["head"].index(column)
        rows = [row for row in table["rows"] if row[place] and re.match(ops, row[0])]
        return {f"{row[0]} {row[1]}": float(row[place].split()[0]) for row in rows}

    return figures


def _field(problem: str, name: str) -> str:
    found = re.search(rf"\b{name}=(\w+)", problem)
    assert found is not None, f"no {name} in {problem}"
    return found[1]


def _named(problem: str) -> str:
    """Return what tells problems apart here."""
    names = [name for name in ("numel", "m", "n", "k", "size") if f"{name}=" in problem]
    return ", ".join(f"{name}={_field(problem, name)}" for name in names)


_GATHER = r"h200-all-gather-(large-)?\d"
_FUSED = r"h200-all-gather-matmul-(4096|8192)"
_OURS = ("push", "pull", "partitioned", "gluon")


def _gathering(algo: str) -> tuple[Goal, ...]:
    """Judge an algorithm of all_gather_matmul."""
    return (
        Goal(f"{algo} over our GEMM with A gathered, 8 ranks on one GPU", 1.05, False,
             _ratio(_FUSED, (algo,), (_GEMM,))),
        Goal(f"{algo} over all-gather, then our GEMM", 1.0, False,
             _ratio(_FUSED, (algo,), ("barrier",))),
        Goal(f"{algo} over all-gather, then cuBLAS", 1.0, False,
             _ratio(_FUSED, (algo,), ("torch", "our all-gather, then torch.mm"))),
    )  # fmt: skip


_GOALS = (
    Goal("all_gather, part of the limit, 64 MB and more", 0.95, True,
         _of_limit(_GATHER, _whole, *_OURS)),
    Goal("8 ranks, 64 MB: times as fast as torch.cat", 1.4, True,
         _ratio(_GATHER, ("torch.cat",), _OURS, "numel=33554432.*size=8")),
    Goal("the same, 2 MB", 1.2, True,
         _ratio(_GATHER, ("torch.cat",), _OURS, "numel=1048576,.*size=8")),
    Goal("Gluon, times as fast as its Triton twin, all sizes", 0.98, True,
         _ratio(_GATHER, ("push",), ("gluon",))),
    Goal("reduce_scatter, part of the limit", 0.85, True,
         _of_limit(r"h200-reduce-scatter-\d", _slices, "direct")),
    Goal("all_reduce two_shot, part of the limit", 0.85, True,
         _of_limit(r"h200-all-reduce-\d", _whole, "two_shot")),
    Goal("all_to_all, part of the limit", 0.85, True,
         _of_limit(r"h200-all-to-all-\d", _slices, "push")),
    Goal("all_reduce of 8 to 512 KB in a graph, times as fast as torch's symm_mem, under MPS", 1.0,
         True, _ratio(r"h200-one-shot-symm-\d", ("symm_mem.one_shot",),
                      ("one_shot", "low_latency"))),
    Goal("host's time of an eager call, symm", 20, False, _host, " us"),
    Goal("a graph of 50 all_reduce of 8 KB, 8 ranks: each over an empty kernel", 3, False, _graph,
         " us"),
    Goal("the same under MPS, times as fast as torch's symm_mem", 1.0, True, _graph_of_torch),
    Goal("GEMM, times as fast as cuBLAS, large shapes", 0.97, True,
         _ratio("h200-gemm", ("torch.mm",), ("gemm",), _LARGE_M)),
    *_gathering("hbm_buffer"),
    *_gathering("direct"),
    Goal("hbm_buffer over PCIe, over the larger of link and product", 1.1, False,
         _over_link("over_limit")),
    Goal("the same, times as fast as copy engine, then cuBLAS", 1.5, True,
         _over_link("times_as_fast")),
    Goal("matmul_reduce_scatter push over GEMM, then collective", 1.0, False,
         _ratio(r"h200-matmul-reduce-scatter-(4096|8192)", ("push",), ("barrier",))),
    Goal("matmul_all_reduce two_shot over GEMM, then collective", 1.0, False,
         _ratio(r"h200-matmul-all-reduce-(4096|8192)", ("two_shot",), ("barrier",))),
    Goal("a traced call over one that is not", 1.1, False, _trace),
    Goal("pattern search with 100 configs: how much slower than the best of all", 3, False,
         _tuned("pattern, 100 configs"), " %"),
    Goal("its choice, times as fast as the default", 1.0, True,
         _tuned("its gain", "all_gather_matmul:|all_gather.gluon")),
    Goal("runs of the same tuning: how much slower the worst choice is than the best", 2, False,
         _tuned("runs apart", "[^:]*$"), " %"),
    Goal("the tuner's GPU has something to measure, of the last run of each kind", 60, True,
         _tuning("busy"), " %"),
    Goal("the tuner's rows, of the same", 1, False, _tuning("rows"), " %"),
)  # fmt: skip
