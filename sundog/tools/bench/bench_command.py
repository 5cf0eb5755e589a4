"""`sundog bench OP`: run the measurement, print the table, write every sample, draw pictures."""

from __future__ import annotations

import csv
import dataclasses
import math
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ...ops.select import Entry, write_entries
from .._console import (
    FINE,
    FOUND,
    command,
    ensure_compiler_cache,
    picture,
    write_json,
    write_results,
)
from .._options import BenchOptions
from ..presets import preset, suite
from ..timing import machine, times_json
from .limits import Rates
from .run import Row, bench


@command("bench")
def run(options: BenchOptions) -> int:
    """Exit with 1 if a variant was wrong or failed, with 2 if nothing could be measured."""
    ensure_compiler_cache()
    if options.suite or options.op == "suite":
        return _run_suite(options)
    rows, rates = bench(options)
    if options.preset:
        options = dataclasses.replace(options, world=preset(options.preset, options.op)[1])
    print_rows(rows, _measured_ranks(options))
    _write_files(options, rows, rates)
    return FOUND if any(row.wrong for row in rows) else FINE


def _run_suite(options: BenchOptions) -> int:
    """Run every part of a suite in turn, a table for each; all of them in one file."""
    if options.op != "suite":
        raise ValueError(f"{options.op} {options.suite}: a name follows only after `bench suite`")
    others = ("csv", "plot", "bars", "entries", "html", "preset")
    if asked := [f"--{name}" for name in others if getattr(options, name)]:
        raise ValueError(f"{', '.join(asked)}: a suite has several ops; it takes --json")
    parts, wrong = [], False
    for op, axes, named in suite(options.suite, options.world):
        both = [*axes, *(options.axes or ())]
        each = dataclasses.replace(options, op=op, axes=both, preset=named, suite="")
        rows, rates = bench(each)
        print_rows(rows, _measured_ranks(each))
        wrong |= any(row.wrong for row in rows)
        parts.append(_content(each, rows, rates))
        if options.json:  # after each part: a suite takes long, and may be stopped
            content = {"kind": "suite", "suite": options.suite, "machine": machine()}
            write_json(options.json, content | {"parts": parts})
    return FOUND if wrong else FINE


def print_rows(rows: list[Row], size: int) -> None:
    """Print, per problem, the op's own variants, then the baselines; times of the slowest rank.

    "Over stored" is the time divided by the one that `auto` knows for this config, if any.
    """
    table = Table(title=f"{size} ranks; time of the slowest")
    columns = ("problem", "variant", "median", "20 %", "80 %", "skew", "GB/s", "TFLOP/s", "limit")
    for column in (*columns, "over stored", "times as fast as"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, _cells(row, rows, size)))
    Console(emoji=False, width=200).print(table)


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
        f"{_rate(row, size):.0f}",
        f"{_flop_rate(row, size):.1f}",
        f"{row.limit / times.median:.2f}",
        f"{times.median / row.stored:.2f}" if row.stored else "",
        ", ".join(others) if row.config else "",
    ]


def _measured_ranks(options: BenchOptions) -> int:
    """Return the ranks that count. Over a link only rank 0 is measured."""
    return 1 if options.link else options.world


def _write_files(options: BenchOptions, rows: list[Row], rates: Rates) -> None:
    write_results(_content(options, rows, rates), options.op, options.json, options.html)
    if options.csv:
        _write_csv(options.csv, rows, _measured_ranks(options))
    if options.entries:
        best = _best_entries(rows, Path(options.json).name or options.op)
        write_entries(Path(options.entries), best)
    if options.bars:
        draw_bars(options.bars, rows)
    if options.plot:
        if options.link:
            draw_link(options.plot, [row_json(row) for row in rows], options.world)
        else:
            draw(options.plot, rows, options.world)


def _content(options: BenchOptions, rows: list[Row], rates: Rates) -> dict[str, object]:
    return {
        "kind": "op", "op": options.op, "world": options.world, "backend": options.backend,
        "link": options.link, "plot": Path(options.plot).name, "machine": machine(),
        "rates": rates.as_json(), "rows": [row_json(row) for row in rows],
    }  # fmt: skip


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


def _best_entries(rows: list[Row], run: str) -> list[Entry]:
    """Keep the fastest config of each algorithm on each problem, for `ops/select.py`."""
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return [
        dataclasses.replace(row.entry, seconds=round(row.median, 9), date=date, run=run)
        for row in _fastest(rows, lambda row: (row.variant, row.problem))
        if row.entry is not None
    ]


def _fastest(rows: Iterable[Row], key: Callable[[Row], Any]) -> list[Row]:
    """Return the fastest timed row for each key, in the order in which the keys come first."""
    groups: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        if row.times is not None:
            groups[key(row)].append(row)
    return [min(group, key=lambda row: row.median) for group in groups.values()]


def _write_csv(path: str, rows: list[Row], size: int) -> None:
    head = ["problem", "variant", "config", "programs", "median_us", "p20_us", "p80_us"]
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*head, "gb_per_s", "tflop_per_s", "of_limit", "expected_us", "wrong"])
        for row in rows:
            known = [row.problem, row.variant, row.config, row.programs or ""]
            writer.writerow([*known, *_figures(row, size), row.wrong])


def _figures(row: Row, size: int) -> list[str]:
    times = row.times
    if times is None:
        return [""] * 7
    micro = [1e6 * t for t in (times.median, times.percentile(20), times.percentile(80))]
    rate, flops = _rate(row, size), _flop_rate(row, size)
    expected = f"{1e6 * row.expected:.3f}" if row.expected else ""
    limit = f"{row.limit / times.median:.3f}"
    return [*(f"{t:.3f}" for t in micro), f"{rate:.1f}", f"{flops:.2f}", limit, expected]


def problem_text(problem: str) -> str:
    """Return a row's problem as text for people."""
    return problem.removeprefix("Problem(").removesuffix(")").replace("torch.", "")


# pictures, with matplotlib, which is an extra: bytes per second, or over a link the time


_PRODUCT = 8  # operations per byte, from which it is a product, not a sum


def draw(path: str, rows: list[Row], size: int) -> None:
    """Draw over the number of programs, a panel per problem, or over bytes where that is fixed."""
    timed = [row for row in rows if row.times is not None]
    has_several = len({row.programs for row in timed if row.config}) > 1
    (_by_programs if has_several else _by_bytes)(path, timed, size)


def _by_programs(path: str, rows: list[Row], size: int) -> None:
    problems = list(dict.fromkeys(row.problem for row in rows))
    across = min(3, len(problems))
    down = math.ceil(len(problems) / across)
    shape = (5 * across, 4 * down)
    with picture(path, down, across, figsize=shape, sharex=True) as (figure, panels):
        variants = list(dict.fromkeys(row.variant for row in rows))
        for panel, problem in zip(panels.flat, problems, strict=False):
            mine = [row for row in rows if row.problem == problem]
            _panel(panel, mine, variants, size)
            read = mine[0].cost.read_bytes / (1 << 20)
            panel.set_title(
                f"{problem_text(problem)}\n{read:.3g} MiB read by each rank", fontsize=9
            )
        for panel in panels.flat[len(problems) :]:
            panel.set_visible(False)
        panels.flat[0].legend(fontsize=8)
        figure.supxlabel("programs")
        figure.supylabel("GB/s of all ranks, read and written")


def _panel(panel: Any, rows: list[Row], variants: list[str], size: int) -> None:
    """Draw a panel. The fastest of several configs with the same number of programs counts."""
    for number, name in enumerate(variants):
        mine = _fastest((row for row in rows if row.variant == name), lambda row: row.programs)
        best = {row.programs: _rate(row, size) for row in mine}
        color = f"C{number}"  # the same in every panel, even if another one is missing
        if mine and mine[0].config:
            rates = [best[programs] for programs in sorted(best)]
            panel.plot(sorted(best), rates, "o-", label=name, color=color)
        elif mine:
            panel.axhline(_rate(mine[0], size), label=name, linestyle="--", color=color)
    if rows[0].limit:  # otherwise there is nothing to move
        limit = rows[0].cost.hbm_bytes * size / rows[0].limit / 1e9
        panel.axhline(limit, label="limit", linestyle=":", color="black")
    panel.set_ylim(bottom=0)


def _by_bytes(path: str, rows: list[Row], size: int) -> None:
    """Draw bytes per second and, for products, operations per second in another panel."""
    is_product = any(row.cost.flops > _PRODUCT * row.cost.hbm_bytes for row in rows)
    rates = {"GB/s of all ranks": _rate, "TFLOP/s of all ranks": _flop_rate}
    names = dict.fromkeys(row.variant for row in rows)
    rows = sorted(rows, key=lambda row: row.cost.hbm_bytes)
    across = 1 + is_product
    with picture(path, 1, across, figsize=(6.4 * across, 4.8)) as (_, panels):
        for panel, (label, rate) in zip(panels[0], rates.items(), strict=False):
            for name in names:
                mine = [row for row in rows if row.variant == name]
                places = [row.cost.hbm_bytes for row in mine]
                panel.plot(places, [rate(row, size) for row in mine], "o-", label=name)
            panel.set(xscale="log", xlabel="bytes read and written per rank", ylabel=label)
        panels[0, 0].legend()


def _flop_rate(row: Row, size: int) -> float:
    return row.cost.flops * size / row.median / 1e12


def _rate(row: Row, size: int) -> float:
    """Return the bytes per second of all ranks, in GB."""
    return row.cost.hbm_bytes * size / row.median / 1e9


def draw_link(path: str, rows: list[dict[str, Any]], size: int) -> None:
    """Draw a line per algorithm, for its fastest config, and per baseline; a panel per M.

    `rows`: as in the JSON.
    """
    panels: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found = re.search(r"\bm=\d+", row["problem"])
        if row["times"] is not None:
            panels[found[0] if found else ""].append(row)
    with picture(path, 1, len(panels), figsize=(6.4 * len(panels), 4.8)) as (_, axes):
        for each, (name, some) in zip(axes[0], panels.items(), strict=True):
            _link_panel(each, some)
            over = f", {name.replace('m=', 'M=')}" if name else ""
            each.set_title(f"{size} ranks, the others' data across PCIe{over}")
        axes[0][0].legend(fontsize=8)


def _link_panel(axes: Any, rows: list[dict[str, Any]]) -> None:
    lines: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        found = re.search(r"\bn=(\d+)|numel=(\d+)", row["problem"])
        if found is None:
            continue
        at = int(found[1] or found[2])
        median = statistics.median(ranks[0] for ranks in row["times"]["samples_ns"])
        lines[row["variant"]][at] = min(lines[row["variant"]].get(at, median), median)
        lines["limit"][at] = row["limit_ns"]
    for name, points in lines.items():
        style = "k:" if name == "limit" else "o-"
        places = sorted(points)
        axes.plot(places, [1e-6 * points[at] for at in places], style, label=name)
    axes.set(xlabel="N", ylabel="ms on rank 0", ylim=(0, None))


Bar = tuple[str, float, float, float]  # label, measured, expected and least microseconds


def bars_of(rows: list[Row]) -> dict[str, list[Bar]]:
    """Return the bars of every problem, with each variant's fastest config. 0 means unknown."""
    panels: dict[str, list[Bar]] = defaultdict(list)
    for row in _fastest(rows, lambda row: (row.problem, row.variant)):
        bar = row.variant, 1e6 * row.median, 1e6 * row.expected, 1e6 * row.limit
        panels[row.problem].append(bar)
    return panels


def draw_bars(path: str, rows: list[Row]) -> None:
    """Draw a panel per problem: the measured time, the expected time, and a line at the limit."""
    panels = bars_of(rows)
    height = 1 + 0.5 * sum(len(bars) + 1 for bars in panels.values())
    with picture(path, max(len(panels), 1), figsize=(8, height)) as (_, axes):
        for panel, (problem, bars) in zip(axes[:, 0], panels.items(), strict=False):
            places = range(len(bars))
            panel.barh([p - 0.2 for p in places], [bar[1] for bar in bars], 0.4, label="measured")
            panel.barh([p + 0.2 for p in places], [bar[2] for bar in bars], 0.4, label="expected")
            panel.axvline(bars[0][3], linestyle=":", color="black", label="limit")
            panel.set_yticks(list(places), [bar[0] for bar in bars])
            panel.invert_yaxis()
            panel.set_title(problem_text(problem), fontsize=9)
            panel.set_xlabel("us of the slowest rank")
        axes[0, 0].legend(fontsize=8)
