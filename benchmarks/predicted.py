"""`python -m benchmarks predict ours`: hold the time model to what was measured on one H200.

The figures of the machine are fitted to half of the shapes in docs/measured (predicted_rows.py),
and judged on the other half. With `--write`, they go into sundog/hardware. Then, with nothing but
the model, an algorithm is chosen for every case on which several were measured.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.predicted_plot import draw_scatter
from benchmarks.predicted_rows import (
    Row,
    measured_rows,
    predict_rows,
    predict_times,
    tuning_rows,
)
from benchmarks.result_files import Figures
from sundog.hardware.description import Hardware, Source, plain, read
from sundog.tools.calibrate_command import (
    errors,
    figure_of,
    fit,
    product_figures,
    signed,
    with_rates,
)

MACHINES = ("h200-shared", "h200-pcie")
# What is fitted, in two steps: collectives say nothing about products.
_MOVING = (
    "gpu.launch_s", "gpu.share_s", "gpu.flag_s", "gpu.peer_s", "gpu.load_s", "gpu.cache_rate",
    "gpu.sm_rate", "gpu.sm_load_rate", "gpu.poll_rate", "gpu.process_s",
)  # fmt: skip
_SOURCE = "fitted: to half of the shapes in docs/measured, by `python -m benchmarks predict ours`"
_DATE = "2026-11-20"
_HEAD = [
    "op, ranks on", "rows", "median", "90th percentile", "without 2 ranks", "worst row",
    "ratio: 90 %, worst",
]  # fmt: skip
_WORST = 12  # rows that the page shows


def main(folder: Path, tuned: Path, json_path: str, plot: str, write: bool) -> None:
    """Fit, judge, print; with `write`, change the package's descriptions."""
    rows = measured_rows(folder)
    machines = fit_machines(rows, {name: read(name) for name in MACHINES})
    if write:
        for name, hardware in machines.items():
            path = Path("sundog/hardware") / f"{name}.json"
            path.write_text(json.dumps(plain(hardware), indent=1) + "\n")
    judged = [row for row in rows if row.is_held_out]
    predicted = predict_times(judged, machines)
    seconds = [each.seconds for each in predicted]
    misses = errors(seconds, [row.seconds for row in judged])
    chosen = choices(rows, predict_rows(rows, machines))
    figures = Figures(
        "What the time model expects of our ops on one H200",
        f"Figures of the machine were fitted to {len(rows) - len(judged)} rows; these are the "
        f"errors on {len(judged)} rows of shapes that the fit has not seen. Goal: median 8 %, 90th "
        "percentile 20 %. Ratio: of the algorithm that the model alone would choose to the best. "
        "The form of the model, and a few of its constants, were chosen with all these rows in "
        "view. The last lines are of rows that were not: every config that tuning runs tried, most "
        "of them far from the default. There the model is not good for reductions and products.",
        _HEAD,
        _summary(judged, misses, chosen) + _tuned_lines(tuning_rows(tuned), machines),
    )
    ordered = sorted(range(len(judged)), key=lambda i: -abs(misses[i]))
    figures.show(
        json_path,
        on_cpu=True,
        samples=[
            [str(judged[i]), judged[i].run, judged[i].seconds, seconds[i], predicted[i].bound]
            for i in ordered
        ],
    )
    for i in ordered[:_WORST]:
        print(f"{misses[i]:+.0%}  {judged[i]}: {judged[i].seconds * 1e6:.1f} us")
    if plot:
        groups = [row.op.partition(".")[0] for row in judged]
        draw_scatter(plot, [row.seconds for row in judged], seconds, groups)


def fit_machines(rows: Sequence[Row], machines: dict[str, Hardware]) -> dict[str, Hardware]:
    """Fit the machines' figures to the rows that are not held out."""
    rows = [row for row in rows if not row.is_held_out]
    moving = [row for row in rows if "matmul" not in row.op and row.machine == "h200-shared"]
    multiplying = [row for row in rows if "matmul" in row.op]
    shared = machines["h200-shared"]
    found = fit(
        {name: figure_of(shared, name) for name in _MOVING},
        lambda figures: predict_rows(moving, _with(machines, figures)),
        [row.seconds for row in moving],
    )
    machines = _with(machines, found)

    def tables(figures: dict[str, float]) -> dict[str, Hardware]:
        return _with(machines, with_rates(shared, figures))

    found = fit(
        product_figures(shared),
        lambda figures: predict_rows(multiplying, tables(figures)),
        [row.seconds for row in multiplying],
    )
    names = (*_MOVING, "gpu.tile_s", "gpu.matmul_rate")
    source = Source(_SOURCE, _DATE)
    return {name: signed(each, names, source) for name, each in tables(found).items()}


def _with(machines: dict[str, Hardware], figures: dict) -> dict[str, Hardware]:
    return {name: each.changed(figures) for name, each in machines.items()}


def choices(rows: Sequence[Row], predicted: Sequence[float]) -> dict[str, list[float]]:
    """By op: how much longer the model's choice took than the best, for every measured case.

    Each algorithm has the config that comes first in its file: its default there.
    """
    cases: dict[tuple, dict[str, tuple[float, float]]] = {}
    for row, seconds in zip(rows, predicted, strict=True):
        cases.setdefault((row.place, *row.case), {}).setdefault(row.op, (seconds, row.seconds))
    found: dict[str, list[float]] = {}
    for case, algorithms in cases.items():
        if len(algorithms) > 1:
            _, took = min(algorithms.values())
            ratio = took / min(measured for _, measured in algorithms.values())
            found.setdefault(f"{case[1]}, {case[0]}", []).append(ratio)
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def _tuned_lines(rows: Sequence[Row], machines: dict[str, Hardware]) -> list[list[str]]:
    predicted = predict_rows(rows, machines)
    misses = errors(predicted, [row.seconds for row in rows])
    lines = _summary(rows, misses, {})
    return [[f"every config in data/h200: {name}", *cells] for name, *cells in lines]


def _summary(
    rows: Sequence[Row], misses: Sequence[float], chosen: dict[str, list[float]]
) -> list[list[str]]:
    groups: dict[str, list[tuple[float, Row]]] = {}
    for row, miss in zip(rows, misses, strict=True):
        groups.setdefault(f"{row.op}, {row.place}", []).append((miss, row))
    lines = []
    for name, found in sorted(groups.items()):
        sizes = [abs(miss) for miss, _ in found]
        more = [abs(miss) for miss, row in found if row.problem.size > 2]
        miss, row = max(found, key=lambda each: abs(each[0]))
        op, _, place = name.partition(", ")
        ratios = chosen.get(f"{op.partition('.')[0]}, {place}", [])
        ratio = f"{quantile(ratios, 0.9):.2f}, {max(ratios):.2f}" if ratios else ""
        lines.append(
            [
                name,
                str(len(found)),
                f"{statistics.median(sizes):.1%}",
                f"{quantile(sizes, 0.9):.1%}",
                f"{quantile(more, 0.9):.1%}" if more else "",
                f"{miss:+.0%}: {row.problem}",
                ratio,
            ]
        )
    return lines
