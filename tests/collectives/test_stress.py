"""Puts, gets, signals and barriers with random sizes and delays; every result compared bitwise.

A small count on the CPU; on a GPU 10,000 iterations with 4 ranks and 2,000 with others
(`--stress` of scripts/gpu-check sets another count, by SUNDOG_STRESS).
"""

from __future__ import annotations

import os
import random

import pytest
import torch
import triton
import triton.language as tl

from sundog import World
from sundog.device import context, memory, signal

PROGRAMS = 4
MOST = 3000
BATCH = 50
PUT, GET, BARRIER, PUT_SIGNAL = range(4)
_RANK, _SIZE = context.RANK, context.SIZE
_VARYING = ["n", "shift", "epoch", "verb", "before", "after"]


@triton.jit
def _delay(junk, rounds):
    for _ in range(rounds):
        tl.atomic_add(junk, 1, sem="relaxed", scope="gpu")


@triton.jit(do_not_specialize=_VARYING)
def exchange(
    src, out, flags, arrived, junk, ctx, n, shift, verb, epoch, before, after,
    LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = the source's src, where source = rank - shift; each program moves its own blocks."""
    pid = tl.program_id(0)
    rank = tl.load(ctx + _RANK).to(tl.int32)
    size = tl.load(ctx + _SIZE).to(tl.int32)
    peer = (rank + shift) % size
    source = (rank + size - shift) % size
    mine = flags + pid * size + rank
    theirs = flags + pid * size + source
    _delay(junk + pid, before)
    if verb == 1:  # GET: tell the reader that src is ready, then read
        signal.signal(mine, peer, epoch, ctx)
        signal.wait(theirs, source, epoch, ctx)
    if verb == 2:  # BARRIER, then read
        signal.barrier_ranks(arrived + pid * size, epoch, ctx, LANES)
    for start in range(pid * BLOCK, n, tl.num_programs(0) * BLOCK):
        offs = start + tl.arange(0, BLOCK)
        mask = offs < n
        if (verb == 1) | (verb == 2):
            memory.get(out + offs, src + offs, source, ctx, mask=mask)
        else:
            memory.put(out + offs, src + offs, peer, ctx, mask=mask)
    _delay(junk + pid, after)
    if verb == 0:
        signal.signal(mine, peer, epoch, ctx)
        signal.wait(theirs, source, epoch, ctx)
    if verb == 3:  # PUT_SIGNAL: one more element, written with the flag
        at = tl.arange(0, BLOCK)
        last = at == 0
        signal.put_signal(out + n + at, src + n + at, mine, peer, epoch, ctx, mask=last)
        signal.wait(theirs, source, epoch, ctx)


def stress(world: World, iterations: int, seed: int, longest: int) -> int:
    same = random.Random(seed)  # drawn alike on every rank
    own = random.Random(seed * 100 + world.rank)
    torch.manual_seed(seed * 100 + world.rank)
    src = world.empty((MOST + 1,), torch.int32, "stress.src")
    out = world.empty((BATCH, MOST + 1), torch.int32, "stress.out")
    flags = world.signals((PROGRAMS, world.size), "stress.flags")
    arrived = world.signals((PROGRAMS, world.size), "stress.arrived")
    junk = world.zeros((PROGRAMS,), torch.int32, "stress.junk")
    lanes = triton.next_power_of_2(world.size)
    epoch = compared = 0
    while epoch < iterations:
        src.random_(-(1 << 31), (1 << 31) - 1)
        out.fill_(-7)
        world.barrier()
        steps = []
        for row in range(min(BATCH, iterations - epoch)):
            epoch += 1
            n = same.choice([0, 1, 255, 256, 257, MOST, same.randrange(MOST)])
            verb, shift = same.randrange(4), same.randrange(world.size)
            waits = [own.choice([0, 0, own.randrange(longest)]) for _ in range(2)]
            exchange[(PROGRAMS,)](
                src, out[row], flags, arrived, junk, world.ctx, n, shift, verb, epoch, *waits,
                LANES=lanes, BLOCK=256,
            )  # fmt: skip
            steps.append((n + (verb == PUT_SIGNAL), shift))
        world.barrier()
        compared += _compare(world, src, out, steps)
        world.barrier()
    return compared


def _compare(
    world: World, src: torch.Tensor, out: torch.Tensor, steps: list[tuple[int, int]]
) -> int:
    for row, (n, shift) in enumerate(steps):
        expected = torch.full_like(out[row], -7)
        expected[:n] = world.peer(src, (world.rank - shift) % world.size)[:n]
        assert torch.equal(out[row], expected), f"step {row}: {n} elements, shift {shift}"
    return len(steps)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.timeout(240)
def test_stress(run, backend, size):
    on_gpu = backend in ("virtual", "symm")
    few = {2: 24, 3: 16, 4: 12, 8: 4}[size]
    default = few if not on_gpu else 10_000 if size == 4 else 2_000
    iterations = int(os.environ.get("SUNDOG_STRESS", default))
    longest = 2000 if on_gpu else 4
    done = run(lambda world: stress(world, iterations, size, longest), size)
    assert done == [iterations] * size
