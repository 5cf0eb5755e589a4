"""What is said of recorded runs: the pattern search replayed, two runs compared."""

from __future__ import annotations

import random

from sundog.bench.tuning import Session, apart, replay, rows_of

from .test_tune_search import CONFIGS, Config, seconds


def made_up(seed: int, chosen: Config) -> Session:
    noise = random.Random(seed)
    times = {config: seconds(config, noise) for config in CONFIGS}
    final = {config: t for config in (CONFIGS[0], chosen) if (t := times[config]) is not None}
    return Session("op", "numel=1", "exhaustive", len(CONFIGS), times, final, chosen)


def test_a_search_is_replayed_over_recorded_times() -> None:
    session = made_up(1, CONFIGS[-1])
    assert session.is_whole
    found = [replay(session, 100, seed) for seed in range(4)]
    assert all(1 <= ratio < 1.03 for ratio in found)
    assert replay(session, len(CONFIGS), 0) == 1.0
    assert replay(session, 1, 0) == session.times[CONFIGS[0]] / session.best, "the default alone"


def test_two_runs_are_compared_by_what_they_chose() -> None:
    near, far = Config(512, 48, 4, "rows"), Config(512, 48, 4, "none")
    a, b, c = made_up(1, near), made_up(2, near), made_up(3, far)
    assert apart(a, b) == 0.0, "the same choice, whatever it took"
    assert 0.1 < apart(a, c) < 0.3
    (line,) = rows_of([a, b, c])
    assert line[:4] == ["op", "numel=1", "1056 of 1056", str(sum(map(_failed, CONFIGS)))]
    assert line[-1] == f"{100 * max(apart(a, c), apart(b, c)):.1f} %"


def _failed(config: Config) -> bool:
    return seconds(config, random.Random(0)) is None
