"""`python -m benchmarks tuning data/h200 docs/measured`: what tuning runs found and cost.

Two tables, and a plot of a tuning of each algorithm, are made from the datasets of a folder and its
runs.json (data/h200/make.py). Each run that tried its whole space is replayed: the pattern search
asks for configs again and gets the recorded times, so it needs no GPU. One line of the table shows
how far from the best of the run it ends with 100 configs, and whether it beats the default. Where
the same tuning ran again with another seed, the line also shows how far apart the choices are.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas

from sundog.dataset.pictures import draw_convergence
from sundog.dataset.reader import read
from sundog.ops import load as ops
from sundog.tools.tune.space import Space, pattern

from .result_files import write

Compared = dict[str, dict[str, float]]  # by run id and config, as it is printed: milliseconds

BUDGETS = (100, 40)
SEEDS = 20


# runs


@dataclass(frozen=True)
class Session:
    """One run of a tuning: the median of each config in order of asking, None where it failed."""

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
    """Return the tunings of sundog's own ops: a base may hold runs of Helion instead."""
    data = read(base)
    found = []
    for run in data.runs[~data.runs.backend.str.startswith("helion")].itertuples():
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
    """Return the seconds from the end of one config to that of the next, where it was timed."""
    steps: dict[bool, list[float]] = {True: [], False: []}  # is the kernel known?
    known: set[str] = set()
    before = None
    for row in rows[rows.repeat == 0].sort_values("timestamp_s").itertuples():
        if before is not None and row.status == "ok":
            steps[row.ir_id in known].append(row.timestamp_s - before)
        known.add(row.ir_id)
        before = row.timestamp_s
    return tuple(steps[True]), tuple(steps[False])


def sessions_of(run: dict[str, Any], found: list[Session]) -> list[Session]:
    """Return the sessions of a run of runs.json; of one that was cut and repeated, the last."""
    ids = {tuned["run_id"] for tuned in run["tuned"]}
    settings = run["search"], run["seed"]
    mine = [each for each in found if each.run_id in ids and (each.search, each.seed) == settings]
    return list({each.run_id: each for each in mine}.values())


def replay(session: Session, budget: int, seed: int) -> float:
    """Return what the pattern search would have found: its best over the best of all."""
    asked: dict[Any, float | None] = {}

    def evaluate(configs: list[Any], generation: int) -> list[float | None]:
        asked.update({config: session.times[config] for config in configs})
        return [asked[config] for config in configs]

    pattern(Space(tuple(session.times)), evaluate, budget, random.Random(seed))
    return min(t for t in asked.values() if t is not None) / session.best


# tables


def medians(content: list[dict[str, Any]]) -> Compared:
    """Return medians of what several runs chose, measured again, interleaved (runs.json)."""
    return {
        each["run_id"]: {
            config: statistics.median(samples)
            for config, samples in zip(each["configs"], each["samples_ms"], strict=True)
            if samples
        }
        for each in content
    }


def apart(runs: list[Session], compared: Compared) -> str:
    """Say how much slower the worst choice of these runs is than the best, by interleaved times.

    Those are the times of `compared`, or of one run's finalists if these hold more of the choices.
    """
    tables = [compared.get(runs[0].run_id, {})]
    tables += [{str(config): t for config, t in run.final.items()} for run in runs]
    chosen = [str(run.chosen) for run in runs]
    known = max(([table[c] for c in chosen if c in table] for table in tables), key=len)
    return f"{100 * (max(known) / min(known) - 1):.1f} % of {len(known)}" if len(known) > 1 else ""


def rows_of(found: list[Session], compared: Compared) -> list[list[str]]:
    """Return a line per tuning: the run that tried the most, and what the others say of it."""
    lines = []
    for (op, problem), runs in _by_problem(found).items():
        whole = max(runs, key=lambda run: len(run.times))
        default = next(iter(whole.times))
        failed = sum(t is None for t in whole.times.values())
        cells = [op, problem, f"{len(whole.times)} of {whole.space}", str(failed)]
        cells += [f"{1e3 * whole.final[c]:.1f} us" for c in (default, whole.chosen)]
        gain = whole.final[default] / whole.final[whole.chosen]
        moved = [abs(t / (whole.times[c] or t) - 1) for c, t in whole.final.items()]
        cells += [f"{gain:.3f}", f"{100 * max(moved):.1f} %", *_replayed([whole], gain)]
        lines.append([*cells, apart(runs, compared)])
    return lines


def op_rows(runs: list[dict[str, Any]], found: list[Session], compared: Compared) -> list[list]:
    """Return a line per problem of an op that was tuned with all its algorithms."""
    lines = {}
    for run in runs:
        if "." in run["op"] or run["search"] != "exhaustive":
            continue
        mine = [each for each in sessions_of(run, found) if each.chosen is not None]
        for problem in dict.fromkeys(each.problem for each in mine):
            algos = [each for each in mine if each.problem == problem]
            best = min(algos, key=lambda each: each.final[each.chosen])
            again = [each for each in found if each.run_id == best.run_id and each.chosen]
            cells = [*_op_cells(run["op"], algos, best), apart(again, compared)]
            lines[run["op"], problem] = cells  # of several runs the last
    return list(lines.values())


def _op_cells(op: str, algos: list[Session], best: Session) -> list[str]:
    name = f"{op}.{next(iter(ops.algorithms(op)))}"
    (first,) = (each for each in algos if each.op == name)
    times = first.final[next(iter(first.times))], best.final[best.chosen]
    gain = times[0] / times[1]
    tried, space = sum(len(each.times) for each in algos), sum(each.space for each in algos)
    failed = sum(t is None for each in algos for t in each.times.values())
    cells = [
        f"{op}: {best.op.rpartition('.')[2]}",
        best.problem,
        f"{tried} of {space}",
        str(failed),
    ]
    cells += [*(f"{1e3 * t:.1f} us" for t in times), f"{gain:.3f}", ""]
    return [*cells, *_replayed(algos, gain)]


def _replayed(algos: list[Session], gain: float) -> list[str]:
    """Return for each budget the worst seed over the best of all, and what is left of the gain.

    The default's first time does not count: compilers ran while it was measured.
    """
    cells = []
    best = min(each.best for each in algos)
    for budget in BUDGETS:
        worst = 0.0
        if all(each.is_whole for each in algos):
            ends = [min(replay(e, budget, n) * e.best for e in algos) for n in range(SEEDS)]
            worst = max(ends) / best
        cells.append(f"{100 * (worst - 1):+.1f} %" if worst else "")
        cells.append(f"{gain / worst:.3f}" if worst else "")
    return cells


def _by_problem(found: list[Session]) -> dict[tuple[str, str], list[Session]]:
    """Group the runs that have the kernels of the last of them."""
    grouped: dict[tuple[str, str], list[Session]] = {}
    for session in found:
        if session.chosen is not None:
            grouped.setdefault((session.op, session.problem), []).append(session)
    return {
        key: [each for each in runs if each.run_id == runs[-1].run_id]
        for key, runs in grouped.items()
    }


HEAD = [
    "op", "problem", "configs", "failed", "default", "best", "gain", "finalists again",
    *itertools.chain(*((f"pattern, {budget} configs", "its gain") for budget in BUDGETS)),
    "runs apart",
]  # fmt: skip
TEXT = (
    "Every config was measured once, the five best and the default again, interleaved. The "
    "figures are of those. Gain: the default's time over the best one's (goal: more than 1). An "
    "op and its best algorithm: all its algorithms were tuned; the default is that of the "
    "first. Finalists again: by how much the second time of one of them differs most from its "
    "first. Where all configs of a space were measured, the pattern search was replayed over "
    f"the first times, without a GPU, with {SEEDS} seeds: how much slower than the best of all "
    "the worst of these ends (goal: 3 % with 100 configs), and its gain. Where the same tuning "
    "ran on the GPU again, by another search or from another seed: how much slower the worst "
    "choice of these runs is than the best one, by interleaved times (goal: 2 %). Where kernels "
    "changed and were tuned again, the figures are of the last ones."
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
    """Return the line of a run of runs.json, whose sessions are among those found."""
    mine = sessions_of(run, found)
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
    """Plot a tuning of each algorithm, the one that tried the most configs."""
    data = read(base)
    kernels = {run.kernel_name: run.kernel_id for run in data.runs.itertuples()}  # the last ones
    now = data.runs.kernel_id == data.runs.kernel_name.map(kernels)
    ended = list(data.runs[data.runs.ended & now].itertuples())
    ended.sort(key=lambda run: -run.num_configs)
    for run in {run.kernel_name: run for run in reversed(ended)}.values():
        rows = data.rows[data.rows.session == run.session]
        name = re.sub(r"[._]", "-", run.kernel_name)
        numbers = [f"{a['name']}={a['value']}" for a in run.arguments if a["type"] == "int"]
        title = f"{run.kernel_name} {', '.join(numbers)}: {run.settings['search']} search"
        draw_convergence(rows, title, f"{start}-{name}.png")


def main(data: Path, docs: Path) -> None:
    recorded = json.loads((data / "runs.json").read_text())
    paths = sorted(path.with_suffix("") for path in data.glob("*.csv"))
    by_base = {base: sessions(str(base)) for base in paths}
    bases = [base for base in paths if by_base[base]]
    found = [session for base in bases for session in by_base[base]]
    common = {"kind": "table", "machine": recorded["machine"]}
    compared = medians(recorded.get("compared", []))
    lines = [*op_rows(recorded["runs"], found, compared), *rows_of(found, compared)]
    rows = {"head": HEAD, "rows": lines}
    write(str(docs / f"{data.name}-tune.json"), {**common, "title": "Tuning", "text": TEXT, **rows})
    text = " ".join(filter(None, (COST_TEXT, recorded.get("note"))))  # the note: how it was started
    cells = [cost_cells(run, found) for run in recorded["runs"] if run["tuned"]]
    title = {"title": "What tuning costs", "text": text}
    costs = {**common, **title, "head": COST_HEAD, "rows": cells}
    write(str(docs / f"{data.name}-tune-cost.json"), costs)
    for base in bases:
        draw(str(base), str(docs / f"{data.name}-tune"))
