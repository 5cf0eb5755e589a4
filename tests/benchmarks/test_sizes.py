"""`python -m benchmarks sizes`: which sizes are drawn, and that every call runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sundog
from benchmarks import sizes
from sundog.tools.timing import Times, Variant


def test_sizes_are_drawn_by_a_seed_and_some_are_prime() -> None:
    cases = sizes.draw_cases(240, 8)
    assert cases == sizes.draw_cases(240, 8) != sizes.draw_cases(240, 8, seed=1)
    assert {case.op for case in cases} == set(sizes.OPS)
    assert {case.dtype for case in cases} == {torch.bfloat16, torch.float32}
    assert min(case.numel for case in cases) < 10
    assert max(case.numel for case in cases) * 8 > 10_000_000
    for case in cases[::3]:
        assert all(case.numel % n for n in range(2, min(case.numel, 100)))
    for numel in (1, 4095, 4096, 4097):
        assert sizes.next_multiple(numel) == (8192 if numel == 4097 else 4096)


@pytest.mark.sim_only
def test_every_call_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the simulator, where a call is made once instead of being timed."""

    def measure(world: sundog.World, variants: list[Variant], *_: Any, **__: Any) -> list[Times]:
        for variant in variants:
            for call in variant.calls:
                call()
        return [Times(each.name, [[1e-6 * (n + 1)]]) for n, each in enumerate(variants)]

    monkeypatch.setattr(sizes, "measure", measure)
    monkeypatch.setattr(sizes, "_ORDINARY", (37,))
    some = [sizes.Case(op, torch.bfloat16, 259) for op in sizes.OPS]
    monkeypatch.setattr(sizes, "draw_cases", lambda count, size: some)
    found = sundog.run(lambda world: sizes._measure_all(world, 600.0), 2, "sim")[0]
    assert [row[:2] for row in found["ordinary"]] == [[op, 37] for op in sizes.OPS]
    assert [row[2] for row in found["cliffs"]] == [259] * 4
    assert {row[5] for row in found["cliffs"]} == {0.5}
    assert not sundog.run(lambda world: sizes._measure_all(world, 0.0), 2, "sim")[0]["cliffs"]
