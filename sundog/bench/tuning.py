"""What tuning runs found and cost: `python -m sundog.bench.tuning data/h200 docs/measured`.

From the datasets of a folder, and its runs.json (data/h200/make.py), come two tables, and a plot of
a tuning of each algorithm.

Each run that tried its whole space is replayed: the pattern search asks for configs again, and gets
the times that were recorded, so it needs no GPU. How far from the best of the run it ends with 100
configs, and whether it beats the default, is one line of the table. Where the same tuning was run
again with another seed, how far apart the choices are, by the times of either run, is told too.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas

from .. import op as ops
from ..dataset.plot import draw_convergence
from ..dataset.reader import read
from ..tuning.search import pattern
from ..tuning.space import Space
from .results import write

__all__ = ["Session", "replay", "sessions"]

BUDGETS = (100, 40)
SEEDS = 20


@dataclass(frozen=True)
class Session:
    """One run of a tuning: the median of each config, None where it failed, in order of asking."""

    op: str
    problem: str
    search: str
    seed: int
    space: int  # configs
    times: dict[Any, float | None]
    final: dict[Any, float]  # of the finalists
    chosen: Any  # the best of those
    run_id: str = ""
    known_s: tuple[float, ...] = ()  # from one timed row to the next, its kernel known ...
    new_s: tuple[float, ...] = ()  # ... and new

    @property
    def best(self) -> float:
        return min(t for t in self.times.values() if t is not None)

    @property
    def is_whole(self) -> bool:
        return len(self.times) == self.space


def sessions(base: str) -> list[Session]:
    data = read(base)
    found = []
    for run in data.runs.itertuples():
        rows = data.rows[(data.rows.session == run.session) & (data.rows.status != "started")]
        found.append(_session(run, rows))
    return found


def _session(run: Any, rows: pandas.DataFrame) -> Session:
    kind = ops.find(run.kernel_name).Config
    rows = rows.sort_values("config_index")
    times: dict[int, dict[Any, float | None]] = {0: {}, 1: {}}  # by repeat
    for row in rows.itertuples():
        timed = float(row.perf_ms) if row.status == "ok" else None
        times[row.repeat][kind(**json.loads(row.config))] = timed
    final = {config: t for config, t in times[1].items() if t is not None}
    values = {each["name"]: each["value"] for each in run.arguments}
    problem = ", ".join(f"{k}={v}" for k, v in values.items() if k in ("numel", "m", "n", "k"))
    search, seed, space = (run.settings[name] for name in ("search", "seed", "space"))
    chosen = min(final, key=lambda config: final[config]) if final else None
    found = run.kernel_name, problem, search, seed, space, times[0], final, chosen
    return Session(*found, run.run_id, *_steps(rows))


def _steps(rows: pandas.DataFrame) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds from the end of one config to that of the next, where it was timed."""
    steps: dict[bool, list[float]] = {True: [], False: []}  # is the kernel known?
    known: set[str] = set()
    before = None
    for row in rows[rows.repeat == 0].sort_values("timestamp_s").itertuples():
        if before is not None and row.status == "ok":
            steps[row.ir_id in known].append(row.timestamp_s - before)
        known.add(row.ir_id)
        before = row.timestamp_s
    return tuple(steps[True]), tuple(steps[False])


def replay(session: Session, budget: int, seed: int) -> float:
    """What the pattern search would have found: its best over the best of all."""
    asked: dict[Any, float | None] = {}

    def evaluate(configs: list[Any], generation: int) -> list[float | None]:
        asked.update({config: session.times[config] for config in configs})
        return [asked[config] for config in configs]

    pattern(Space(tuple(session.times)), evaluate, budget, random.Random(seed))
    return min(t for t in asked.values() if t is not None) / session.best


def apart(a: Session, b: Session, judges: list[Session]) -> float | None:
    """How much slower the worse of two choices is, by the times of the run that is harder on it.

    A run in which both were finalists took their times in turns: only these count then.
    """
    found = []
    for run in judges:
        both = {a.chosen, b.chosen}
        times = [(run.final if both <= run.final.keys() else run.times).get(c) for c in both]
        if None not in times:
            found.append(max(times) / min(times) - 1)  # type: ignore[type-var, operator]
    return max(found, default=None)


def rows_of(found: list[Session]) -> list[list[str]]:
    """A line per tuning: the run that tried the most, and what the others say of it."""
    lines = []
    for (op, problem), runs in _by_problem(found).items():
        whole = max(runs, key=lambda run: len(run.times))
        default = next(iter(whole.times))
        failed = sum(t is None for t in whole.times.values())
        cells = [op, problem, f"{len(whole.times)} of {whole.space}", str(failed)]
        cells += [f"{1e3 * whole.final[c]:.1f} us" for c in (default, whole.chosen)]
        cells.append(f"{whole.final[default] / whole.final[whole.chosen]:.3f}")
        moved = [abs(t / (whole.times[c] or t) - 1) for c, t in whole.final.items()]
        cells += [f"{100 * max(moved):.1f} %", *_replayed(whole, default)]
        pairs = [apart(a, b, runs) for a, b in itertools.combinations(runs, 2)]
        known = [pair for pair in pairs if pair is not None]
        cells.append(f"{100 * max(known):.1f} % of {len(runs)}" if known else "")
        lines.append(cells)
    return lines


def _replayed(whole: Session, default: Any) -> list[str]:
    """Of each budget, the worst seed: over the best of all, and what is left of the gain.

    Not by the default's first time: it is the first config that is measured, and 7 and 11 % slower
    then, with all_reduce, than beside the others.
    """
    cells = []
    gain = whole.final[default] / whole.final[whole.chosen]
    for budget in BUDGETS:
        worst = max(replay(whole, budget, seed) for seed in range(SEEDS)) if whole.is_whole else 0
        cells.append(f"{100 * (worst - 1):+.1f} %" if worst else "")
        cells.append(f"{gain / worst:.3f}" if worst else "")
    return cells


def _by_problem(found: list[Session]) -> dict[tuple[str, str], list[Session]]:
    grouped: dict[tuple[str, str], list[Session]] = {}
    for session in found:
        if session.chosen is not None:
            grouped.setdefault((session.op, session.problem), []).append(session)
    return grouped


HEAD = [
    "op", "problem", "configs", "failed", "default", "best", "gain", "finalists again",
    *itertools.chain(*((f"pattern, {budget} configs", "its gain") for budget in BUDGETS)),
    "runs apart",
]  # fmt: skip
TEXT = (
    "Every config was measured once, the five best and the default again, in turns: those are the "
    "figures. Gain: the default's time over the best one's (goal: more than 1). Finalists again: "
    "by how much the second time of one of them differs most from its first. Where all configs of "
    "a space were measured, the pattern search was replayed over the first times, without a GPU, "
    f"with {SEEDS} seeds: how much slower than the best of all the worst of these ends (goal: 3 % "
    "with 100 configs), and its gain. Where the same tuning ran on the GPU again, by another "
    "search or from another seed: how much slower the worst choice of so many runs is than the "
    "best one, by times of one run (goal: 2 %)."
)
COST_HEAD = [
    "op", "problems", "search", "configs", "time", "a config, kernel known", "kernel new", "busy",
    "while it searched", "a kernel ran", "rows",
]  # fmt: skip
COST_TEXT = (
    "A line per run, in their order; time: all of it, from before the world is opened. A config: "
    "the median time from the end of one row to that of the next. Busy: the part of the time in "
    "which the process with the GPU had a config to measure (goal: 60 %); while it searched: the "
    "same without what comes before the first search and between two. A kernel ran: by nvidia-smi, "
    "whose samples are the part of a moment in which one did. Rows: the part that writing them "
    "took (goal: 1 %)."
)


def cost_cells(run: dict[str, Any], found: list[Session]) -> list[str]:
    """`run`: of runs.json, whose sessions are among those found."""
    ids = {tuned["run_id"] for tuned in run["tuned"]}
    settings = run["search"], run["seed"]
    mine = [each for each in found if each.run_id in ids and (each.search, each.seed) == settings]
    problems = len({each.problem for each in mine})
    tried = sum(tuned["tried"] for tuned in run["tuned"])
    cells = [run["op"], str(problems), run["search"], str(tried), f"{run['seconds']:.1f} s"]
    for steps in ([s.known_s for s in mine], [s.new_s for s in mine]):
        flat = list(itertools.chain(*steps))
        cells.append(f"{1e3 * statistics.median(flat):.0f} ms" if flat else "")
    busy, writing = (sum(t[k] * t["seconds"] for t in run["tuned"]) for k in ("busy", "writing"))
    searched = sum(tuned["seconds"] for tuned in run["tuned"])
    ran = run["kernels_ran"]
    cells += [f"{busy / run['seconds']:.0%}", f"{busy / searched:.0%}"]
    return [*cells, "" if ran is None else f"{ran:.0%}", f"{writing / run['seconds']:.2%}"]


def draw(base: str, start: str) -> None:
    """How a tuning of each algorithm went on: the one that tried the most configs."""
    data = read(base)
    ended = sorted(data.runs[data.runs.ended].itertuples(), key=lambda run: -run.num_configs)
    for run in {run.kernel_name: run for run in reversed(ended)}.values():
        rows = data.rows[data.rows.session == run.session]
        name = re.sub(r"[._]", "-", run.kernel_name)
        numbers = [f"{a['name']}={a['value']}" for a in run.arguments if a["type"] == "int"]
        title = f"{run.kernel_name} {', '.join(numbers)}: {run.settings['search']} search"
        draw_convergence(rows, title, f"{start}-{name}.png")


def main(data: Path, docs: Path) -> None:
    told = json.loads((data / "runs.json").read_text())
    bases = sorted(path.with_suffix("") for path in data.glob("*.csv"))
    found = [session for base in bases for session in sessions(str(base))]
    common = {"kind": "table", "machine": told["machine"]}
    rows = {"head": HEAD, "rows": rows_of(found)}
    write(str(docs / f"{data.name}-tune.json"), {**common, "title": "Tuning", "text": TEXT, **rows})
    text = " ".join(filter(None, (COST_TEXT, told.get("note"))))  # the note: how it was started
    cells = [cost_cells(run, found) for run in told["runs"] if run["tuned"]]
    title = {"title": "What tuning costs", "text": text}
    costs = {**common, **title, "head": COST_HEAD, "rows": cells}
    write(str(docs / f"{data.name}-tune-cost.json"), costs)
    for base in bases:
        draw(str(base), str(docs / f"{data.name}-tune"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
