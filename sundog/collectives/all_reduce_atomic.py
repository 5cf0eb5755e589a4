"""All-reduce, atomic: every rank adds its tensor to every rank's output, by atomics at the peer.

It takes sums only. The order in which the ranks' parts arrive is random, so floats differ in their
last bits from run to run and between ranks, and 16-bit ones are rounded at every addition. It runs
only if `algo` names it. Nothing is read from a peer, which suits links where loads wait long.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..device import chunks, context, signal, trace
from ..ops.op import Plan, World, agree, barrier_flags
from . import _reduce
from .all_reduce import Problem, cost, inputs, reference

SYMMETRIC = ("out",)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)


class Config(_reduce.Config):
    """Its type says that this algorithm takes it."""


default = Config.whole


def valid(problem: Problem, config: Config) -> str | None:
    if problem.op != "sum":
        return f"atomic can only sum, not {problem.op}"
    if problem.dtype not in DTYPES:
        return (
            f"GPUs have no atomic that adds {problem.dtype}; convert it, or use another algorithm"
        )
    return _reduce.valid(problem, config)


def space(problem: Problem) -> list[Config]:
    return _reduce.configs(Config, (1024, 2048, 4096), (4, 8, 16, 32, 64, 128), (4, 8))


def cases(size: int) -> list[Problem]:
    kinds = ((37, torch.float32), (1283, torch.int32), (5, torch.bfloat16))
    return [Problem(numel, dtype, size) for numel, dtype in kinds]


@triton.jit
def _atomic_kernel(
    x, out, zeroed, done, epochs, ctx, numel,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rank = tl.load(ctx + context.RANK)
    epoch = tl.load(epochs + program) + 1
    PER: tl.constexpr = chunks.WIDE // (x.dtype.element_ty.primitive_bitwidth // 8)
    first = program.to(tl.int64) * BLOCK
    step = tl.num_programs(0) * BLOCK
    body = tl.cast(numel, tl.int64) // PER * PER
    last = body + tl.arange(0, PER)  # the elements after the last 16 bytes
    has_last = (last < numel) & (program == tl.num_programs(0) - 1)
    for start in range(first, body, step):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at, tl.zeros((BLOCK,), out.dtype.element_ty), mask=at < body)
    tl.store(out + last, tl.zeros((PER,), out.dtype.element_ty), mask=has_last)
    # My zeros before the flags, for the peers' programs with this number, which add to just those
    # tiles; the peers' zeros before my additions.
    signal.barrier_ranks(zeroed + program * SIZE, epoch, ctx, SIZE, TRACE)
    trace.begin(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    outs = _reduce.everywhere(out, rank, ctx, SIZE)  # each rank begins with a different peer
    for start in range(first, body, step):
        at = start + tl.arange(0, BLOCK)
        _add(outs, tl.load(x + at, mask=at < body), at, at < body, SIZE)
    _add(outs, tl.load(x + last, mask=has_last), last, has_last, SIZE)
    trace.end(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    # My part before the flags; all peers' parts before whatever follows this kernel here.
    signal.barrier_ranks(done + program * SIZE, epoch, ctx, SIZE, TRACE)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


@triton.jit
def _add(outs, tile, at, mask, SIZE: tl.constexpr):
    for place in tl.static_range(SIZE):
        # Relaxed suffices: additions need no order, and the barrier after them publishes them.
        tl.atomic_add(outs[place] + at, tile, mask=mask, sem="relaxed", scope="sys")


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes any contiguous x, and a symmetric out, which is not x."""
    refused = valid(problem, config)
    if world.kernel_mode >= signal.STORE.value:
        refused = "it adds to peers' memory by atomics, and signals='store' rules them out"
    agree(world, "all_reduce.atomic", problem, config, refused)
    flags = barrier_flags(world, "all_reduce", config.programs, "zeroed", "done")

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        _atomic_kernel[(config.programs,)](
            x, out, *flags, world.ctx, problem.numel, SIZE=problem.size,
            BLOCK=config.block, TRACE=world.kernel_mode, num_warps=config.num_warps,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, tuple(flags), launch)
