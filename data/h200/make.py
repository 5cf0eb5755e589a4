"""Made the data beside it, on one H200: `python data/h200/make.py FOLDER`.

Exhaustive runs first; then the same tuning by the pattern search, to compare. Each line that it
prints is one run. It goes on after a failure.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import sundog
from sundog.bench.results import machine

WORLD = 8
GATHER = [f"numel={numel},dtype=bfloat16" for numel in (131072, 4194304, 16777216)]
MATMUL = [
    f"m={m},n={n},k={k},dtype=bfloat16"
    for m, n, k in ((4096, 3584, 8192), (1024, 3584, 8192), (2048, 7168, 4096))
]
REDUCE = ["numel=4194304,dtype=bfloat16,op=sum"]
RUNS = (
    ("all_gather.push", GATHER, "exhaustive", 1000, 0),
    ("all_gather_matmul.hbm_buffer", MATMUL, "exhaustive", 1000, 0),
    ("all_reduce", REDUCE, "exhaustive", 1000, 0),
    ("all_gather.push", GATHER[1:2], "pattern", 100, 1),
    ("all_gather_matmul.barrier", MATMUL, "exhaustive", 1000, 0),
    ("all_gather.gluon", GATHER, "exhaustive", 1000, 0),
    ("all_gather_matmul.hbm_buffer", MATMUL[:1], "pattern", 60, 1),
)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for op, problems, search, budget, seed in RUNS:
        log = str(folder / op.partition(".")[0])
        try:
            done = sundog.tune(
                op, problems, world=WORLD, budget=budget, search=search, seed=seed, log=log
            )
        except Exception as error:
            print(op, f"{type(error).__name__}: {error}", flush=True)
            continue
        for tuned in done:
            print(
                f"{tuned.op} {search} {tuned.tried} tried, {tuned.failed} failed, "
                f"{tuned.default_milliseconds} -> {tuned.milliseconds} ms, {tuned.seconds:.1f} s, "
                f"busy {tuned.busy:.2f}, rows {tuned.writing:.4f}, {tuned.problem} {tuned.config}",
                flush=True,
            )
            shown = {k: str(v) for k, v in asdict(tuned).items() if k in ("problem", "config")}
            shares = {
                k: getattr(tuned, k) for k in ("tried", "failed", "seconds", "busy", "writing")
            }
            rows.append({"op": tuned.op, "search": search, **shown, **shares})
            (folder / "runs.json").write_text(json.dumps({"rows": rows}))
    (folder / "runs.json").write_text(json.dumps({"machine": machine(), "rows": rows}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
