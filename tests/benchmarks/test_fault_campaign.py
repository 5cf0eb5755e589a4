"""The fault campaign: its cases follow from a seed, and silence is never taken for an answer."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from support.scripts import python

from benchmarks.fault_process import _told
from benchmarks.fault_programs import KINDS, MUTUAL, Case, Step, make_case
from benchmarks.fault_verdicts import judge, rows_of

pytestmark = pytest.mark.sim_only
CASE = Case(0, 0, "shm", "absent", 3, (Step("all_gather"),), rank=1)
PEER_LOST = "rank 1 of 3 died while rank {} waited for it"


def written(folder: Path, sentences: list[str], statuses: list[int | None], late: float) -> Path:
    """Write what a case leaves: rank 1 has the fault at second 10, the others speak `late`."""
    (folder / "events1.jsonl").write_text(json.dumps({"event": "fault", "rank": 1, "at": 10.0}))
    for rank, sentence in enumerate(sentences):
        (folder / f"output{rank}.txt").write_text(f"Traceback:\n  x\n{sentence}\n")
    ends = [{"status": s, "at": 10 + late, "hung": s is None} for s in statuses]
    (folder / "result.json").write_text(json.dumps({"processes": ends, "shared": None}))
    return folder


@pytest.mark.parametrize("backend", KINDS)
def test_a_seed_makes_the_same_cases_and_all_kinds(backend: str) -> None:
    cases = [make_case(number, 5, backend) for number in range(100)]
    assert cases == [make_case(number, 5, backend) for number in range(100)]
    assert min(Counter(case.kind for case in cases).values()) >= 9
    assert set(KINDS[backend]) == {case.kind for case in cases}
    for case in cases:
        struck = case.steps[case.step]
        assert struck.op in MUTUAL
        assert case.rank in (case.members if struck.in_group else range(case.size))
    assert any(step.replays for case in cases for step in case.steps)
    assert any(step.stream for case in cases for step in case.steps)


def test_named_in_time_by_all(tmp_path: Path) -> None:
    lost = [f"sundog.errors.PeerLost: {PEER_LOST.format(rank)}" for rank in range(3)]
    lost[0] = f"[rank0]: {lost[0]}"
    verdict = judge(CASE, written(tmp_path, lost, [1, 1, 1], 3.9), "", [])
    assert verdict.good
    assert verdict.culprit
    assert verdict.sentences[::2] == [f"PeerLost: {PEER_LOST.format(rank)}" for rank in (0, 2)]


@pytest.mark.parametrize(
    ("sentence", "statuses", "late", "left", "bad"),
    [
        ("", [1, 1, 1], 1.0, "", "named"),
        ("AssertionError: the sum is nan", [1, 1, 1], 1.0, "", "named"),
        ("sundog.errors.PeerLost: x", [1, 1, 1], 4.1, "", "in_time"),
        ("sundog.errors.PeerLost: rank 0 is gone", [1, 1, 1], 1.0, "", "culprit"),
        ("sundog.errors.PeerLost: x", [0, 1, 1], 1.0, "", "status"),
        ("sundog.errors.PeerLost: x", [1, None, 1], 1.0, "", "status"),
        ("sundog.errors.PeerLost: x", [1, None, 1], 1.0, "", "clean"),
        ("sundog.errors.PeerLost: x", [1, 1, 1], 1.0, "1 processes left", "clean"),
    ],
)
def test_what_is_bad_is_counted_as_bad(
    tmp_path: Path, sentence: str, statuses: list, late: float, left: str, bad: str
) -> None:
    verdict = judge(CASE, written(tmp_path, [sentence] * 3, statuses, late), left, [])
    assert not getattr(verdict, bad)
    assert not verdict.good or bad == "culprit"


def test_files_in_shared_memory_are_left_behind(tmp_path: Path) -> None:
    folder = written(tmp_path, ["sundog.errors.PeerLost: rank 1"] * 3, [1, 1, 1], 1.0)
    assert judge(CASE, folder, "", []).clean
    assert not judge(CASE, folder, "", ["sem.x"]).clean, "the machine's"
    result = json.loads((folder / "result.json").read_text())
    for own, clean in ((["torch_1"], False), ([], True)):
        (folder / "result.json").write_text(json.dumps({**result, "shared": own}))
        assert judge(CASE, folder, "", ["of another program"]).clean == clean


def test_a_case_that_never_struck_is_no_injected_fault(tmp_path: Path) -> None:
    folder = written(tmp_path, ["sundog.errors.PeerLost: x"] * 3, [1, 1, 1], 1.0)
    (folder / "events1.jsonl").unlink()
    verdict = judge(CASE, folder, "", [])
    assert not verdict.struck
    assert not verdict.good


@pytest.mark.long
def test_a_campaign_ends_with_a_table_and_a_file(tmp_path: Path) -> None:
    """Of three faults on the simulator, each in its own processes."""
    path = tmp_path / "faults.json"
    words = ["--backend", "sim", "--count", "3", "--no-control", "--json", str(path)]
    done = python(["-m", "benchmarks.faults", *words], folder=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(path.read_text())
    assert content["machine"]["command"].startswith("python -m benchmarks.faults --backend sim")
    assert rows_of(content["cases"])[-1] == ["all", "3", "3", "3", "3", "3", "3"]
    assert "Faults on sim" in done.stdout


def test_what_a_run_raised_is_kept_with_the_rank_that_raised_it() -> None:
    """The rank stands in a note of the error, as in a traceback."""
    error = ValueError("the heap is full")
    error.__notes__ = ["sundog: raised on rank 3 of 4"]
    told = _told(error)
    assert (told["type"], told["text"]) == (
        "ValueError",
        "the heap is full\nsundog: raised on rank 3 of 4",
    )
