"""`--html` of each command: the page of its result, looked at in a browser."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sundog.cli import app

from .conftest import ROOT

Show = Callable[..., Any]
pytestmark = pytest.mark.timeout(300)  # a browser on a busy machine


def page_of(show: Show, out: Path, *words: str) -> Any:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
    return show.open(out)  # type: ignore[attr-defined]


def test_isa_shows_its_kernels(show: Show, tmp_path: Path) -> None:
    out = tmp_path / "isa.html"
    given = ["all_gather.push", "--target", "sm_90", "--problem", "numel=4096,dtype=float32"]
    page = page_of(show, out, "isa", *given, "--html", str(out))
    table = page.get_by_role("table", name=re.compile("Compiled kernels, all_gather.push"))
    cells = table.get_by_role("row").nth(1).inner_text().split("\t")
    assert (cells[0], cells[2]) == ("all_gather.push", "sm_90")
    assert int(cells[3]) > 0  # registers


def test_probe_shows_its_verdicts(show: Show, tmp_path: Path) -> None:
    out = tmp_path / "probe.html"
    given = ["all_gather.push", "--backend", "sim", "--replays", "1", "--html", str(out)]
    page = page_of(show, out, "probe", *given)
    page.get_by_role("tab", name="Capture").click()
    row = page.get_by_role("table", name="Verdicts of the probe").get_by_role("row").nth(1)
    assert row.inner_text().split("\t")[:3] == ["all_gather.push", "CAPTURABLE", "ok"]


def test_tune_shows_its_attempts(show: Show, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    out = tmp_path / "tune.html"
    problem = ["--problem", "numel=4096,dtype=float32", "--budget", "1"]
    given = ["all_gather.push", "--compile-only", "--target", "sm_90", *problem]
    page = page_of(show, out, "tune", *given, "--log", str(tmp_path / "log"), "--html", str(out))
    page.get_by_role("tab", name="Tuning").click()
    attempts = page.get_by_role("table", name="Attempts, the fastest first")
    assert attempts.get_by_role("row").nth(1).inner_text().split("\t")[1] == "compiled"


def test_report_shows_what_was_measured_on_a_gpu(show: Show, tmp_path: Path) -> None:
    """`bench` needs a GPU: two of its files, as they were recorded."""
    out = tmp_path / "bench.html"
    files = [str(ROOT / "docs" / "measured" / f"h200-all-reduce-{n}.json.xz") for n in (2, 8)]
    page = page_of(show, out, "report", "-o", str(out), *files)
    page.get_by_role("tab", name="Benchmarks").click()
    for ranks in (2, 8):
        page.get_by_role("heading", name=re.compile(f"all_reduce, {ranks} ranks")).wait_for()
    assert page.get_by_role("img", name="roofline").count() == 2
    assert page.get_by_role("img", name=re.compile("bars of")).count() == 2
    sentences = page.locator(".crossings li").all_inner_texts()
    assert any("is the fastest up to" in each for each in sentences)
