"""ACCEPT in an op's file: equivalent mutants, each with its reason, checked to be still so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sundog.cli import app
from sundog.ops.load import load

FILE = "tests/tools/check/accepting.py"
EQUIVALENT = "send: tl.debug_barrier(): dropped #2"
KILLED = "send: tl.debug_barrier(): dropped"

pytestmark = pytest.mark.sim_only


def check(path: Path, monkeypatch: pytest.MonkeyPatch, accept: object) -> tuple[int, str]:
    monkeypatch.setattr(load(FILE), "ACCEPT", accept)
    words = [FILE, "--world", "2", "--schedules", "20", "--mutate", "--json", str(path)]
    done = CliRunner().invoke(app, ["check", *words])
    return done.exit_code, " ".join(done.output.split())


def test_an_accepted_mutant_does_not_fail_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "found.json"
    reason = load(FILE).ACCEPT[EQUIVALENT]
    code, text = check(path, monkeypatch, {EQUIVALENT: reason})
    assert code == 0, text
    assert f"accepted: {EQUIVALENT}: {reason}" in text
    mutants = {each["name"]: each for each in json.loads(path.read_text())["mutants"]}
    assert mutants[EQUIVALENT]["accepted"] == reason
    assert [name for name, each in mutants.items() if not each["killed_by"]] == [EQUIVALENT]


@pytest.mark.parametrize(
    ("accept", "code", "text"),
    [
        ({}, 1, EQUIVALENT),
        ({EQUIVALENT: "ends", KILLED: "same"}, 1, f"remove from ACCEPT {KILLED!r}: the checker"),
        ({EQUIVALENT: "ends", "gone: x": "was"}, 1, "remove from ACCEPT 'gone: x': there is no"),
        ({EQUIVALENT: " "}, 2, "has no reason"),
        ([EQUIVALENT], 2, "expected a dict of mutants and reasons"),
    ],
)
def test_what_is_not_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accept: object, code: int, text: str
) -> None:
    found = check(tmp_path / "found.json", monkeypatch, accept)
    assert found[0] == code, found[1]
    assert text in found[1]
