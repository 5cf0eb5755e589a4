"""Build the wheels of `sundog` and `sundog-dataset`, and try each in a clean environment.

    python scripts/wheels.py dist

Both are built from copies in a temporary folder, so that nothing of an earlier build is left in
them. `sundog` is tried in an environment that borrows torch and the other dependencies from this
one (2 GB need not be installed twice); `sundog-dataset` in one that has its own dependencies only.
"""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
import tempfile
import textwrap
import venv
from pathlib import Path

import assets

ROOT = Path(__file__).parent.parent
IGNORED = shutil.ignore_patterns("__pycache__")

# What each distribution is made of, by its place in the copy.
SUNDOG = {name: name for name in ("pyproject.toml", "README.md", "LICENSE", "sundog")}
DATASET = {
    "pyproject.toml": "packaging/dataset/pyproject.toml",
    "README.md": "packaging/dataset/README.md",
    "LICENSE": "LICENSE",
    "sundog/__init__.py": "sundog/__init__.py",
    "sundog/py.typed": "sundog/py.typed",
    "sundog/dataset": "sundog/dataset",
}

TRY_SUNDOG = """
import importlib.metadata, pathlib, sundog, sys
assert pathlib.Path(sundog.__file__).is_relative_to(sys.prefix), sundog.__file__
assert importlib.metadata.version("sundog") == sundog.__version__
(plugin,) = importlib.metadata.distribution("sundog").entry_points.select(group="pytest11")
plugin.load()
assert "torch" not in sys.modules, "every start of pytest would import torch"
"""
TRY_DATASET = """
import importlib.util, pathlib, sundog, sundog.dataset, sys
assert pathlib.Path(sundog.__file__).is_relative_to(sys.prefix), sundog.__file__
assert not [name for name in ("torch", "triton", "greenlet") if importlib.util.find_spec(name)]
from sundog.dataset import Recorder, RunInfo, read
source = [{"name": "k", "path": "k.py", "text": "k", "captures": {}, "options": {}}]
run = RunInfo("k", source, {}, [], {}, 2, "sim", {"name": "gpu"}, {"triton": "3.7.1"})
with Recorder("runs", run) as recorder:
    recorder.start({"BLOCK": 64}).end("ok", samples=[0.71, 0.70, 0.72])
assert read("runs").rows.perf_ms.dropna().tolist() == [0.71]
try:
    sundog.run
except ImportError as error:
    assert "sundog-dataset" in str(error), error
else:
    raise AssertionError("sundog.run is there without torch")
"""


def main(folder: Path) -> None:
    reason = assets.build()
    if reason:
        print(f"the wheel has no page for `sundog report`: {reason}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        try_sundog(build(SUNDOG, folder, scratch), scratch / "with-torch")
        try_dataset(build(DATASET, folder, scratch), scratch / "without-torch")


def build(contents: dict[str, str], folder: Path, scratch: Path) -> Path:
    """Build one wheel from a copy of its files and return its path."""
    copy = Path(tempfile.mkdtemp(dir=scratch))
    for target, source in contents.items():
        (copy / target).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, copy / target, ignore=IGNORED)
        else:
            shutil.copy(ROOT / source, copy / target)
    known = set(folder.glob("*.whl"))
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(copy))
    (wheel,) = set(folder.glob("*.whl")) - known
    return wheel


def try_sundog(wheel: Path, place: Path) -> None:
    """Install the wheel beside this environment's packages, and use it from an empty folder."""
    venv.create(place, with_pip=False)
    borrowed = [path for path in site.getsitepackages() if path.endswith("-packages")]
    (packages,) = place.glob("lib/*/site-packages")
    lines = "\n".join(f"site.addsitedir({path!r})" for path in borrowed)
    (packages / "borrowed.pth").write_text(f"import site; exec({lines!r})\n")
    pip("--python", str(place / "bin/python"), "install", "--no-deps", str(wheel))
    run(place, "python", "-c", TRY_SUNDOG)
    run(place, "sundog", "--version")
    run(place, "sundog", "new", "op", "row_sum")
    run(place, "sundog", "check", "row_sum.py", "--world", "2", "--schedules", "2")
    if assets.is_fresh():
        words = ["--world", "2", "--schedules", "1", "--html", "row_sum.html"]
        run(place, "sundog", "check", "row_sum.py", *words)
    (place / "test_fixture.py").write_text(
        "def test_it(sundog_check):\n    sundog_check(lambda world: world.barrier(), 2, 1)\n"
    )
    run(place, "python", "-m", "pytest", "-q", "test_fixture.py")
    run(place, "python", "-m", "pytest", "-q", "-p", "sundog.testing", "test_fixture.py")


def try_dataset(wheel: Path, place: Path) -> None:
    """Install the wheel with its own dependencies alone, then write, read and inspect a dataset."""
    venv.create(place, with_pip=False)
    constraints = ["-c", str(ROOT / "constraints.txt")]
    pip("--python", str(place / "bin/python"), "install", *constraints, str(wheel))
    run(place, "python", "-c", TRY_DATASET)
    run(place, "sundog-data", "info", "runs")


def pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *words]
    subprocess.run(command, check=True)


def run(place: Path, program: str, *words: str) -> None:
    """Run a program of an environment in that environment's folder."""
    shown = words[0] if words[0] != "-c" else "(a script)"
    print(f"{place.name}: {program} {shown}", flush=True)
    words = tuple(textwrap.dedent(word) for word in words)
    subprocess.run([str(place / "bin" / program), *words], check=True, cwd=place)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
