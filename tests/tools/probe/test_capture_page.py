"""The code in docs/capture.md: one op that can be captured, and four ways in which it can't."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import sundog
from sundog.tools.probe.probe import Subject, probe_subject

PAGE = Path(__file__).parents[3] / "docs" / "capture.md"
HEAD = """import torch
import triton
import triton.language as tl
from sundog.device import context, signal

"""
N = 37
VERDICTS = {
    "Swap": "CAPTURABLE",
    "NotCapturable": "NOT CAPTURABLE",
    "Stale": "STALE",
    "Wrong": "WRONG",
    "Hangs": "HANGS",
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    blocks = [part.split("```")[0] for part in PAGE.read_text().split("```python\n")[1:]]
    path = tmp_path_factory.mktemp("page") / "capture_page.py"
    path.write_text(HEAD + "\n\n".join(blocks))
    spec = importlib.util.spec_from_file_location("capture_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _inputs(world: sundog.World, seed: int) -> tuple[torch.Tensor]:
    torch.manual_seed(seed * 1000 + world.rank)
    return (torch.randint(-50, 51, (N,)).float().to(world.device),)


def _swapped(rank: int, xs: list[torch.Tensor]) -> torch.Tensor:
    return xs[1 - rank]


@pytest.mark.parametrize("name", VERDICTS)
def test_every_class_of_the_page(page, backend, name):
    def prepare(world: sundog.World) -> object:
        return getattr(page, name)(world, N)

    if backend == "symm" or (backend != "sim" and name == "Wrong"):
        pytest.skip("ranks are processes already, or it takes luck to see the race")
    row = probe_subject(Subject(name, prepare, _inputs, _swapped), 2, backend, 5)
    assert row.verdict == VERDICTS[name], row
    assert row.verdict != "NOT CAPTURABLE" or ".item() > 50" in row.worst[1].where
