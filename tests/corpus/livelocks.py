"""Programs that run for ever: each undoes, or overtakes, what the other one waits for."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.failures import DEADLOCK, LIVELOCK
from sundog.checker.findings import Rule

from .pair import Kernel, Pair

__all__ = ["PAIRS"]


@triton.jit
def turns_wrong(word, out):
    me = tl.program_id(0)
    # wrong: each program overwrites what the other one waits for, and both wait for a 3
    while tl.atomic_xchg(word, 1 + me, sem="acq_rel", scope="gpu") != 3:
        pass
    tl.store(out + me, 1)


@triton.jit
def turns_fixed(word, out):
    me = tl.program_id(0)
    # acquires what the program before this one released, and releases to the next one
    while tl.atomic_cas(word, me, me + 1, sem="acq_rel", scope="gpu") != me:
        pass
    tl.store(out + me, 1)


@triton.jit
def never_swaps_wrong(word, out):
    me = tl.program_id(0)
    seen = tl.atomic_add(word, 0, sem="relaxed", scope="gpu")
    done = 0
    while done == 0:
        # wrong: `seen` is not read again after another program changed the word
        old = tl.atomic_cas(word, seen, seen + 1, sem="acq_rel", scope="gpu")
        done = (old == seen).to(tl.int32)
    tl.store(out + me, 1)


@triton.jit
def swaps_fixed(word, out):
    me = tl.program_id(0)
    seen = tl.atomic_add(word, 0, sem="relaxed", scope="gpu")
    done = 0
    while done == 0:
        old = tl.atomic_cas(word, seen, seen + 1, sem="acq_rel", scope="gpu")
        done = (old == seen).to(tl.int32)
        seen = old
    tl.store(out + me, 1)


@triton.jit
def spins_wrong(word, out):
    me = tl.program_id(0)
    ready = tl.atomic_add(word, 1, sem="acq_rel", scope="gpu")
    # wrong: the value is read once, before the loop
    while ready < 1:
        pass
    tl.store(out + me, 1)


@triton.jit
def polls_fixed(word, out):
    me = tl.program_id(0)
    ready = tl.atomic_add(word, 1, sem="acq_rel", scope="gpu")
    while ready < 1:
        # acquires what the other program released with its arrival
        ready = tl.atomic_add(word, 0, sem="acquire", scope="gpu") - 1
    tl.store(out + me, 1)


def both(kernel: Kernel, world: sundog.World) -> None:
    word, out = torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    # each program waits for what the other one does, so both must be resident
    kernel[(2,)](word, out, launch_cooperative_grid=True)
    assert out.tolist() == [1, 1]


def _pair(name: str, wrong: Kernel, fixed: Kernel, rule: Rule = LIVELOCK) -> Pair:
    return Pair("runs for ever", name, partial(both, wrong), partial(both, fixed), 1, rule)


PAIRS = [
    _pair("two programs overwrite each other", turns_wrong, turns_fixed),
    _pair("a loop without an access", spins_wrong, polls_fixed),
    # nothing changes while it fails, so this one is stopped before it repeats itself
    _pair("a compare-and-swap that never swaps", never_swaps_wrong, swaps_fixed, DEADLOCK),
]
