"""GEMM + all-reduce, one shot in one kernel: a partial goes to all ranks as soon as it is computed.

Programs take tiles in turn: first all partials, then all rows to add. Every partial crosses each
link, but nothing waits for a second trip, which suits small results. It does not pay where ranks
share a GPU, and so its memory: 118 us against 117 for GEMM, then all-reduce, with M=16, and 242
against 191 with M=256 (8 ranks on one H200, docs/measured.md). When that was measured the loops
over tiles and over K were one; Triton 3.9 ran out of registers in it, around the stores to all
ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ..device import context, signal, tiles, trace
from ..ops.op import Plan, agree
from . import _gemm, _matmul_reduce
from ._call import resident
from ._matmul_reduce import Config, default, space, valid
from .matmul_all_reduce import Problem, cases, cost, inputs, reference

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ()
OP = "matmul_all_reduce.one_shot"


@triton.jit
def _one_shot_kernel(a, b, out, bias, inbox, flags, ctx, K, cfg, shape):
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(flags.epochs + program) + 1
    here = _matmul_reduce.half_of(inbox, epoch, cfg)
    _push_to_all(a, b, out, here, ctx, K, cfg, shape)
    # The partials, stored by all warps, before the counts that all ranks wait for.
    _matmul_reduce.count_all(flags.sent, epoch, ctx, cfg)
    # All ranks' partials before my loads of them.
    signal.wait_all(flags.sent, epoch * programs, ctx, cfg.size, cfg.trace)
    _matmul_reduce.add_all(out, bias, here, ctx, cfg, shape)
    tl.store(flags.epochs + program, epoch)  # read by the next call on the stream


@triton.jit
def _push_to_all(a, b, out, inbox, ctx, K, cfg, shape):
    """Multiply this program's tiles and store them to all ranks."""
    program, rank = tl.program_id(0), tl.load(ctx + context.RANK).to(tl.int32)
    away = tiles.distances(ctx, cfg.size)
    rows, cols = tl.cdiv(out.rows, shape.tile_m), tl.cdiv(out.cols, shape.tile_n)
    trace.begin(trace.COMPUTE, program, 0, rank, ctx, cfg.trace)
    for n in range(program, rows * cols, tl.num_programs(0)):
        i, j = _gemm.swizzle(n, rows, cols, shape.group_m)
        row, col = i * shape.tile_m, j * shape.tile_n
        acc = _matmul_reduce.product(a, b, row, col, K, shape)
        for step in range(cfg.size):  # each rank begins with a different peer
            there = tiles.of_rank(inbox, (rank + step) % cfg.size, away)
            _matmul_reduce.store(_matmul_reduce.slot(there, rank), row, col, acc, shape)
    trace.end(trace.COMPUTE, program, 0, rank, ctx, cfg.trace)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags and the inbox. The plan takes any a, b, bias and out."""
    refused = resident(valid(problem, config), config.programs, world.num_sms)
    agree(world, OP, problem, config, refused)
    flags = _matmul_reduce.flags_of(world, problem, config, OP)
    return _matmul_reduce.plan_inbox(
        world, OP, problem, config, _one_shot_kernel, flags, problem.m, parts=2
    )
