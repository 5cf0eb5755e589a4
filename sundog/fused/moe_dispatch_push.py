"""MoE dispatch, push: for the many tokens of prefill.

One kernel numbers this rank's tokens of each expert. The next loads each token once and stores it
to its slot at each expert's rank, between two barriers of the programs with the same number. While
a token is stored, the next one and its routes are loaded: top-k rows are written for each row read,
so the memory must be busy with stores all the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from ..collectives import _copy
from ..device import context, signal, trace
from ..ops.op import Plan, agree
from ._dispatch import (
    COUNTS,
    IDS,
    emit_counts,
    fetch,
    flags_of,
    heads_of,
    launch_shape,
    refuse_unknown,
    routed,
    store_all,
)
from .moe_dispatch import (
    OP,
    Config,
    Problem,
    cases,
    cost,
    default,
    inputs,
    reference,
    space,
    valid,
    wrong,
)

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ("out",)
_EACH = tl.constexpr(4)  # experts whose tokens a program numbers


@triton.jit
def _number_kernel(ids, slots, counts, pairs, EXPERTS: tl.constexpr):
    """Give a number to each entry of a program's experts."""
    first = tl.program_id(0) * _EACH
    before = ()
    for _ in tl.static_range(_EACH):
        before = before + (tl.full((), 0, tl.int32),)  # type: ignore[assignment]
    for start in range(0, pairs, IDS):
        at = start + tl.arange(0, IDS)
        chosen = tl.load(ids + at, mask=at < pairs, other=-1)
        after = ()
        for i in tl.static_range(_EACH):
            mine = (chosen == first + i).to(tl.int32)
            number = before[i] + tl.cumsum(mine, 0) - mine
            tl.store(slots + at, number, mask=(mine > 0) & (first + i < EXPERTS))
            after = after + (before[i] + tl.sum(mine, 0),)  # type: ignore[assignment]
        before = after
    for i in tl.static_range(_EACH):
        tl.store(counts + first + i, before[i], mask=first + i < EXPERTS)


@triton.jit
def _routes(ids, slots, out, item, items, n, rank, ctx, shape):
    """Find where a token goes: for each expert the address, and a bit that says whether it goes."""
    places, sent = (), 0
    first = (item // shape.parts) * shape.topk
    for k in tl.static_range(shape.topk):
        expert = tl.load(ids + first + k, mask=item < items, other=-1).to(tl.int64)
        is_expert = (expert >= 0) & (expert < shape.experts)
        # Only written for experts.
        slot = tl.load(slots + first + k, mask=is_expert & (item < items), other=shape.slots)
        place, is_there = routed(expert, slot, out, n, rank, ctx, shape)
        places = places + (place,)
        sent |= is_there.to(tl.int32) << k  # one word for all, since separate values spill
    return places, sent


@triton.jit
def _send_kernel(
    x, ids, slots, counts, out, heads, flags, ctx, pairs, n, shape, TRACE: tl.constexpr
):
    """Send tokens of n words. `pairs` is tokens times top-k."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    rank = tl.load(ctx + context.RANK)
    epoch = tl.load(flags.epochs + program) + 1
    items = pairs // shape.topk * shape.parts
    tile = fetch(x, program, items, n, shape)
    places, sent = _routes(ids, slots, out, program, items, n, rank, ctx, shape)
    # My out is free: it was last read before this kernel on the stream. The peers' programs with
    # this number store to it only after this barrier.
    signal.barrier_ranks(flags.ready + program * shape.size, epoch, ctx, shape.size, TRACE)
    trace.begin(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    for item in range(program, items, programs):
        store_all(tile, places, sent, item % shape.parts, n, shape)
        tile = fetch(x, item + programs, items, n, shape)  # arrives while these are stored
        places, sent = _routes(ids, slots, out, item + programs, items, n, rank, ctx, shape)
    for first in range(program * COUNTS, shape.experts, programs * COUNTS):
        expert = first + tl.arange(0, COUNTS)
        count = tl.load(counts + expert, mask=expert < shape.experts, other=0)
        emit_counts(heads, expert, count, flags, rank, ctx, shape)
    refuse_unknown(ids, pairs, flags, ctx, shape)
    trace.end(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    # My tokens and counts before the flags; all peers' before whatever follows this kernel here.
    signal.barrier_ranks(flags.arrived + program * shape.size, epoch, ctx, shape.size, TRACE)
    tl.store(flags.epochs + program, epoch)  # read by the next call on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes any x, ids and slots, and a symmetric out of bytes."""
    agree(world, f"{OP}.push", problem, config, valid(problem, config))
    counts = torch.empty(problem.experts, dtype=torch.int32, device=world.device)
    flags = flags_of(world, problem, config)
    numbering = (triton.cdiv(problem.experts, _EACH.value),)

    def launch(x: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> Any:
        if problem.zeroed:
            out.zero_()  # before this rank says that it is free
        pairs = ids.numel()
        _number_kernel[numbering](ids, slots, counts, pairs, problem.experts, num_warps=8)
        (source, target), aligned = _copy.as_words(problem.row, x.view(-1), out)
        shape = launch_shape(problem, config, source.itemsize, aligned)
        _send_kernel[(config.programs,)](
            source, ids, slots, counts, target, heads_of(problem, out), flags, world.ctx, pairs,
            problem.row // source.itemsize, shape, TRACE=world.kernel_mode,
            num_warps=config.num_warps,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, tuple(flags), launch)
