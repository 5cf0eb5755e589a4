"""What commands share: extras that are missing, a home that can't be written, exit statuses."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from support.scripts import python
from typer.testing import CliRunner

from sundog.cli import app
from sundog.errors import SundogError
from sundog.tools._console import command, note

pytestmark = pytest.mark.sim_only
ROOT = Path(__file__).parents[2]


@pytest.fixture
def _no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def find_others(name: str, *given: Any) -> Any:
        return None if name.partition(".")[0] == "matplotlib" else find(name, *given)

    monkeypatch.setattr(importlib.util, "find_spec", find_others)
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)


@pytest.mark.usefixtures("_no_matplotlib")
@pytest.mark.parametrize(
    "words",
    [
        ["trace", "tools.trace.late_op", "--world", "2", "--backend", "sim", "--out", "t.json"],
        ["bench", "all_gather"],
    ],
)
def test_a_plot_without_matplotlib_says_what_to_install(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*words, "--plot", "p.png"])
    assert done.exit_code == 2, done.output
    assert done.exception is None or isinstance(done.exception, SystemExit)
    wanted = "--plot needs matplotlib: pip install matplotlib"
    assert wanted in " ".join(done.output.split())
    assert not list(tmp_path.iterdir()), "refused before anything ran"


def test_a_home_that_cannot_be_written() -> None:
    environment = {**os.environ, "HOME": "/proc/nowhere", "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_CACHE_DIR", None)
    environment.pop("TRITON_HOME", None)
    words = ["isa", "all_gather.push", "--target", "sm_90", "--world", "2"]
    done = python(["-m", "sundog", *words], environment)
    assert done.returncode == 0, done.stderr
    assert "/proc/nowhere/.triton/cache cannot be written" in done.stderr
    assert "TRITON_CACHE_DIR" in done.stderr
    assert "0 marked" in done.stdout


@pytest.mark.parametrize(
    ("raised", "status", "text"),
    [
        (None, 1, ""),
        (ValueError("numel=-1 is negative"), 2, "sundog x: numel=-1 is negative"),
        (SundogError("[no] markup"), 2, "sundog x: [no] markup"),
        (KeyboardInterrupt(), 130, "sundog x: interrupted"),
    ],
)
def test_exit_statuses(
    raised: BaseException | None, status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @command("x")
    def run(options: None) -> int:
        if raised is not None:
            raise raised
        return 1

    assert run(None) == status
    assert capsys.readouterr().err.strip() == text


def test_every_command_has_an_example() -> None:
    names = [each.name or each.callback.__name__ for each in app.registered_commands]
    assert {"check", "isa", "probe", "trace", "tune", "bench"} < set(names)
    for name in names:
        text = " ".join(CliRunner().invoke(app, [name, "--help"]).output.split())
        assert f"Example: sundog {name}" in text
        assert name == "demo" or "Exit status: 0" in text


def test_a_line_number_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich would write `theirs.py:100: text` with the emoji that it names `100`."""
    note("theirs.py:100: text")
    assert capsys.readouterr().err == "theirs.py:100: text\n"
    texts = [path.read_text() for path in (ROOT / "sundog").rglob("*.py")]
    consoles = [given for text in texts for given in re.findall(r"\bConsole\((.*)", text)]
    assert len(consoles) > 10
    assert [given for given in consoles if not given.startswith("emoji=False")] == []
