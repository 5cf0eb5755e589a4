"""Nothing that tuning leaves outside of a test's own folder; compiled kernels are kept for all."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUNDOG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(compiled))
    monkeypatch.chdir(tmp_path)
