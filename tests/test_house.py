"""Budgets that keep the house in order. A feature raises its folder's in the same commit."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "scripts"))
from house import House, account

from sundog.checker.rules import WATCHING
from sundog.ops.op import FUNCTIONS, OPS, SHAPE

# Lines per folder, with the files directly in it.
BUDGETS = {
    "(top)": 1185,
    "backends": 3980,
    "checker": 3725,
    "collectives": 3805,
    "compat": 2980,
    "compiled": 1000,
    "dataset": 3835,
    "dataset/helion": 1830,
    "dataset/triton": 1670,
    "device": 1000,
    "fused": 6875,
    "hardware": 420,
    "interpreter": 3845,
    "learn": 420,
    "machine": 3770,
    "nodes": 1895,
    "ops": 1965,
    "predict": 1465,
    "report": 535,
    "tools": 3105,
    "tools/bench": 900,
    "tools/check": 1480,
    "tools/predict": 850,
    "tools/probe": 835,
    "tools/trace": 600,
    "tools/tune": 2630,
    "torch": 2420,
    "world": 1555,
}
LONGEST_FILE = 450
TOP_LEVEL_FILES = 11
COLLIDING_CLASSES = 5  # `Problem` and `Config` are names that every op has
ONE_IMPORTER = 35  # without what a table names
CLOSURE = 12  # files that a collective's import reads
KERNEL_ARGUMENTS = 12
TEST_NAME = 60  # characters; the docstring has room for a sentence


@pytest.fixture(scope="module")
def house() -> House:
    return House.read()


def test_every_folder_keeps_its_budget(house: House) -> None:
    over = {f: n for f, n in house.lines.items() if n > BUDGETS.get(f, 0)}
    assert not over, "cut lines, or raise the budget here and say why in the commit"
    assert set(BUDGETS) == set(house.lines), "a folder is gone: remove its budget"


def test_no_file_is_too_long(house: House) -> None:
    assert not [(m.name, m.lines) for m in house.modules.values() if m.lines > LONGEST_FILE]


@pytest.mark.parametrize("folder", ["collectives", "fused"])
def test_unused_imports_are_names_of_an_op(house: House, folder: str) -> None:
    """An algorithm imports what it has in common with its op; ruff does not look at these."""
    named = {*SHAPE, "SYMMETRIC", "ACCEPT", "wrong"}
    modules = [m for name, m in house.modules.items() if name.startswith(f"sundog.{folder}.")]
    assert any(unused(module.tree) for module in modules)
    found = {module.name: unused(module.tree) - named for module in modules}
    assert not {name: left for name, left in found.items() if left}


def unused(tree: ast.Module) -> set[str]:
    """Return what a module imports and does not use; an annotation is a use."""
    aliases = [
        alias
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        or (isinstance(node, ast.ImportFrom) and node.module != "__future__")
        for alias in node.names
    ]
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return {alias.asname or alias.name for alias in aliases} - used


def test_few_files_are_at_the_top_level(house: House) -> None:
    assert sum(m.folder == "(top)" for m in house.modules.values()) <= TOP_LEVEL_FILES


def test_names_are_unique(house: House) -> None:
    assert not house.colliding_stems
    assert len(house.colliding_classes) <= COLLIDING_CLASSES, house.colliding_classes


def test_few_modules_have_one_importer(house: House) -> None:
    """What a table names is not counted: commands in cli.py, algorithms in OPS, rules."""
    named = {*OPS.values(), *FUNCTIONS.values(), *(f"sundog.checker.{rule}" for rule in WATCHING)}
    entries = ("sundog.cli", "sundog.__main__")
    single = {name: by for name, by in house.one_importer.items() if by not in entries}
    found = {name: by for name, by in single.items() if name not in named}
    assert len(found) <= ONE_IMPORTER, found


def test_a_collective_reads_few_files(house: House) -> None:
    name, files = max(house.closures.items(), key=lambda each: len(each[1]))
    assert len(files) <= CLOSURE, (name, sorted(files))


def test_kernels_have_few_arguments(house: House) -> None:
    """A NamedTuple counts as its fields."""
    assert not {n: c for n, c in house.wide_kernels.items() if c > KERNEL_ARGUMENTS}


def test_names_of_tests_are_short() -> None:
    texts = [path.read_text() for path in Path(__file__).parent.rglob("*.py")]
    names = [name for text in texts for name in re.findall(r"^ *def (test_\w+)", text, re.M)]
    assert len(names) > 1000
    assert not [name for name in names if len(name) > TEST_NAME]


def test_the_counting_itself(tmp_path: Path) -> None:
    """On a small package whose figures are known."""
    files = {
        "__init__.py": "",
        "a/__init__.py": "",
        "a/one.py": "from ..b import two\nclass Same: pass\n",
        "b/__init__.py": "",
        "b/two.py": "def f():\n    from ..a import three\nclass Same: pass\n",
        "a/three.py": "if TYPE_CHECKING:\n    from . import one\n",
        "b/three.py": "@jit\ndef k(x, y: T): pass\nclass T(NamedTuple):\n    p: int; q: int\n",
    }
    for name, text in files.items():
        path = tmp_path / "sundog" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    small = House.read(tmp_path)
    assert small.colliding_stems == {"three": ["sundog.a.three", "sundog.b.three"]}
    assert small.colliding_classes == {"Same": ["sundog.a.one", "sundog.b.two"]}
    assert small.one_importer == {"sundog.a.three": "sundog.b.two", "sundog.b.two": "sundog.a.one"}
    assert small.closure("sundog.a.one") == {"sundog.a.one", "sundog.b.two"}
    assert small.wide_kernels == {"sundog.b.three.k": 3}
    rows = account(small, {tmp_path / "sundog/a/three.py"}).splitlines()
    assert rows[2:] == [
        "| (top) | 1 | 0 | 0 | 0 |",
        "| a | 2 | 2 | 1 | 2 |",
        "| all | 6 | 9 | 1 | 2 |",
        "| b | 3 | 7 | 0 | 0 |",
    ]
