"""All-reduce, one shot: every rank shows its tensor to all, then reads and reduces all of them.

One barrier and one round of reads give a low latency, but every rank reads W tensors in full, so it
wins for small ones only. No rank touches a peer's x or out: they may be any tensors, and out may be
x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device import chunks, signal, trace
from ..ops.op import Plan, World, agree, barrier_flags
from . import _reduce
from .all_reduce import Problem, cases, cost, inputs, reference

SYMMETRIC = ()
LARGEST = 64 << 20  # bytes: the plan holds twice as much; two_shot wins long before this size
# Bytes up to which it is chosen where nothing was measured. On an H200 two_shot was faster from 512
# KB on 8 ranks, from 2 MB on 4, and from 8 MB on 2.
USUAL = 512 << 10


class Config(_reduce.Config):
    """Its type says that this algorithm takes it."""


default = Config.whole


def valid(problem: Problem, config: Config) -> str | None:
    nbytes = problem.numel * problem.dtype.itemsize
    if nbytes > LARGEST:
        return f"one_shot of {nbytes} bytes, and it takes up to {LARGEST}; use two_shot"
    return _reduce.valid(problem, config)


def space(problem: Problem) -> list[Config]:
    return _reduce.configs(
        Config, (512, 1024, 2048, 4096, 8192), (1, 2, 4, 8, 16, 32, 64), (4, 8, 16)
    )


@triton.jit
def _one_shot_kernel(
    x, out, buffer, flags, epochs, ctx, numel, stride,
    OP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    PER: tl.constexpr = chunks.WIDE // (x.dtype.element_ty.primitive_bitwidth // 8)
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    first = program.to(tl.int64) * BLOCK
    # Whole chunks of 16 bytes: a mask that ends there does not cut one.
    body = tl.cast(numel, tl.int64) // PER * PER
    # These loads are in flight together: none needs the result of another.
    epoch = tl.load(epochs + program) + 1
    buffers = _reduce.everywhere(buffer, 0, ctx, SIZE)
    mine = first + tl.arange(0, BLOCK)
    tile = tl.load(x + mine, mask=mine < body)
    # Nobody reads this half of my buffer any more. The programs with this number read it two calls
    # ago. After that, in the next kernel of its stream, each of them signalled the last call's
    # barrier, where this program waited for all of them.
    half = (epoch % 2) * stride
    halves = ()
    for peer in tl.static_range(SIZE):
        halves = halves + (buffers[peer] + half,)  # type: ignore[assignment]
    trace.begin(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    tl.store(buffer + half + mine, tile, mask=mine < body)
    for start in range(first + programs * BLOCK, body, programs * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(buffer + half + at, tl.load(x + at, mask=at < body), mask=at < body)
    if program == programs - 1:  # which reduces the last elements too
        last = body + tl.arange(0, PER)
        tl.store(buffer + half + last, tl.load(x + last, mask=last < numel), mask=last < numel)
    # My tiles before the flags, for the peers' programs with this number, which read just those;
    # their tiles before my loads.
    trace.end(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    signal.barrier_ranks(flags + program * SIZE, epoch, ctx, SIZE, TRACE)
    trace.begin(trace.COMPUTE, program, 0, trace.ALL, ctx, TRACE)
    # The buffers begin at multiples of 16 bytes, so tiles are the same as above, whatever out is.
    _reduce.reduce_span((out,), halves, numel, program, programs, OP, SIZE, 1, BLOCK, True)
    trace.end(trace.COMPUTE, program, 0, trace.ALL, ctx, TRACE)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate two copies of x, used in turn, and flags. The plan takes any contiguous tensors."""
    agree(world, "all_reduce.one_shot", problem, config, valid(problem, config))
    stride = triton.cdiv(problem.numel, 256) * 256  # elements; the second half is aligned too
    buffer = world.empty((2, stride), _reduce.kind(problem.dtype), "all_reduce.buffer")
    flags, epochs = barrier_flags(world, "all_reduce", config.programs, "flags")
    op = _reduce.operator(problem.op, problem.dtype)

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        _one_shot_kernel[(config.programs,)](
            _reduce.storage(x), _reduce.storage(out), buffer, flags, epochs, world.ctx,
            problem.numel, stride, OP=op, SIZE=problem.size, BLOCK=config.block,
            TRACE=world.kernel_mode, num_warps=config.num_warps,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, (buffer, flags, epochs), launch)
