"""`sundog bench OP`: from the command line's words to a table and files."""

from __future__ import annotations

import csv
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bound import bench_bound
from benchmarks.graph_savings import bench_capture
from benchmarks.host_time import bench_host
from benchmarks.trace_cost import bench_trace

from ...errors import SundogError
from ...ops.select import Entry, write_entries
from ...target import has_gpu
from ..trace.trace_subject import Subject
from . import results
from .run import Row, bench

__all__ = ["bound", "capture", "host", "op", "trace"]


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


def host(sizes: Sequence[int], backend: str, json_file: str) -> int:
    """What an eager call with a cached plan costs the host."""
    if not has_gpu():
        print("sundog bench host: torch finds no GPU here", file=sys.stderr)
        return 2
    measured = [(size, bench_host(size, backend)) for size in sizes]
    head = ["ranks", *(times.name for times in measured[0][1])]
    rows = [[str(s), *(f"{1e6 * t.median:.1f} us" for t in found)] for s, found in measured]
    for row in rows:
        print(", ".join(f"{name} {cell}" for name, cell in zip(head, row, strict=True)))
    if json_file:
        title = f"What an eager call costs the host (`{backend}`)"
        text = (
            "With a cached plan, by the CPU's clock, 20 calls in a row: median of the slowest rank."
        )
        content = {"kind": "table", "title": title, "text": text, "machine": results.machine()}
        samples = [{"world": s, "times": [results.times_json(t) for t in f]} for s, f in measured]
        results.write(json_file, content | {"head": head, "rows": rows, "samples": samples})
    return 0


def bound(sizes: Sequence[int], backend: str, json_file: str) -> int:
    """With and without the bound on waits, for several world sizes."""
    if not has_gpu():
        print("sundog bench bound: torch finds no GPU here", file=sys.stderr)
        return 2
    measured = []
    for size in sizes:
        times = bench_bound(size, backend)
        measured.append((size, times))
        text = ", ".join(f"{t.name} {1e6 * t.median:.1f} us" for t in times)
        print(f"{size} ranks, 200 barriers: {text}", flush=True)
    if json_file:
        rows = [{"world": s, "times": [results.times_json(t) for t in ts]} for s, ts in measured]
        content = {"kind": "bound", "backend": backend, "machine": results.machine()}
        results.write(json_file, content | {"rows": rows})
    return 0


def capture(size: int, backend: str, nbytes: int, json_file: str) -> int:
    """Small all-reduces in a graph, one by one, and as empty kernels."""
    if not has_gpu():
        print("sundog bench capture: torch finds no GPU here", file=sys.stderr)
        return 2
    found = bench_capture(size, backend, nbytes)
    for times in found.graphs:
        print(f"{times.name}: {1e6 * times.median:.2f} us per call in a graph")
    for times in found.wall:
        print(f"{times.name}: {1e6 * times.median:.2f} us per call by the clock on the wall")
    if json_file:
        content = {"kind": "capture", "world": size, "backend": backend, "nbytes": nbytes}
        content["machine"] = results.machine()
        content["graphs"] = [results.times_json(times) for times in found.graphs]
        content["wall"] = [results.times_json(times) for times in found.wall]
        results.write(json_file, content)
    return 0


def trace(subject: Subject, size: int, backend: str, link: str, json_file: str) -> int:
    """With and without trace points."""
    if not has_gpu():
        print("sundog bench trace: torch finds no GPU here", file=sys.stderr)
        return 2
    try:
        title, times = bench_trace(subject, size, backend, link)
    except (SundogError, ValueError) as error:
        print(f"sundog bench trace: {error}", file=sys.stderr)
        return 2
    off, on = times
    cost = f"{100 * (on.median / off.median - 1):+.1f} %"
    print(f"{title}: {1e6 * off.median:.1f} us, traced {1e6 * on.median:.1f} us, {cost}")
    if json_file:
        content = {"kind": "trace_cost", "title": title, "world": size, "backend": backend}
        content |= {"link": link, "machine": results.machine()}
        results.write(json_file, content | {"times": [results.times_json(t) for t in times]})
    return 0


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
