"""The table of rules: the same in code and on the page, and extended by one file and one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from corpus import PAIRS
from support.scripts import python

from sundog.checker.findings import Rule
from sundog.checker.rules import OBJECTIONS, RULES

pytestmark = pytest.mark.sim_only

ROOT = Path(__file__).parents[2]
HEAD = ["| kind | rule | what it means | what to do |", "|---|---|---|---|"]


def row(rule: Rule) -> str:
    name = f"`{rule.name}`" if rule.name else ""
    advice = rule.advice.replace("sundog.device.", "")
    return f"| `{rule.kind}` | {name} | {rule.means} | {advice} |"


def test_the_page_has_the_table_of_rules() -> None:
    lines = (ROOT / "docs" / "checker.md").read_text().splitlines()
    start = lines.index(HEAD[0])
    end = lines.index("", start)
    assert lines[start:end] == [*HEAD, *map(row, RULES)]


def test_the_memory_model_explains_every_kind_about_memory() -> None:
    page = (ROOT / "docs" / "memory_model.md").read_text()
    section = page.partition("## What goes wrong\n")[2].partition("\n## ")[0]
    for kind in OBJECTIONS - {"wrong result"}:
        assert f"- **{kind.capitalize()}.**" in section, kind


def test_rules_have_names_of_their_own() -> None:
    assert len({(rule.kind, rule.name) for rule in RULES}) == len(RULES)


def test_an_error_is_no_objection_to_a_mutant() -> None:
    assert "error" not in OBJECTIONS
    assert {rule.kind for rule in RULES} - {"error"} == OBJECTIONS


def test_the_corpus_shows_every_rule() -> None:
    """A refusal has its own tests, and so have remarks: they are no findings.

    A wrong result is what a twin compares with torch.
    """
    without_pair = {"wrong result", "cannot be interpreted"}
    shown = {(pair.rule.kind, pair.rule.name) for pair in PAIRS}
    for rule in RULES:
        if not ({rule.kind, rule.name} & without_pair or rule.is_strict):
            assert (rule.kind, rule.name) in shown


NEW_RULE = '''
"""Tiles that are stored with gaps between their elements."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .encounter import Encounter, Found
from .findings import Rule

GAPS = Rule("layout", "gaps", "a tile is stored with gaps", "Store it side by side.")
RULES = [GAPS]


def look(here: Encounter) -> Iterable[Found]:
    addresses = here.touch.addresses.ravel()
    if here.event.verb != "store" or (np.diff(addresses) == here.touch.size).all():
        return ()
    return (Found(GAPS, f"{addresses.size} lanes store"),)
'''

TARGET = """
import torch
import triton
import triton.language as tl


@triton.jit
def pairs(out):
    at = tl.arange(0, 8)
    tl.store(out + at * 2, at)


def main(world):
    pairs[(1,)](torch.zeros(16, dtype=torch.int32))
"""


def test_a_new_rule_takes_one_file_and_one_line(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "sundog", tmp_path / "sundog")
    (tmp_path / "target.py").write_text(TARGET)
    assert check_in(tmp_path) == []

    checker = tmp_path / "sundog" / "checker"
    (checker / "gaps.py").write_text(NEW_RULE.lstrip())
    rules = (checker / "rules.py").read_text()
    added = rules.replace('    "proxies",\n', '    "proxies",\n    "gaps",\n')
    assert len(added.splitlines()) == len(rules.splitlines()) + 1
    (checker / "rules.py").write_text(added)
    (finding,) = check_in(tmp_path)
    assert finding["rule"] == "gaps"
    assert finding["why"] == "8 lanes store"
    assert finding["second"]["text"] == "tl.store(out + at * 2, at)"
    assert finding["suggestion"] == "Store it side by side."


def check_in(folder: Path) -> list[dict]:
    """Run `sundog check` of the package in this folder; return its findings."""
    command = ["-m", "sundog", "check", "target.py", "--world", "1"]
    options = ["--schedules", "1", "--json", "found.json"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    done = python([*command, *options], environment, folder)
    assert done.returncode in (0, 1), done.stderr
    return json.loads((folder / "found.json").read_text())["findings"]
