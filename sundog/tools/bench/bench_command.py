"""`sundog bench OP`: from the command line's words to a table and files."""

from __future__ import annotations

import csv
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ...errors import SundogError
from ...ops.select import Entry, write_entries
from . import results
from .run import Row, bench

__all__ = ["op"]


def op(
    name: str, axes: Sequence[str], size: int, backend: str, only: Sequence[str], samples: int,
    csv_file: str, json_file: str, plot_file: str, link: str = "", entries_file: str = "",
) -> int:  # fmt: skip
    """Exit status: 1 if a variant was wrong or failed, 2 if nothing could be measured."""
    try:
        rows, rates = bench(name, axes, size, backend, only, samples, link)
    except (SundogError, ValueError) as error:
        print(f"sundog bench {name}: {error}", file=sys.stderr)
        return 2
    ranks = 1 if link else size  # that are measured
    results.print_rows(rows, ranks)
    if json_file:
        content = {"kind": "op", "op": name, "world": size, "backend": backend, "link": link}
        content |= {"plot": Path(plot_file).name}
        content |= {"machine": results.machine(), "rates": rates.as_json()}
        results.write(json_file, content | {"rows": [results.row_json(row) for row in rows]})
    if csv_file:
        _write_csv(csv_file, rows, ranks)
    if entries_file:
        write_entries(Path(entries_file), _best(rows, Path(json_file).name or name))
    if plot_file:
        from . import link_plot, plot  # matplotlib is an extra

        if link:
            link_plot.draw(plot_file, [results.row_json(row) for row in rows], size)
        else:
            plot.draw(plot_file, rows, size)
    return 1 if any(row.wrong for row in rows) else 0


def _best(rows: list[Row], run: str) -> list[Entry]:
    """The fastest config of each algorithm on each problem, for `choice`."""
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
        writer.writerow([*head, "gb_per_s", "of_limit", "wrong"])
        for row in rows:
            known = [row.problem, row.variant, row.config, row.programs or ""]
            writer.writerow([*known, *_measured(row, size), row.wrong])


def _measured(row: Row, size: int) -> list[str]:
    times = row.times
    if times is None:
        return [""] * 5
    micro = [1e6 * t for t in (times.median, times.percentile(20), times.percentile(80))]
    rate = row.cost.hbm_bytes * size / times.median / 1e9  # of all ranks
    return [*(f"{t:.3f}" for t in micro), f"{rate:.1f}", f"{row.limit / times.median:.3f}"]
