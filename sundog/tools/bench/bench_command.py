"""`sundog bench OP`: run the measurement, print the table, write the files."""

from __future__ import annotations

import csv
import dataclasses
import time
from pathlib import Path

from ...ops.select import Entry, write_entries
from ...report.page import check_page, write_page
from .._console import (
    FINE,
    FOUND,
    check_extra,
    check_writable,
    command,
    ensure_compiler_cache,
    write_json,
)
from ..presets import preset
from ..timing import machine
from . import results
from .limits import Rates
from .run import BenchOptions, Row, bench

__all__ = ["BenchOptions", "run"]


@command("bench")
def run(options: BenchOptions) -> int:
    """Exit with 1 if a variant was wrong or failed, with 2 if nothing could be measured."""
    check_writable(
        options.csv, options.json, options.plot, options.bars, options.entries, options.html
    )
    check_page(options.html)
    for flag, path in (("--plot", options.plot), ("--bars", options.bars)):
        if path:
            check_extra(flag, "plot", "matplotlib")
    ensure_compiler_cache()
    rows, rates = bench(options)
    if options.preset:
        options = dataclasses.replace(options, world=preset(options.preset, options.op)[1])
    results.print_rows(rows, _measured_ranks(options))
    _write_files(options, rows, rates)
    return FOUND if any(row.wrong for row in rows) else FINE


def _measured_ranks(options: BenchOptions) -> int:
    """Over a link only rank 0 is measured."""
    return 1 if options.link else options.world


def _write_files(options: BenchOptions, rows: list[Row], rates: Rates) -> None:
    if options.json:
        write_json(options.json, _content(options, rows, rates))
    write_page(options.html, _content(options, rows, rates), options.op)
    if options.csv:
        _write_csv(options.csv, rows, _measured_ranks(options))
    if options.entries:
        best = _best_entries(rows, Path(options.json).name or options.op)
        write_entries(Path(options.entries), best)
    if options.bars:
        from . import plot  # matplotlib is an extra

        plot.draw_bars(options.bars, rows)
    if options.plot:
        from . import plot

        if options.link:
            plot.draw_link(options.plot, [results.row_json(row) for row in rows], options.world)
        else:
            plot.draw(options.plot, rows, options.world)


def _content(options: BenchOptions, rows: list[Row], rates: Rates) -> dict[str, object]:
    return {
        "kind": "op", "op": options.op, "world": options.world, "backend": options.backend,
        "link": options.link, "plot": Path(options.plot).name, "machine": machine(),
        "rates": rates.as_json(), "rows": [results.row_json(row) for row in rows],
    }  # fmt: skip


def _best_entries(rows: list[Row], run: str) -> list[Entry]:
    """Keep the fastest config of each algorithm on each problem, for `ops/select.py`."""
    date = time.strftime("%Y-%m-%d", time.gmtime())
    best: dict[tuple[str, str], tuple[float, Entry]] = {}
    for row in rows:
        if row.entry is None or row.times is None:
            continue
        seconds, place = row.times.median, (row.variant, row.problem)
        if place not in best or seconds < best[place][0]:
            entry = dataclasses.replace(row.entry, seconds=round(seconds, 9), date=date, run=run)
            best[place] = seconds, entry
    return [entry for _, entry in best.values()]


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
    rate = row.cost.hbm_bytes * size / times.median / 1e9  # of all ranks
    flops = row.cost.flops * size / times.median / 1e12
    expected = f"{1e6 * row.expected:.3f}" if row.expected else ""
    limit = f"{row.limit / times.median:.3f}"
    return [*(f"{t:.3f}" for t in micro), f"{rate:.1f}", f"{flops:.2f}", limit, expected]
