"""The timeline, benchmarks, tuning, capture and IR views, in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sundog.report.page import write_comparison, write_report
from sundog.report.sections import Section, read_sections, section

from .made import bench_content, check_content, probe_content, trace_content

ROOT = Path(__file__).parents[2]
Show = Callable[..., Any]
pytestmark = pytest.mark.timeout(300)  # a browser on a busy machine


def bases(*names: str) -> list[Section]:
    pytest.importorskip("pandas")
    return [part for name in names for part in read_sections(str(ROOT / "data" / "h200" / name))]


def test_a_trace_zooms_searches_and_adds_up(show: Show, tmp_path: Path) -> None:
    page = show(section(trace_content(), "trace.json"))
    page.get_by_role("tab", name="Timeline").click()
    drawing = page.get_by_role("img", name="timeline of 40 spans and 10 arrows")
    drawing.wait_for()
    assert drawing.locator(".mark").count() == 40
    page.get_by_role("button", name="Zoom in").click()
    assert page.locator(".range").inner_text().startswith("2.25 to 6.75 of 9 us")
    page.get_by_role("group", name="timeline").press("0")
    assert page.locator(".range").inner_text().startswith("0 to 9 of 9 us")
    page.get_by_label("Search").fill("wait rank 1 program 3")
    # Rank 1's own, and that of rank 0, which rank 1 ends.
    assert page.get_by_role("status").inner_text() == "2 of 40 spans match"
    row = page.get_by_role("table", name="By rank").get_by_role("row").nth(1)
    # Five programs, each 9 long, of which 3 waited; fetch 4, of which 2 beside compute.
    assert row.inner_text().split("\t") == ["0", "9", "33 %", "rank 1, 33 %", "50 %"]
    overlap = page.get_by_role("table", name=re.compile("Overlap")).get_by_role("row").nth(1)
    assert overlap.inner_text().split("\t")[2:] == ["11 %", "22 %", "22 %", "33 %"]
    path = page.get_by_role("table", name=re.compile("Critical path")).get_by_role("row")
    assert "wait\trank 1 program" in path.last.inner_text()


def test_a_trace_is_saved_as_it_was_for_perfetto(show: Show, tmp_path: Path) -> None:
    page = show(section(trace_content(), "trace.json"))
    page.get_by_role("tab", name="Timeline").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Save for ui.perfetto.dev").click()
    saved = json.loads(Path(download.value.path()).read_text())
    given = trace_content()
    assert saved["otherData"] == given["otherData"]
    assert [e for e in saved["traceEvents"] if e["ph"] == "X"] == [
        e for e in given["traceEvents"] if e["ph"] == "X"
    ]
    assert sum(e["ph"] == "f" for e in saved["traceEvents"]) == 10


def test_benchmarks_have_bars_lines_crossings_and_a_roofline(show: Show) -> None:
    page = show(section(bench_content(), "b.json"))
    page.get_by_role("tab", name="Benchmarks").click()
    bars = page.get_by_role("img", name="bars of 3 variants")
    assert bars.locator("rect").count() == 3
    page.get_by_role("img", name=re.compile("time against numel of")).wait_for()
    page.get_by_role("img", name="roofline").wait_for()
    assert page.locator(".crossings").inner_text() == (
        "one_shot is the fastest up to numel=1024, two_shot from 65536 on."
    )
    page.get_by_label("Problem").select_option(label="numel=1024, dtype=bfloat16, size=8")
    assert "4.3" in bars.inner_html()


def test_two_commits_are_compared_in_one_report(show: Show) -> None:
    old, new = bench_content(), bench_content(faster=1.5, commit="bbbb")
    page = show(section(old, "old.json"), section(new, "new.json"))
    page.get_by_role("tab", name="Benchmarks").click()
    changes = page.get_by_role("table", name=re.compile(r"old.json \(aaaa\) to new.json \(bbbb\)"))
    assert changes.get_by_text("better", exact=True).count() == 3
    assert changes.get_by_text("worse", exact=True).count() == 0


def test_predictions_say_where_algorithms_cross(show: Show) -> None:
    points = [
        {"machine": "h200x8", "problem": f"Problem(numel={n}, size=8)", "best": "one_shot",
         "times": {"one_shot": {"seconds": 1e-6 * n, "bound": "link", "parts": []},
                   "ring": {"seconds": 5e-6 + 1e-7 * n, "bound": "latency", "parts": []}}}
        for n in (1, 2, 64, 128)
    ]  # fmt: skip
    page = show(section(points, "p.json"))
    page.get_by_role("tab", name="Benchmarks").click()
    assert page.locator(".crossings").inner_text() == (
        "one_shot, h200x8 is the fastest up to numel=2, ring, h200x8 from 64 on."
    )


def test_capture_shows_verdicts_and_root_causes(show: Show) -> None:
    page = show(section(probe_content(), "probe.json"))
    page.get_by_role("tab", name="Capture").click()
    assert "ok" in page.get_by_role("row", name="all_gather.push").inner_text()
    cause = page.get_by_role("table", name="Root causes").get_by_role("row").nth(1).inner_text()
    assert "reads a tensor on the host" in cause
    assert "mine.py:12" in cause


def test_tuning_draws_the_runs_of_a_base_and_compares_two(show: Show) -> None:
    page = show(*bases("all_gather"))
    page.get_by_role("tab", name="Tuning").click()
    name = re.compile(r"parallel coordinates of \d+ configs over .*programs")
    page.get_by_role("img", name=name).wait_for()
    page.get_by_role("img", name="best so far").wait_for()
    time = page.get_by_role("table", name="Where the time went")
    assert time.get_by_role("row").count() == 2
    page.get_by_label("Compare with").select_option(index=2)
    assert time.get_by_role("row").count() == 3
    both = page.get_by_role("table", name="The best configs of both runs")
    assert "best, ms" in both.inner_text()


def test_an_ir_graph_opens_closes_maps_and_compares(show: Show) -> None:
    page = show(*bases("all_gather", "helion"))
    page.get_by_role("tab", name="IR graph").click()
    graph = page.get_by_role("group", name=re.compile("IR graph of .*nodes shown"))
    page.get_by_role("button", name="Close all regions").click()
    assert graph.get_by_role("button").count() == 1
    page.get_by_role("button", name="▸ builtin.module").press("Enter")
    page.get_by_role("button", name="▸ builtin.module").press("Enter")
    page.get_by_role("button", name=re.compile("tt.func")).click()
    listing = page.get_by_role("region", name=re.compile("source of sundog.collectives"))
    first = listing.locator("li.chosen")
    assert "def _" in first.inner_text()
    page.get_by_role("table", name="Details").wait_for()
    listing.locator("li.mapped button").nth(2).click()
    said = page.locator(".now").last.inner_text()
    assert re.fullmatch(r"[1-9]\d* nodes come from sundog/collectives/.*\.", said)
    assert graph.locator(".node.chosen").count() > 0
    graphs = page.get_by_role("combobox", name="Graph", exact=False)
    names = graphs.locator("option").all_inner_texts()
    helion = next(at for at, name in enumerate(names) if "attention helion" in name)
    graphs.select_option(index=helion)
    page.get_by_role("button", name=re.compile("aten.exp2")).first.click()
    assert "torch.exp2" in page.locator("li.chosen").inner_text()
    kernel = names[0].split()[0]
    other = next(at for at, name in enumerate(names) if at and name.startswith(kernel))
    graphs.select_option(index=0)
    page.get_by_label("Compare with").select_option(index=other + 1)
    page.get_by_role("table", name=re.compile(r"nodes are the same, \d+ differ")).wait_for()


def test_a_comparison_marks_what_got_better_and_worse(show: Show, tmp_path: Path) -> None:
    fixed = check_content() | {"findings": []}
    old = [
        section(check_content(), "c.json"),
        section(bench_content(), "b.json"),
        section(probe_content("CAPTURABLE"), "p.json"),
    ]
    new = [
        section(fixed, "c.json"),
        section(bench_content(faster=0.5), "b.json"),
        section(probe_content(), "p.json"),
    ]
    paths = [tmp_path / "old.html", tmp_path / "new.html"]
    for path, sections in zip(paths, (old, new), strict=True):
        write_report(str(path), sections)
    write_comparison(str(tmp_path / "both.html"), *map(str, paths))
    page = show.open(tmp_path / "both.html")  # type: ignore[attr-defined]
    text = page.locator("[role=tabpanel]:visible p").first.inner_text()
    assert text.endswith("1 better, 4 worse, 6 the same.")
    changes = page.get_by_role("table", name="What changed").get_by_role("row")
    assert "two_shot" in changes.nth(1).inner_text()
    better = changes.filter(has_text="race: relaxed release")
    assert better.inner_text().startswith("better")
    assert changes.filter(has_text="mine.py:main").inner_text().startswith("worse")


@pytest.mark.long
def test_the_docs_have_a_picture_of_every_view(chromium: Any, tmp_path: Path) -> None:
    """Made from real data, as those of docs/report are."""
    import report_shots  # of scripts/; it needs playwright

    report_shots.shoot_all(chromium, *report_shots.make_reports(tmp_path), tmp_path / "shots")
    made, kept = tmp_path / "shots", ROOT / "docs" / "report"
    assert len([*made.iterdir()]) == 8
    assert {path.name for path in made.iterdir()} == {path.name for path in kept.iterdir()}
