"""Rank functions with known faults, for the tests of the checker's front."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sundog import World
from sundog.device import context, memory, signal


@triton.jit
def send(x, inbox, out, flag, ctx, n, BARRIER: tl.constexpr, BLOCK: tl.constexpr):
    rank, size = tl.load(ctx + context.RANK), tl.load(ctx + context.SIZE)
    at = tl.arange(0, BLOCK)
    right = (rank + 1) % size
    memory.store(inbox + at, tl.load(x + at, mask=at < n), right, ctx, mask=at < n)
    if BARRIER:
        tl.debug_barrier()
    tl.atomic_xchg(memory.translate(flag, right, ctx), 1, sem="release", scope="sys")
    signal.wait(flag, (rank + size - 1) % size, 1, ctx)
    tl.store(out + at, tl.load(inbox + at, mask=at < n), mask=at < n)


def _send(world: World, barrier: bool) -> torch.Tensor:
    n = 37
    x, inbox = world.randn((n,), name="x"), world.empty((n,), name="inbox")
    out = torch.empty(n)
    flag = world.signals(1, "flag")
    world.barrier()
    send[(1,)](x, inbox, out, flag, world.ctx, n, BARRIER=barrier, BLOCK=64)
    return out


def clean(world: World) -> torch.Tensor:
    return _send(world, barrier=True)


def racy(world: World) -> torch.Tensor:
    return _send(world, barrier=False)


@triton.jit
def assembly(x):
    tl.store(x, tl.inline_asm_elementwise("activemask.b32 $0;", "=r", [], tl.int32, False, 1))


def only_gpu(world: World) -> None:
    assembly[(1,)](torch.zeros(1, dtype=torch.int32))


@triton.jit
def alone(x, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x + at, tl.load(x + at) + 1)


def no_synchronisation(world: World) -> None:
    alone[(1,)](torch.zeros(16), BLOCK=16)


def raises(world: World) -> None:
    if world.rank == 1:
        raise KeyError("nobody has it")


def wrong(world: World) -> None:
    assert world.rank != 1, "rank 1 computed something else"


@triton.jit
def number(x):
    tl.store(x + tl.program_id(0), tl.program_id(0))


def four_at_once(world: World) -> None:
    """Refuse to run where fewer than four programs are resident."""
    if world.num_sms < 4:
        raise ValueError(f"4 programs on {world.num_sms} SMs could wait for ever")
    number[(4,)](torch.zeros(4, dtype=torch.int32))
