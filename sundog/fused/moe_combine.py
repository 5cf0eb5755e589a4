"""MoE combine: every token's expert outputs, weighted and added, back on the token's rank.

`y` has the experts' outputs where moe_dispatch put their tokens. Each rank reads its own from the
peers' memory: nobody sends what is not asked for. The sum is in float32 and in the order of the
experts, whatever their order in top-k, so it has the same bits at every grid and replay.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from .. import gpu_limits
from ..collectives._copy import random_tensor
from ..device import context, memory, signal, trace
from ..ops.dispatch import CallOptions, call
from ..ops.op import Cost, Plan, agree, barrier_flags
from ._call import check_tensors
from .moe_dispatch import Config, Handle, Problem, default, random_ids, slots_of, space, unfit
from .moe_dispatch import valid as valid_dispatch

if TYPE_CHECKING:
    from ..world.world import World

__all__ = [
    "OP", "SYMMETRIC", "Config", "Problem", "cases", "cost", "default", "inputs", "moe_combine",
    "plan", "reference", "space", "valid",
]  # fmt: skip

OP = "moe_combine"
SYMMETRIC = ("y",)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDE = 16  # bytes that a thread loads at once


def valid(problem: Problem, config: Config) -> str | None:
    if problem.dtype not in DTYPES:
        return f"{problem.dtype}: expected one of bfloat16, float16 and float32"
    return valid_dispatch(problem, config)


def cost(problem: Problem) -> Cost:
    """If all ranks have all their tokens, and each expert as many as any other."""
    read = problem.max_tokens * problem.topk * problem.row
    away = read * (problem.size - 1) // problem.size
    added = 2 * problem.max_tokens * problem.topk * problem.hidden
    return Cost(added, read, problem.max_tokens * problem.row, away)


def cases(size: int) -> list[Problem]:
    """Small problems: more experts than tokens, rows of odd sizes."""
    return [
        Problem(5, 64, torch.bfloat16, size, 2 * size, 2),
        Problem(3, 37, torch.float32, size, size, 3),
    ]


def inputs(
    world: World, problem: Problem, seed: int, exact: bool = True
) -> tuple[torch.Tensor, ...]:
    """Outputs of this rank's experts; experts, slots and weights of its own tokens."""
    shape = (problem.local, problem.size * problem.slots, problem.hidden)
    y = random_tensor(world, math.prod(shape), problem.dtype, seed, exact).view(shape)
    ids = random_ids(world, problem, seed)
    weights = (ids % 4 + 1).float() / 4
    return y, ids, slots_of(ids), weights


def reference(
    problem: Problem, rank: int, y: list[torch.Tensor], ids: list[torch.Tensor],
    slots: list[torch.Tensor], weights: list[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """The answer on a rank, from all ranks' inputs."""
    shape = (problem.max_tokens, problem.hidden)
    if y[rank].is_meta:  # only its shape is asked for
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
    y, ids, slots, weights, out, flags, ctx, tokens, hidden,
    SHAPE: tl.constexpr, BLOCK: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """SHAPE: ranks, experts, top-k, slots."""
    SIZE: tl.constexpr = SHAPE[0]
    TOPK: tl.constexpr = SHAPE[2]
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(flags.epochs + program) + 1
    # My y is written: what wrote it came before this kernel on the stream. The peers' programs
    # with this number read it only after this barrier.
    signal.barrier_ranks(flags.ready + program * SIZE, epoch, ctx, SIZE, TRACE)
    trace.begin(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    for token in range(program, tokens, programs):
        rows, factors = _rows_of(y, ids, slots, weights, token, hidden, ctx, SHAPE)
        for start in range(0, hidden, BLOCK):
            column = start + tl.arange(0, BLOCK)
            total = tl.zeros((BLOCK,), tl.float32)
            for k in tl.static_range(TOPK):
                mask = (column < hidden) & (factors[k] != 0)
                total += factors[k] * tl.load(rows[k] + column, mask=mask, other=0.0).to(tl.float32)
            at = tl.cast(token, tl.int64) * hidden + column
            tl.store(out + at, total.to(out.dtype.element_ty), mask=column < hidden)
    trace.end(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    # My loads of the peers' y before the flags: they may overwrite it then.
    signal.barrier_ranks(flags.done + program * SIZE, epoch, ctx, SIZE, TRACE)
    tl.store(flags.epochs + program, epoch)  # read by the next call on the stream


@triton.jit
def _rows_of(y, ids, slots, weights, token, hidden, ctx, SHAPE: tl.constexpr):
    """Where a token's expert outputs are, and their weights; of what is no expert the weight is 0.

    In the order of the experts, and once for all columns of the token.
    """
    LOCAL: tl.constexpr = SHAPE[1] // SHAPE[0]
    TOPK: tl.constexpr = SHAPE[2]
    rank = tl.load(ctx + context.RANK)
    first = token * TOPK
    places = _places(ids + first, TOPK)
    rows, factors = (), ()
    for place in tl.static_range(TOPK):
        entry = first
        for k in tl.static_range(TOPK):
            entry += tl.where(places[k] == place, k, 0)
        expert = tl.load(ids + entry).to(tl.int64)
        weight = tl.load(weights + entry)
        is_expert = (expert >= 0) & (expert < SHAPE[1])
        slot = tl.load(slots + entry, mask=is_expert, other=SHAPE[3])
        is_there = slot < SHAPE[3]
        expert = tl.where(is_there, expert, 0)
        row = ((expert % LOCAL) * SHAPE[0] + rank) * SHAPE[3] + tl.where(is_there, slot, 0)
        rows = rows + (memory.translate(y + row * hidden, expert // LOCAL, ctx),)  # type: ignore[assignment]
        factors = factors + (tl.where(is_there, weight, 0.0),)  # type: ignore[assignment]
    return rows, factors


@triton.jit
def _places(ids, TOPK: tl.constexpr):
    """Of each of a token's experts: how many come before it in their order."""
    places = ()
    for k in tl.static_range(TOPK):
        expert, place = tl.load(ids + k), 0
        for other in tl.static_range(TOPK):
            than = tl.load(ids + other)
            place += tl.where((than < expert) | ((than == expert) & (other < k)), 1, 0)
        places = places + (place,)  # type: ignore[assignment]
    return places


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes a symmetric y; the others may lie anywhere."""
    agree(world, OP, problem, config, valid(problem, config))
    flags = _Flags(*barrier_flags(world, OP, config.programs, "ready", "done"))
    shape = (problem.size, problem.experts, problem.topk, problem.slots)
    threads = gpu_limits.here().warp_size * config.num_warps
    block = min(triton.next_power_of_2(problem.hidden), threads * _WIDE // problem.dtype.itemsize)

    def launch(y: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *alike, out = rest
        _combine_kernel[(config.programs,)](
            y, *alike, out, flags, world.ctx, out.shape[0], problem.hidden,
            SHAPE=shape, BLOCK=block, TRACE=world.kernel_mode, num_warps=config.num_warps,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, tuple(flags), launch)


def moe_combine(
    world: World, y: torch.Tensor, handle: Handle, *, out: torch.Tensor | None = None,
    algo: str = "auto", config: Any = None, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    """The weighted sum of each token's expert outputs, [tokens, hidden].

    `y` [local experts, ranks * slots, hidden] has the output of each token where moe_dispatch put
    it, on every rank. It is copied to the heap if it is not there.
    """
    check_tensors(world, OP, y=y, out=out)
    if not isinstance(handle, Handle):
        raise ValueError(f"{OP}: handle is a {type(handle).__name__}, expected moe_dispatch's")
    asked = handle.problem
    rows = (asked.local, asked.size * asked.slots)
    if y.dim() != 3 or tuple(y.shape[:2]) != rows or not y.is_contiguous():
        raise ValueError(
            f"{OP}: y is {tuple(y.shape)} with strides {y.stride()}, expected "
            f"[{rows[0]}, {rows[1]}, hidden], contiguous"
        )
    problem = dataclasses.replace(asked, hidden=y.shape[2], dtype=y.dtype, zeroed=False)
    refused = unfit(problem) or (None if y.dtype in DTYPES else f"y has {y.dtype}")
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
