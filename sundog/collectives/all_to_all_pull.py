"""All-to-all, pull: every part is loaded from the peer that has it.

As push the other way round: only this rank writes its output, which may be an ordinary tensor
without a copy; the peers read x. Reads wait for the link where writes need not. Moves every byte
once: with n bytes a tensor 2n at each rank, where push and a copy of its output move 4n.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from ..device import context, memory, signal, trace
from ..ops.op import Plan, agree, barrier_flags
from . import _copy
from ._copy import Config, default, space, wrong_config
from .all_to_all import Problem, cases, cost, inputs, reference

if TYPE_CHECKING:
    from ..world.world import World

__all__ = [
    "SYMMETRIC", "Config", "Problem", "cases", "cost", "default", "inputs", "plan", "reference",
    "space", "valid",
]  # fmt: skip

SYMMETRIC = ("x",)


def valid(problem: Problem, config: Config) -> str | None:
    if problem.splits is not None:
        return "its parts are not equal, so a rank does not know where they lie: use mail"
    return wrong_config(config)


@triton.jit(do_not_specialize=["n"])
def _pull_kernel(
    x, out, ready, done, epochs, ctx, n,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    """`n`: words of a part."""
    program = tl.program_id(0)
    rank = tl.load(ctx + context.RANK)
    epoch = tl.load(epochs + program) + 1
    # My tensor was written before this kernel on the stream; the peers read it after this.
    signal.barrier_ranks(ready + program * SIZE, epoch, ctx, SIZE, TRACE)
    for step in tl.static_range(SIZE):
        peer = (rank + step) % SIZE
        src = memory.translate(x + rank * n, peer, ctx)
        trace.begin(trace.FETCH, program, 0, peer, ctx, TRACE)
        _copy.copy((out + peer * n,), src, n, program, tl.num_programs(0), 1, BLOCK, ALIGNED)
        trace.end(trace.FETCH, program, 0, peer, ctx, TRACE)
    # My loads before the flags: whatever follows this kernel there may overwrite that tensor.
    signal.barrier_ranks(done + program * SIZE, epoch, ctx, SIZE, TRACE)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes a symmetric x, and any contiguous out."""
    agree(world, "all_to_all.pull", problem, config, valid(problem, config))
    flags = barrier_flags(world, "all_to_all", config.programs, "ready", "done")

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if problem.numel:
            (source, target), aligned = _copy.as_words(problem.nbytes, x, out)
            _pull_kernel[(config.programs,)](
                source, target, *flags, world.ctx, source.numel() // problem.size,
                SIZE=problem.size, BLOCK=config.block, ALIGNED=aligned,
                TRACE=world.trace, num_warps=config.num_warps,
            )  # fmt: skip
        return out

    return Plan(world, problem, config, tuple(flags), launch)
