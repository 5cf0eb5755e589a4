"""All-gather, pull: load every rank's tensor, store it here.

As push the other way round: a barrier says that the peers' tensors are there, a second one that all
have read mine. The output is touched by this rank only and may lie anywhere. Reads wait for the
link where writes need not, so it wins only where the output is an ordinary tensor, and staging it
for push would cost more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..device import context, memory, signal, trace
from ..ops.op import Plan, agree, barrier_flags
from ..ops.passive import stand_in
from . import _copy
from ._copy import Config, default, space, valid
from .all_gather import Problem, cases, cost, inputs, reference

if TYPE_CHECKING:
    from ..world.world import World

__all__ = [
    "SYMMETRIC", "Config", "Problem", "cases", "cost", "default", "inputs", "plan", "reference",
    "space", "valid",
]  # fmt: skip

SYMMETRIC = ("x",)


@triton.jit(do_not_specialize=["n"])
def _pull_kernel(
    x, out, ready, done, epochs, ctx, n,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rank = tl.load(ctx + context.RANK)
    epoch = tl.load(epochs + program) + 1
    # My tensor was written before this kernel on the stream; the peers read it after this.
    signal.barrier_ranks(ready + program * SIZE, epoch, ctx, SIZE, TRACE)
    for step in tl.static_range(SIZE):
        peer = (rank + step) % SIZE
        src = memory.translate(x, peer, ctx)
        trace.begin(trace.FETCH, program, 0, peer, ctx, TRACE)
        _copy.copy((out + peer * n,), src, n, program, tl.num_programs(0), 1, BLOCK, ALIGNED)
        trace.end(trace.FETCH, program, 0, peer, ctx, TRACE)
    # My loads before the flags: whatever follows this kernel here may overwrite my tensor.
    signal.barrier_ranks(done + program * SIZE, epoch, ctx, SIZE, TRACE)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes a symmetric x, and any contiguous out."""
    agree(world, "all_gather.pull", problem, config, valid(problem, config))
    flags = barrier_flags(world, "all_gather", config.programs, "ready", "done")

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if world.passive and problem.numel:
            stand_in(world, *flags)
        elif problem.numel:
            (source, target), aligned = _copy.as_words(problem.nbytes, x, out)
            _pull_kernel[(config.programs,)](
                source, target, *flags, world.ctx, source.numel(),
                SIZE=problem.size, BLOCK=config.block, ALIGNED=aligned,
                TRACE=world.trace, num_warps=config.num_warps,
            )  # fmt: skip
        return out

    return Plan(world, problem, config, tuple(flags), launch)
