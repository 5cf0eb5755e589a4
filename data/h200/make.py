"""Made the data beside it, on one H200: `python data/h200/make.py FOLDER [SECONDS]`.

Whole spaces first, then one of the same tunings by the pattern search, to compare. What is not done
after so many seconds is left out; what was measured is kept.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import sundog
from sundog.bench.results import machine

WORLD = 8
GATHER = [f"numel={numel},dtype=bfloat16" for numel in (4194304, 131072, 16777216)]
REDUCE = ["numel=4194304,dtype=bfloat16,op=sum"]
MATMUL = [
    f"m={m},n={n},k={k},dtype=bfloat16"
    for m, n, k in ((4096, 3584, 8192), (1024, 3584, 8192), (512, 7168, 8192))
]
RUNS = (
    ("all_gather.push", GATHER, "exhaustive", 0),
    ("all_reduce", REDUCE, "exhaustive", 0),
    ("all_gather_matmul.hbm_buffer", MATMUL, "exhaustive", 0),
    ("all_gather.push", GATHER[:1], "pattern", 1),
    ("all_gather_matmul.barrier", MATMUL, "exhaustive", 0),
    ("all_gather.gluon", GATHER, "exhaustive", 0),
)


def main(folder: Path, seconds: float) -> None:
    begin = time.monotonic()
    rows: list[dict] = []

    def in_time(*step: object) -> None:
        if time.monotonic() - begin > seconds:
            raise TimeoutError(f"{seconds:.0f} s are over")

    for op, problems, search, seed in RUNS:
        if time.monotonic() - begin > seconds:
            break
        log = str(folder / op.partition(".")[0])
        budget = 100 if search == "pattern" else 10**6
        try:
            done = sundog.tune(
                op, problems, world=WORLD, budget=budget, search=search, seed=seed, log=log,
                progress=in_time,
            )  # fmt: skip
        except Exception as error:
            print(f"{op} {search}: {type(error).__name__}: {error}", flush=True)
            continue
        rows += [row_of(tuned, search) for tuned in done]
        write(folder, {"rows": rows})
    write(folder, {"machine": machine(), "rows": rows})  # only now: it uses CUDA in this process


def row_of(tuned: sundog.tuning.Tuned, search: str) -> dict:
    row = {name: getattr(tuned, name) for name in ("op", "run_id", "tried", "failed")}
    row |= {"seconds": tuned.seconds, "busy": tuned.busy}
    row |= {"problem": str(tuned.problem), "search": search, "writing": tuned.writing}
    row |= {"config": str(tuned.config), "default": str(tuned.default)}
    row |= {"ms": tuned.milliseconds, "default_ms": tuned.default_milliseconds}
    print(f"{time.strftime('%H:%M:%S')} {row}", flush=True)
    return row


def write(folder: Path, content: dict) -> None:
    (folder / "runs.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 1e9)
