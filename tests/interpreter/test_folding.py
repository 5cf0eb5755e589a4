"""Loops over products that run once for all turns: the machine hears the same as turn by turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from sundog.hardware.description import read
from sundog.interpreter import folding
from sundog.ops import load as ops
from sundog.ops.load import changed
from sundog.tools.predict.simulated import Simulation, call_of, simulated
from sundog.tools.predict.timed_machine import TimedAccesses
from sundog.world.world import World

H200X8, HEAP, BLOCK, TURNS = read("h200x8"), 1 << 26, 16, 9
Heard = list[tuple]


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Heard:
    """What the machine hears of loads and products: who, what."""
    found: Heard = []
    for name in ("skipped_load", "product"):
        own = getattr(TimedAccesses, name)

        def note(self: TimedAccesses, *what: Any, name: str = name, own: Callable = own) -> Any:
            program, first = self._timed.program, what[0]
            if name == "skipped_load":  # a run has other addresses than the one before
                first -= self._timed.memory.find(first, first + 1).start
            found.append((program.rank, program.number, name, first, *what[2:]))
            return own(self, *what)

        monkeypatch.setattr(TimedAccesses, name, note)
    return found


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The turns of all loops that ran once for all."""
    found: list[int] = []
    own = folding._Trial.repeat

    def repeat(self: folding._Trial, turns: int) -> None:
        found.append(turns)
        own(self, turns)

    monkeypatch.setattr(folding._Trial, "repeat", repeat)
    return found


CASES = [
    ("all_gather_matmul.direct", {"shard": "k"}),
    ("all_gather_matmul.direct", {"shard": "m"}),
    ("all_gather_matmul.hbm_buffer", {"shard": "k"}),
    ("all_gather_matmul.barrier", {}),
    ("matmul_reduce_scatter.push", {}),
    ("matmul_all_reduce.two_shot", {}),
]


@pytest.mark.parametrize(("op", "fields"), CASES)
def test_folding_changes_no_time(
    op: str, fields: dict, heard: Heard, repeated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every program ends at the same time, to the last bit, and has heard the same."""
    module = ops.find(op)
    problem = changed(module.cases(3)[0], {"m": 96, "n": 80, "k": 3 * 512, **fields})
    problem = changed(problem, {"dtype": torch.bfloat16})

    def run(with_data: bool = False) -> tuple[Heard, list[float]]:
        heard.clear()
        call = call_of(module, problem, module.default(problem, 20))
        made = simulated(Simulation(call, H200X8, 3, HEAP, 20, with_data=with_data))
        return list(heard), [track.now for track in made.tracks]

    folded = run()
    assert repeated
    monkeypatch.setattr(folding, "_FEWEST", 1 << 30)
    repeated.clear()
    assert run() == folded
    assert not repeated
    assert run(with_data=True)[1] == folded[1]


@triton.jit
def _column(a, extra, turn, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Return where a turn loads, and do besides what KIND says."""
    if KIND == "chosen":
        return (turn + 1) * BLOCK if turn % 2 == 0 else turn * BLOCK
    elif KIND == "divided":
        return tl.where(turn // 3 == 1, turn % 3, tl.minimum(turn, 7)) * BLOCK
    elif KIND == "pointers":
        tl.load(extra + turn * BLOCK + tl.arange(0, BLOCK))
    elif KIND == "stored":
        tl.store(extra + turn, 1.0)
    elif KIND == "taken":  # noqa: SIM102 (the constant and the tensor are not one condition)
        if turn % 2 == 0:
            a.load([0, BLOCK])
    return turn * BLOCK


@triton.jit
def _turns(a, out, extra, count, KIND: tl.constexpr, BLOCK: tl.constexpr):
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    for turn in range(count):
        x = a.load([0, _column(a, extra, turn, KIND, BLOCK)])
        acc = tl.dot(x, x.T, acc)
    tl.store(out, tl.sum(acc))


@triton.jit
def _carrying(a, out, extra, count, KIND: tl.constexpr, BLOCK: tl.constexpr):
    acc, at = tl.zeros((BLOCK, BLOCK), tl.float32), 0
    for _turn in range(count):
        x = a.load([0, at])
        at += BLOCK
        acc = tl.dot(x, x.T, acc)
    tl.store(out, tl.sum(acc))


@pytest.mark.parametrize(
    ("kind", "is_folded"),
    [
        ("plain", True), ("divided", True), ("chosen", False), ("taken", False),
        ("carried", False), ("pointers", False), ("stored", False),
    ],
)  # fmt: skip
def test_what_differs_by_turn_is_not_folded(
    kind: str, is_folded: bool, heard: Heard, repeated: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel = _carrying if kind == "carried" else _turns

    def call(world: World) -> None:
        a, out, extra = torch.zeros(BLOCK, 256), torch.zeros(1), torch.zeros(256)
        described = TensorDescriptor(a, [BLOCK, 256], [256, 1], [BLOCK, BLOCK])
        kernel[(1,)](described, out, extra, TURNS, KIND=kind, BLOCK=BLOCK)

    def run() -> tuple[Heard, float]:
        heard.clear()
        seconds = simulated(Simulation(call, H200X8, 1, HEAP)).seconds
        return list(heard), seconds

    folded = run()
    assert repeated == ([TURNS - 1] if is_folded else [])
    monkeypatch.setattr(folding, "_FEWEST", 1 << 30)
    assert run() == folded
