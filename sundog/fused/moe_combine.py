"""MoE combine: weigh and add every token's expert outputs on the token's rank.

`y` has the experts' outputs where moe_dispatch put their tokens. Each rank reads those of its own
tokens from the peers' memory, so nothing is sent that is not needed. The sum is in float32 and in
the order of the experts, whatever their order in top-k, so it has the same bits at every grid and
replay.

Few tokens, as in decode, are split into parts, one for each program. With many, a program adds
whole tokens, and looks up where the next one's rows are while it adds.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from .. import gpu_limits
from ..collectives import _reduce
from ..collectives._copy import random_tensor
from ..device import context, memory, signal, trace
from ..ops.dispatch import CallOptions, call, packed
from ..ops.op import Cost, Plan, agree, barrier_flags
from ._call import check_tensors
from ._gemm import constants
from .moe_dispatch import Config, Handle, Problem, random_ids, slots_of, space, unfit
from .moe_dispatch import default as default_dispatch
from .moe_dispatch import valid as valid_dispatch

if TYPE_CHECKING:
    from ..world.world import World

OP = "moe_combine"
SYMMETRIC = ("y",)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDE = tl.constexpr(16)  # bytes that a thread loads at once


def valid(problem: Problem, config: Config) -> str | None:
    if problem.dtype not in DTYPES:
        return f"{problem.dtype}: expected one of bfloat16, float16 and float32"
    return valid_dispatch(problem, config)


def default(problem: Problem, num_sms: int) -> Config:
    """Choose as in dispatch, with more warps: top-k rows are loaded for each row stored."""
    like = default_dispatch(problem, num_sms)
    part = triton.cdiv(problem.row, like.parts)
    warps = triton.next_power_of_2(part) // _reduce.warp_bytes()
    return Config(like.programs, like.parts, min(max(warps, 1), 16))


def cost(problem: Problem) -> Cost:
    """Count as if every rank had its most tokens, and every expert equally many."""
    read = problem.max_tokens * problem.topk * problem.row
    away = read * (problem.size - 1) // problem.size
    added = 2 * problem.max_tokens * problem.topk * problem.hidden
    return Cost(added, read, problem.max_tokens * problem.row, away)


def cases(size: int) -> list[Problem]:
    """Return small problems: more experts than tokens, rows of odd sizes."""
    return [
        Problem(5, 64, torch.bfloat16, size, 2 * size, 2),
        Problem(3, 37, torch.float32, size, size, 3),
        Problem(2, 36, torch.float32, size, size, 1),
    ]


def inputs(
    world: World, problem: Problem, seed: int, exact: bool = True
) -> tuple[torch.Tensor, ...]:
    """Make outputs of this rank's experts; experts, slots and weights of its own tokens."""
    shape = (problem.local, problem.size * problem.slots, problem.hidden)
    y = random_tensor(world, math.prod(shape), problem.dtype, seed, exact).view(shape)
    ids = random_ids(world, problem, seed)
    weights = (ids % 4 + 1).float() / 4
    return y, ids, slots_of(ids), weights


def reference(
    problem: Problem, rank: int, y: list[torch.Tensor], ids: list[torch.Tensor],
    slots: list[torch.Tensor], weights: list[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Return the answer on a rank, from all ranks' inputs."""
    shape = (problem.max_tokens, problem.hidden)
    if y[rank].is_meta:  # only its shape is wanted
        return y[rank].new_empty(shape)
    experts, order = ids[rank].long().sort(dim=1, stable=True)
    at = rank * problem.slots + slots[rank].long().gather(1, order)
    factors = weights[rank].gather(1, order)
    out = torch.zeros(shape, device=y[rank].device)
    for k in range(problem.topk):
        for peer in range(problem.size):
            token = (experts[:, k] // problem.local == peer).nonzero().flatten()
            rows = y[peer][experts[token, k] % problem.local, at[token, k]].float()
            out[token] += factors[token, k, None] * rows
    return out.to(problem.dtype)


class _Flags(NamedTuple):
    ready: torch.Tensor  # by program and rank: its experts' outputs are there
    done: torch.Tensor  # by program and rank: it has read those of this rank
    epochs: torch.Tensor  # by program: how often it has run


@triton.jit
def _combine_kernel(
    y, ids, slots, weights, out, flags, ctx, tokens, hidden, shape, TRACE: tl.constexpr
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    rank = tl.load(ctx + context.RANK)
    epoch = tl.load(flags.epochs + program) + 1
    items = tokens * shape.parts
    rows, factors = _rows_of(y, ids, slots, weights, program, items, hidden, rank, ctx, shape)
    # My y was written before this kernel on the stream. The peers' programs with this number read
    # it only after this barrier.
    signal.barrier_ranks(flags.ready + program * shape.size, epoch, ctx, shape.size, TRACE)
    trace.begin(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    for item in range(program, items, programs):
        here, weighed = rows, factors
        # Where the next token's rows are: this arrives while the current ones are added.
        after = item + programs
        rows, factors = _rows_of(y, ids, slots, weights, after, items, hidden, rank, ctx, shape)
        to = out + (item // shape.parts).to(tl.int64) * hidden
        _add(to, here, weighed, item % shape.parts, hidden, shape)
    trace.end(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    # My loads of the peers' y before the flags: they may overwrite it then.
    signal.barrier_ranks(flags.done + program * shape.size, epoch, ctx, shape.size, TRACE)
    tl.store(flags.epochs + program, epoch)  # read by the next call on the stream


@triton.jit
def _add(to, rows, factors, part, hidden, shape):
    """Add a part of a token's weighted expert outputs, in their order. All loads come first."""
    end = tl.minimum((part + 1) * shape.width, hidden)
    PER: tl.constexpr = _WIDE // (to.dtype.element_ty.primitive_bitwidth // 8)
    if shape.aligned:
        end = end // PER * PER  # the same, with a divisor that the compiler knows
    for start in range(part * shape.width, end, shape.block):
        column = start + tl.arange(0, shape.block)
        tiles = ()
        for k in tl.static_range(shape.topk):
            src = rows[k] + column
            if shape.aligned:
                src = tl.multiple_of(src, _WIDE)
            mask = (column < end) & (factors[k] != 0)
            tiles = tiles + (tl.load(src, mask=mask, other=0.0),)
        total = tl.zeros((shape.block,), tl.float32)
        for k in tl.static_range(shape.topk):
            total += factors[k] * tiles[k].to(tl.float32)
        dst = to + column
        if shape.aligned:
            dst = tl.multiple_of(dst, _WIDE)
        tl.store(dst, total.to(to.dtype.element_ty), mask=column < end)


@triton.jit
def _rows_of(y, ids, slots, weights, item, items, hidden, rank, ctx, shape):
    """Find a token's expert outputs and their weights, in the order of the experts.

    An entry that is not an expert has weight 0.
    """
    first = (item // shape.parts) * shape.topk
    experts = ()
    for k in tl.static_range(shape.topk):
        expert = tl.load(ids + first + k, mask=item < items, other=-1)
        experts = experts + (expert,)
    rows, factors = (), ()
    for place in tl.static_range(shape.topk):
        expert, entry = _at(experts, place, shape.topk)
        weight = tl.load(weights + first + entry, mask=item < items, other=0.0)
        is_expert = (expert >= 0) & (expert < shape.experts)
        slot = tl.load(slots + first + entry, mask=is_expert, other=shape.slots)
        is_there = slot < shape.slots
        known = tl.where(is_there, expert, 0).to(tl.int64)
        row = ((known % shape.local) * shape.size + rank) * shape.slots
        there = y + (row + tl.where(is_there, slot, 0)) * hidden
        rows = rows + (memory.translate(there, known // shape.local, ctx),)
        factors = factors + (tl.where(is_there, weight, 0.0),)
    return rows, factors


@triton.jit
def _at(experts, place: tl.constexpr, TOPK: tl.constexpr):
    """Return the expert at a place in the order of a token's experts, and its entry."""
    found, entry = experts[0], 0
    for k in tl.static_range(TOPK):
        before = 0
        for other in tl.static_range(TOPK):
            if other < k:
                before += (experts[other] <= experts[k]).to(tl.int32)
            elif other > k:
                before += (experts[other] < experts[k]).to(tl.int32)
        found = tl.where(before == place, experts[k], found)
        entry = tl.where(before == place, k, entry)
    return found, entry


class _CombineShape(NamedTuple):
    """The constants that the kernel is compiled for."""

    size: tl.constexpr  # ranks
    experts: tl.constexpr
    local: tl.constexpr  # experts of a rank
    topk: tl.constexpr
    slots: tl.constexpr
    parts: tl.constexpr  # of a token
    width: tl.constexpr  # elements of a part
    block: tl.constexpr  # that are added at once
    aligned: tl.constexpr  # rows begin and end at multiples of 16 bytes


def _launch_shape(problem: Problem, config: Config, aligned: bool) -> _CombineShape:
    """Return the constants: a thread has 16 bytes of each of top-k rows in flight at once."""
    per = _WIDE.value // problem.dtype.itemsize
    width = triton.cdiv(triton.cdiv(problem.hidden, config.parts), per) * per
    most = gpu_limits.here().warp_size * config.num_warps * per
    return constants(
        _CombineShape, size=problem.size, experts=problem.experts, local=problem.local,
        topk=problem.topk, slots=problem.slots, parts=config.parts, width=width,
        block=min(triton.next_power_of_2(width), most), aligned=aligned,
    )  # fmt: skip


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes a symmetric y; the others may be any tensors."""
    agree(world, OP, problem, config, valid(problem, config))
    flags = _Flags(*barrier_flags(world, OP, config.programs, "ready", "done"))

    def launch(y: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *alike, out = rest
        aligned = (problem.row | y.data_ptr() | out.data_ptr()) % _WIDE.value == 0
        _combine_kernel[(config.programs,)](
            y, *alike, out, flags, world.ctx, out.shape[0], problem.hidden,
            _launch_shape(problem, config, aligned), TRACE=world.kernel_mode,
            num_warps=config.num_warps,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, tuple(flags), launch)


def moe_combine(
    world: World, y: torch.Tensor, handle: Handle, *, out: torch.Tensor | None = None,
    algo: str = "auto", config: Any = None, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return the weighted sum of each token's expert outputs, [tokens, hidden].

    `y` [local experts, ranks * slots, hidden] has the output of each token where moe_dispatch put
    it, on every rank. It is copied to the heap if it is not there.
    """
    if not isinstance(handle, Handle):
        raise ValueError(f"{OP}: handle is a {type(handle).__name__}, expected moe_dispatch's")
    check_tensors(world, OP, y=y, out=out, topk_weights=handle.weights)
    asked = handle.problem
    rows = (asked.local, asked.size * asked.slots)
    if y.dim() != 3 or tuple(y.shape[:2]) != rows:
        raise ValueError(f"{OP}: y is {tuple(y.shape)}, expected [{rows[0]}, {rows[1]}, hidden]")
    y = packed(world, OP, y, explain, "y")
    problem = dataclasses.replace(asked, hidden=y.shape[2], dtype=y.dtype, zeroed=False)
    refused = unfit(problem) or (None if y.dtype in DTYPES else f"no sum of {y.dtype}")
    if refused is not None:
        raise ValueError(f"{OP}: {refused}")
    shape = (handle.ids.shape[0], y.shape[2])
    if out is None:
        out = torch.empty(shape, dtype=y.dtype, device=y.device)
    if tuple(out.shape) != shape or out.dtype != y.dtype or not out.is_contiguous():
        raise ValueError(f"{OP}: out is {tuple(out.shape)} of {out.dtype}, expected {shape}")
    given = {"y": y, "ids": handle.ids, "slots": handle.slots, "weights": handle.weights}
    options = CallOptions(algo, config, False, explain)
    call(world, OP, problem, {**given, "out": out}, options, is_flat=False)
    return out
