"""A backend is a file and a line; others ask what it can do, not what it is called."""

from __future__ import annotations

import ast
import shutil
import textwrap
from pathlib import Path

import pytest
from support.scripts import python

import sundog
from sundog import backends, knobs

pytestmark = pytest.mark.sim_only
HERE = Path(backends.__file__).parent


def test_the_folder_has_the_backends_that_are_named() -> None:
    files = {path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_")}
    assert files == set(knobs.BACKENDS)


@pytest.mark.parametrize("name", knobs.BACKENDS)
def test_every_backend_says_what_it_can_do(name: str) -> None:
    module = backends.load(name)
    can = module.CAPABILITIES
    assert callable(module.run)
    assert hasattr(module, "open_world") == can.processes
    assert "" in can.links


@pytest.mark.parametrize("name", ["virtual", "symm", "_gpu", "_gang", "_cuda_graph", "_measured"])
def test_gpu_backends_import_no_simulator(name: str) -> None:
    """Neither `sim` nor `shm`, nor the interpreter or the checker, by an import of their own."""
    tree = ast.parse((HERE / f"{name}.py").read_text())
    imported = {
        (node.module or alias.name, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    rooms = {part for pair in imported for text in pair for part in text.split(".")}
    assert not rooms & {"sim", "shm", "interpreter", "checker"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"backend": "shm", "link": "pcie"}, "not 'shm'"),
        ({"backend": "shm", "sim": sundog.Sim()}, "sim=... is for backend 'sim', not 'shm'"),
        ({"backend": "loud"}, "backend 'loud': expected one of sim, shm, virtual, symm"),
    ],
)
def test_what_a_backend_cannot_do_is_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        sundog.run(lambda world: None, 2, **options)


def test_init_needs_ranks_that_are_processes() -> None:
    with pytest.raises(ValueError, match=r"ranks of 'sim' are not processes: use sundog\.run"):
        sundog.init("sim")


def test_a_new_backend_takes_a_file_and_a_line(tmp_path: Path) -> None:
    """`loud` is `sim` with a voice: its file, and its name in knobs.py."""
    shutil.copytree(Path(sundog.__file__).parent, tmp_path / "sundog")
    (tmp_path / "sundog/backends/loud.py").write_text(
        textwrap.dedent(
            '''
            """Backend `loud`: the simulator, which says when a world begins."""

            from . import Capabilities, WorldOptions, sim

            CAPABILITIES = Capabilities(on_gpu=False, processes=False)


            def run(fn, world_size: int, options: WorldOptions) -> list:
                print(f"{world_size} ranks")
                return sim.run(fn, world_size, options)
            '''
        )
    )
    knobs_file = tmp_path / "sundog/knobs.py"
    text = knobs_file.read_text()
    line = 'BACKENDS = ("sim", "shm", "virtual", "symm")'
    assert text.count(line) == 1
    knobs_file.write_text(text.replace(line, line.replace(")", ', "loud")')))
    program = "import sundog; print(sundog.run(lambda world: world.rank, 3, 'loud'))"
    done = python(["-c", program], {"PYTHONPATH": str(tmp_path)}, tmp_path)
    assert done.stdout.splitlines() == ["3 ranks", "[0, 1, 2]"], done.stderr
