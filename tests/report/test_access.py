"""Views for everybody: axe finds nothing serious, they print, and Firefox shows them too."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sundog.report.page import write_report
from sundog.report.sections import Section, read_sections, section

from .conftest import ROOT, asset_build
from .made import HOSTILE, bench_content, check_content, probe_content, trace_content

AXE = ROOT / "frontend" / "node_modules" / "axe-core" / "axe.min.js"
pytestmark = pytest.mark.timeout(300)  # browsers on a busy machine
VIEWS = ["Overview", "Race view", "Timeline", "IR graph", "Tuning", "Benchmarks", "Capture"]


def all_sections() -> list[Any]:
    pytest.importorskip("pandas")
    return [
        section(check_content(HOSTILE), "found.json"),
        section(trace_content(), "trace.json"),
        section(bench_content(), "bench.json"),
        section(probe_content(), "probe.json"),
        *map(_cut, read_sections(str(ROOT / "data" / "h200" / "all_reduce"))),
    ]


def _cut(part: Section) -> Section:
    """Keep one run and one graph: these tests look at views, not at data."""
    lists = {k: v[:1] if isinstance(v, list) else v for k, v in part.data.items()}
    for run in lists.get("runs", ()):
        run["rows"] = {name: column[:20] for name, column in run["rows"].items()}
    return Section(part.kind, part.name, lists)


def serious(page: Any, view: str, scheme: str, options: str) -> list[tuple[str, ...]]:
    page.emulate_media(color_scheme=scheme)
    return [
        (view, scheme, each["id"], each["nodes"][0]["html"][:200])
        for each in page.evaluate(f"axe.run({options})")["violations"]
        if each["impact"] in ("serious", "critical")
    ]


@pytest.mark.long
def test_axe_finds_no_serious_violation(show: Callable[..., Any]) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not installed: npm ci in frontend/")
    page = show(*all_sections())
    assert page.get_by_role("tab").all_inner_texts() == VIEWS
    page.evaluate(AXE.read_text())  # by the driver: the page's own policy lets no script in
    found = []
    for name in VIEWS:
        page.get_by_role("tab", name=name).click()
        found += serious(page, name, "light", "{}")
        found += serious(page, name, "dark", "{runOnly: ['color-contrast']}")
    assert not found


def test_printing_shows_every_view(show: Callable[..., Any]) -> None:
    page = show(*all_sections())
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.locator("[role=tabpanel]:visible").count() == len(VIEWS)
    assert page.get_by_role("img", name="roofline").is_visible()


@pytest.mark.long
def test_firefox_shows_every_view(assets: None, tmp_path: Path) -> None:
    firefox, node = shutil.which("firefox-esr"), shutil.which("node", path=asset_build.node_path())
    if firefox is None or node is None:
        pytest.skip("there is no firefox-esr, or no Node to drive it")
    path = tmp_path / "report.html"
    write_report(str(path), all_sections())
    script = ROOT / "frontend" / "firefox.mjs"
    done = subprocess.run([node, script, firefox, path.as_uri()], capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip(f"Firefox does not start here: {done.stderr.strip()[:300]}")
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["tabs"] == VIEWS
    assert seen["errors"] == []
    left = [url for url in seen["requests"] if not url.startswith(("file:", "data:", "blob:"))]
    assert not left
    assert all(size > 200 for size in seen["lengths"]), seen["lengths"]
