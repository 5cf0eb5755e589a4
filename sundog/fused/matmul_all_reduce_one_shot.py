"""GEMM + all-reduce, one shot in one kernel: a partial goes to all ranks as soon as it is computed.

Programs take tiles in turn: first all partials, then all tiles to add. Every partial crosses
each link, but nothing waits for a second trip: for small results.
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

SYMMETRIC = ()


def default(problem: Problem, num_sms: int) -> Config:
    return matmul_reduce.default_of(problem, problem.m, num_sms)


class _Flags(NamedTuple):
    ready: Any  # by rank: its inbox is free
    arrived: Any  # by tile and rank: its partial is in the inbox
    epochs: Any  # by program: how often it has run


@triton.jit
def _one_shot_kernel(a, b, out, bias, inbox, flags, ctx, K, F, S):
    program, programs = tl.program_id(0), tl.num_programs(0)
    rank = tl.load(ctx + context.RANK).to(tl.int32)
    epoch = tl.load(flags.epochs + program) + 1
    point, away = 0, tiles.distances(ctx, F.lanes)
    if program == 0:
        # My inbox is free: the call that read it last is over. Peers fill it behind this.
        point = trace.signal_all(point, flags.ready, epoch, ctx, F.lanes, F.trace)
    rows, cols = tl.cdiv(out.rows, S.tile_m), tl.cdiv(out.cols, S.tile_n)
    for n in range(program, rows * cols, programs):
        i, j = gemm.swizzle(n, rows, cols, S.group_m)
        row, col = i * S.tile_m, j * S.tile_n
        point, acc = matmul_reduce.product(point, a, b, row, col, K, ctx, F, S)
        if n == program:
            # They have read the last call's partials.
            point = trace.wait_all(point, flags.ready, epoch, ctx, F.lanes, F.trace)
        for step in range(F.size):  # each rank begins with another peer
            there = tiles.of_rank(inbox, (rank + step) % F.size, away)
            matmul_reduce.send(there, rank * rows * cols + n, acc, S)
        # The partial, stored by all warps, before the flags that all ranks wait for.
        arrived = flags.arrived + n * F.size
        point = trace.signal_all(point, arrived, epoch, ctx, F.lanes, F.trace)
    for n in range(program, rows * cols, programs):
        i, j = gemm.swizzle(n, rows, cols, S.group_m)
        # All ranks' partials of this tile before my loads of them.
        arrived = flags.arrived + n * F.size
        point = trace.wait_all(point, arrived, epoch, ctx, F.lanes, F.trace)
        for strip in range(0, S.tile_m, matmul_reduce.STRIP):
            acc = matmul_reduce.total(inbox, n, rows * cols, strip, F, S)
            acc = gemm.finish(bias, acc, j * S.tile_n, out.cols, S)
            tiles.store(out, i * S.tile_m + strip, j * S.tile_n, acc)
    trace.finish(point, ctx, F.trace)
    tl.store(flags.epochs + program, epoch)  # read by the next call, behind this one on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags and the inbox. The plan takes any a, b, bias and out."""
    refused = resident(valid(problem, config), config.programs, world.num_sms)
    agree(world, "matmul_all_reduce.one_shot", problem, config, refused)
    num_tiles = triton.cdiv(problem.m, config.tile_m) * triton.cdiv(problem.n, config.tile_n)
    flags = _Flags(
        world.signals(problem.size, "matmul_all_reduce.ready"),
        world.signals((num_tiles, problem.size), "matmul_all_reduce.arrived"),
        world.signals(config.programs, "matmul_all_reduce.epochs"),
    )
    shape = (problem.size * num_tiles * config.tile_m, config.tile_n)
    inbox = world.empty(shape, problem.dtype, "matmul_all_reduce.inbox")
    world.barrier()  # everybody's flags are zero before the first signal

    def launch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *added, out = rest
        x, y, shape = matmul_reduce.given(problem, config, a, b)
        _one_shot_kernel[(config.programs,)](
            x, y, tiles.view(out), added[0] if added else None, tiles.view(inbox), flags,
            world.ctx, problem.k, matmul_reduce.constants(world), shape,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, (*flags, inbox), launch)
