"""GEMM + all-reduce, two shots in one kernel: partials go to a tile's owner, the sum to all ranks.

Tile t belongs to rank t mod W. Programs take tiles in turn: first partials, each rank
beginning with another owner; then the own tiles, whose sums are stored to all ranks. Moves every
byte twice over each link, whatever the number of ranks.

For ranks that share a GPU it does not pay: 8 on one H200 took 2654 us at 4096 x 3584 x 8192, and
2522 for GEMM, then all-reduce, which was faster on all nine shapes (docs/measured.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..device import context, tiles, trace
from ..op import Plan, agree
from . import gemm, matmul_reduce
from .call import resident
from .matmul_all_reduce import Problem, cases, cost, inputs, reference
from .matmul_reduce import Config, space, valid

if TYPE_CHECKING:
    from ..world import World

__all__ = [
    "SYMMETRIC", "Config", "Problem", "cases", "cost", "default", "inputs", "plan", "reference",
    "space", "valid",
]  # fmt: skip

SYMMETRIC = ("out",)


def default(problem: Problem, num_sms: int) -> Config:
    return matmul_reduce.default_of(problem, problem.m, num_sms)


class _Flags(NamedTuple):
    arrived: Any  # by own tile and rank: its partial is in the inbox
    final: Any  # by tile and rank: its owner has stored it here
    epochs: Any  # by program: how often it has run


@triton.jit
def _two_shot_kernel(a, b, out, bias, inbox, flags, ctx, K, F, S):
    program, programs = tl.program_id(0), tl.num_programs(0)
    rank = tl.load(ctx + context.RANK).to(tl.int32)
    epoch = tl.load(flags.epochs + program) + 1
    point, away = 0, tiles.distances(ctx, F.lanes)
    rows, cols = tl.cdiv(out.rows, S.tile_m), tl.cdiv(out.cols, S.tile_n)
    owned = tl.cdiv(rows * cols, F.size)  # the last ranks may have one less
    for n in range(program, owned * F.size, programs):
        index, owner = n // F.size, (rank + 1 + n % F.size) % F.size
        tile = index * F.size + owner
        if tile < rows * cols:
            i, j = gemm.swizzle(tile, rows, cols, S.group_m)
            row, col = i * S.tile_m, j * S.tile_n
            point, acc = matmul_reduce.product(point, a, b, row, col, K, ctx, F, S)
            # The owner has read the last call's partial: I have waited for what came of it.
            there = tiles.of_rank(inbox, owner, away)
            matmul_reduce.send(there, rank * owned + index, acc, S)
            # The partial, stored by all warps, before the flag that the owner waits for.
            arrived = flags.arrived + index * F.size
            point = trace.signal(point, arrived + rank, owner, epoch, ctx, F.trace)
    for index in range(program, owned, programs):
        tile = index * F.size + rank
        if tile < rows * cols:
            i, j = gemm.swizzle(tile, rows, cols, S.group_m)
            # All ranks' partials before my loads; and their out is free: they are in this call too.
            arrived = flags.arrived + index * F.size
            point = trace.wait_all(point, arrived, epoch, ctx, F.lanes, F.trace)
            for strip in range(0, S.tile_m, matmul_reduce.STRIP):
                acc = matmul_reduce.total(inbox, index, owned, strip, F, S)
                acc = gemm.finish(bias, acc, j * S.tile_n, out.cols, S)
                for step in range(F.size):  # each rank begins with another peer
                    there = tiles.of_rank(out, (rank + step) % F.size, away)
                    tiles.store(there, i * S.tile_m + strip, j * S.tile_n, acc)
            # The result, stored by all warps, and my loads of the inbox, before the flags.
            final = flags.final + tile * F.size
            point = trace.signal_all(point, final, epoch, ctx, F.lanes, F.trace)
    for tile in range(program, rows * cols, programs):
        # The owners' stores to my out, and their loads of my partials, before what follows here.
        owner = tile % F.size
        final = flags.final + tile * F.size + owner
        point = trace.wait(point, final, owner, epoch, ctx, F.trace)
    trace.finish(point, ctx, F.trace)
    tl.store(flags.epochs + program, epoch)  # read by the next call, behind this one on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags and the inbox. The plan takes any a, b and bias, and a symmetric out."""
    refused = resident(valid(problem, config), config.programs, world.num_sms)
    agree(world, "matmul_all_reduce.two_shot", problem, config, refused)
    num_tiles = triton.cdiv(problem.m, config.tile_m) * triton.cdiv(problem.n, config.tile_n)
    owned = triton.cdiv(num_tiles, problem.size)
    flags = _Flags(
        world.signals((owned, problem.size), "matmul_all_reduce.arrived"),
        world.signals((num_tiles, problem.size), "matmul_all_reduce.final"),
        world.signals(config.programs, "matmul_all_reduce.epochs"),
    )
    shape = (problem.size * owned * config.tile_m, config.tile_n)
    inbox = world.empty(shape, problem.dtype, "matmul_all_reduce.inbox")
    world.barrier()  # everybody's flags are zero before the first signal

    def launch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *added, out = rest
        x, y, shape = matmul_reduce.given(problem, config, a, b)
        _two_shot_kernel[(config.programs,)](
            x, y, tiles.view(out), added[0] if added else None, tiles.view(inbox), flags,
            world.ctx, problem.k, matmul_reduce.constants(world), shape,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, (*flags, inbox), launch)
