"""All interleavings up to equivalence: none is missed, few are run twice, rare bugs are found."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from support.traced import traced

import sundog
from sundog.tools._options import CheckOptions
from sundog.tools.check import check_command
from sundog.tools.check.exhaustive import Touched, check_all, small_calls
from sundog.tools.check.schedules import check, check_once

HEAP = 256 << 10


@triton.jit
def mixed(words, out, STEPS: tl.constexpr):
    """Each program adds to its own word, and once to one that all share."""
    me = tl.program_id(0)
    for _ in range(STEPS):
        tl.atomic_add(words + 1 + me, 1, sem="relaxed", scope="gpu")
    tl.store(out + me, tl.atomic_add(words, 1 + me, sem="relaxed", scope="gpu"))


@triton.jit
def waits(words, out):
    """Program 1 waits for program 0; program 2 races with both for another word."""
    me = tl.program_id(0)
    if me == 0:
        tl.atomic_add(words + 1, 1, sem="relaxed", scope="gpu")
        tl.atomic_xchg(words, 1, sem="release", scope="gpu")
    elif me == 1:
        while tl.atomic_add(words, 0, sem="acquire", scope="gpu") < 1:
            pass
        tl.store(out, tl.atomic_add(words + 1, 2, sem="relaxed", scope="gpu"))
    else:
        tl.store(out + 1, tl.atomic_xchg(words + 1, 8, sem="relaxed", scope="gpu"))


@triton.jit
def rare(words, out, STEPS: tl.constexpr):
    """Program 1 sees an odd value only between two of program 0's steps late in a long run."""
    if tl.program_id(0) == 0:
        for _ in range(STEPS):
            tl.atomic_add(words + 1, 1, sem="relaxed", scope="gpu")
        tl.atomic_xchg(words, 1, sem="relaxed", scope="gpu")
        tl.atomic_xchg(words, 2, sem="relaxed", scope="gpu")
    else:
        tl.store(out, tl.atomic_add(words, 0, sem="acq_rel", scope="gpu"))


def world_of(
    kernel: Any, programs: int, seen: set | None = None, bad: int = -1, **given: Any
) -> Callable[[sundog.World], None]:
    def main(world: sundog.World) -> None:
        words, out = torch.zeros(8, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        kernel[(programs,)](words, out, **given)
        if seen is not None:
            seen.add(tuple(out.tolist()))
        assert out[0].item() != bad

    return main


@pytest.mark.long
def test_no_outcome_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all steps count as dependent, the reduction runs every interleaving."""
    few, everything = set(), set()
    reduced = check_all(world_of(mixed, 3, few, STEPS=1), 1, 0, HEAP)
    monkeypatch.setattr(Touched, "depends", lambda self, other: True)
    whole = check_all(world_of(mixed, 3, everything, STEPS=1), 1, 0, HEAP)
    assert reduced.is_complete
    assert whole.is_complete
    assert few == everything
    assert len(few) > 2
    assert 3 * reduced.runs < whole.runs


def test_a_wait_is_one_event() -> None:
    """What random schedules show is among what the reduction shows, in a few runs."""
    few, lucky = set(), set()
    reduced = check_all(world_of(waits, 3, few), 1, 0, HEAP)
    check(world_of(waits, 3, lucky), 1, 60, 0, 16, HEAP)
    assert reduced.is_complete
    assert reduced.runs <= 20  # with those that read older values
    assert lucky <= few
    assert len(few) == 3  # program 2 comes first, between the others, or last


def test_equivalent_interleavings_run_once() -> None:
    """Only the order on the shared word matters: 3! of 1,680, and 4! of 63,063,000."""
    three = check_all(world_of(mixed, 3, STEPS=2), 1, 0, HEAP)
    assert (three.runs, three.is_complete) == (math.factorial(3), True)
    assert three.runs + three.redundant < math.factorial(9) / math.factorial(3) ** 3 / 100
    four = check_all(world_of(mixed, 4, STEPS=3), 1, 0, HEAP)
    assert (four.runs, four.is_complete) == (math.factorial(4), True)


def test_a_rare_bug_is_always_found_and_replays() -> None:
    main = world_of(rare, 2, bad=1, STEPS=40)
    luck = [check(main, 1, 1, seed, 16, HEAP) for seed in range(30)]
    assert sum(bool(report.findings) for report in luck) <= 3
    coverage = check_all(main, 1, 0, HEAP)
    assert coverage.is_complete
    (finding,) = coverage.report.findings
    assert finding.kind == "wrong result"
    again = check_once(main, 1, finding.token, 0, HEAP)
    assert [f.kind for f in again.findings] == ["wrong result"]


def test_time_that_runs_out_is_said() -> None:
    coverage = check_all(world_of(mixed, 4, STEPS=3), 1, 0, HEAP, seconds=0.01)
    assert not coverage.is_complete
    assert 0 < coverage.share < 1
    assert "of those known so far" in str(coverage)
    assert "not covered" in str(coverage)


@pytest.mark.parametrize("op", ["broadcast.push", "all_reduce.low_latency", "all_to_all.mail"])
def test_an_op_is_called_twice_by_two_programs(op: str) -> None:
    (name,) = found = small_calls(op, 2)
    report, trace = traced(found[name], 2)
    assert name == op
    assert report.widest == 2
    launches = [event for event in trace if event[0] == "launch"]
    assert len(launches) == 2 * 2  # calls and ranks
    assert not report.findings, report


def test_an_op_without_an_algorithm_means_each_of_them() -> None:
    assert list(small_calls("all_gather", 2))[:2] == ["all_gather.push", "all_gather.pull"]
    assert small_calls("tests.tools.check.kernels:clean", 2) == {}


def test_the_file_has_what_every_algorithm_showed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, clean = world_of(rare, 2, bad=1, STEPS=1), world_of(mixed, 2, STEPS=1)
    functions = {"op.one": bad, "op.two": clean, "op.three": bad}
    monkeypatch.setattr(check_command, "small_calls", lambda *_: functions)
    path = tmp_path / "check.json"
    options = CheckOptions("all_gather", 1, 1, 0, exhaustive=True, json=str(path))
    assert check_command.run(options) == 1
    written = json.loads(path.read_text())
    assert [line.split(":")[0] for line in written["coverage"].splitlines()] == [*functions]
    assert [each["run"] for each in written["findings"]] == [0, 1]
    assert len(written["runs"]) == 2
    assert written["schedules"] > 3


def test_a_terminal_sees_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs so far and seconds left; where stderr is no terminal, nothing."""
    options = CheckOptions("tests.tools.check.kernels:clean", 2, 1, 0, exhaustive=True, seconds=20)
    assert check_command.run(options) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # to rich: it is a terminal
    assert check_command.run(options) == 0
    told = re.sub(r"\x1b\[[0-9;?]*\w", "", capsys.readouterr().err)
    assert re.search(r"interleavings of .*0/\?.* at most \d+ s left", told), told
