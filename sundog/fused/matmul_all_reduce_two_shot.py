"""GEMM + all-reduce, two shots in one kernel: partials go to the rows' owner, the sum to all ranks.

Rank r owns slice r of the rows. Programs take tiles in turn, beginning with the next rank's rows.
Each product is stored to the owner of its rows while the next one is multiplied. When all ranks
have sent everything, programs add what this rank owns and store it to all ranks. Every byte crosses
each link twice, whatever the number of ranks, and the products hide the first time.

8 ranks on one H200 (docs/measured.md) take 0.97 to 1.01 times as long as with GEMM, then
all-reduce, on six large shapes: 2509 us against 2486 with 4096 x 3584 x 8192, 625 against 626 with
M=1024, 10640 against 10921 with M=16384. It saves a launch and a barrier of ranks, which is 5 us,
less than these times vary from sample to sample. It reads what it adds, and writes the sum, as the
collective does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
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

SYMMETRIC = ("out",)
OP = "matmul_all_reduce.two_shot"


class _Flags(NamedTuple):
    sent: torch.Tensor  # as in _matmul_reduce.InboxFlags
    done: torch.Tensor  # by program and rank: it has read its inbox, and stored its sums here
    epochs: torch.Tensor  # by program: how often it has run


@triton.jit
def _two_shot_kernel(a, b, out, bias, inbox, flags, ctx, K, cfg, shape):
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(flags.epochs + program) + 1
    # The owners have read the last call's partials: I waited for that at its end.
    _matmul_reduce.push(a, b, inbox, out.rows, out.cols, K, ctx, cfg, shape)
    # The partials, stored by all warps, before the counts that their owners wait for.
    _matmul_reduce.count_all(flags.sent, epoch, ctx, cfg)
    # All ranks' partials before my loads. Their out is free, since they are in this call too.
    signal.wait_all(flags.sent, epoch * programs, ctx, cfg.size, cfg.trace)
    _add_all(out, bias, inbox, ctx, cfg, shape)
    # My loads of the inbox and my stores to all ranks' out before the flags; the peers' loads of
    # what I sent, and their stores to my out, before whatever follows this kernel here.
    done = flags.done + program * cfg.size
    signal.barrier_ranks(done, epoch, ctx, cfg.size, cfg.trace)
    tl.store(flags.epochs + program, epoch)  # read by the next call on the stream


@triton.jit
def _add_all(out, bias, inbox, ctx, cfg, shape):
    """Add this program's share of its rank's rows, into all ranks' `out`."""
    program, rank = tl.program_id(0), tl.load(ctx + context.RANK).to(tl.int32)
    away = tiles.distances(ctx, cfg.size)
    first = rank * inbox.rows
    rows = tl.maximum(tl.minimum(out.rows - first, inbox.rows), 0)
    strips, cols = tl.cdiv(rows, cfg.strip), tl.cdiv(out.cols, shape.tile_n)
    trace.begin(trace.FETCH, program, 0, rank, ctx, cfg.trace)
    for n in tl.range(program, strips * cols, tl.num_programs(0), num_stages=cfg.ahead):
        row, col = n // cols * cfg.strip, n % cols * shape.tile_n
        acc = _matmul_reduce.total(inbox, row, col, rows, cfg, shape)
        acc = _gemm.finish(bias, acc, col, out.cols, shape)
        for step in tl.static_range(cfg.size):  # each rank begins with a different peer
            there = tiles.of_rank(out, (rank + step) % cfg.size, away)
            tiles.store(tiles.part(there, first, rows), row, col, acc)
    trace.end(trace.FETCH, program, 0, rank, ctx, cfg.trace)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags and the inbox. The plan takes any a, b and bias, and a symmetric out."""
    refused = resident(valid(problem, config), config.programs, world.num_sms)
    agree(world, OP, problem, config, refused)
    flags = _Flags(
        world.signals(problem.size + 1, f"{OP}.sent"),
        world.signals((config.programs, problem.size), f"{OP}.done"),
        world.signals(config.programs, f"{OP}.epochs"),
    )
    rows = _matmul_reduce.slice_rows(problem)
    return _matmul_reduce.plan_inbox(
        world, OP, problem, config, _two_shot_kernel, flags, rows, parts=1
    )
