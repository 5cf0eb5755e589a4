"""All-reduce and RMSNorm, one shot: every rank shows its rows to all, then reads all rows.

One barrier and one round of reads: only low_latency waits less. But every rank reads W tensors in
full, so it wins for few rows only. No rank touches a peer's tensors, which may be anywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from ..collectives import _reduce
from ..device import signal, trace
from ..ops.op import Plan, agree, barrier_flags
from . import _rms_norm
from . import all_reduce_rms_norm as norm
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
)

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ()
LARGEST = 64 << 20  # bytes of x: the plan holds twice as much, and two_shot reads less
# Bytes of all outputs up to which it is chosen where nothing was measured: twice as much as for
# all_reduce.one_shot, which has one output.
USUAL = 1 << 20


def valid(problem: Problem, config: Config) -> str | None:
    nbytes = problem.tokens * problem.hidden * problem.dtype.itemsize
    if nbytes > LARGEST:
        return f"one_shot of {nbytes} bytes, and it takes up to {LARGEST}; use two_shot"
    return norm.valid(problem, config)


@triton.jit
def _one_shot_kernel(x, given, out, buffer, flags, epochs, ctx, tokens, stride, cfg):
    program, programs = tl.program_id(0), tl.num_programs(0)
    # These loads are in flight together: none needs the result of another.
    epoch = tl.load(epochs + program) + 1
    buffers = _reduce.everywhere(buffer, 0, ctx, cfg.size)
    row = _rms_norm.fetch_row(x, program, tokens, 0, cfg)
    # Nobody reads this half of my buffer any more. The programs with this number read it two calls
    # ago. After that, in the next kernel of its stream, each of them signalled the last call's
    # barrier, where this program waited for all of them.
    half = (epoch % 2) * stride
    trace.begin(trace.FETCH, program, 0, trace.ALL, ctx, cfg.trace)
    for token in range(program, tokens, programs):
        _show(buffer + half, row, token, cfg)
        row = _rms_norm.fetch_row(x, token + programs, tokens, 0, cfg)
    trace.end(trace.FETCH, program, 0, trace.ALL, ctx, cfg.trace)
    # My rows before the flags, for the peers' programs with this number, which read just those;
    # their rows before my loads.
    signal.barrier_ranks(flags + program * cfg.size, epoch, ctx, cfg.size, cfg.trace)
    trace.begin(trace.COMPUTE, program, 0, trace.ALL, ctx, cfg.trace)
    for token in range(program, tokens, programs):
        added = _rms_norm.add_row(buffers, half, token, given, cfg)
        _rms_norm.finish_whole(added, token, _rms_norm.here(out), given, cfg, 1)
    trace.end(trace.COMPUTE, program, 0, trace.ALL, ctx, cfg.trace)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


@triton.jit
def _show(half, row, token, cfg):
    """Store a row into my buffer, for all ranks."""
    for n in tl.static_range(len(row)):
        column = n * cfg.block + tl.arange(0, cfg.block)
        at = token.to(tl.int64) * cfg.hidden + column
        tl.store(half + at, row[n], mask=column < cfg.hidden)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate two copies of x, used in turn, and flags. The plan takes any contiguous tensors."""
    agree(world, f"{OP}.one_shot", problem, config, valid(problem, config))
    programs = programs_of(config, problem.tokens)
    stride = triton.cdiv(problem.tokens * problem.hidden, 256) * 256  # elements, aligned
    buffer = world.empty((2, stride), problem.dtype, f"{OP}.buffer")
    flags, epochs = barrier_flags(world, OP, programs, "flags")
    return planned(
        world, problem, config, _one_shot_kernel, programs, (buffer, flags, epochs), stride,
        block=_rms_norm.block_of(problem.hidden), num_warps=_rms_norm.warps_of(problem.hidden),
    )  # fmt: skip
