"""The overview and the race view, in a browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sundog.cli import app
from sundog.demo import PAGE
from sundog.report.sections import section

from .made import HOSTILE, check_content

pytestmark = pytest.mark.timeout(300)  # a browser on a busy machine


def test_the_overview_says_what_was_found_and_covered(show: Callable[..., Any]) -> None:
    page = show(section(check_content(), "found.json"))
    row = page.get_by_role("row", name="found.json").first
    for text in ("✗ found", "1 findings, 0 remarks", "3 schedules, 2 ranks", "mutants: not asked"):
        assert text in row.inner_text()
    assert "2.13.0" in page.get_by_role("table", name="Versions and machines").inner_text()


def test_a_race_is_drawn_and_can_be_stepped_through(show: Callable[..., Any]) -> None:
    page = show(section(check_content(), "found.json"))
    page.get_by_role("tab", name="Overview").press("ArrowRight")
    page.get_by_role("heading", name="race: relaxed release, 2 times").wait_for()
    drawing = page.get_by_role("img", name=re.compile("space-time diagram of 6 events in 4 lanes"))
    dashed = drawing.locator("line[stroke-dasharray]")
    assert dashed.count() == 1
    ends = dashed.evaluate("line => [line.y1.baseVal.value, line.y2.baseVal.value]")
    assert ends == [24 + 44, 24 + 3 * 44]  # from rank 0's program to rank 1's
    now = page.locator(".now")
    assert now.inner_text().startswith("Step 6 of 6: rank 1 pass_right(0,0,0): load inbox[0:8]")
    page.get_by_role("button", name="Step back").click()
    assert "atomic ADD (acquire, sys) flag[0], 3 times" in now.inner_text()
    page.get_by_role("group", name="space-time diagram").press("Home")
    assert now.inner_text().startswith("Step 1 of 6")
    page.get_by_role("button", name="Step forward").click()
    assert now.inner_text().startswith("Step 2 of 6")
    source = page.get_by_role("region", name="source of k.py")
    assert source.locator("li.second").inner_text().split() == ["4", "load"]


def test_markup_in_names_stays_text(show: Callable[..., Any]) -> None:
    content = check_content(HOSTILE)
    content["notes"] = [HOSTILE]
    page = show(section(content, HOSTILE))
    page.on("dialog", lambda dialog: dialog.dismiss())
    assert HOSTILE.replace("\u2028", "") in page.locator("td").nth(2).inner_text().replace(
        "\u2028", ""
    )
    page.get_by_role("tab", name="Race view").click()
    assert "<script>alert(1)</script>" in page.locator(".why").inner_text()
    assert page.locator("img[src]").count() == 0
    assert page.locator("main script").count() == 0


def test_a_deadlock_shows_who_waits_for_whom(show: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "dead.json"
    words = ["tests.report.kernels:silent", "--world", "2", "--schedules", "1", "--json", str(path)]
    assert CliRunner().invoke(app, ["check", *words]).exit_code == 1
    page = show(path)
    page.get_by_role("tab", name="Race view").click()
    graph = page.get_by_role("img", name="wait-for graph of 3 parties")
    names = graph.locator(".node text").all_text_contents()
    assert "rank 0 host: returned" in names
    assert "rank 1 pass_right(0,0,0)" in names
    assert graph.locator(".edge").count() == 2  # host 1 on its kernel, the kernel on rank 0
    assert "There is no cycle" in page.locator(".cycle-text").inner_text()


def test_a_livelock_shows_its_cycle_and_is_stepped_through(
    show: Callable[..., Any], endless: Path
) -> None:
    page = show(endless)
    page.get_by_role("tab", name="Race view").click()
    names = [f"rank {rank} endless_kernel(0,0,0)" for rank in (0, 1)]
    said = page.locator(".cycle-text").inner_text()
    assert said in {f"The cycle: {' → '.join([a, b, a])}." for a, b in (names, names[::-1])}
    graph = page.get_by_role("img", name="wait-for graph of 2 parties")
    assert (graph.locator(".node.cycle").count(), graph.locator(".edge.cycle").count()) == (2, 2)
    pairs = page.get_by_role("table", name="Who waits for whom")
    assert "reads flag[0] again and again at tests/report/kernels.py:36" in pairs.inner_text()
    step, group = page.locator(".now"), page.get_by_role("group", name="space-time diagram")
    last = step.inner_text()
    assert "atomic XCHG (acq_rel, sys) flag[0]" in last
    page.get_by_role("button", name="Step back").click()
    before = step.inner_text()
    assert before != last
    assert "tl.atomic_xchg" in page.locator("li.current").inner_text()
    group.press("ArrowRight")
    assert step.inner_text() == last
    group.press("Home")
    assert step.inner_text().startswith("Step 1 of")


def test_the_demo_writes_its_page(
    show: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(app, ["demo"]).output
    assert str(tmp_path / PAGE) in said.replace("\n", "")
    page = show.open(tmp_path / PAGE)  # type: ignore[attr-defined]
    assert page.get_by_role("tab").all_inner_texts() == ["Overview", "Race view", "Timeline"]
    page.get_by_role("tab", name="Race view").click()
    page.get_by_role("heading", name=re.compile("no CTA barrier before the release")).wait_for()
