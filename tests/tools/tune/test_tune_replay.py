"""What is said of recorded runs: the pattern search replayed, two runs compared."""

from __future__ import annotations

import csv
import dataclasses
import json
import random
from pathlib import Path

import pytest

import sundog
from benchmarks.tuning_runs import (
    Session,
    apart,
    cost_cells,
    medians,
    op_rows,
    replay,
    rows_of,
)
from sundog.ops.select import package_file, read_entries
from sundog.tools.tune.space import SEARCHES, Space, first_asked

from .test_tune_search import CONFIGS, Config, seconds


def made_up(seed: int, chosen: Config) -> Session:
    noise = random.Random(seed)
    times = {config: seconds(config, noise) for config in CONFIGS}
    final = {config: t for config in (CONFIGS[0], chosen) if (t := times[config]) is not None}
    return Session("op", "numel=1", "exhaustive", seed, len(CONFIGS), times, final, chosen)


def test_a_search_is_replayed_over_recorded_times() -> None:
    session = made_up(1, CONFIGS[-1])
    assert session.is_whole
    found = [replay(session, 100, seed) for seed in range(4)]
    assert all(1 <= ratio < 1.03 for ratio in found)
    assert replay(session, len(CONFIGS), 0) == 1.0
    assert replay(session, 1, 0) == session.times[CONFIGS[0]] / session.best, "the default alone"


@pytest.mark.parametrize("search", SEARCHES)
def test_what_a_search_begins_with_is_known_before(search: str) -> None:
    """So that it is compiled while the search before it still runs."""
    asked: list[list[Config]] = []

    def evaluate(configs: list[Config], generation: int) -> list[float | None]:
        asked.append(configs)
        return [1.0] * len(configs)

    space = Space(tuple(CONFIGS))
    SEARCHES[search](space, evaluate, 40, random.Random(3))
    assert first_asked(search, space, 40, 3) == asked[0]
    assert len(asked[0]) == (8 if search in ("pattern", "model") else 40)


def test_two_runs_are_compared_by_what_they_chose() -> None:
    near, far = Config(512, 48, 4, "rows"), Config(512, 48, 4, "none")
    a, b, c = made_up(1, near), made_up(2, near), made_up(3, far)
    assert apart([a, b], {}) == "0.0 % of 2", "the same choice, whatever it took"
    assert apart([a, c], {}) == "", "no run has both times interleaved"
    compared = medians(
        [{"run_id": "", "configs": [str(near), str(far)], "samples_ms": [[9, 2, 2], [3, 2, 2.5]]}]
    )
    assert apart([a, b, c], compared) == "25.0 % of 3"
    a.final[far] = 1.01 * a.final[near]
    assert apart([a, b, c], {}) == "1.0 % of 3", "both were finalists of the first run"
    (line,) = rows_of([dataclasses.replace(c, run_id="old"), a, b], {})
    assert line[:4] == ["op", "numel=1", "1056 of 1056", str(sum(map(_failed, CONFIGS)))]
    assert line[-1] == "0.0 % of 2"
    gain = a.final[CONFIGS[0]] / a.final[near] / max(replay(a, 100, seed) for seed in range(20))
    assert line[9] == f"{gain:.3f}", "the worst seed's, over the default"


def test_an_op_is_as_fast_as_its_best_algorithm() -> None:
    """And its default is that of the first algorithm."""
    near = Config(512, 48, 4, "rows")
    slow, fast = (
        dataclasses.replace(made_up(1, near), op=f"all_gather.{algo}", run_id=algo)
        for algo in ("push", "pull")
    )
    for config, t in fast.times.items():
        fast.times[config] = t and t / 2
    fast.final[near] /= 2
    run = {"op": "all_gather", "search": "exhaustive", "seed": 1}
    tuned = [{"run_id": algo} for algo in ("push", "pull")]
    (line,) = op_rows([{**run, "tuned": tuned}], [slow, fast], {})
    assert line[:3] == ["all_gather: pull", "numel=1", "2112 of 2112"]
    assert line[4:6] == [
        f"{1e3 * slow.final[CONFIGS[0]]:.1f} us",
        f"{1e3 * fast.final[near]:.1f} us",
    ]
    assert line[6] == f"{slow.final[CONFIGS[0]] / fast.final[near]:.3f}"
    worst = max(replay(fast, 100, seed) for seed in range(20))
    assert line[8] == f"{100 * (worst - 1):+.1f} %", "of the slow one nothing comes near"
    assert op_rows([{**run, "op": "all_gather.pull", "tuned": tuned}], [slow, fast], {}) == []


def test_a_run_costs_what_it_took_from_first_to_last() -> None:
    session = dataclasses.replace(made_up(1, CONFIGS[-1]), run_id="r", known_s=(0.1, 0.3, 0.2))
    tuned = {"run_id": "r", "tried": 10, "seconds": 6.0, "busy": 0.5, "writing": 0.01}
    run = {"op": "op", "search": "exhaustive", "seed": 1, "seconds": 8.0, "kernels_ran": 0.25}
    cells = cost_cells(
        {**run, "tuned": [tuned, {**tuned, "run_id": "s", "seconds": 1.2}]}, [session]
    )
    assert cells == [
        "op",
        "1",
        "exhaustive",
        "20",
        "8.0 s",
        "200 ms",
        "",
        "45%",
        "50%",
        "25%",
        "0.90%",
    ]


def _failed(config: Config) -> bool:
    return seconds(config, random.Random(0)) is None


def test_every_promoted_best_is_in_the_data() -> None:
    root = Path(sundog.__file__).parents[1]
    entries = [e for e in read_entries(package_file("nvidia-h200")) if e.run.startswith("data/")]
    assert entries
    for entry in entries:
        base, run = entry.run.split()
        with (root / f"{base}.csv").open(newline="") as file:
            found = [
                float(row["perf_ms"])
                for row in csv.DictReader(file)
                if row["run_id"].startswith(run)
                and row["repeat"] == "1"
                and json.loads(row["config"]) == entry.config
            ]
        assert pytest.approx(1e3 * entry.seconds, rel=1e-5) in found, entry
