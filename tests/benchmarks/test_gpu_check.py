"""scripts/gpu-check in parts, with outcomes merged from several runs; the leases of gpu-measure."""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import os
import sys
import tarfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.sim_only
SCRIPTS = Path(__file__).parents[2] / "scripts"


def loaded(name: str) -> ModuleType:
    """Load a script, whose name no import statement can spell."""
    loader = importlib.machinery.SourceFileLoader(name.replace("-", "_"), str(SCRIPTS / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module, with parts that no other test has filled."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.delitem(sys.modules, "gpu_parts", raising=False)
    module = loaded("gpu-check")
    monkeypatch.delitem(sys.modules, "gpu_parts")
    return module


@pytest.fixture
def measure(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return loaded("gpu-measure")


def written(path: Path, commit: str, name: str, **outcomes: str) -> Path:
    tests = [
        {"test": test, "outcome": o, "seconds": 1.0, "text": ""} for test, o in outcomes.items()
    ]
    part = {"name": name, "backend": "virtual", "seconds": 5.0, "tests": tests}
    path.write_text(json.dumps({"machine": {"commit": commit}, "parts": [part]}))
    return path


def asked(check: ModuleType, *merge: Path, names: tuple[str, ...] = ()) -> argparse.Namespace:
    return argparse.Namespace(merge=list(merge), names=names)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_shares_are_the_whole(check: ModuleType, count: int) -> None:
    shares = [check.names_of(f"{number}/{count}") for number in range(1, count + 1)]
    whole = [part.name for stage in check.STAGES for part in stage] + ["bench"]
    assert [name for share in shares for name in share] == whole
    with pytest.raises(ValueError, match="expected 1/2"):
        check.names_of(f"{count + 1}/{count}")


def test_every_path_is_there(check: ModuleType) -> None:
    paths = {path for stage in check.STAGES for part in stage for path in part.paths}
    assert [path for path in paths if not (SCRIPTS.parent / path).exists()] == []


def test_outcomes_are_merged_and_what_is_unfinished_runs_again(
    check: ModuleType, tmp_path: Path
) -> None:
    first = written(tmp_path / "a.json", "c1", "fused", x="passed", y="failed")
    second = written(tmp_path / "b.json", "c1", "probe", z="passed", w="unfinished")
    options = asked(check, first, second, names=("fused", "probe", "stress"))
    assert check.merge(options)["commit"] == "c1"
    parts: dict[str, Any] = {part.name: part for stage in check.STAGES for part in stage}
    assert parts["fused"].count("failed") == parts["fused"].count("passed") == 1
    chosen = [name for name, part in parts.items() if check.is_chosen(part, options)]
    assert chosen == ["probe", "stress"]


def test_runs_of_different_commits_are_not_merged(check: ModuleType, tmp_path: Path) -> None:
    first = written(tmp_path / "a.json", "c1", "fused", x="passed")
    second = written(tmp_path / "b.json", "c2", "probe", z="passed")
    with pytest.raises(SystemExit, match="different commits: c1, c2"):
        check.merge(asked(check, first, second))


def test_every_lease_ends_within_ten_minutes(measure: ModuleType) -> None:
    assert {
        lease: total
        for lease, steps in measure.LEASES.items()
        if (total := sum(step.seconds for step in steps)) > 600
    } == {}


def test_a_step_that_hangs_costs_only_itself(
    measure: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = (
        measure.Step("hangs", 1, "-m timeit -n 1 __import__('time').sleep(60)"),
        measure.Step("fails", 20, "-m timeit -n 1 1/0"),
        measure.Step("works", 20, "-m timeit -n 1 pass"),
    )
    end = measure.time.monotonic() + 60
    ended = {step.name: measure.run(step, tmp_path, dict(os.environ), end) for step in steps}
    assert {name: status for name, (status, _) in ended.items()} == {
        "hangs": "ended after 1 s",
        "fails": "exit status 1",
        "works": "exit status 0",
    }
    assert measure.run(steps[2], tmp_path, {}, 0.0)[0] == "not started: the time was up"
    measure.pack(tmp_path, "lease")
    with tarfile.open(tmp_path / "lease.tar.xz") as archive:
        assert sorted(archive.getnames()) == ["fails.txt", "hangs.txt", "works.txt"]
