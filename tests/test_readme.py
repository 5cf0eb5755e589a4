"""README and reference pages are true: programs run, tables match the code, links lead on."""

from __future__ import annotations

import pkgutil
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sundog.cli import app
from sundog.knobs import KNOBS
from sundog.ops.op import OPS

README = Path(__file__).parent.parent / "README.md"
REFERENCE = README.parent / "docs" / "reference"
sys.path.append(str(README.parent / "scripts" / "site"))

import ops_page  # noqa: E402


@pytest.mark.parametrize("page", ["README.md", "docs/fused.md"])
def test_the_program_runs(monkeypatch, page):
    monkeypatch.setenv("SUNDOG_BACKEND", "sim")
    program = (README.parent / page).read_text().split("```python\n")[1].split("```")[0]
    exec(compile(program, page, "exec"), {"__name__": "page"})


def test_environment_variables_are_listed_with_their_defaults():
    text = (REFERENCE / "environment.md").read_text()
    rows = re.findall(r"^\| `(SUNDOG_\w+)` \|(.*?)\|(.*)\|$", text, re.M)
    listed = [tuple(cell.strip() for cell in row) for row in rows]
    assert listed == [(k.name, str(k.default), k.meaning) for k in KNOBS]


def test_every_op_is_listed_with_its_algorithms():
    text = ops_page.fill((REFERENCE / "ops.md").read_text())
    for key in OPS:
        op, _, algorithm = key.partition(".")
        (row,) = re.findall(rf"^\| `world\.{op}\(.*$", text, re.M)
        assert re.search(rf"\b{algorithm}\b", row), key
        assert f"sundog/collectives/{op}.py" in row or f"sundog/fused/{op}.py" in row


def test_every_op_has_its_signature_on_the_page():
    text = ops_page.fill((REFERENCE / "ops.md").read_text())
    for op in {key.partition(".")[0] for key in OPS}:
        assert re.search(rf"^::: sundog\.\w+\.{op}\.{op}$", text, re.M), op
    assert '`world.all_reduce(x, op="sum", out=None)`' in text


def test_every_folder_of_the_package_is_listed():
    folders = {f.parent.name for f in (README.parent / "sundog").glob("*/*") if "__" not in f.stem}
    rooms = {name for name in folders if not name.startswith("__")}
    assert len(rooms) > 15
    assert not [room for room in rooms if f"`sundog/{room}/`" not in README.read_text()]


def test_every_command_is_listed():
    text = README.read_text()
    commands = [command.name or command.callback.__name__ for command in app.registered_commands]
    groups = [group.name for group in app.registered_groups]
    for name in commands + groups:
        assert f"`sundog {name}" in text, name
        result = CliRunner().invoke(app, [name, "--help"])
        assert result.exit_code == 0


PAGES = sorted([*README.parent.glob("*.md"), *README.parent.glob("docs/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\(([\w/.-]+)(?:#[\w-]+)?\)", page.read_text()):
        path = (page.parent / target).resolve()
        if path.parent == README.parent / "docs" / "tutorials":  # made from tutorials/*.py
            path = README.parent / "tutorials" / f"{path.stem}.py"
        assert path.exists(), target


@pytest.mark.parametrize("page", sorted(REFERENCE.glob("*.md")), ids=lambda page: page.name)
def test_the_reference_names_what_exists(page):
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.M):
        assert pkgutil.resolve_name(name), name
