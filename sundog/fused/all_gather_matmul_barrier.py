"""All-gather, then GEMM: the baseline. It wins where there is little to hide, as with a small M.

A kernel pulls all ranks' parts of A into one matrix, framed by two barriers of the programs with
the same number. A plain GEMM follows on the stream. All ranks add in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from ..device import context, signal, tiles, trace
from ..ops.op import Plan, agree, barrier_flags
from ..ops.passive import stand_in
from . import _aligned, _gemm
from ._call import hint_of, resident
from ._fitting import fitting
from .all_gather_matmul import Problem, cases, cost, inputs, reference, unfit

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ("a",)
_TILE = 65536  # bytes of the gather's largest tile
_LEAST_TILE = 2048  # elements of its smallest
_LONGEST = 1024  # elements of a tile along the contiguous dimension


@dataclass(frozen=True)
class Config(_gemm.Grid):
    """Its type says which algorithms take it."""


def valid(problem: Problem, config: Config) -> str | None:
    return unfit(problem) or _gemm.valid_grid(config, problem.dtype)


def space(problem: Problem) -> list[Config]:
    made = [
        Config(**tile, group_m=group_m)
        for tile in _gemm.tried(
            (64, 64, 4, 4), (64, 128, 4, 5), (128, 128, 4, 4), (128, 128, 8, 3), (128, 256, 8, 3),
            (128, 256, 8, 4),
        )
        for group_m in (1, 4, 8)
    ]  # fmt: skip
    return [config for config in made if valid(problem, config) is None]


def default(problem: Problem, num_sms: int) -> Config:
    base = fitting(problem.m, problem.m, problem.n, problem.k, problem.dtype, num_sms)
    most = triton.cdiv(problem.m * problem.k, _LEAST_TILE)  # tiles to gather
    most = max(
        most, triton.cdiv(problem.m, base["tile_m"]) * triton.cdiv(problem.n, base["tile_n"])
    )
    return Config(**base, programs=max(1, min(num_sms, most)))


@triton.jit
def _gather_kernel(
    a, whole, ready, done, epochs, ctx,
    SIZE: tl.constexpr, BY_K: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr, HINT: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rank = tl.load(ctx + context.RANK).to(tl.int32)
    epoch = tl.load(epochs + program) + 1
    rows, cols = tl.cdiv(a.rows, ROWS), tl.cdiv(a.cols, COLS)
    # My A is complete, since all earlier work on the stream has ended. The peers' programs with
    # this number read it after this barrier.
    signal.barrier_ranks(ready + program * SIZE, epoch, ctx, SIZE, TRACE)
    trace.begin(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    for n in range(program, SIZE * rows * cols, tl.num_programs(0)):
        # Each rank begins with a different peer. The same tile of all peers comes before the next
        # tile: ranks that share a GPU then read the same tiles at about the same time, from its L2
        # cache.
        peer, tile = (rank + n) % SIZE, n // SIZE
        row, col = tile // cols * ROWS, tile % cols * COLS
        data = tiles.gather(a, row, col, peer, ctx, ROWS, COLS, HINT)
        if BY_K:
            mask = tiles.inside(a, row, col, ROWS, COLS)  # beyond it is the next one
            at = tiles.at(whole, row, peer * a.cols + col, ROWS, COLS)
            tl.store(at, data, mask=mask)
        else:
            tiles.store(tiles.part(whole, peer * a.rows, a.rows), row, col, data)
    trace.end(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    # My loads of the peers' A before the flags: they may overwrite it when their kernel has ended.
    signal.barrier_ranks(done + program * SIZE, epoch, ctx, SIZE, TRACE)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


class Gather(NamedTuple):
    """All of A on this rank, and what fills it."""

    whole: torch.Tensor
    padded: torch.Tensor  # the same with the zeros that align its rows
    workspaces: tuple[torch.Tensor, ...]
    launch: Callable[[torch.Tensor], None]


def gather(world: World, problem: Problem, programs: int, descriptors: bool = True) -> Gather:
    """Allocate flags and the gathered A. `launch` takes a symmetric a. A collective on the host."""
    width = _aligned.padded(problem.k, problem.dtype.itemsize, descriptors)
    flags = barrier_flags(world, "all_gather_matmul", programs, "ready", "done")
    padded = world.empty((problem.m, width), problem.dtype, "all_gather_matmul.gathered")
    whole = padded[:, : problem.k]
    padded[:, problem.k :].zero_()

    def launch(a: torch.Tensor) -> None:
        if world.passive:
            stand_in(world, *flags)
            return
        hint = hint_of(a)
        most = _TILE // a.itemsize
        rows, cols = _tile(a.shape, min(most, problem.m * problem.k // programs), hint)
        _gather_kernel[(programs,)](
            tiles.view(a), tiles.view(whole), *flags, world.ctx, SIZE=problem.size,
            BY_K=problem.shard == "k", ROWS=rows,
            COLS=cols, HINT=hint, TRACE=world.kernel_mode,
            num_warps=4 if rows * cols < most else 16,
        )  # fmt: skip

    return Gather(whole, padded, (*flags, padded), launch)


def _tile(shard: torch.Size, share: int, hint: tuple[int, int]) -> tuple[int, int]:
    """Choose the gather's tile: long in the contiguous dimension, and within a program's share."""
    down = hint[0] > 1
    numel = max(_LEAST_TILE, triton.next_power_of_2(share))
    length = min(_LONGEST, triton.next_power_of_2(max(1, shard[0 if down else 1])))
    return (length, numel // length) if down else (numel // length, length)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags and the gathered A. The plan takes a symmetric a, any b, bias and out."""
    refused = resident(valid(problem, config), config.programs, world.num_sms)
    agree(world, "all_gather_matmul.barrier", problem, config, refused)
    _, padded, workspaces, fill = gather(world, problem, config.programs, config.descriptors)
    rooms = _aligned.Rooms(world, config, config.programs)

    def launch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *bias, out = rest
        [y] = rooms.wide(b)  # on a passive rank too, and first: all launch the same kernels
        fill(a)
        if not world.passive:
            added = bias[0] if bias else None
            _gemm.matmul(padded, y, out, added, problem.activation, config, config.programs)
        return out

    return Plan(world, problem, config, workspaces, launch)
