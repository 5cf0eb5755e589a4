"""What a tuning run leaves for later: bests in the user's file, and in the package's."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from sundog.dataset import Recorder, RunInfo, describe_run
from sundog.ops import select
from sundog.tools.tune.cache import known_results, promote
from sundog.tools.tune.tune import tune

from .test_tune_run import ON_SIM, OP, check_base, fake_clock

pytestmark = pytest.mark.sim_only


def test_promote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "package_file", lambda name: tmp_path / "own" / f"{name}.json")
    with pytest.raises(ValueError, match="nothing was tuned here"):
        promote([])
    options: dict[str, Any] = {"world": 2, "budget": 3, "place": ON_SIM, "timer": fake_clock}
    done = tune(OP, ["numel=10", "numel=20"], log=str(tmp_path / "log"), **options)
    assert [tuned.problem.numel for tuned in done] == [10, 20]
    ((path, entries),) = promote([])
    assert path == tmp_path / "own" / "simulator.json"
    assert [entry.problem["numel"] for entry in entries] == [10, 20]
    monkeypatch.setenv("SUNDOG_CACHE", str(tmp_path / "empty"))
    assert select.entries("simulator") == tuple(entries), "from the package now"
    with pytest.raises(ValueError, match="nothing was tuned for 'nvidia-h200'"):
        promote(["nvidia-h200"])


def test_what_a_base_knows_of_a_run(tmp_path: Path) -> None:
    """Medians; None of what failed before something that did not; nothing of what failed last."""
    base = str(tmp_path / "log")

    def session(info: RunInfo | None, *tried: tuple[str, str, list[float]]) -> None:
        with Recorder(base, info) as recorder:
            for config, status, times in tried:
                trial = recorder.start(config)
                for ms in times:
                    trial.end(status, perf_ms=ms)
                if status != "started" and not times:
                    trial.end(status, error="x" * 200_000 if status != "compiled" else None)

    ok, bad, nothing = ("a", "ok", [1.0, 9.0, 2.0]), ("b", "error", []), ("c", "started", [])
    session(None, ok, bad, nothing, ("d", "compiled", []), ("e", "timeout", []))
    session(None, ("f", "accuracy_error", []), ("a", "ok", [3.0, 4.0]), ("g", "error", []))
    session(describe_run(len, [1]), ("h", "ok", [1.0]))
    with open(f"{base}.csv", "a") as file:
        file.write("torn,by a crash")
    known = {json.loads(config): ms for config, ms in known_results(base, "").items()}
    assert known == {"a": 3.0, "b": None, "d": None, "f": None}
    assert known_results(str(tmp_path / "nothing"), "") == {}


def test_an_unwritable_cache_is_refused_before_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = select.user_file("simulator")
    path.parent.mkdir(parents=True)
    path.write_text('[{"another": "version"}]')
    options: dict[str, Any] = {"budget": 2, "world": 2, "place": ON_SIM, "timer": fake_clock}
    with pytest.raises(ValueError, match="not a list of measurements"):
        tune(OP, log=str(tmp_path / "log"), **options)
    monkeypatch.setenv("SUNDOG_CACHE", str(path / "in_a_file"))
    with pytest.raises(ValueError, match="cannot be written: Not a directory"):
        tune(OP, log=str(tmp_path / "log"), **options)
    assert not (tmp_path / "log.csv").exists()


def test_a_run_that_was_interrupted_replaces_nothing_faster(tmp_path: Path) -> None:
    def interrupt(*step: object) -> None:
        raise KeyboardInterrupt

    options: dict[str, Any] = {"world": 2, "place": ON_SIM, "timer": fake_clock}
    tune(OP, budget=50, log=str(tmp_path / "log"), **options)
    (best,) = select.entries("simulator")
    for seconds, kept in ((best.seconds, best.config), (1.0, {"block": 64, "num_warps": 4})):
        select.write_entries(
            select.user_file("simulator"), [dataclasses.replace(best, seconds=seconds)]
        )
        with pytest.raises(KeyboardInterrupt):
            tune(OP, budget=50, log=str(tmp_path / "log"), progress=interrupt, **options)
        (entry,) = select.entries("simulator")
        assert kept.items() <= entry.config.items(), "the default is measured first, and is slow"


def test_a_cache_that_breaks_later_costs_its_entry_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(path: Path, new: list[select.Entry]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(select, "write_entries", full)
    options: dict[str, Any] = {"budget": 2, "world": 2, "place": ON_SIM, "timer": fake_clock}
    done = tune(OP, ["numel=10", "numel=20"], log=str(tmp_path / "log"), **options)
    assert [tuned.tried for tuned in done] == [2, 2], "the second one ran, too"
    assert "simulator.json cannot be written: No space left on device" in caplog.text
    check_base(str(tmp_path / "log"))


def test_two_tuners_at_once_lose_no_entry(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "nvidia-h200.json"

    def add(first: int) -> None:
        for numel in range(first, first + 30):
            entry = select.Entry("all_gather.push", {"numel": numel}, {}, 1e-6, "", "")
            select.write_entries(path, [entry])

    tuners = [multiprocessing.get_context("fork").Process(target=add, args=(n,)) for n in (0, 30)]
    for tuner in tuners:
        tuner.start()
    for tuner in tuners:
        tuner.join()
    assert sorted(entry.problem["numel"] for entry in select.read_entries(path)) == [*range(60)]
