"""`python -m benchmarks before-after OLD`: the same ops in two source trees, interleaved.

OLD is a folder with the `sundog` of another commit. Each round runs `sundog bench` of every op in
one tree and then in the other, on the same GPU; the figure is the ratio of the medians.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sundog.tools.bench.bench_command import problem_text
from sundog.tools.timing import times_of

from .result_files import Figures, read_result

_SIZES = ("numel=4096,65536,1048576", "dtype=bfloat16")
_SHAPES = ("m=256,4096", "n=3584", "k=8192", "dtype=bfloat16")
AXES = {
    "all_gather": _SIZES,
    "all_reduce": _SIZES,
    "reduce_scatter": _SIZES,
    "all_to_all": _SIZES,
    "all_gather_matmul": _SHAPES,
    "matmul_reduce_scatter": _SHAPES,
    "matmul_all_reduce": _SHAPES,
}
_SECONDS = 120  # for one op in one tree
Case = tuple[str, str, str]  # op, problem, variant with its config


def main(old: Path, size: int, rounds: int, samples: int, json_file: str) -> None:
    new = Path(__file__).resolve().parent.parent
    found: dict[Case, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for op in AXES:
            for name, tree in (("old", old.resolve()), ("new", new)):
                for case, median in _bench(tree, op, size, samples).items():
                    found.setdefault(case, {"old": [], "new": []})[name].append(median)
    rows = compare(found)
    ratios = [float(row[-1]) for row in rows]
    text = (
        f"{size} ranks on one GPU, bfloat16, {rounds} interleaved rounds, medians of {samples} "
        f"samples of the slowest rank. Over all {len(rows)} lines new over old is "
        f"{statistics.median(ratios):.3f} in the middle and {max(ratios):.3f} at most."
    )
    head = ["op", "problem", "variant", "old", "new", "new over old"]
    figures = Figures("Before and after the barrier after every wait", text, head, rows)
    figures.show(json_file, medians=[[*case, times] for case, times in found.items()])


def compare(found: dict[Case, dict[str, list[float]]]) -> list[list[str]]:
    """Return a line for what both trees have measured: the best round of each."""
    rows = []
    for case, times in found.items():
        if times["old"] and times["new"]:
            old, new = min(times["old"]), min(times["new"])
            rows.append([*case, f"{1e6 * old:.1f} us", f"{1e6 * new:.1f} us", f"{new / old:.3f}"])
    return rows


def _bench(tree: Path, op: str, size: int, samples: int) -> dict[Case, float]:
    """Run `sundog bench` in a tree; seconds by problem and variant."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        words = [sys.executable, "-m", "sundog", "bench", op, "--world", str(size)]
        words += ["--samples", str(samples), "--baseline", "none", "--json", str(path)]
        words += [word for axis in AXES[op] for word in ("--axis", axis)]
        given = os.environ.get("PYTHONPATH", "")
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, (str(tree), given))))
        done = subprocess.run(
            words, cwd=tree, env=environment, capture_output=True, text=True, timeout=_SECONDS
        )
        if not path.exists():
            print(f"{op} in {tree.name}: exit status {done.returncode}\n{done.stderr[-1000:]}")
            return {}
        return {
            (op, problem_text(row["problem"]), _variant(row)): times_of(row["times"]).median
            for row in read_result(path)["rows"]
            if row["times"] is not None
        }


def _variant(row: dict[str, Any]) -> str:
    """Name the algorithm and the settings that matter, as both trees write them."""
    config = re.sub(r"^\w+\(|\)$", "", row["config"])
    return f"{row['variant']} {config}".strip()
