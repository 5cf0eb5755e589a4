"""MoE dispatch, low latency: one kernel, for the few tokens of decode.

There are so few entries of top-k that each program counts for itself which slot a token has, and
none waits for a kernel that numbers them. This, and the first token's loads, happen before the
barrier that says that the peers' out is free. Tokens are split into parts, so that all programs
have one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from ..collectives import _copy
from ..device import context, signal, trace
from ..ops.op import Plan, agree
from . import moe_dispatch
from ._dispatch import (
    COUNTS,
    emit_counts,
    fetch,
    flags_of,
    heads_of,
    launch_shape,
    refuse_unknown,
    routed,
    store_all,
)
from .moe_dispatch import OP, Problem, cases, cost, inputs, reference, wrong

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ("out",)
LARGEST = 2048  # entries of top-k on a rank: each program reads all of them for each token
_AT_ONCE = tl.constexpr(64)  # entries that are counted at once, for as many experts


class Config(moe_dispatch.Config):
    """Its type says that this algorithm takes it."""


def valid(problem: Problem, config: Config) -> str | None:
    pairs = problem.max_tokens * problem.topk
    if pairs > LARGEST:
        return f"{pairs} entries of top-k, and it takes up to {LARGEST}; use push"
    return moe_dispatch.valid(problem, config)


def space(problem: Problem) -> list[Config]:
    return [_taken(each) for each in moe_dispatch.space(problem)]


def default(problem: Problem, num_sms: int) -> Config:
    return _taken(moe_dispatch.default(problem, num_sms))


def _taken(config: moe_dispatch.Config) -> Config:
    return Config(config.programs, config.parts, config.num_warps)


@triton.jit
def _routes(every, ids, slots, out, item, pairs, n, rank, ctx, shape):
    """Find where a token goes, for each of its experts. Their slots are counted here, and kept.

    `every` has all entries, of which each program counts those before its own.
    """
    places, sent = (), 0
    token, part = item // shape.parts, item % shape.parts
    at = tl.arange(0, every.shape[0])
    for k in tl.static_range(shape.topk):
        entry = token * shape.topk + k
        expert = tl.load(ids + entry, mask=entry < pairs, other=-1).to(tl.int64)
        before = tl.sum(((every == expert) & (at < entry)).to(tl.int32), 0)
        is_expert = (expert >= 0) & (expert < shape.experts)
        # One program for each token stores its slots, which combine reads.
        tl.store(slots + entry, before, mask=is_expert & (part == 0))
        slot = tl.where(is_expert, before, shape.slots)
        place, is_there = routed(expert, slot, out, n, rank, ctx, shape)
        places = places + (place,)
        sent |= is_there.to(tl.int32) << k
    return places, sent


@triton.jit
def _count(ids, expert, pairs):
    """Count the entries of each of these experts."""
    count = expert * 0
    for start in range(0, pairs, _AT_ONCE):
        at = start + tl.arange(0, _AT_ONCE)
        chosen = tl.load(ids + at, mask=at < pairs, other=-1)
        count += tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), 0)
    return count


@triton.jit
def _dispatch_kernel(
    x, ids, slots, out, heads, flags, ctx, pairs, n, shape, IDS: tl.constexpr, TRACE: tl.constexpr
):
    """Send tokens of n words. `pairs` is tokens times top-k; IDS is room for all entries."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    rank = tl.load(ctx + context.RANK)
    epoch = tl.load(flags.epochs + program) + 1
    items = pairs // shape.topk * shape.parts
    tile = fetch(x, program, items, n, shape)
    at = tl.arange(0, IDS)
    every = tl.load(ids + at, mask=at < pairs, other=-1)
    places, sent = _routes(every, ids, slots, out, program, pairs, n, rank, ctx, shape)
    # My out is free: it was last read before this kernel on the stream. The peers' programs with
    # this number store to it only after this barrier.
    signal.barrier_ranks(flags.ready + program * shape.size, epoch, ctx, shape.size, TRACE)
    trace.begin(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    for item in range(program, items, programs):
        store_all(tile, places, sent, item % shape.parts, n, shape)
        if item + programs < items:
            tile = fetch(x, item + programs, items, n, shape)
            places, sent = _routes(
                every, ids, slots, out, item + programs, pairs, n, rank, ctx, shape
            )
    for first in range(program * COUNTS, shape.experts, programs * COUNTS):
        expert = first + tl.arange(0, COUNTS)
        emit_counts(heads, expert, _count(ids, expert, pairs), flags, rank, ctx, shape)
    refuse_unknown(ids, pairs, flags, ctx, shape)
    trace.end(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    # My tokens and counts before the flags; all peers' before whatever follows this kernel here.
    signal.barrier_ranks(flags.arrived + program * shape.size, epoch, ctx, shape.size, TRACE)
    tl.store(flags.epochs + program, epoch)  # read by the next call on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes any x, ids and slots, and a symmetric out of bytes."""
    agree(world, f"{OP}.low_latency", problem, config, valid(problem, config))
    flags = flags_of(world, problem, config)
    room = triton.next_power_of_2(max(problem.max_tokens * problem.topk, 1))

    def launch(x: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> Any:
        if problem.zeroed:
            out.zero_()  # before this rank says that it is free
        (source, target), aligned = _copy.as_words(problem.row, x.view(-1), out)
        shape = launch_shape(problem, config, source.itemsize, aligned)
        _dispatch_kernel[(config.programs,)](
            source, ids, slots, target, heads_of(problem, out), flags, world.ctx, ids.numel(),
            problem.row // source.itemsize, shape, IDS=room, TRACE=world.kernel_mode,
            num_warps=config.num_warps,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, tuple(flags), launch)
