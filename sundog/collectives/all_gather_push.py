"""All-gather, push: load my tensor once, store it to every rank.

A fixed number of programs walks over the tiles. Each loads a tile and stores it W times, beginning
with a different peer on every rank. Two barriers of the programs with the same number frame the
stores: the first says that the peers' outputs may be overwritten, the second that all has arrived.
Push reads every byte once and moves it once over each link: use it for large tensors.

Loading the first tile before the first barrier, or every tile one ahead of its stores, was tried:
106.5 and 106.4 us instead of 107.1 (64 MB, 2 ranks of an H200), too little for a second path.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device import context, memory, signal, trace
from ..ops.op import Plan, World, agree, barrier_flags
from . import _copy
from ._copy import Config, default, space, valid
from .all_gather import Problem, cases, cost, inputs, reference

SYMMETRIC = ("out",)


@triton.jit(do_not_specialize=["n"])
def _push_kernel(
    x, out, ready, arrived, epochs, ctx, n,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rank = tl.load(ctx + context.RANK)
    epoch = tl.load(epochs + program) + 1
    # Computed once, where my tensor goes at every rank. 64-bit, since the rank is.
    places = ()
    for step in tl.static_range(SIZE):
        place = memory.translate(out + rank * n, (rank + step) % SIZE, ctx)
        places = places + (place,)  # type: ignore[assignment]  # Triton takes no annotation
    # This rank's output is free: what read it last came before this kernel on the stream. The
    # peers' programs with this number write it only after this barrier.
    signal.barrier_ranks(ready + program * SIZE, epoch, ctx, SIZE, TRACE)
    trace.begin(trace.FETCH, program, 0, rank, ctx, TRACE)
    _copy.copy(places, x, n, program, tl.num_programs(0), SIZE, BLOCK, ALIGNED)
    trace.end(trace.FETCH, program, 0, rank, ctx, TRACE)
    # My tiles before the flags; all peers' tiles before whatever follows this kernel here.
    signal.barrier_ranks(arrived + program * SIZE, epoch, ctx, SIZE, TRACE)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes any contiguous x, only read here, and a symmetric out."""
    agree(world, "all_gather.push", problem, config, valid(problem, config))
    flags = barrier_flags(world, "all_gather", config.programs, "ready", "arrived")

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if problem.numel:
            (source, target), aligned = _copy.as_words(problem.nbytes, x, out)
            _push_kernel[(config.programs,)](
                source, target, *flags, world.ctx, source.numel(),
                SIZE=problem.size, BLOCK=config.block, ALIGNED=aligned,
                TRACE=world.kernel_mode, num_warps=config.num_warps,
            )  # fmt: skip
        return out

    return Plan(world, problem, config, tuple(flags), launch)
