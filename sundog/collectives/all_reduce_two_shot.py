"""All-reduce, two shots in one kernel: rank r reduces slice r of all tensors and stores it to all.

Every byte is read once and written once, which is fastest for large tensors. Two barriers of the
programs with the same number frame it. out may be x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..device import context, signal, trace
from ..ops.op import Plan, World, agree
from . import _reduce
from ._reduce import valid
from .all_reduce import Problem, cases, cost, inputs, reference

SYMMETRIC = ("x", "out")


class Config(_reduce.Config):
    """Its type says that this algorithm takes it."""


default = Config.sliced


def space(problem: Problem) -> list[Config]:
    return _reduce.configs(
        Config, (1024, 2048, 4096, 8192, 16384), (4, 8, 16, 32, 64, 128), (4, 8, 16)
    )


@triton.jit
def _two_shot_kernel(
    x, out, ready, done, epochs, ctx, numel,
    OP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    NBYTES: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    program = tl.program_id(0)
    rank = tl.load(ctx + context.RANK)
    epoch = tl.load(epochs + program) + 1
    length = _reduce.slice_length(numel, NBYTES, SIZE)
    begin = rank * length
    xs = _reduce.everywhere(x + begin, 0, ctx, SIZE)
    outs = _reduce.everywhere(out + begin, rank, ctx, SIZE)  # each rank begins elsewhere
    count = tl.maximum(tl.minimum(length, numel - begin), 0)
    # My x is written and my out is free, since all earlier work on the stream has ended. The peers'
    # programs with this number touch them only after this barrier.
    signal.barrier_ranks(ready + program * SIZE, epoch, ctx, SIZE, TRACE)
    trace.begin(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    # This works in place too: only this program touches these elements, on all ranks.
    _reduce.reduce_span(
        outs, xs, count, program, tl.num_programs(0), OP, SIZE, SIZE, BLOCK, ALIGNED
    )
    trace.end(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    # My loads of the peers' x, which they may overwrite then, and my stores to their out, which
    # they may read then, before the flags; the peers' before whatever follows this kernel here.
    signal.barrier_ranks(done + program * SIZE, epoch, ctx, SIZE, TRACE)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes a symmetric x and out, which may be the same."""
    agree(world, "all_reduce.two_shot", problem, config, valid(problem, config))
    return _reduce.plan_framed(
        world, "all_reduce", problem, config, _two_shot_kernel, problem.numel
    )
