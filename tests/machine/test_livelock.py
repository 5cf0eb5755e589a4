"""A program that runs for ever is stopped, with the steps that it repeats; others are let run."""

from __future__ import annotations

import time

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog.backends.sim import Sim
from sundog.errors import Livelock


@triton.jit
def overwrite(word, out):
    me = tl.program_id(0)
    while tl.atomic_xchg(word, 1 + me, sem="acq_rel", scope="gpu") != 3:
        pass
    tl.store(out + me, 1)


@triton.jit
def third_ends_it(word, out):
    """Two programs overwrite each other until they see a 3, which the last one writes."""
    me = tl.program_id(0)
    if me == 2:
        tl.atomic_xchg(word + 1, 3, sem="acq_rel", scope="gpu")
    else:
        while tl.atomic_add(word + 1, 0, sem="acquire", scope="gpu") != 3:
            tl.atomic_xchg(word, 1 + me, sem="acq_rel", scope="gpu")
    tl.store(out + me, 1)


@triton.jit
def work_without_end_in_sight(word, out, TURNS: tl.constexpr):
    """Repeat the same two values very often, and count."""
    turn = 0
    while turn < TURNS:
        tl.atomic_xchg(word, turn % 2, sem="relaxed", scope="gpu")
        turn += 1
    tl.store(out, turn)


@triton.jit
def compute_only(out, TURNS: tl.constexpr):
    turn = 0
    while turn < TURNS:
        turn += 1
    tl.store(out, turn)


@triton.jit
def poll_a_tile(words, out):
    """A plain load of a tile is no poll to the simulator: it must not run for ever."""
    at = tl.arange(0, 4)
    while tl.sum(tl.load(words + at)) == 0:
        pass
    tl.store(out, 1)


def run(kernel: triton.JITFunction, programs: int, token: str, *more: int) -> list[int]:
    def main(world: sundog.World) -> list[int]:
        word, out = torch.zeros(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
        given = (out,) if kernel is compute_only else (word, out)
        kernel[(programs,)](*given, *more)
        return out.tolist()

    return sundog.run(main, 1, "sim", sim=Sim(token), heap_size=256 << 10)[0]


@pytest.mark.parametrize("token", ["random:0", "pct:1:3", "ranks:2:3"])
def test_two_programs_that_undo_each_other_are_stopped(token: str) -> None:
    begin = time.monotonic()
    with pytest.raises(Livelock, match="2 programs run without end") as raised:
        run(overwrite, 2, token)
    assert time.monotonic() - begin < 60
    text = str(raised.value)
    assert "atomic XCHG found 1" in text
    assert "atomic XCHG found 2" in text
    assert "while tl.atomic_xchg(word, 1 + me" in text


def test_a_poll_of_a_tile_is_stopped() -> None:
    with pytest.raises(Livelock, match="1 program runs without end"):
        run(poll_a_tile, 1, "random:0")


@pytest.mark.parametrize("seed", range(4))
def test_a_low_priority_program_gets_its_turn(seed: int) -> None:
    """PCT alone would run the two of higher priority for ever."""
    assert run(third_ends_it, 3, f"pct:{seed}:2")[:3] == [1, 1, 1]


def test_a_program_that_counts_is_no_livelock() -> None:
    assert run(work_without_end_in_sight, 1, "random:0", 20_000)[0] == 20_000
    assert run(compute_only, 1, "random:0", 100_000)[0] == 100_000
