"""The page's assets, and one browser for all tests of this folder."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sundog.cli import app
from sundog.report.page import write_report
from sundog.report.sections import Section, section

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))
import assets as asset_build  # noqa: E402


@pytest.fixture(scope="session")
def assets() -> None:
    """Build the page's script, or skip with the reason."""
    reason = asset_build.build(seconds=60)
    if reason:
        pytest.skip(f"the page is not built: {reason}")


@pytest.fixture(scope="package")  # its event loop must be gone before other folders' tests
def chromium(assets: None) -> Iterator[Any]:
    executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("there is no browser: install Debian's chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        words = ["--no-sandbox", "--disable-dev-shm-usage"]
        try:
            browser = driver.chromium.launch(executable_path=executable, args=words)
        except playwright.Error as error:
            pytest.skip(f"chromium does not start here: {str(error).splitlines()[0]}")
        yield browser
        browser.close()


@pytest.fixture
def show(chromium: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open a report, and expect at the end that nothing failed and no request left the page."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True)
    context.set_default_timeout(90_000)  # the machine may have other work
    wrong: list[str] = []
    requests: list[str] = []

    def open_page(path: Path) -> Any:
        page = context.new_page()
        page.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else 0)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(path.as_uri())
        page.get_by_role("tablist", name="views").wait_for()
        return page

    def show_sections(*sections: Section | Path) -> Any:
        given = [
            each if isinstance(each, Section) else section(json.loads(each.read_text()), each.name)
            for each in sections
        ]
        path = tmp_path / "report.html"
        write_report(str(path), given)
        return open_page(path)

    show_sections.open = open_page  # type: ignore[attr-defined]
    yield show_sections
    context.close()
    assert not wrong
    assert {url for url in requests if not url.startswith(("file:", "blob:"))} == set()


@pytest.fixture(scope="package")  # one check for two files: it takes 6,000 steps
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Check the kernel that never ends; return the JSON of that."""
    path = tmp_path_factory.mktemp("endless") / "found.json"
    given = ["check", "tests.report.kernels:endless", "--world", "2", "--schedules", "1"]
    assert CliRunner().invoke(app, [*given, "--json", str(path)]).exit_code == 1
    return path
