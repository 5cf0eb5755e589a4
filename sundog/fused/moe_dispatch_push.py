"""MoE dispatch, push: for the many tokens of prefill.

One kernel numbers this rank's tokens of each expert. The next loads each token once and stores it
to its slot at each expert's rank, between two barriers of the programs with one number. While a
token is stored, the next one and its way are loaded: top-k rows are written for one that is read,
so the memory is busy with stores all the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..collectives import _copy
from ..collectives._copy import WIDE
from ..device import context, memory, signal, trace
from ..ops.op import Plan, agree, barrier_flags
from ._gemm import constants
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
)  # fmt: skip

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ("out",)
_IDS = tl.constexpr(2048)  # that a program looks at at once
_EACH = tl.constexpr(4)  # experts whose tokens a program numbers
_COUNTS = tl.constexpr(32)  # that a program stores at once


class DispatchShape(NamedTuple):
    """What a kernel is compiled for."""

    size: tl.constexpr  # ranks
    experts: tl.constexpr
    local: tl.constexpr  # experts of a rank
    topk: tl.constexpr
    slots: tl.constexpr
    head: tl.constexpr  # bytes of the counts
    parts: tl.constexpr  # of a token
    width: tl.constexpr  # words of a part
    block: tl.constexpr  # the same, or the next power of two
    aligned: tl.constexpr  # rows begin and end at multiples of 16 bytes


class DispatchFlags(NamedTuple):
    """What the ranks' programs tell each other, and what is refused."""

    ready: torch.Tensor  # by program and rank: its out is free
    arrived: torch.Tensor  # by program and rank: its tokens are here
    epochs: torch.Tensor  # by program: how often it has run
    limits: torch.Tensor  # by expert: its tokens. Only the names of these two are used, in errors
    unknown: torch.Tensor


def flags_of(world: World, problem: Problem, config: Config) -> DispatchFlags:
    names = (problem.experts, f"{OP}.tokens_of_expert"), (1, f"{OP}.expert_index")
    limits, unknown = (world.signals(*each) for each in names)
    ready, arrived, epochs = barrier_flags(world, OP, config.programs, "ready", "arrived")
    return DispatchFlags(ready, arrived, epochs, limits, unknown)


def launch_shape(problem: Problem, config: Config, itemsize: int, aligned: bool) -> DispatchShape:
    """`itemsize`: bytes of a word."""
    per = WIDE.value // itemsize
    words = triton.cdiv(triton.cdiv(problem.row // itemsize, config.parts), per) * per
    return constants(
        DispatchShape, size=problem.size, experts=problem.experts, local=problem.local,
        topk=problem.topk, slots=problem.slots, head=problem.counts_bytes, parts=config.parts,
        width=words, block=triton.next_power_of_2(words), aligned=aligned,
    )  # fmt: skip


@triton.jit
def _number_kernel(ids, slots, counts, pairs, EXPERTS: tl.constexpr):
    """Give numbers to the entries of each of a program's experts."""
    first = tl.program_id(0) * _EACH
    before = ()
    for _ in tl.static_range(_EACH):
        before = before + (tl.full((), 0, tl.int32),)  # type: ignore[assignment]
    for start in range(0, pairs, _IDS):
        at = start + tl.arange(0, _IDS)
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
def columns(part, n, shape):
    """Return the words of a row that are a part of it, and which of them are there."""
    at = part * shape.width + tl.arange(0, shape.block)
    end = tl.minimum((part + 1) * shape.width, n)
    if shape.aligned:
        end = end // 4 * 4  # itself, as a number of which the compiler knows a divisor
    return at, at < end


@triton.jit
def fetch(x, item, items, n, shape):
    """Load the words of a part of a token."""
    at, mask = columns(item % shape.parts, n, shape)
    src = x + (item // shape.parts).to(tl.int64) * n + at
    if shape.aligned:
        src = tl.multiple_of(src, WIDE)
    return tl.load(src, mask=mask & (item < items))


@triton.jit
def routed(expert, slot, out, n, rank, ctx, shape):
    """Return where an expert has this token of `rank`, and whether it has it."""
    nbytes: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    is_there = slot < shape.slots
    expert = tl.where(is_there, expert, 0)
    place = ((expert % shape.local) * shape.size + rank) * shape.slots + tl.where(is_there, slot, 0)
    there = out + shape.head // nbytes + place * n
    return memory.translate(there, expert // shape.local, ctx), is_there


@triton.jit
def _routes(ids, slots, out, item, items, n, rank, ctx, shape):
    """Find where a token goes: for each expert the place, and a bit that says whether it goes."""
    places, sent = (), 0
    first = (item // shape.parts) * shape.topk
    for k in tl.static_range(shape.topk):
        expert = tl.load(ids + first + k, mask=item < items, other=-1).to(tl.int64)
        is_expert = (expert >= 0) & (expert < shape.experts)
        # Written for experts only.
        slot = tl.load(slots + first + k, mask=is_expert & (item < items), other=shape.slots)
        place, is_there = routed(expert, slot, out, n, rank, ctx, shape)
        places = places + (place,)
        sent |= is_there.to(tl.int32) << k  # a word for all: each as a value of its own spills
    return places, sent


@triton.jit
def store_all(tile, places, sent, part, n, shape):
    """Store a part of a token to each of its places."""
    at, mask = columns(part, n, shape)
    for k in tl.static_range(shape.topk):
        dst = places[k] + at
        if shape.aligned:
            dst = tl.multiple_of(dst, WIDE)
        tl.store(dst, tile, mask=mask & ((sent >> k) & 1 == 1))


@triton.jit
def emit_counts(out, expert, count, flags, rank, ctx, shape):
    """Store counts to the experts' ranks; leave a record if one is above the slots."""
    is_one = expert < shape.experts
    known = tl.where(is_one, expert, 0)
    there = out.to(tl.pointer_type(tl.int32)) + (known % shape.local) * shape.size + rank
    memory.store(there, tl.minimum(count, shape.slots), known // shape.local, ctx, mask=is_one)
    most = tl.max(count, 0)
    if most > shape.slots:
        which = tl.max(tl.where(count == most, known, 0), 0)
        signal.refuse(flags.limits + which, most, shape.slots, ctx)


@triton.jit
def refuse_unknown(ids, pairs, flags, ctx, shape):
    """Leave a record of an entry that is no expert, and not -1. After the first barrier: a record
    ends the waits of this rank, and what is stored after them must find the peers' out free."""
    for start in range(tl.program_id(0) * _IDS, pairs, tl.num_programs(0) * _IDS):
        at = start + tl.arange(0, _IDS)
        chosen = tl.load(ids + at, mask=at < pairs, other=-1).to(tl.int64)
        bad = (chosen < -1) | (chosen >= shape.experts)
        if tl.sum(bad.to(tl.int32), 0) > 0:
            highest = tl.max(tl.where(bad, chosen, -1), 0)
            seen = tl.where(highest >= 0, highest, tl.min(tl.where(bad, chosen, 0), 0))
            signal.refuse(flags.unknown, seen, shape.experts - 1, ctx)


@triton.jit
def _send_kernel(x, ids, slots, counts, out, flags, ctx, pairs, n, shape, TRACE: tl.constexpr):
    """`pairs`: tokens times top-k. `n`: words of a token."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    rank = tl.load(ctx + context.RANK)
    epoch = tl.load(flags.epochs + program) + 1
    items = pairs // shape.topk * shape.parts
    tile = fetch(x, program, items, n, shape)
    places, sent = _routes(ids, slots, out, program, items, n, rank, ctx, shape)
    # My out is free: what read it last came before this kernel on the stream. The peers' programs
    # with this number store to it only after this barrier.
    signal.barrier_ranks(flags.ready + program * shape.size, epoch, ctx, shape.size, TRACE)
    trace.begin(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    for item in range(program, items, programs):
        store_all(tile, places, sent, item % shape.parts, n, shape)
        tile = fetch(x, item + programs, items, n, shape)  # arrives while these are stored
        places, sent = _routes(ids, slots, out, item + programs, items, n, rank, ctx, shape)
    for first in range(program * _COUNTS, shape.experts, programs * _COUNTS):
        expert = first + tl.arange(0, _COUNTS)
        count = tl.load(counts + expert, mask=expert < shape.experts, other=0)
        emit_counts(out, expert, count, flags, rank, ctx, shape)
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
            source, ids, slots, counts, target, flags, world.ctx, pairs,
            problem.row // source.itemsize, shape, TRACE=world.kernel_mode,
            num_warps=config.num_warps,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, tuple(flags), launch)
