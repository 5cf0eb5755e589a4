"""All-gather, push: load my tensor once, store it to every rank.

A fixed number of programs walks over the tiles; each loads a tile and stores it W times, beginning
with another peer on every rank. Two barriers of the programs with one number frame the stores: the
peers' outputs may be overwritten; all has arrived. Moves every byte once over each link.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..device import context, memory, signal
from ..op import Cost, Plan, agree
from ..world import World

__all__ = [
    "Config", "Problem", "all_gather", "cases", "cost", "default", "inputs", "plan", "reference",
    "space", "valid",
]  # fmt: skip


@dataclass(frozen=True)
class Problem:
    numel: int  # of each rank's input
    dtype: torch.dtype
    size: int  # ranks


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


def cost(problem: Problem) -> Cost:
    nbytes = problem.numel * problem.dtype.itemsize
    return Cost(0, nbytes, nbytes * problem.size, nbytes * (problem.size - 1))


def cases(size: int) -> list[Problem]:
    """Small problems with awkward sizes: what check, probe and tests run."""
    return [
        Problem(numel, dtype, size)
        for numel, dtype in ((37, torch.float32), (4099, torch.int16), (1, torch.int64))
    ]


def inputs(world: World, problem: Problem, seed: int, exact: bool = True) -> tuple[torch.Tensor]:
    """Random bits of every element: the op only moves them."""
    torch.manual_seed(seed * 1000 + world.rank)
    x = world.empty((problem.numel,), problem.dtype, "x")
    return (x.copy_(torch.randint(-99, 99, (problem.numel,)).to(problem.dtype)),)


def reference(parts: list[torch.Tensor]) -> torch.Tensor:
    """The answer on every rank, from all ranks' inputs."""
    return torch.cat([part.flatten() for part in parts])


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
    """Allocate flags and, for outputs that are not symmetric, a place to gather in."""
    reason = valid(problem, config)
    if reason is not None:
        raise ValueError(f"all_gather: {reason}")
    agree(world, "all_gather", problem, config)
    shape = (config.programs, problem.size)
    ready = world.signals(shape, "all_gather.ready")
    arrived = world.signals(shape, "all_gather.arrived")
    epochs = world.signals(config.programs, "all_gather.epochs")
    staging = world.empty((problem.size * problem.numel,), problem.dtype, "all_gather.staging")
    world.barrier()  # everybody's flags are zero before the first signal

    def launch(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        target = out if out is not None and world.is_symmetric(out) else staging
        _push_kernel[(config.programs,)](
            x, target, ready, arrived, epochs, world.ctx, problem.numel,
            SIZE=problem.size, LANES=triton.next_power_of_2(problem.size), BLOCK=config.block,
            num_warps=config.num_warps,
        )  # fmt: skip
        if target is out:
            return out
        return staging.clone() if out is None else out.copy_(staging.view_as(out))

    return Plan(world, problem, config, (ready, arrived, epochs, staging), launch)


def all_gather(world: World, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """As torch's all_gather_into_tensor: the ranks' tensors along the first dimension.

    `x` may be any contiguous tensor: it is only read here. A symmetric `out` saves a copy.
    """
    if not x.is_contiguous():
        raise ValueError(f"all_gather: x of shape {tuple(x.shape)} is not contiguous")
    shape = (world.size * x.shape[0], *x.shape[1:]) if x.dim() else (world.size,)
    if out is not None and (out.numel() != world.size * x.numel() or out.dtype != x.dtype):
        raise ValueError(
            f"all_gather: out has {out.numel()} elements of {out.dtype}, expected "
            f"{world.size * x.numel()} of {x.dtype} ({world.size} ranks x {x.numel()})"
        )
    problem = Problem(x.numel(), x.dtype, world.size)
    config = default(problem, world.num_sms)
    made = world.cached_plan(("all_gather", problem, config), lambda: plan(world, problem, config))
    return made(x, out).view(out.shape if out is not None else shape)
