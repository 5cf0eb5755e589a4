"""All-reduce and RMSNorm, two shots in one kernel, with the norm between them.

Rank r reads its rows of all ranks' x, adds the residual, normalises, and stores the results to all
ranks. Every byte of x is read once and every output written once, which is fastest for many rows.
Two barriers of the programs with the same number frame it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ..collectives import _reduce
from ..device import context, signal, trace
from ..ops.op import Plan, agree, barrier_flags
from . import _rms_norm
from .all_reduce_rms_norm import (
    OP,
    Config,
    Problem,
    cases,
    cost,
    default,
    inputs,
    planned,
    programs_of,
    reference,
    space,
    valid,
)

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ("x", "out")


def _rows(problem: Problem) -> int:
    """Count the rows that a rank normalises. The last ranks may have fewer."""
    return int(triton.cdiv(problem.tokens, problem.size))


@triton.jit
def _two_shot_kernel(x, given, out, ready, done, epochs, ctx, tokens, rows, cfg):
    program = tl.program_id(0)
    rank = tl.load(ctx + context.RANK)
    epoch = tl.load(epochs + program) + 1
    xs = _reduce.everywhere(x, 0, ctx, cfg.size)
    outs = _rms_norm.there(out, rank, ctx, cfg.size)  # each rank begins with a different peer
    end = tl.minimum((rank + 1) * rows, tokens)
    # My x is written and my out is free, since all earlier work on the stream has ended. The peers'
    # programs with this number touch them only after this barrier.
    signal.barrier_ranks(ready + program * cfg.size, epoch, ctx, cfg.size, cfg.trace)
    trace.begin(trace.FETCH, program, 0, trace.ALL, ctx, cfg.trace)
    for number in range(rank * rows + program, end, tl.num_programs(0)):
        # Always `number`, which the compiler does not know. Otherwise it would keep an address of
        # every part, rank and tensor across the loop, and spill 160 bytes a thread with 8 ranks and
        # rows of 7168.
        token = tl.minimum(number, tokens - 1)
        added = _rms_norm.add_row(xs, 0, token, given, cfg)
        _rms_norm.finish_whole(added, token, outs, given, cfg, cfg.size)
    trace.end(trace.FETCH, program, 0, trace.ALL, ctx, cfg.trace)
    # My loads of the peers' x, which they may overwrite then, and my stores to their out, which
    # they may read then, before the flags; the peers' before whatever follows this kernel here.
    signal.barrier_ranks(done + program * cfg.size, epoch, ctx, cfg.size, cfg.trace)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes a symmetric x and out; the others may be any tensors."""
    agree(world, f"{OP}.two_shot", problem, config, valid(problem, config))
    programs = programs_of(config, _rows(problem))
    flags = barrier_flags(world, OP, programs, "ready", "done")
    return planned(
        world, problem, config, _two_shot_kernel, programs, flags, _rows(problem),
        block=_rms_norm.block_of(problem.hidden), num_warps=_rms_norm.warps_of(problem.hidden),
    )  # fmt: skip
