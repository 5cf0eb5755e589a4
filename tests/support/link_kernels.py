"""Kernels for ranks behind a link: rank 0 works, stand-ins of one program play the others."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sundog import World
from sundog.device import memory, signal

__all__ = ["PULLING", "check_pulled", "fetch", "pull", "pull_all", "stand_in"]

# The ops that have stand-ins (sundog/ops/passive.py).
PULLING = (
    "all_gather.pull",
    "all_to_all.pull",
    "all_gather_matmul.barrier",
    "all_gather_matmul.hbm_buffer",
    "all_gather_matmul.direct",
    "all_gather_matmul.copy_engine",
)


@triton.jit
def pull(src, dst, ready, done, ctx, n, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rank 0 fetches every peer's data across the link and tells each that it has."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for peer in range(1, SIZE):
        signal.wait(ready + peer, peer, 1, ctx)  # the peer's data is there
        tl.store(dst + peer * n + at, memory.load(src + at, peer, ctx, mask=at < n), mask=at < n)
        # My load before the word that lets the peer go on; one flag per program.
        signal.signal(done + tl.program_id(0), peer, 1, ctx)


@triton.jit
def stand_in(src, ready, done, ctx, n, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    """One program plays a passive rank: doubles its data, says so, waits until it was fetched."""
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(src + at, 2 * tl.load(src + at, mask=at < n), mask=at < n)
    signal.signal(ready + tl.load(ctx), 0, 1, ctx)
    for program in range(PROGRAMS):
        signal.wait(done + program, 0, 1, ctx)


@triton.jit
def fetch(src, dst, ctx, n, BLOCK: tl.constexpr):
    base = memory.translate(src, 1, ctx)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(dst + at, tl.load(base + at, mask=at < n), mask=at < n)


def pull_all(world: World, n: int, block: int, passive: bool) -> torch.Tensor:
    """What rank 0 has fetched of all ranks' data, which they doubled first."""
    src = world.empty((n,)).copy_(_data(world.rank, n))
    dst = world.zeros((world.size, n))
    programs = triton.cdiv(n, block)
    ready, done = world.signals(world.size, "ready"), world.signals(programs, "done")
    world.barrier()
    if passive:
        stand_in[(1,)](src, ready, done, world.ctx, n, PROGRAMS=programs, BLOCK=block)
    else:
        pull[(programs,)](src, dst, ready, done, world.ctx, n, SIZE=world.size, BLOCK=block)
    world.barrier()
    return dst.cpu()


def check_pulled(got: torch.Tensor, size: int, n: int) -> None:
    for rank in range(1, size):
        assert torch.equal(got[rank], 2 * _data(rank, n))


def _data(rank: int, n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(rank))
