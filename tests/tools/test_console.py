"""What commands share: extras that are missing, a home that can't be written, exit statuses."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from support.scripts import python
from typer.testing import CliRunner

import sundog
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


def commands(command: Any, *names: str) -> Iterator[tuple[str, Any]]:
    """List commands and groups with their names."""
    yield " ".join(names), command
    for name, each in getattr(command, "commands", {}).items():
        yield from commands(each, *names, name)


EVERY = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("name", EVERY)
def test_every_command_has_an_example(name: str) -> None:
    assert {"check", "isa", "data import helion", "new"} < EVERY.keys()
    text = " ".join(CliRunner().invoke(app, [*name.split(), "--help"]).output.split())
    assert f"Example: sundog {name}" in text
    assert re.search(r"Exit status( of every command)?: 0 ", text)


@pytest.mark.parametrize("name", EVERY)
def test_what_lacks_an_argument_gets_an_example(name: str) -> None:
    command = EVERY[name]
    lacking = [p.name for p in getattr(command, "params", []) if p.required]
    if lacking:
        done = CliRunner().invoke(app, name.split(), terminal_width=400)
        assert done.exit_code == 2
        told = " ".join(done.output.replace("│", " ").split())
        example = command.help.partition("Example: ")[2].partition("\n")[0]
        assert f"Missing argument '{lacking[0]}'. For example: {example}" in told
    assert lacking or name not in ("trace", "bench", "predict", "data info", "new op")


@pytest.mark.parametrize("words", ["check", "demo", "data info nowhere", "new op row_sum --dir no"])
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("SUNDOG_TIMEOUT", "abc", "expected more than 0 seconds. Seconds until a wait"),
        ("SUNDOG_SEED", "1.5", "expected a whole number. Seed of"),
        ("SUNDOG_SIGNALS", "loud", "expected atomic or store. How ranks signal"),
        ("SUNDOG_HEAP_SIZE", "1²", "expected a whole number of bytes"),
    ],
)
def test_a_variable_that_cannot_be_read(
    words: str, name: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the command would not use it."""
    monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, words.split())
    assert (done.exit_code, type(done.exception)) == (2, SystemExit), done.output
    assert f"sundog: {name}={value!r}: {expected}" in done.output
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        sundog.run(lambda world: None, 2, "sim", heap_size=1 << 20, timeout=9, signals="store")
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        sundog.init("shm")


def test_a_value_that_cannot_be_read_gets_an_example() -> None:
    done = CliRunner().invoke(app, ["trace", "all_gather", "--world", "x"], terminal_width=400)
    assert done.exit_code == 2
    told = " ".join(done.output.replace("│", " ").split())
    assert (
        "unable to parse string as an integer. For example: sundog trace all_gather --out" in told
    )


def test_a_line_number_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich would write `theirs.py:100: text` with the emoji that it names `100`."""
    note("theirs.py:100: text")
    assert capsys.readouterr().err == "theirs.py:100: text\n"
    texts = [path.read_text() for path in (ROOT / "sundog").rglob("*.py")]
    consoles = [given for text in texts for given in re.findall(r"\bConsole\((.*)", text)]
    assert len(consoles) > 10
    assert [given for given in consoles if not given.startswith("emoji=False")] == []
