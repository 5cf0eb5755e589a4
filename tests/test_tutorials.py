"""Every tutorial runs, agrees with torch on every backend, and passes the checker."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from sundog.testing import check
from sundog.tools._subject import function_of

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "tutorials").glob("*.py"))
each = pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)


def rank_function(path: Path, world_size: int):
    return function_of(str(path), world_size)


def test_the_ladder_has_eight_steps():
    numbers = [path.stem.partition("_")[0] for path in TUTORIALS]
    assert numbers == [f"{n:02}" for n in range(1, len(TUTORIALS) + 1)]
    assert len(numbers) >= 8


@each
@pytest.mark.sim_only
def test_it_runs_as_a_script_and_says_what_was_equal(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    last = capsys.readouterr().out
    assert "4 ranks" in last
    assert "torch" in last or "neighbour" in last


@each
@pytest.mark.parametrize("world_size", [1, 3])
def test_it_runs_on_this_backend(path, world_size, run, backend):
    if backend in ("virtual", "symm") and path.stem == "09_check_a_kernel_you_have":
        with pytest.raises(ValueError, match="start the program with torchrun"):
            run(rank_function(path, world_size), world_size)
        return
    assert len(run(rank_function(path, world_size), world_size)) == world_size


@each
@pytest.mark.sim_only
def test_the_checker_finds_nothing(path):
    check(rank_function(path, 3), world_size=3, schedules=2)


@pytest.mark.sim_only
def test_the_race_is_reported_with_its_line_and_the_repair():
    tutorial = runpy.run_path(str(ROOT / "tutorials/05_a_race.py"))
    report = tutorial["report_of_the_bug"]()
    assert "race" in report
    assert "05_a_race.py:" in report
    assert "tl.debug_barrier()" in report


@pytest.mark.sim_only
def test_a_report_names_the_idiom_and_the_smallest_repair():
    tutorial = runpy.run_path(str(ROOT / "tutorials/09_check_a_kernel_you_have.py"))
    report = tutorial["report_of_the_bug"]()
    signals = "Idiom: atom.global.relaxed.sys.cas.b32 signals, then atom.global.acquire.sys.cas.b32"
    assert signals in report
    assert "Smallest repair: atom.global.release.sys.cas.b32 at tutorials/09_check_a_ker" in report


@pytest.mark.sim_only
def test_the_probe_tells_the_two_captures_apart():
    tutorial = runpy.run_path(str(ROOT / "tutorials/07_capture_and_replay.py"))
    assert tutorial["verdict"](tutorial["Shift"]) == "CAPTURABLE"
    assert tutorial["verdict"](tutorial["FrozenShift"]) == "WRONG"
