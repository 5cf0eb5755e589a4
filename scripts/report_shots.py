"""Make the pictures of docs/report.md: a page of real data, each view in Chromium.

    PYTHONPATH=. python scripts/report_shots.py docs/report

Needs `make assets`, Debian's chromium, playwright and matplotlib's Pillow. A test makes the same
pictures (tests/report/test_views.py). They get a palette: each is below 100 kB.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).parent.parent
BENCH = ROOT / "docs" / "measured" / "h200-all-reduce-8.json.xz"
BASES = [str(ROOT / "data" / "h200" / name) for name in ("all_gather", "helion")]
MOST_BYTES = 100_000


def sundog(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "sundog", *words], cwd=ROOT, stdout=subprocess.DEVNULL)


def make_reports(folder: Path) -> tuple[Path, Path]:
    """Check the demo's race, trace an all-gather, and put measured data beside them."""
    race, trace, probe = (str(folder / f"{name}.json") for name in ("race", "trace", "probe"))
    sundog("check", "sundog.demo:racy", "--world", "4", "--schedules", "1", "--json", race)
    sundog("trace", "all_gather", "--world", "4", "--backend", "sim", "--out", trace)
    sundog("probe", "all_gather.push", "all_reduce.ring", "--world", "2", "--replays", "2",
           "--json", probe)  # fmt: skip
    clean = str(folder / "clean.json")
    sundog("check", "sundog.demo:right", "--world", "4", "--schedules", "1", "--json", clean)
    whole, old, new = (folder / f"{name}.html" for name in ("report", "old", "new"))
    sundog("report", "-o", str(whole), race, trace, str(BENCH), probe, *BASES)
    sundog("report", "-o", str(old), race, trace)
    sundog("report", "-o", str(new), clean, trace)
    both = folder / "comparison.html"
    sundog("report", "--compare", "-o", str(both), str(old), str(new))
    return whole, both


def shoot(page: Page, view: str, out: Path) -> None:
    page.get_by_role("tab", name=view).click()
    if view == "Timeline":
        page.get_by_role("checkbox", name="critical path").check()
    if view == "IR graph":
        page.get_by_role("button", name="tt.func").click()
    page.wait_for_timeout(400)
    path = out / f"{view.lower().replace(' ', '_')}.png"
    page.screenshot(path=path)
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(96, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    size = path.stat().st_size
    print(f"{path.name}: {size:,} bytes")
    assert size < MOST_BYTES, path


def shoot_all(browser: Browser, whole: Path, both: Path, out: Path) -> None:
    """Make a picture of each view of the report, and one of the comparison."""
    out.mkdir(parents=True, exist_ok=True)
    page = browser.new_page(viewport={"width": 1200, "height": 780})
    page.set_default_timeout(90_000)  # the machine may have other work
    for report in (whole, both):
        page.goto(report.as_uri())
        page.get_by_role("tablist").wait_for()
        views = [tab.inner_text() for tab in page.get_by_role("tab").all()]
        for view in views if report is whole else views[:1]:
            shoot(page, view, out)
    page.close()


def main(out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        chromium = shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        shoot_all(browser, *make_reports(Path(folder)), out)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
