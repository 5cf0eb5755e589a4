"""Reduce-scatter: rank r gets slice r of the sum (average, ...) of all ranks' tensors.

There is one algorithm, direct: every rank pulls its slice from all ranks and reduces it in rank
order. Every byte is read once, and the bits are those of all_reduce. Two barriers of the programs
with the same number frame it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..device import context, signal, trace
from ..ops.dispatch import CallOptions, call, check_out, packed, repeated
from ..ops.op import Cost, Plan, World, agree, new_output
from . import _reduce
from ._reduce import Config, valid

SYMMETRIC = ("x",)
default = Config.whole


@dataclass(frozen=True)
class Problem:
    numel: int  # of each rank's output
    dtype: torch.dtype
    size: int  # ranks
    op: str = "sum"


def space(problem: Problem) -> list[Config]:
    return _reduce.configs(
        Config, (1024, 2048, 4096, 8192, 16384), (4, 8, 16, 32, 64, 128), (4, 8, 16)
    )


def cost(problem: Problem) -> Cost:
    nbytes = problem.numel * problem.dtype.itemsize
    others = problem.size - 1
    return Cost(problem.numel * others, nbytes * problem.size, nbytes, nbytes * others)


def cases(size: int) -> list[Problem]:
    return [
        Problem(37, torch.float32, size, "sum"),
        Problem(2056, torch.bfloat16, size, "avg"),
        Problem(1, torch.int64, size, "prod"),
    ]


def inputs(world: World, problem: Problem, seed: int, exact: bool = True) -> tuple[torch.Tensor]:
    torch.manual_seed(seed * 1000 + world.rank)
    numel = problem.numel * problem.size
    x = world.empty((numel,), problem.dtype, "x")
    return (_reduce.randomize(x, problem.op, exact),)


def reference(problem: Problem, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
    slices = [part.view(problem.size, problem.numel)[rank] for part in parts]
    return _reduce.reference(problem.op, slices)


def reduce_scatter(
    world: World, x: torch.Tensor, op: Any = "sum", out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, async_op: bool = False, explain: bool = False,
) -> Any:  # fmt: skip
    """Return slice `rank` of all ranks' sum, like torch's reduce_scatter_tensor, along dimension 0.

    `op` as for all_reduce. Without `out` the result is an ordinary tensor. An x that is not
    symmetric is copied to the heap. With `async_op=True`, returns a handle; `handle.wait()`
    returns the result.
    """
    options = CallOptions(algo, config, async_op, explain)
    if _reduce.is_unusual(x, op):
        from . import _given  # most calls need none of it

        op = _given.name_of(op)
        if _given.has_views(x, op) and x.dim():  # else its two parts would go to two ranks
            return _given.by_views(reduce_scatter, world, x, out, op=op, **options._asdict())
    asked = ("reduce_scatter", op, out is None)
    out = new_output(x, 1, world.size) if out is None else out
    if repeated(world, asked, x, out, options):
        return out
    x = packed(world, "reduce_scatter", x, explain)
    _reduce.check("reduce_scatter", op, x.dtype)
    length = x.shape[0] if out is None and x.dim() else x.numel()
    if length % world.size:
        raise ValueError(
            f"reduce_scatter: x of shape {tuple(x.shape)} does not split into {world.size} equal "
            f"slices; pad it to {triton.cdiv(length, world.size) * world.size}"
        )
    assert out is not None  # packed, or the division, has refused anything else
    check_out("reduce_scatter", x, out, x.numel() // world.size)
    problem = Problem(out.numel(), x.dtype, world.size, op)
    return call(world, "reduce_scatter", problem, {"x": x, "out": out}, options, asked)


@triton.jit
def _direct_kernel(
    x, out, ready, done, epochs, ctx, numel,
    OP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rank = tl.load(ctx + context.RANK)
    epoch = tl.load(epochs + program) + 1
    slices = _reduce.everywhere(x + rank * numel, 0, ctx, SIZE)
    # My x is written, since all earlier work on the stream has ended. The peers' programs with this
    # number read it after this barrier.
    signal.barrier_ranks(ready + program * SIZE, epoch, ctx, SIZE, TRACE)
    trace.begin(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    _reduce.reduce_span(
        (out,), slices, numel, program, tl.num_programs(0), OP, SIZE, 1, BLOCK, ALIGNED
    )
    trace.end(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    # My loads of the peers' x before the flags: they may overwrite it when their kernel has ended.
    signal.barrier_ranks(done + program * SIZE, epoch, ctx, SIZE, TRACE)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes a symmetric x and any contiguous out, only written here."""
    agree(world, "reduce_scatter.direct", problem, config, valid(problem, config))
    apart = problem.numel * problem.dtype.itemsize
    return _reduce.plan_framed(
        world, "reduce_scatter", problem, config, _direct_kernel, problem.numel, apart
    )
