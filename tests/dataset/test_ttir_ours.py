"""Every kernel of this repository round-trips: as the examples and ops launch it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_roundtrip import ARCHS, STAGES, prints, prints_of_text

import sundog
from sundog.dataset.triton.compile import lower_stages, source_of
from sundog.dataset.triton.ttir import extract_ttir_graph, rebuild_module_text
from sundog.machine import launcher
from sundog.ops.load import find
from sundog.ops.op import OPS
from sundog.tools._subject import function_of, room

pytestmark = pytest.mark.compat

ROOT = Path(__file__).parent.parent.parent
TARGETS = [*OPS, *(str(path) for path in sorted((ROOT / "examples").glob("*.py")))]


def called_once(target: str) -> Callable[[sundog.World], None]:
    """On each of its cases. What comes out is what other tests are about."""

    def main(world: sundog.World) -> None:
        op = find(target)
        for problem in op.cases(2):
            plan = op.plan(world, problem, op.default(problem, world.num_sms))
            given = op.inputs(world, problem, 0)
            out = room(world, op, problem, given)
            world.barrier()
            plan(*given, out)

    return main


def launches(target: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, list, dict]]:
    """One launch of each kernel that a target runs on two ranks, its tensors as shapes only."""
    found: dict[Any, tuple[Any, list, dict]] = {}
    prepare = launcher._prepare

    def note(machine: Any, kernel: Any, args: Any, kwargs: Any, grid: Any) -> Any:
        bare = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in args]
        found.setdefault(kernel.fn, (kernel, bare, dict(kwargs)))
        return prepare(machine, kernel, args, kwargs, grid)

    monkeypatch.setattr(launcher, "_prepare", note)
    monkeypatch.setenv("STEPS", "1")  # of the example that trains: each step launches the same
    sundog.run(called_once(target) if target in OPS else function_of(target, 2), 2, "sim")
    return list(found.values())


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: Path(target).stem)
def test_kernels_round_trip(target: str, monkeypatch: pytest.MonkeyPatch):
    kernels = launches(target, monkeypatch)
    assert kernels
    for kernel, args, kwargs in kernels:
        # Gluon begins as ttgir, and its layouts are for one size of a warp.
        archs, stages = (("sm_90",), ("ttgir",)) if kernel.is_gluon() else (ARCHS, STAGES)
        for arch in archs:
            seen = []
            source, options = source_of(kernel, args, kwargs, arch=arch)
            for stage, module in lower_stages(source, options, arch=arch):
                record = extract_ttir_graph(module)
                assert prints_of_text(rebuild_module_text(record)) == prints(module)
                seen.append(stage)
            assert tuple(seen) == stages
