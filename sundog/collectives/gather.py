"""Gather: rank `dst` gets all ranks' tensors, one after the other. `dst` pulls; the others wait.

Every other rank signals that its tensor is there, and leaves when `dst` has read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..device import context, memory, signal, trace
from ..ops.dispatch import AsyncHandle, CallOptions, call, check_out, packed
from ..ops.op import Cost, Plan, World, agree, barrier_flags
from . import _copy
from ._copy import Config, Moved, default, random_tensor, space, valid

SYMMETRIC = ("x",)
# Mutants that `check --mutate` need not kill (sundog/tools/check/mutation.py).
ACCEPT = {
    "_gather_kernel: wait: after tl.store(epochs + program, epoch)": (
        "guards what follows the kernel; only this program, of this rank, touches that word"
    ),
}


@dataclass(frozen=True)
class Problem(Moved):
    """`numel` is of each rank's input."""

    dst: int


def cost(problem: Problem) -> Cost:
    """Return the cost of the rank that receives."""
    nbytes = problem.nbytes * problem.size
    return Cost(0, nbytes, nbytes, nbytes - problem.nbytes)


def cases(size: int) -> list[Problem]:
    return [Problem(n, d, size, size // 2) for n, d in ((37, torch.int16), (3072, torch.bfloat16))]


def inputs(world: World, problem: Problem, seed: int, exact: bool = True) -> tuple[torch.Tensor]:
    return (random_tensor(world, problem.numel, problem.dtype, seed, exact),)


def reference(problem: Problem, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the answer on `dst`, and nothing on other ranks."""
    whole = torch.cat([part.flatten() for part in parts])
    return whole if rank == problem.dst else whole[:0]


def gather(
    world: World, x: torch.Tensor, dst: int = 0, out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, async_op: bool = False, explain: bool = False,
) -> Any:  # fmt: skip
    """Gather the tensors on rank `dst`, like torch's gather, along the first dimension; else None.

    Without `out` the result is an ordinary tensor; only `dst` may pass one. An `x` that is not
    symmetric is copied to the heap. With `async_op=True`, returns a handle; `handle.wait()`
    returns the result.
    """
    dst = world._check_rank(dst)
    x = packed(world, "gather", x, explain)
    if world.rank != dst and out is not None:
        raise ValueError(f"gather: rank {world.rank} gives an out, but rank {dst} gets the result")
    if world.rank == dst and out is None:
        shape = (world.size * x.shape[0], *x.shape[1:]) if x.dim() else (world.size,)
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    if out is not None:
        check_out("gather", x, out, world.size * x.numel())
    problem = Problem(x.numel(), x.dtype, world.size, dst)
    options = CallOptions(algo, config, async_op, explain)
    tensors = {"x": x, "out": x if out is None else out}
    answer = call(world, "gather", problem, tensors, options)
    if world.rank == dst:
        return answer
    return AsyncHandle(world, answer.done, None, (x,)) if async_op else None


@triton.jit(do_not_specialize=["n", "dst"])
def _gather_kernel(
    x, out, ready, done, epochs, ctx, n, dst,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rank = tl.load(ctx + context.RANK)
    epoch = tl.load(epochs + program) + 1
    # My tensor was written before this kernel on the stream. Only dst reads it, after this.
    mine, theirs = ready + program * SIZE, done + program * SIZE
    signal.signal_all(mine, epoch, ctx, SIZE, TRACE)
    if rank == dst:
        # Every rank's tensor is there.
        signal.wait_all(mine, epoch, ctx, SIZE, TRACE)
        trace.begin(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
        for peer in tl.static_range(SIZE):
            src = memory.translate(x, peer, ctx)
            place = out + peer * n.to(tl.int64)
            _copy.copy((place,), src, n, program, tl.num_programs(0), 1, BLOCK, ALIGNED)
        trace.end(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
        # My loads before the flags: the others may then overwrite their tensors.
        signal.signal_all(theirs, epoch, ctx, SIZE, TRACE)
    signal.wait(theirs + dst, dst, epoch, ctx, TRACE)  # dst has read mine
    tl.store(epochs + program, epoch)  # read by the next call on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes a symmetric x, and on `dst` any contiguous out."""
    agree(world, "gather.pull", problem, config, valid(problem, config))
    flags = barrier_flags(world, "gather", config.programs, "ready", "done")

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if problem.numel:
            target = out if world.rank == problem.dst else x
            (source, result), aligned = _copy.as_words(problem.nbytes, x, target)
            _gather_kernel[(config.programs,)](
                source, result, *flags, world.ctx, source.numel(), problem.dst,
                SIZE=problem.size, BLOCK=config.block, ALIGNED=aligned,
                TRACE=world.kernel_mode, num_warps=config.num_warps,
            )  # fmt: skip
        return out

    return Plan(world, problem, config, tuple(flags), launch)
