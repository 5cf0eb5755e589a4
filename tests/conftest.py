"""The same tests on every backend: `pytest --backend sim|shm|virtual|symm`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

import sundog


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--backend", default="sim", choices=["sim", "shm", "virtual", "symm"])


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--backend")


@pytest.fixture
def run(backend: str) -> Callable[..., list[Any]]:
    """`sundog.run` on the backend that was asked for."""
    return functools.partial(sundog.run, backend=backend)
