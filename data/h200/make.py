"""Make the data of this folder on one H200: `python data/h200/make.py FOLDER [SECONDS [OP ...]]`.

First a whole space of each op, then the same tunings by the pattern search with other seeds, and
other problems. Nothing starts after SECONDS; what was measured is kept, an op that fails does not
stop the others, and what the folder's runs.json has is not run again. At the end the choices of
several runs of one tuning are measured again, interleaved.
"""

from __future__ import annotations

import ast
import itertools
import json
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import sundog
from sundog.tools._pool import Failure, Worker
from sundog.tools.timing import machine
from sundog.tools.tune.measure import WHERE, TunePlace, serve_world
from sundog.tools.tune.space import Job, jobs
from sundog.tools.tune.tune import Tuned

WORLD = 8
GATHER = [f"numel={numel},dtype=bfloat16" for numel in (4194304, 131072, 1048576)]
REDUCE = ["numel=1048576,dtype=bfloat16,op=sum"]
MATMUL = [
    f"m={m},n={n},k={k},dtype=bfloat16"
    for m, n, k in ((4096, 3584, 8192), (1024, 3584, 8192), (512, 7168, 8192))
]
RUNS = (
    ("all_gather.gluon", GATHER[:1], "exhaustive", 0),
    ("all_reduce", REDUCE, "exhaustive", 0),
    ("all_gather_matmul.hbm_buffer", MATMUL, "exhaustive", 0),
    ("all_gather.gluon", GATHER[1:], "exhaustive", 0),
    ("all_gather.gluon", GATHER, "pattern", 1),
    ("all_reduce", REDUCE, "pattern", 1),
    ("all_gather_matmul", MATMUL, "exhaustive", 0),
    ("all_gather_matmul.direct", MATMUL, "pattern", 1),
    ("all_gather_matmul", MATMUL, "pattern", 2),
    ("all_reduce", REDUCE, "exhaustive", 1),
    ("all_gather.gluon", GATHER, "pattern", 2),
)


def main(folder: Path, seconds: float, ops: list[str]) -> None:
    end = time.monotonic() + seconds
    path, watch = folder / "runs.json", folder / "gpu.log"
    recorded = json.loads(path.read_text()) if path.exists() else {"runs": []}
    before = recorded["runs"]
    known = [(r["op"], r["problems"], r["search"], r["seed"]) for r in before if not r["error"]]
    runs: list[dict[str, Any]] = []
    with watch.open("a") as file:
        smi = subprocess.Popen(
            ["nvidia-smi", "--query-gpu=timestamp,utilization.gpu,clocks.sm,clocks.mem",
             "--format=csv,noheader,nounits", "-lms", "100"], stdout=file,
        )  # fmt: skip
    try:
        for run in RUNS:
            wanted = not ops or run[0].partition(".")[0] in ops
            if wanted and run not in known and time.monotonic() < end:
                runs.append(tune(folder, *run, end))
        recorded["compared"] = compare(before + runs)
    finally:  # what came before an interrupt counts
        smi.terminate()
        # Only now: it uses CUDA in this process.
        here = {**machine(), "command": "python data/h200/make.py FOLDER"}
        after = [{**run, "machine": here, "kernels_ran": ran(run, watch)} for run in runs]
        recorded |= {"machine": here, "runs": before + after}
        path.write_text(json.dumps(recorded, indent=1) + "\n")


def tune(
    folder: Path, op: str, problems: list[str], search: str, seed: int, end: float
) -> dict[str, Any]:
    """Tune once and time it, from before its world is opened until after it is closed."""

    def in_time(*step: object) -> None:
        if time.monotonic() > end:
            raise TimeoutError("the time is over")

    log = str(folder / op.partition(".")[0])
    budget = 100 if search == "pattern" else 10**6
    begin = time.time()
    known: dict[str, Any] = {"op": op, "problems": problems, "search": search, "seed": seed}
    known |= {"begin": begin, "error": ""}
    done: list[Tuned] = []
    try:
        done = sundog.tune(
            op, problems, world=WORLD, budget=budget, search=search, seed=seed, log=log,
            progress=in_time,
        )  # fmt: skip
    except Exception as error:
        known["error"] = f"{type(error).__name__}: {error}"
    known |= {"seconds": time.time() - begin, "tuned": [row_of(each) for each in done]}
    summary = [(each.op, each.tried, each.failed, each.milliseconds, each.busy) for each in done]
    print(time.strftime("%X"), op, search, seed, known["seconds"], summary, known["error"])
    return known


def compare(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Measure what several runs of the same tuning chose, interleaved, in one world."""
    where: dict[str, Job] = {}  # by run id: the same kernels on the same problem
    chosen: dict[str, dict[str, Any]] = {}
    for run in runs:
        for text, tuned in itertools.product(run["problems"], run["tuned"]):
            (job,) = jobs(tuned["op"], text, WORLD)
            if str(job.problem) == tuned["problem"] and tuned["ms"] is not None:
                where[tuned["run_id"]] = job
                config = config_of(job, tuned["config"])
                chosen.setdefault(tuned["run_id"], {})[tuned["config"]] = config
    several = [run_id for run_id, configs in chosen.items() if len(configs) > 1]
    if not several:
        return []
    place = TunePlace("virtual", final_samples=30)
    world = Worker(serve_world([where[run_id] for run_id in several], place), 120)
    found = []
    try:
        for task in (WHERE, *((n, [*chosen[run_id].values()]) for n, run_id in enumerate(several))):
            world.submit(task)
            found.append(world.wait())
    finally:
        world.close()
    return [
        {"run_id": run_id, "configs": list(chosen[run_id]),
         "samples_ms": [measured.samples_ms for measured in reply]}
        for run_id, reply in zip(several, found[1:], strict=True)
        if not isinstance(reply, Failure)
    ]  # fmt: skip


def config_of(job: Job, text: str) -> Any:
    """Return the config that is printed like this."""
    (made,) = ast.parse(text).body
    assert isinstance(made, ast.Expr)
    assert isinstance(made.value, ast.Call)
    given = {str(word.arg): ast.literal_eval(word.value) for word in made.value.keywords}
    return job.module.Config(**given)


def row_of(tuned: Tuned) -> dict[str, Any]:
    names = ("op", "run_id", "tried", "failed", "seconds", "busy", "writing")
    row = {name: getattr(tuned, name) for name in names}
    row |= {"problem": str(tuned.problem), "config": str(tuned.config)}
    row |= {"ms": tuned.milliseconds, "default_ms": tuned.default_milliseconds}
    return row


def ran(run: dict[str, Any], watch: Path) -> float | None:
    """Return the part of a run's time in which a kernel ran, by nvidia-smi."""
    shares = []
    for line in watch.read_text().splitlines():
        when, _, rest = line.partition(", ")
        share = rest.partition(", ")[0]  # then the clocks, which lines of 12:36 do not have
        if share.isdecimal():
            at = datetime.strptime(when, "%Y/%m/%d %H:%M:%S.%f").timestamp()
            if 0 <= at - run["begin"] <= run["seconds"]:
                shares.append(int(share) / 100)
    return sum(shares) / len(shares) if shares else None


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 1e9, sys.argv[3:])
