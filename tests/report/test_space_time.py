"""`check --json`: events, edges and source of the schedule that showed a finding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sundog.cli import app
from sundog.tools.check import space_time

HERE = "tests.report.kernels"


def check(path: Path, name: str, *words: str) -> dict[str, Any]:
    path = path / "found.json"
    given = ["check", f"{HERE}:{name}", "--world", "2", "--schedules", "1", "--json", str(path)]
    CliRunner().invoke(app, [*given, *words])
    return dict(json.loads(path.read_text()))


def text(run: dict[str, Any], at: int) -> str:
    place = run["places"][run["events"][at][0]]
    return f"rank {run['lanes'][place['lane']]['rank']} {place['what']} {run['events'][at][1]}"


def edges(run: dict[str, Any], kind: str) -> set[tuple[str, str]]:
    return {(text(run, a), text(run, b)) for a, b, name in run["edges"] if name == kind}


def test_a_race_has_its_two_events_and_the_edges_around_them(tmp_path: Path) -> None:
    found = check(tmp_path, "without_barrier")
    assert (found["kind"], found["schema_version"], found["world"]) == ("check", 1, 2)
    (finding,) = found["findings"]
    run = found["runs"][finding["run"]]
    assert run["token"] == finding["token"]
    first, second = (text(run, at) for at in finding["events"])
    assert first.endswith("store inbox[0:1000]")
    assert second.endswith("load inbox[0:1000]")
    assert first.split()[1] == str(finding["first"]["rank"])
    signals = edges(run, "order")
    assert {
        ("rank 0 atomic XCHG flag[0]", "rank 1 atomic ADD flag[0]"),
        ("rank 1 atomic XCHG flag[0]", "rank 0 atomic ADD flag[0]"),
    } <= signals
    assert not edges(run, "heard")
    assert all(a < b for a, b, _ in run["edges"])


def test_source_has_the_lines_of_every_place(tmp_path: Path) -> None:
    found = check(tmp_path, "without_barrier")
    for place in found["runs"][0]["places"]:
        if place["line"]:
            text = found["source"][place["file"]]
            assert 0 <= place["line"] - text["first"] < len(text["lines"])
    side = found["findings"][0]["first"]
    text = found["source"][side["file"]]
    assert text["lines"][side["line"] - text["first"]].strip() == side["text"]


def test_a_signal_that_gives_no_order_is_an_edge_of_its_own(tmp_path: Path) -> None:
    found = check(tmp_path, "relaxed")
    assert found["findings"][0]["rule"] == "relaxed release"
    run = found["runs"][found["findings"][0]["run"]]
    assert ("rank 0 atomic XCHG flag[0]", "rank 1 atomic ADD flag[0]") in edges(run, "heard")
    assert not edges(run, "order")


def test_a_deadlock_has_its_waits_and_hosts(tmp_path: Path) -> None:
    found = check(tmp_path, "silent")
    run = found["runs"][found["findings"][0]["run"]]
    assert run["failure"] == "Deadlock"
    assert [(wait["rank"], wait["owes"]) for wait in run["waits"]] == [(1, 0)]
    assert {host["rank"]: host["state"] for host in run["hosts"]} == {0: "returned", 1: "waits"}
    assert run["hosts"][1]["waits_for"] == "its kernels to end (pass_right)"


def test_a_clean_check_has_no_runs(tmp_path: Path) -> None:
    found = check(tmp_path, "clean")
    assert (found["findings"], found["runs"], found["source"]) == ([], [], {})


def test_a_long_schedule_keeps_its_last_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = check(tmp_path, "without_barrier")
    monkeypatch.setattr(space_time, "MOST_EVENTS", len(whole["runs"][0]["events"]) - 3)
    cut = check(tmp_path, "without_barrier")
    (finding,), (run,) = cut["findings"], cut["runs"]
    assert run["dropped"] == 3
    assert run["events"] == whole["runs"][0]["events"][3:]
    assert [at + 3 for at in finding["events"]] == whole["findings"][0]["events"]
    assert all(0 <= a < len(run["events"]) for a, _, _ in run["edges"])


def test_a_livelock_ends_with_the_steps_that_repeat(endless: Path) -> None:
    found = json.loads(endless.read_text())
    assert found["findings"][0]["kind"] == "livelock"
    run = found["runs"][found["findings"][0]["run"]]
    assert run["failure"] == "Livelock"
    last = {text(run, at) for at in range(len(run["events"]) - 20, len(run["events"]))}
    assert last == {f"rank {rank} atomic XCHG flag[0]" for rank in range(2)}
    kernels = {at for at, lane in enumerate(run["lanes"]) if lane["program"] is not None}
    files = {place["file"] for place in run["places"] if place["lane"] in kernels}
    assert files == {"tests/report/kernels.py"}  # and not where the checker records them
