"""One set of tests for every backend: `pytest --backend sim|shm|virtual|symm`.

A test asks for the fixture `run` instead of calling `sundog.run`; what calls `sundog.run` without
naming a backend gets the chosen one too. Without a GPU, GPU tests are skipped with a reason.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Before torch is imported, and for every process that a test starts. Tensors here are small, and
# two test processes share two cores: more threads only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import sundog

BACKENDS = ("sim", "shm", "virtual", "symm")
ON_GPU = ("virtual", "symm")
_NO_GPU = "needs a GPU, and torch finds none"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", choices=BACKENDS, default="sim", help="where worlds run")
    parser.addoption("--link", default="", help="of worlds on `virtual`: pcie or host")
    parser.addoption("--share", default="0/1", help="of all tests, the first of two halves: 0/2")
    parser.addoption("--outcomes", default="", help="file that gets a JSON line per test event")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu(*backends): needs a GPU, and one of these backends")
    config.addinivalue_line("markers", "sim_only: about the simulator; skipped on other backends")
    config.addinivalue_line("markers", "alone: counts what the GPU has left, or time")
    name = config.getoption("--backend")
    if name != "sim" or (_runs_tests(config) and has_gpu()):
        os.environ["SUNDOG_BACKEND"] = name
    if name in ON_GPU:
        os.environ.setdefault("SUNDOG_HEAP_SIZE", "64M")  # hundreds of small worlds
        os.environ.setdefault("SUNDOG_TIMEOUT", "20")


def _runs_tests(config: pytest.Config) -> bool:
    """Is it no process that only starts others, with -n? That one never imports torch."""
    return hasattr(config, "workerinput") or config.getoption("dist", "no") == "no"


def has_gpu() -> bool:
    from sundog import target

    return target.has_gpu()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first, step = map(int, config.getoption("--share").split("/"))
    items[:] = items[first::step]
    name = config.getoption("--backend")
    with_gpu = has_gpu()
    for item in items:
        gpu = item.get_closest_marker("gpu")
        if gpu and not with_gpu:
            item.add_marker(pytest.mark.skip(reason=_NO_GPU))
        elif gpu and gpu.args and name not in gpu.args:
            item.add_marker(pytest.mark.skip(reason=f"about {', '.join(gpu.args)}, not {name}"))
        if item.get_closest_marker("sim_only") and name != "sim":
            item.add_marker(pytest.mark.skip(reason=f"about the simulator, not {name}"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What is imported stays: the garbage collector need not look at it again for every test.

    It also looks less often than after each 700 new objects, which took 9 % of the time. On a GPU
    it does not: there an object may hold the GPU's memory.
    """
    gc.collect()
    gc.freeze()
    if session.config.getoption("--backend") not in ON_GPU:
        gc.set_threshold(10_000, 10, 10)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """The name of the chosen backend."""
    name = request.config.getoption("--backend")
    if name in ON_GPU and not has_gpu():
        pytest.skip(f"--backend {name}: {_NO_GPU}")
    return name


@pytest.fixture(scope="session")
def ranks() -> Any:
    """The processes of `--backend symm`, one of which this is."""
    from support.spmd import Ranks

    return Ranks()


@pytest.fixture
def run(backend: str, request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """`sundog.run` on the chosen backend; takes what `sundog.run` takes."""
    if backend == "symm":
        together = request.getfixturevalue("ranks")
        return lambda fn, world_size, **options: together.run(fn, world_size, **options)

    link = {"link": request.config.getoption("--link")} if backend == "virtual" else {}

    def call(fn: Callable[[sundog.World], Any], world_size: int, **options: Any) -> list[Any]:
        return sundog.run(fn, world_size, **{"backend": backend, **link, **options})

    return call


# What a run that may hang leaves behind: scripts/gpu-check goes on with the next test from it.


def pytest_runtest_logstart(nodeid: str, location: object) -> None:
    _note(nodeid, "started", 0.0, "")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        _note(report.nodeid, report.outcome, report.duration, text)


def _note(test: str, outcome: str, seconds: float, text: str) -> None:
    if _outcomes:
        with _outcomes[0].open("a") as file:
            record = {"test": test, "outcome": outcome, "seconds": seconds, "text": text}
            file.write(json.dumps(record) + "\n")


_outcomes: list[Path] = []


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    path = session.config.getoption("--outcomes")
    _outcomes[:] = [Path(path)] if path else []
