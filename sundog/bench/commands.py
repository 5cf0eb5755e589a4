"""`sundog bench OP`: from the command line's words to a table and files."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from ..errors import SundogError
from ..target import has_gpu
from . import results
from .bound import bench_bound
from .run import Row, bench

__all__ = ["bound", "op"]


def op(
    name: str, axes: Sequence[str], size: int, backend: str, only: str, samples: int,
    csv_file: str, json_file: str, plot_file: str,
) -> int:  # fmt: skip
    """Exit status: 1 if a result was wrong, 2 if nothing could be measured."""
    try:
        rows, rates = bench(name, axes, size, backend, only, samples)
    except (SundogError, ValueError) as error:
        print(f"sundog bench {name}: {error}", file=sys.stderr)
        return 2
    results.print_rows(rows, size)
    if json_file:
        content = {"kind": "op", "op": name, "world": size, "backend": backend}
        content |= {"machine": results.machine(), "rates": rates.as_json()}
        results.write(json_file, content | {"rows": [results.row_json(row) for row in rows]})
    if csv_file:
        _write_csv(csv_file, rows)
    if plot_file:
        _plot(plot_file, rows)
    return 1 if any(row.wrong for row in rows) else 0


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


def _write_csv(path: str, rows: list[Row]) -> None:
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["problem", "variant", "config", "median_us", "p20_us", "p80_us", "wrong"])
        for row in rows:
            times = row.times
            cells = [times.median, times.percentile(20), times.percentile(80)] if times else []
            shown = [f"{1e6 * t:.3f}" for t in cells] or ["", "", ""]
            writer.writerow([row.problem, row.variant, row.config, *shown, row.wrong])


def _plot(path: str, rows: list[Row]) -> None:
    """Achieved bytes per second over the bytes of a rank, one line per variant."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots()
    for name in dict.fromkeys(row.variant for row in rows):
        points = [(r.cost.hbm_bytes, r.times) for r in rows if r.variant == name and r.times]
        axes.plot([n for n, _ in points], [n / t.median / 1e9 for n, t in points], "o-", label=name)
    axes.set(xscale="log", xlabel="bytes read and written per rank", ylabel="GB/s per rank")
    axes.legend()
    figure.savefig(path)
