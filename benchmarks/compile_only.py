"""`python -m benchmarks compile-only`: how long `sundog tune --compile-only` takes.

Three ops, two targets, 12 configs of each at random, with Triton's cache empty: under 2 minutes.
Where others use the machine too, the CPU time is what counts.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time

from sundog.tools.tune.tune import Tuned, tune

from .result_files import Figures

OPS = {
    "all_gather.push": "numel=4194304,dtype=bfloat16",
    "all_reduce.two_shot": "numel=4194304,dtype=bfloat16,op=sum",
    "all_gather_matmul.hbm_buffer": "m=4096,n=3584,k=8192,dtype=bfloat16",
}
TARGETS = ("sm_90", "gfx942")
BUDGET = 12
GOAL_S = 120


def measure(op: str, folder: str) -> tuple[list[Tuned], float, float]:
    """Compile, and return what was compiled with the seconds of the clock and of all cores."""
    begin, cpu = time.monotonic(), _cpu_seconds()
    log = os.path.join(folder, "log")
    done = tune(op, OPS[op], budget=BUDGET, search="random", targets=TARGETS, log=log)
    return done, time.monotonic() - begin, _cpu_seconds() - cpu


def _cpu_seconds() -> float:
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)  # workers count once they have ended
    return sum(use.ru_utime + use.ru_stime for use in map(resource.getrusage, who))


def main(json_path: str) -> None:
    rows: list[list[str]] = []
    total = total_cpu = 0.0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
        for op in OPS:
            done, seconds, cpu = measure(op, folder)
            total, total_cpu = total + seconds, total_cpu + cpu
            counts = f"{sum(each.tried for each in done)}, {sum(e.failed for e in done)} failed"
            rows.append([op, counts, f"{seconds:.0f} s", f"{cpu:.0f} s"])
    cores = os.cpu_count() or 1
    free = f"{total_cpu:.0f} s: {total_cpu / cores:.0f} s if all {cores} were free"
    rows.append(["all", f"goal {GOAL_S} s", f"{total:.0f} s", free])
    text = (
        f"{BUDGET} configs at random for each of {' and '.join(TARGETS)}, from an empty cache, on "
        f"{cores} CPU cores that other work shared."
    )
    head = ["op", "configs", "time", "of all cores"]
    Figures("Tuning without a GPU", text, head, rows).show(json_path, on_cpu=True)
