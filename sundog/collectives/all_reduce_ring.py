"""All-reduce, ring: partial sums of W slices go round, then the finished slices go round.

Every rank talks only to its two neighbours, in 2 (W - 1) steps. Each link carries 2 (W - 1) / W of
the tensor, the least possible, so it wins where all ranks together can't use every link at once.

The order of addition differs from slice to slice (it begins with the slice's own rank), and a
partial sum is rounded to the dtype at every step, as in NCCL's ring. So its bits are the same in
every run, but not those of one_shot and two_shot, and it runs only if `algo` names it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device import chunks, context, memory, signal
from ..ops.op import Plan, World, agree
from . import _reduce
from .all_reduce import Problem, cases, cost, inputs, reference

SYMMETRIC = ("out",)


class Config(_reduce.Config):
    """Its type says that this algorithm takes it."""


default = Config.sliced


def valid(problem: Problem, config: Config) -> str | None:
    if problem.op == "avg" and not problem.dtype.is_floating_point:
        return f"ring passes sums on as {problem.dtype}, where they may wrap: no average of those"
    return _reduce.valid(problem, config)


def space(problem: Problem) -> list[Config]:
    return _reduce.configs(Config, (1024, 2048, 4096, 8192), (4, 8, 16, 32, 64, 128), (4, 8))


@triton.jit
def _ring_kernel(
    x, out, inbox, arrived, epochs, ctx, numel, slice_numel,
    OP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """Pass tiles p of every slice on: program p of a rank talks to programs p of its neighbours.

    No flag is needed to say that an inbox or an out may be written: the rank before me finishes no
    slice, and ends no call, without my part of it. So when it writes my out, I have launched this
    call; and when it writes my inbox in the next call, I have read all of it in this one.
    """
    program = tl.program_id(0)
    rank = tl.load(ctx + context.RANK)
    epoch = tl.load(epochs + program) + 1
    after, before = (rank + 1) % SIZE, (rank + SIZE - 1) % SIZE
    next_inbox, next_out = memory.translate(inbox, after, ctx), memory.translate(out, after, ctx)
    flags = arrived + program * 2 * SIZE  # a flag per step
    for step in range(SIZE - 1):  # slice rank - step moves on, with my part added
        place = (rank + SIZE - step) % SIZE
        if step == 0:
            _step(next_inbox, None, x, None, place, numel, slice_numel, OP, SIZE, BLOCK)
        else:
            _step(next_inbox, None, x, inbox, place, numel, slice_numel, OP, SIZE, BLOCK)
        # My partial sums before the flag, for the rank after me, which adds its own to them; those
        # of the rank before me before my loads in the next step.
        signal.signal(flags + step, after, epoch, ctx, TRACE)
        signal.wait(flags + step, before, epoch, ctx, TRACE)
    if SIZE == 1:
        _step(next_out, out, x, None, after, numel, slice_numel, OP, SIZE, BLOCK)
    else:
        _step(next_out, out, x, inbox, after, numel, slice_numel, OP, SIZE, BLOCK)
    for step in range(SIZE - 1):  # slice rank - step arrives finished, and moves on
        # My finished slice before the flag, for the rank after me; that of the rank before me
        # before my loads, and before whatever follows this kernel here.
        signal.signal(flags + SIZE + step, after, epoch, ctx, TRACE)
        signal.wait(flags + SIZE + step, before, epoch, ctx, TRACE)
        if step < SIZE - 2:
            place = (rank + SIZE - step) % SIZE
            _step(next_out, None, out, None, place, numel, slice_numel, OP, SIZE, BLOCK)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


@triton.jit
def _step(
    to, own, x, inbox, place, numel, slice_numel,
    OP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Send slice `place` of x to the next rank, added to the inbox's if there is one.

    With `own`, the slice is finished here, and is also stored there.
    """
    PER: tl.constexpr = chunks.WIDE // (x.dtype.element_ty.primitive_bitwidth // 8)
    begin = place * slice_numel
    end = tl.minimum(begin + slice_numel, numel)
    body = end // PER * PER  # a slice begins at such a multiple too
    for start in range(begin + tl.program_id(0) * BLOCK, body, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        _tile(to, own, x, inbox, at, at < body, OP, SIZE)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        last = body + tl.arange(0, PER)
        _tile(to, own, x, inbox, last, (last >= begin) & (last < end), OP, SIZE)


@triton.jit
def _tile(to, own, x, inbox, at, mask, OP: tl.constexpr, SIZE: tl.constexpr):
    tile = _reduce.widen(tl.load(x + at, mask=mask))
    if inbox is not None:
        tile = _reduce.combine(_reduce.widen(tl.load(inbox + at, mask=mask)), tile, OP)
    if own is not None:
        tile = _reduce.finish(tile, OP, SIZE)
    tl.store(to + at, tile.to(x.dtype.element_ty), mask=mask)
    if own is not None:
        tl.store(own + at, tile.to(x.dtype.element_ty), mask=mask)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags and an inbox of x's size. The plan takes a contiguous x, a symmetric out."""
    agree(world, "all_reduce.ring", problem, config, valid(problem, config))
    inbox = world.empty((problem.numel,), _reduce.kind(problem.dtype), "all_reduce.inbox")
    arrived = world.signals((config.programs, 2, problem.size), "all_reduce.arrived")
    epochs = world.signals(config.programs, "all_reduce.epochs")
    world.barrier()  # every rank's flags are zero before the first signal
    op = _reduce.operator(problem.op, problem.dtype)
    slice_numel = _reduce.slice_of(problem.numel, problem.dtype, problem.size)

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        _ring_kernel[(config.programs,)](
            _reduce.storage(x), _reduce.storage(out), inbox, arrived, epochs, world.ctx,
            problem.numel, slice_numel, OP=op, SIZE=problem.size, BLOCK=config.block,
            TRACE=world.kernel_mode, num_warps=config.num_warps,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, (inbox, arrived, epochs), launch)
