"""Runs of a tuning, as a dataset has them, and the pattern search replayed over one."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

import pandas

from sundog.dataset.reader import read
from sundog.ops import op as ops
from sundog.tools.tune.search import pattern
from sundog.tools.tune.space import Space

__all__ = ["Session", "replay", "sessions", "sessions_of"]


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


def sessions_of(run: dict[str, Any], found: list[Session]) -> list[Session]:
    """`run`: of runs.json. What was cut and done again is there twice: the last counts."""
    ids = {tuned["run_id"] for tuned in run["tuned"]}
    settings = run["search"], run["seed"]
    mine = [each for each in found if each.run_id in ids and (each.search, each.seed) == settings]
    return list({each.run_id: each for each in mine}.values())


def replay(session: Session, budget: int, seed: int) -> float:
    """What the pattern search would have found: its best over the best of all."""
    asked: dict[Any, float | None] = {}

    def evaluate(configs: list[Any], generation: int) -> list[float | None]:
        asked.update({config: session.times[config] for config in configs})
        return [asked[config] for config in configs]

    pattern(Space(tuple(session.times)), evaluate, budget, random.Random(seed))
    return min(t for t in asked.values() if t is not None) / session.best
