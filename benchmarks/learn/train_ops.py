"""`python -m benchmarks.learn train-ops data/h200`: a model of the ops' configs, and its scores.

It is trained on the recorded tunings of a folder. For the table, a problem is left out: a model of
the other problems leads a search on it, which is replayed on the recorded times, beside the pattern
search. Only runs that tried their whole space count.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy

from sundog.dataset.reader import read
from sundog.learn.op_model import Trees, columns_of, lines
from sundog.tools.tune.space import Space, by_model, pattern

from ..tuning_runs import Session, sessions
from .train import fit

TARGET = "nvidia-h200"
SEEDS = 10
_SETTINGS: dict[str, Any] = {"max_iter": 150, "learning_rate": 0.08, "min_samples_leaf": 6}


@dataclass(frozen=True)
class Example:
    """A session whose times are known for the whole space, with its problem's fields."""

    session: Session
    problem: dict[str, Any]

    def line(self, config: Any) -> dict[str, Any]:
        fields = {f"problem_{name}": value for name, value in self.problem.items()}
        own = {f"config_{f.name}": getattr(config, f.name) for f in dataclasses.fields(config)}
        return {"op": self.session.op, **fields, **own}

    @property
    def name(self) -> str:
        return f"{self.session.op} {self.session.problem}"


def examples(folder: Path) -> list[Example]:
    """Return the newest whole session of each op and problem."""
    found: dict[str, Example] = {}
    for path in sorted(folder.glob("*.csv")):
        base = str(path.with_suffix(""))
        problems = {run.run_id: _numbers(run.arguments) for run in read(base).runs.itertuples()}
        for session in sessions(base):
            if session.is_whole:
                made = Example(session, problems[session.run_id])
                found[made.name] = made
    return list(found.values())


def _numbers(arguments: list[dict[str, Any]]) -> dict[str, int]:
    return {each["name"]: each["value"] for each in arguments if each.get("type") == "int"}


def train(known: list[Example], about: dict[str, Any]) -> Trees:
    given, target = [], []
    for each in known:
        for config, time in each.session.times.items():
            if time is not None:
                given.append(each.line(config))
                target.append(min(math.log(time / each.session.best), math.log(8)))
    names, columns = sorted({each["op"] for each in given}), columns_of(given)
    model = fit(lines(given, names, columns), numpy.array(target), about, **_SETTINGS)
    return dataclasses.replace(model, about={**model.about, "ops": names, "columns": columns})


def replayed(example: Example, trees: Trees | None, search: Any, budget: int, seed: int) -> float:
    """Return the best that a search finds over the best of the whole space."""
    times = example.session.times
    first, *others = times
    random.Random(seed).shuffle(others)
    configs = (first, *others)
    scores: tuple[float, ...] = ()
    if trees is not None:
        given = [example.line(config) for config in configs]
        table = lines(given, trees.about["ops"], trees.about["columns"])
        scores = tuple(map(float, trees.predict(table)))
    asked: list[float] = []

    def evaluate(wanted: list[Any], generation: int) -> list[float | None]:
        asked.extend(times[config] or math.inf for config in wanted)
        return [times[config] for config in wanted]

    search(Space(configs, scores), evaluate, budget, random.Random(seed))
    return min(asked) / example.session.best


def data_hash(known: list[Example]) -> str:
    """Return a hash of the times that the model is trained on."""
    times = [
        [each.name, sorted((str(c), t) for c, t in each.session.times.items())] for each in known
    ]
    return hashlib.sha256(json.dumps(sorted(times, key=str)).encode()).hexdigest()


def medians(example: Example, trees: Trees, budgets: Sequence[int]) -> Iterator[float]:
    """Replay both searches with each budget; give the medians over some orders of the space."""
    for budget, (model, search) in product(budgets, ((trees, by_model), (None, pattern))):
        found = [replayed(example, model, search, budget, seed) for seed in range(SEEDS)]
        yield float(numpy.median(found))


def main(folder: Path, out: Path | None, budgets: tuple[int, ...] = (5, 10, 20)) -> None:
    known = examples(folder)
    by_op: dict[str, list[Example]] = defaultdict(list)
    for each in known:
        by_op[each.session.op].append(each)
    head = "".join(f"{name + ' ' + str(b):>12}" for b in budgets for name in ("model", "pattern"))
    print(f"{'best found, over the best: median':52}{'space':>6}{head}")
    for example in known:
        others = [each for each in known if each is not example]
        if len(by_op[example.session.op]) < 2:
            continue  # no other problem of this algorithm to learn from
        cells = "".join(f"{n:12.3f}" for n in medians(example, train(others, {}), budgets))
        print(f"{example.name:52}{len(example.session.times):6}{cells}", flush=True)
    if out is not None:
        about = {"target": TARGET, "version": 1, "trained_on": [each.name for each in known]}
        about |= {"data": data_hash(known), "script": "python -m benchmarks.learn train-ops"}
        train(known, about).save(out)
        print(f"{out}: {out.stat().st_size} bytes, {len(known)} tunings")
