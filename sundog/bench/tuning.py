"""What tuning runs found and cost: `python -m sundog.bench.tuning data/h200 docs/measured`.

From the datasets of a folder, and its runs.json (data/h200/make.py), come two tables.

Each run that tried its whole space is replayed: the pattern search asks for configs again, and gets
the times that were recorded, so it needs no GPU. How far from the best of the run it ends with 100
configs, and whether it beats the default, is one line of the table. Where the same tuning was run
twice, how far apart the two choices are, by the times of either run, is told too.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas

from .. import op as ops
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
    space: int  # configs
    times: dict[Any, float | None]
    final: dict[Any, float]  # of the finalists
    chosen: Any  # the best of those
    run_id: str = ""
    seconds: float = 0.0
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
    search, space = run.settings["search"], run.settings["space"]
    chosen = min(final, key=lambda config: final[config]) if final else None
    found = run.kernel_name, problem, search, space, times[0], final, chosen
    return Session(*found, run.run_id, run.seconds, *_steps(rows))


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


def apart(a: Session, b: Session) -> float:
    """How much slower the worse choice of two runs is, by the times of the run that is harder."""
    found = []
    for run in (a, b):
        times = [run.times.get(session.chosen) for session in (a, b)]
        if None not in times:
            found.append(max(times) / min(times) - 1)  # type: ignore[type-var, operator]
    return max(found)


def rows_of(found: list[Session]) -> list[list[str]]:
    """A line per tuning: the run that tried the most, and what the others say of it."""
    lines = []
    for (op, problem), runs in _by_problem(found).items():
        whole = max(runs, key=lambda run: len(run.times))
        default = next(iter(whole.times))
        gain = whole.final[default] / whole.final[whole.chosen]
        failed = sum(t is None for t in whole.times.values())
        cells = [op, problem, f"{len(whole.times)} of {whole.space}", str(failed)]
        cells += [f"{1e3 * whole.final[c]:.1f} us" for c in (default, whole.chosen)]
        cells.append(f"{gain:.3f}")
        first = whole.times
        moved = [abs(t / (first[config] or t) - 1) for config, t in whole.final.items()]
        cells.append(f"{100 * max(moved):.1f} %")
        for budget in BUDGETS if whole.is_whole else ():
            worst = max(replay(whole, budget, seed) for seed in range(SEEDS))
            cells.append(f"{100 * (worst - 1):+.1f} %")
        cells += [""] * (len(HEAD) - 1 - len(cells))
        pairs = [apart(a, b) for a, b in itertools.combinations(runs, 2)]
        cells.append(f"{100 * max(pairs):.1f} %" if pairs else "")
        lines.append(cells)
    return lines


def _by_problem(found: list[Session]) -> dict[tuple[str, str], list[Session]]:
    grouped: dict[tuple[str, str], list[Session]] = {}
    for session in found:
        if session.chosen is not None:
            grouped.setdefault((session.op, session.problem), []).append(session)
    return grouped


HEAD = [
    "op", "problem", "configs", "failed", "default", "best", "gain", "finalists again",
    *(f"pattern, {budget} configs" for budget in BUDGETS), "two runs apart",
]  # fmt: skip
TEXT = (
    "Every config was measured once, the five best and the default again, in turns: those are the "
    "figures. Finalists again: by how much the second time of one of them differs most from its "
    "first. Where all configs of a space were measured, the pattern search was replayed over the "
    f"recorded times, without a GPU, with {SEEDS} seeds: how much slower than the best of all the "
    "worst of these ends. Where the same tuning ran twice: how much slower the worse of the two "
    "choices is."
)
COST_HEAD = [
    "op", "problem", "search", "configs", "time", "a config, kernel known", "kernel new", "busy",
    "rows",
]  # fmt: skip
COST_TEXT = (
    "A config: the median time from the end of one row to that of the next. Busy: the part of the "
    "time in which the process with the GPU had a config to measure (goal: 60 %). Rows: the part "
    "that writing them took (goal: 1 %)."
)


def cost_cells(session: Session, shares: dict[str, Any]) -> list[str]:
    """`shares`: of the same run, from runs.json."""
    cells = [session.op, session.problem, session.search, str(len(session.times))]
    cells.append(f"{session.seconds:.1f} s")
    for steps in (session.known_s, session.new_s):
        cells.append(f"{1e3 * statistics.median(steps):.0f} ms" if steps else "")
    busy, writing = shares.get("busy"), shares.get("writing")
    cells.append("" if busy is None else f"{busy:.0%}")
    cells.append("" if writing is None else f"{writing:.2%}")
    return cells


def main(data: Path, docs: Path) -> None:
    told = json.loads((data / "runs.json").read_text())
    bases = sorted(path.with_suffix("") for path in data.glob("*.csv"))
    found = [session for base in bases for session in sessions(str(base))]
    common = {"kind": "table", "machine": told["machine"]}
    rows = {"head": HEAD, "rows": rows_of(found)}
    write(str(docs / f"{data.name}-tune.json"), {**common, "title": "Tuning", "text": TEXT, **rows})
    shares = {(run["run_id"], run["search"]): run for run in told["rows"]}
    text = " ".join(filter(None, (COST_TEXT, told.get("note"))))  # the note: how it was started
    cells = [cost_cells(each, shares.get((each.run_id, each.search), {})) for each in found]
    title = {"title": "What tuning costs", "text": text}
    costs = {**common, **title, "head": COST_HEAD, "rows": cells}
    write(str(docs / f"{data.name}-tune-cost.json"), costs)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
