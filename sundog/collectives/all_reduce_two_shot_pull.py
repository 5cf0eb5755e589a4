"""All-reduce, two shots, the second one pulled: reduce slice r, then load the others' slices.

As two_shot, but no rank writes another rank's out, so out may be an ordinary tensor without a copy.
With n bytes a tensor it moves 3n + n/W at each rank, where two_shot and a copy of its out move 4n.
With out on the heap two_shot is faster, with 2n. Two barriers of the programs with the same number
frame the first shot. out may be x.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device import chunks, context, memory, signal, trace
from ..ops.op import Plan, World, agree
from . import _reduce
from ._reduce import valid
from .all_reduce import Problem, cases, cost, inputs, reference

SYMMETRIC = ("x",)


class Config(_reduce.Config):
    """Its type says that this algorithm takes it."""


default = Config.sliced


def space(problem: Problem) -> list[Config]:
    return _reduce.configs(Config, (2048, 4096, 8192, 16384), (4, 8, 16, 32, 64, 128), (4, 8, 16))


@triton.jit
def _two_shot_pull_kernel(
    x, out, reduced, flags, epochs, ctx, numel,
    OP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    """Reduce this rank's slice into `reduced`, which the peers load. `flags`: of two barriers."""
    NBYTES: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    program, programs = tl.program_id(0), tl.num_programs(0)
    rank = tl.load(ctx + context.RANK)
    epoch = tl.load(epochs + program) + 1
    length = _reduce.slice_length(numel, NBYTES, SIZE)
    xs = _reduce.everywhere(x + rank * length, 0, ctx, SIZE)
    mine = tl.maximum(tl.minimum(length, numel - rank * length), 0)
    ready = flags + program * SIZE
    there = ready + programs * SIZE
    # My x is written, since all earlier work on the stream has ended. The peers' programs with this
    # number read it after this barrier.
    signal.barrier_ranks(ready, epoch, ctx, SIZE, TRACE)
    trace.begin(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    # The peers' programs with this number load just the tiles that this one stores here.
    if ALIGNED:
        _reduce.reduce_span((reduced,), xs, mine, program, programs, OP, SIZE, 1, BLOCK, True)
    else:  # the same tiles, by narrow loads
        for start in range(program.to(tl.int64) * BLOCK, mine, programs * BLOCK):
            at = start + tl.arange(0, BLOCK)
            tile = _reduce.reduce_few(xs, at, at < mine, OP, SIZE)
            tl.store(reduced + at, tile, mask=at < mine)
    trace.end(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    # My part of the slice before the flags, for the peers' programs; theirs before my loads. And my
    # loads of the peers' x before the flags: they may store to it, where out is x.
    signal.barrier_ranks(there, epoch, ctx, SIZE, TRACE)
    for step in tl.static_range(SIZE):
        peer = (rank + step) % SIZE
        begin = peer * length
        count = tl.maximum(tl.minimum(length, numel - begin), 0)
        source = memory.translate(reduced, peer, ctx)
        _pull(out + begin, source, count, program, programs, BLOCK, ALIGNED)
    # No barrier is needed to say that the slices were read: a peer stores to its slice again only
    # after the next call's first barrier, which the program here with its number reaches after
    # these loads.
    tl.store(epochs + program, epoch)  # read by the next call on the stream


@triton.jit
def _pull(out, reduced, n, part, parts, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Load the tiles that program `part` of a peer has stored, and its last elements."""
    PER: tl.constexpr = chunks.WIDE // (out.dtype.element_ty.primitive_bitwidth // 8)
    body = n // PER * PER if ALIGNED else n
    for start in range(part.to(tl.int64) * BLOCK, body, parts * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(reduced + at, mask=at < body), mask=at < body)
    if ALIGNED and part == parts - 1:
        last = body + tl.arange(0, PER)
        tl.store(out + last, tl.load(reduced + last, mask=last < n), mask=last < n)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate a slice and flags. The plan takes a symmetric x, and any contiguous out."""
    agree(world, "all_reduce.two_shot_pull", problem, config, valid(problem, config))
    slice_numel = _reduce.slice_of(problem.numel, problem.dtype, problem.size)
    kind = _reduce.kind(problem.dtype)
    reduced = world.empty((max(slice_numel, 1),), kind, "all_reduce.reduced")
    flags = world.signals((2, config.programs, problem.size), "all_reduce.flags")
    epochs = world.signals(config.programs, "all_reduce.epochs")
    world.barrier()  # every rank's flags are zero before the first signal
    op = _reduce.operator(problem.op, problem.dtype)

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        aligned = _reduce.is_aligned(0, x)  # alike on all ranks: x has one offset in all heaps
        _two_shot_pull_kernel[(config.programs,)](
            _reduce.storage(x), _reduce.storage(out), reduced, flags, epochs, world.ctx,
            problem.numel, OP=op, SIZE=problem.size, BLOCK=config.block, ALIGNED=aligned,
            TRACE=world.kernel_mode, num_warps=config.num_warps,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, (reduced, flags, epochs), launch)
