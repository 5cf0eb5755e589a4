"""What the algorithms of moe_dispatch share: flags, and the reading and sending of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from ..collectives._copy import WIDE
from ..device import memory, signal
from ..ops.op import barrier_flags
from ._gemm import constants
from .moe_dispatch import OP, Config, Problem

if TYPE_CHECKING:
    from ..world.world import World

IDS = tl.constexpr(2048)  # entries of top-k that a program looks at at once
COUNTS = tl.constexpr(32)  # that a program stores at once


class DispatchShape(NamedTuple):
    """What a kernel is compiled for."""

    size: tl.constexpr  # ranks
    experts: tl.constexpr
    named: tl.constexpr  # experts, in errors
    local: tl.constexpr  # experts of a rank
    topk: tl.constexpr
    slots: tl.constexpr
    head: tl.constexpr  # bytes of the counts
    parts: tl.constexpr  # of a token
    width: tl.constexpr  # words of a part
    block: tl.constexpr  # the same, or the next power of two
    aligned: tl.constexpr  # rows begin and end at multiples of 16 bytes


class DispatchFlags(NamedTuple):
    """What the ranks' programs signal to each other, and what is refused."""

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


def heads_of(problem: Problem, out: torch.Tensor) -> torch.Tensor:
    """Return the counts at the beginning of out."""
    return out[: problem.counts_bytes].view(torch.int32)


def launch_shape(problem: Problem, config: Config, itemsize: int, aligned: bool) -> DispatchShape:
    """Return the constants of a problem and a config. A word has `itemsize` bytes."""
    per = WIDE.value // itemsize
    words = triton.cdiv(triton.cdiv(problem.row // itemsize, config.parts), per) * per
    return constants(
        DispatchShape, size=problem.size, experts=problem.experts, local=problem.local,
        named=problem.named or problem.experts, topk=problem.topk, slots=problem.slots,
        head=problem.counts_bytes, parts=config.parts, width=words,
        block=triton.next_power_of_2(words), aligned=aligned,
    )  # fmt: skip


@triton.jit
def columns(part, n, shape):
    """Return where the words of a part of a row are, and which of them exist."""
    at = part * shape.width + tl.arange(0, shape.block)
    end = tl.minimum((part + 1) * shape.width, n)
    if shape.aligned:
        end = end // 4 * 4  # the same, with a divisor that the compiler knows
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
    """Return where an expert stores this token of `rank`, and whether it does."""
    nbytes: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    is_there = slot < shape.slots
    expert = tl.where(is_there, expert, 0)
    place = ((expert % shape.local) * shape.size + rank) * shape.slots + tl.where(is_there, slot, 0)
    there = out + shape.head // nbytes + place * n
    return memory.translate(there, expert // shape.local, ctx), is_there


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
def emit_counts(heads, expert, count, flags, rank, ctx, shape):
    """Store counts to the experts' ranks. Leave a record if one exceeds the slots.

    `heads`: the counts at the beginning of out.
    """
    is_one = expert < shape.experts
    known = tl.where(is_one, expert, 0)
    there = heads + (known % shape.local) * shape.size + rank
    memory.store(there, tl.minimum(count, shape.slots), known // shape.local, ctx, mask=is_one)
    most = tl.max(count, 0)
    if most > shape.slots:
        which = tl.max(tl.where(count == most, known, 0), 0)
        signal.refuse(flags.limits + which, most, shape.slots, ctx)


@triton.jit
def refuse_unknown(ids, pairs, flags, ctx, shape):
    """Leave a record of an entry that is neither an expert nor -1. Call it after the first barrier:
    a record ends this rank's waits, and what is stored after them must find the peers' out free."""
    for start in range(tl.program_id(0) * IDS, pairs, tl.num_programs(0) * IDS):
        at = start + tl.arange(0, IDS)
        chosen = tl.load(ids + at, mask=at < pairs, other=-1).to(tl.int64)
        bad = (chosen < -1) | (chosen >= shape.experts)
        if tl.sum(bad.to(tl.int32), 0) > 0:
            highest = tl.max(tl.where(bad, chosen, -1), 0)
            seen = tl.where(highest >= 0, highest, tl.min(tl.where(bad, chosen, 0), 0))
            signal.refuse(flags.unknown, seen, shape.named - 1, ctx)
