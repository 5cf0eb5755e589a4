"""What the bound on waits costs: barriers of all ranks with it and without it, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sundog.device import context, signal
from sundog.launch import run
from sundog.tools.timing import Times, Variant, measure
from sundog.world.world import World

__all__ = ["bench_bound"]

_ROUNDS = 200
_SIZE = context.SIZE


def bench_bound(size: int, backend: str) -> list[Times]:
    """Seconds per launch of 200 barriers: bounded as all our waits are, and unbounded."""
    return list(run(_measure, size, backend)[0])


def _measure(world: World) -> list[Times]:
    lanes = triton.next_power_of_2(world.size)
    variants = []
    for kernel in (_bounded, _unbounded):
        flags = world.signals(world.size, "bound.flags")
        last = world.signals(1, "bound.last")
        variants.append(
            Variant(kernel.__name__[1:], [_call(kernel, flags, last, world.ctx, lanes)])
        )
    world.barrier()
    return measure(world, variants, at_least=4)


def _call(kernel, flags, last, ctx: torch.Tensor, lanes: int):  # type: ignore[no-untyped-def]
    return lambda: kernel[(1,)](flags, last, ctx, ROUNDS=_ROUNDS, LANES=lanes)


@triton.jit
def _bounded(flags, last, ctx, ROUNDS: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    epoch = tl.load(last)
    for _ in range(ROUNDS):
        epoch += 1
        signal.barrier_ranks(flags, epoch, ctx, LANES)
    tl.store(last, epoch)


@triton.jit
def _unbounded(flags, last, ctx, ROUNDS: tl.constexpr, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    epoch = tl.load(last)
    for _ in range(ROUNDS):
        epoch += 1
        signal.signal_all(flags, epoch, ctx, LANES)
        _wait_for_ever(flags, epoch, ctx, LANES)
    tl.store(last, epoch)


@triton.jit
def _wait_for_ever(flags, epoch, ctx, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    """As signal.wait_all, but for the bound."""
    lane = tl.arange(0, LANES)
    valid = lane < tl.load(ctx + _SIZE).to(tl.int32)
    seen = tl.atomic_add(flags + lane, lane * 0, mask=valid, sem="acquire", scope="sys")
    late = tl.sum((valid & (seen < epoch)).to(tl.int32), 0)
    while late > 0:
        seen = tl.atomic_add(flags + lane, lane * 0, mask=valid, sem="acquire", scope="sys")
        late = tl.sum((valid & (seen < epoch)).to(tl.int32), 0)
    tl.debug_barrier()
