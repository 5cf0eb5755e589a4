"""CONTRIBUTING.md adds one of each: its five examples, applied to a copy of the package, work."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from support.scripts import python

ROOT = Path(__file__).parent.parent
CODE = r"[^\n]*\n\n```python\n(.*?)```"  # after the rest of the paragraph
FILE = re.compile(rf"^Write `([^`]+)`{CODE}", re.M | re.S)
FUNCTION = re.compile(rf"Write a function above `([^`]+)` in `([^`]+)`{CODE}", re.S)
LINE = re.compile(rf"^Add a line after `([^`]+)` in `([^`]+)`{CODE}", re.M | re.S)
CHANGE = re.compile(rf"^Change the line that begins with `([^`]+)` in `([^`]+)`{CODE}", re.M | re.S)
TRY = re.compile(r"^Try it[^\n]*:\n\n```\n(.*?)```", re.M | re.S)
STATUS = re.compile(r"\s*# exits with (\d): (.*)$")


def sections() -> dict[str, str]:
    page = (ROOT / "CONTRIBUTING.md").read_text().partition("## Five things to add")[2]
    parts = re.split(r"^### (.*)$", page, flags=re.M)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


SECTIONS = sections()


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with all five examples in it."""
    root = tmp_path_factory.mktemp("copy")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "sundog", root / "sundog", ignore=ignored)
    for text in SECTIONS.values():
        for path, code in FILE.findall(text):
            assert not (root / path).exists(), path
            (root / path).write_text(code)
        for marker, path, code in FUNCTION.findall(text):
            _edit(root / path, marker, lambda line, code=code: code + line)
        for marker, path, code in LINE.findall(text):
            _edit(root / path, marker, lambda line, code=code: line + code)
        for marker, path, code in CHANGE.findall(text):
            _edit(root / path, marker, lambda line, code=code: code)
    return root


def _edit(path: Path, marker: str, edited: Callable[[str], str]) -> None:
    """Edit the first line that begins with the marker."""
    lines = path.read_text().splitlines(keepends=True)
    number = next(n for n, line in enumerate(lines) if line.lstrip().startswith(marker))
    lines[number] = edited(lines[number])
    path.write_text("".join(lines))


def test_there_are_five():
    assert list(SECTIONS) == [
        "An algorithm",
        "A collective",
        "A backend",
        "A check rule",
        "A baseline",
    ]


@pytest.mark.parametrize("name", SECTIONS)
def test_each_takes_one_file_and_one_line(name):
    text = SECTIONS[name]
    assert len(FILE.findall(text)) + len(FUNCTION.findall(text)) == 1
    (line,) = [found[-1] for found in LINE.findall(text) + CHANGE.findall(text)]
    assert line.count("\n") == 1
    assert len(TRY.findall(text)) == 1


@pytest.mark.long
@pytest.mark.sim_only
@pytest.mark.parametrize("name", SECTIONS)
def test_the_example_works(name, copy):
    (commands,) = TRY.findall(SECTIONS[name])
    for command in commands.splitlines():
        status = STATUS.search(command)
        words = shlex.split(STATUS.sub("", command))
        start = ["-m", "sundog"] if words[0] == "sundog" else []
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        done = python([*start, *words[1:]], environment, copy)
        expected = int(status[1]) if status else 0
        assert done.returncode == expected, f"{command}\n{done.stdout}\n{done.stderr}"
        if status:
            assert status[2] in re.sub(r"\s+", " ", done.stdout + done.stderr)
