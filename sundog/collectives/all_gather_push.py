"""All-gather, push: load my tensor once, store it to every rank.

A fixed number of programs walks over the tiles; each loads a tile and stores it W times, beginning
with another peer on every rank. Two barriers of the programs with one number frame the stores: the
peers' outputs may be overwritten; all has arrived. Moves every byte once over each link.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..device import context, memory, signal
from ..op import Plan, agree
from .all_gather import Problem, cases, cost, inputs, reference

if TYPE_CHECKING:
    from ..world import World

__all__ = [
    "SYMMETRIC", "Config", "Problem", "cases", "cost", "default", "inputs", "plan", "reference",
    "space", "valid",
]  # fmt: skip

SYMMETRIC = ("out",)


@dataclass(frozen=True)
class Config:
    block: int = 2048  # elements of a tile
    programs: int = 16
    num_warps: int = 4


def valid(problem: Problem, config: Config) -> str | None:
    if config.block & (config.block - 1) or config.block < 1:
        return f"block {config.block} is not a power of two"
    if config.programs < 1:
        return f"programs {config.programs}: at least one must do the work"
    return None


def space(problem: Problem) -> list[Config]:
    return [
        Config(block, programs, num_warps)
        for block in (1024, 2048, 4096, 8192)
        for programs in (4, 8, 16, 32, 64)
        for num_warps in (4, 8)
    ]


def default(problem: Problem, num_sms: int) -> Config:
    """No more programs than tiles, or than SMs: all of them wait for their peers at once."""
    tiles = triton.cdiv(max(problem.numel, 1), Config.block)
    return Config(programs=max(1, min(tiles, num_sms)))


@triton.jit
def _push_kernel(
    x, out, ready, arrived, epochs, ctx, numel,
    SIZE: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rank = tl.load(ctx + context.RANK)
    epoch = tl.load(epochs + program) + 1
    # This rank's output is free: what read it last came before this kernel on the stream. The
    # peers' programs with this number write it only behind this barrier.
    signal.barrier_ranks(ready + program * SIZE, epoch, ctx, LANES)
    for start in range(program * BLOCK, numel, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tile = tl.load(x + at, mask=at < numel)
        for step in tl.static_range(SIZE):
            peer = (rank + step) % SIZE
            memory.store(out + rank * numel + at, tile, peer, ctx, mask=at < numel)
    # My tiles before the flags; all peers' tiles before whatever follows this kernel here.
    signal.barrier_ranks(arrived + program * SIZE, epoch, ctx, LANES)
    tl.store(epochs + program, epoch)  # read by the next call, behind this one on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes any contiguous x, only read here, and a symmetric out."""
    agree(world, "all_gather.push", problem, config, valid(problem, config))
    shape = (config.programs, problem.size)
    ready = world.signals(shape, "all_gather.ready")
    arrived = world.signals(shape, "all_gather.arrived")
    epochs = world.signals(config.programs, "all_gather.epochs")
    world.barrier()  # everybody's flags are zero before the first signal

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        _push_kernel[(config.programs,)](
            x, out, ready, arrived, epochs, world.ctx, problem.numel,
            SIZE=problem.size, LANES=triton.next_power_of_2(problem.size), BLOCK=config.block,
            num_warps=config.num_warps,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, (ready, arrived, epochs), launch)
