"""The serving loop finds wrong results and counts what it did."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sundog
from benchmarks import endless

pytestmark = pytest.mark.sim_only


def test_a_short_loop_serves_checks_and_replays() -> None:
    how = endless.Endless(calls=103, sizes=9, largest=600)
    served = sundog.run(lambda world: endless.serve(world, how), 2, "sim", heap_size=how.heap)
    assert [(each.checked, each.replayed, each.wrong) for each in served] == [(3, 2, [])] * 2


def test_a_loop_whose_time_is_over_stops_on_all_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    how = endless.Endless(calls=8, sizes=9, largest=600, seconds=0)
    monkeypatch.setattr(endless, "_TELL_EVERY", 2)
    served = sundog.run(lambda world: endless.serve(world, how), 2, "sim", heap_size=how.heap)
    assert [each.calls for each in served] == [2, 2]
    assert "2 calls, 0 s," in capsys.readouterr().err


def test_the_sizes_are_different_and_divide_among_the_ranks() -> None:
    sizes = endless._sizes(endless.Endless(), 3, random.Random(0))
    assert len(set(sizes)) == len(sizes) == 2000
    assert all(size % 3 == 0 for size in sizes)
    assert 2 * max(sizes) <= 1_400_000
    assert sum(2 * size < 140_000 for size in sizes) > 1000  # more small ones than large ones


@pytest.mark.parametrize("op", endless.OPS)
def test_one_wrong_element_is_found(op: str) -> None:
    world: Any = SimpleNamespace(rank=0, size=2)
    reduced = op in ("all_reduce", "reduce_scatter")
    right = torch.full((6,), 3.0) if reduced else torch.tensor([1.0, 1, 1, 2, 2, 2])
    assert endless._differences(world, "x", op, right) == []
    right[4] = float("nan")
    (line,) = endless._differences(world, "x", op, right)
    assert line == "rank 0, x: 1 of 6 elements are wrong"
