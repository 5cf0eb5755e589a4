"""All-reduce, one shot: every rank shows its tensor to all, then reads and reduces all of them.

One barrier and one round of reads: the least latency, but every rank reads W tensors in full, so it
wins for small ones only. Nobody touches a peer's x or out: they may lie anywhere, and out may be x.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..device import signal, trace
from ..ops.op import Plan, agree
from . import _reduce
from .all_reduce import Problem, cases, cost, inputs, reference

if TYPE_CHECKING:
    from ..world.world import World

__all__ = [
    "SYMMETRIC", "Config", "Problem", "cases", "cost", "default", "inputs", "plan", "reference",
    "space", "valid",
]  # fmt: skip

SYMMETRIC = ()
LARGEST = 64 << 20  # bytes: the plan holds twice as much, and two_shot reads less from far below
# Bytes up to which it is taken where nothing was measured. On an H200 two_shot was faster from
# 512 KB on 8 ranks, 2 MB on 4, 8 MB on 2.
USUAL = 512 << 10


class Config(_reduce.Config):
    """Its type says that this algorithm takes it."""


def valid(problem: Problem, config: Config) -> str | None:
    nbytes = problem.numel * problem.dtype.itemsize
    if nbytes > LARGEST:
        return f"one_shot of {nbytes} bytes, and it takes up to {LARGEST}; use two_shot"
    return _reduce.refused(config.block, config.programs, config.num_warps)


def space(problem: Problem) -> list[Config]:
    return _reduce.configs(
        Config, (512, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 16, 32, 64), (4, 8, 16)
    )


def default(problem: Problem, num_sms: int) -> Config:
    return Config(*_reduce.tiling(problem.numel, problem.dtype, num_sms))


@triton.jit
def _one_shot_kernel(
    x, out, buffer, flags, epochs, ctx, numel, stride,
    OP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    first = program.to(tl.int64) * BLOCK
    step = tl.num_programs(0) * BLOCK
    # These loads wait for memory together: none needs what another one brings.
    epoch = tl.load(epochs + program) + 1
    buffers = _reduce.everywhere(buffer, 0, ctx, SIZE)
    tile = _load_tile(x, first, numel, BLOCK)
    # Nobody reads this half of my buffer any more. It was read two calls ago, by the programs with
    # this number; each of them signalled the last call's barrier after that, in the next kernel of
    # its stream, and this program has waited there for all of them.
    half = (epoch % 2) * stride
    halves = ()
    for peer in tl.static_range(SIZE):
        halves = halves + (buffers[peer] + half,)  # type: ignore[assignment]
    trace.begin(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    _store_tile(buffer + half, tile, first, numel, BLOCK)
    for start in range(first + step, numel, step):
        _store_tile(buffer + half, _load_tile(x, start, numel, BLOCK), start, numel, BLOCK)
    # My tiles before the flags, for the peers' programs with this number, which read just those;
    # their tiles before my loads.
    trace.end(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    signal.barrier_ranks(flags + program * SIZE, epoch, ctx, SIZE, TRACE)
    trace.begin(trace.COMPUTE, program, 0, trace.ALL, ctx, TRACE)
    for start in range(first, numel, step):
        _reduce.reduce_tile(out, halves, start, numel, OP, SIZE, BLOCK)
    trace.end(trace.COMPUTE, program, 0, trace.ALL, ctx, TRACE)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


@triton.jit
def _load_tile(src, start, numel, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= numel:  # without a mask, which might end inside 16 bytes
        tile = tl.load(src + at)
    else:
        tile = tl.load(src + at, mask=at < numel)
    return tile


@triton.jit
def _store_tile(dst, tile, start, numel, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= numel:
        tl.store(dst + at, tile)
    else:
        tl.store(dst + at, tile, mask=at < numel)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate two copies of x, used in turn, and flags. The plan takes any contiguous tensors."""
    agree(world, "all_reduce.one_shot", problem, config, valid(problem, config))
    stride = triton.cdiv(problem.numel, 256) * 256  # elements; the second half is aligned too
    buffer = world.empty((2, stride), _reduce.kind(problem.dtype), "all_reduce.buffer")
    flags = world.signals((config.programs, problem.size), "all_reduce.flags")
    epochs = world.signals(config.programs, "all_reduce.epochs")
    world.barrier()  # everybody's flags are zero before the first signal
    op = _reduce.operator(problem.op, problem.dtype)

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        _one_shot_kernel[(config.programs,)](
            _reduce.storage(x), _reduce.storage(out), buffer, flags, epochs, world.ctx,
            problem.numel, stride, OP=op, SIZE=problem.size, BLOCK=config.block,
            TRACE=world.trace, num_warps=config.num_warps,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, (buffer, flags, epochs), launch)
