"""Above 2,000 marks every view draws on a canvas, with a table beside it, and stays responsive."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from sundog.report.sections import Section, section

from .made import bench_content, check_content, trace_content

Show = Callable[..., Any]
pytestmark = pytest.mark.timeout(300)  # a browser on a busy machine

COLOURS = """canvas => {
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size;
}"""


def colours(canvas: Any) -> int:
    """Count the colours on a canvas: one if nothing was drawn."""
    return int(canvas.evaluate(COLOURS))


def rows(page: Any, table: str) -> int:
    return int(page.get_by_role("table", name=table, exact=True).get_by_role("row").count()) - 1


def test_a_hundred_thousand_spans_are_drawn_on_a_canvas(show: Show) -> None:
    """The limits are of the processor's time: a machine with other work takes longer to get it."""
    page = show(section(trace_content(100_000, ranks=8), "large.json"))
    used = processor_time(page)
    assert used() < 2  # to load and first paint: 0.15 s were seen
    page.get_by_role("tab", name="Timeline").click()
    drawing = page.get_by_role("img", name="timeline of 100000 spans and 25000 arrows")
    drawing.wait_for()
    assert used() < 2  # and to draw: 0.3 s more
    assert drawing.evaluate("node => node.tagName") == "CANVAS"
    assert colours(drawing) > 10
    before = used()
    page.get_by_role("button", name="Zoom in").click()
    page.get_by_label("Search").fill("wait rank 1 program 3")
    assert page.get_by_role("status").inner_text().startswith("392 of 100000 spans match")
    assert used() - before < 2  # 0.2 s were seen
    page.get_by_text("The spans as a table").click()
    assert rows(page, "Spans") == 200
    page.get_by_role("button", name="Show more: 99800 rows are left").click()
    assert rows(page, "Spans") == 400


def processor_time(page: Any) -> Callable[[], float]:
    """Return what the page's main thread has used so far, in seconds."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})

    def used() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return float(next(each["value"] for each in metrics if each["name"] == "TaskDuration"))

    return used


def test_a_long_schedule_is_stepped_through_on_a_canvas(show: Show) -> None:
    content = check_content()
    run = content["runs"][0]
    run["events"] += [[3 + at % 2, f"flag[{at}]", 1] for at in range(15_000)]
    page = show(section(content, "long.json"))
    page.get_by_role("tab", name="Race view").click()
    page.get_by_role("checkbox", name="all events").check()
    drawing = page.get_by_role("img", name="space-time diagram of 15006 events in 4 lanes")
    assert drawing.evaluate("node => node.tagName") == "CANVAS"
    assert colours(drawing) > 10
    group = page.get_by_role("group", name="space-time diagram")
    used = processor_time(page)
    group.press("End")
    assert page.locator(".now").inner_text().startswith("Step 15006 of 15006")
    for _ in range(10):
        group.press("ArrowLeft")
    assert page.locator(".now").inner_text().startswith("Step 14996 of 15006")
    assert used() < 10  # eleven steps: 0.5 s were seen
    page.get_by_role("button", name="Show more").click()
    assert rows(page, "Events") == 400


def tuning_content(attempts: int) -> dict[str, Any]:
    column = list(range(attempts))
    run = {
        "session": "s", "kernel": "k", "problem": "n=1", "hardware": "made up", "backend": "sim",
        "world": 2, "seconds": 10, "started_at": "2026", "versions": {}, "search": {},
        "rows": {
            "time_s": column, "status": ["ok"] * attempts,
            "ms": [1 + 1 / (1 + at) for at in column],
            "low_ms": [1] * attempts, "high_ms": [2] * attempts,
            "compile_s": [1] * attempts,
            "config": [{"block": 1 << at % 5, "warps": at % 7} for at in column],
            "error": [""] * attempts,
        },
    }  # fmt: skip
    return {"runs": [run], "damage": [], "left_out": 0}


def test_a_run_of_five_thousand_configs_is_drawn_whole(show: Show) -> None:
    page = show(Section("tuning", "base", tuning_content(5000)))
    page.get_by_role("tab", name="Tuning").click()
    for name in ("parallel coordinates of 5000 configs over block, warps", "best so far"):
        canvas = page.get_by_role("img", name=name).locator("canvas").first
        assert colours(canvas) > 10
    page.get_by_role("button", name="Show more: 4800 rows are left").click()
    assert rows(page, "Attempts, the fastest first") == 400


def test_benchmarks_of_many_sizes_are_drawn_on_a_canvas(show: Show) -> None:
    content = bench_content()
    content["rows"] = [
        row | {"problem": f"Problem(numel={at}, size=8)"}
        for row in content["rows"][:3]
        for at in range(1, 801)
    ]
    page = show(section(content, "many.json"))
    page.get_by_role("tab", name="Benchmarks").click()
    lines = page.get_by_role("img", name=re.compile("time against numel"))
    assert lines.locator("canvas").count() == 2  # lines, dots
    assert all(colours(canvas) > 3 for canvas in lines.locator("canvas").all())
    assert page.get_by_role("img", name="roofline").locator("canvas").count() == 1
    assert rows(page, "All rows of all_reduce") == 200


def ir_content(nodes: int) -> dict[str, Any]:
    parts = [{"id": "m", "label": "builtin.module", "parent": None, "detail": {}, "at": []}]
    parts += [
        parts[0] | {"id": f"n{at}", "label": "arith.addi", "parent": "m"} for at in range(nodes)
    ]
    edges = [[f"n{at}", f"n{at + 1}", "data"] for at in range(nodes - 1)]
    graph = {
        "ir_id": "a" * 12, "run": "k", "kernel": "k", "stage": "ttir", "config": {}, "ms": None,
        "nodes": parts, "edges": edges, "source": {}, "left_out": 7,
    }  # fmt: skip
    return {"graphs": [graph], "left_out": 0}


@pytest.mark.parametrize(("nodes", "tag"), [(300, "svg"), (3000, "CANVAS")])
def test_a_large_graph_is_drawn_as_the_tree_of_its_regions(
    show: Show, nodes: int, tag: str
) -> None:
    page = show(Section("ir", "base", ir_content(nodes)))
    page.get_by_role("tab", name="IR graph").click()
    drawing = page.get_by_role("img", name=f"IR graph of k, {nodes + 1} nodes shown")
    assert drawing.evaluate("node => node.tagName") == tag
    page.get_by_text(f"7 nodes of this graph are left out: a page has the first {nodes + 1}")
    assert rows(page, "Nodes shown") == 200
    page.get_by_role("table", name="Nodes shown").get_by_role(
        "button", name="n20", exact=True
    ).click()
    page.get_by_role("heading", name="arith.addi (n20)").wait_for()
    box = drawing.bounding_box()
    page.get_by_role("button", name="Close all regions").click()
    page.get_by_role("group", name="IR graph of k, 1 nodes shown").wait_for()
    assert box["height"] > 2000


def test_a_canvas_takes_the_light_colours_for_paper(show: Show) -> None:
    page = show(section(trace_content(4000, ranks=2), "t.json"))
    page.emulate_media(color_scheme="dark")
    page.get_by_role("tab", name="Timeline").click()
    canvas = page.locator("canvas")
    canvas.wait_for()
    dark = canvas.evaluate("node => node.toDataURL()")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(20, 24, 29)"
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(background) == "rgb(255, 255, 255)"
    assert canvas.evaluate("node => node.toDataURL()") != dark
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert canvas.evaluate("node => node.toDataURL()") == dark
