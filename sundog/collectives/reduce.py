"""Reduce: one rank gets the sum (average, ...) of all ranks' tensors.

There is one algorithm, direct: that rank pulls all tensors and reduces them in rank order, and the
others wait until it has read theirs. The bits are those of all_reduce. It is simple: one rank's
links carry everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from ..device import signal, trace
from ..ops.dispatch import ASYNC_STREAM, CallOptions, call, check_out, on_stream, packed
from ..ops.op import Cost, Plan, World, agree
from . import _reduce
from ._reduce import Config, valid

SYMMETRIC = ("x",)
default = Config.whole


@dataclass(frozen=True)
class Problem:
    numel: int  # of each rank's tensor
    dtype: torch.dtype
    size: int  # ranks
    op: str = "sum"
    dst: int = 0  # the rank that gets the result


def space(problem: Problem) -> list[Config]:
    return _reduce.configs(Config, (1024, 2048, 4096), (8, 16, 64), (4,))


def cost(problem: Problem) -> Cost:
    """Return the cost of the rank that gets the result; the others do nothing."""
    nbytes = problem.numel * problem.dtype.itemsize
    others = problem.size - 1
    return Cost(problem.numel * others, nbytes * problem.size, nbytes, nbytes * others)


def cases(size: int) -> list[Problem]:
    return [
        Problem(37, torch.float32, size, "sum", 0),
        Problem(4099, torch.bfloat16, size, "avg", size - 1),
        Problem(1, torch.int64, size, "prod", size // 2),
    ]


def inputs(world: World, problem: Problem, seed: int, exact: bool = True) -> tuple[torch.Tensor]:
    torch.manual_seed(seed * 1000 + world.rank)
    x = world.empty((problem.numel,), problem.dtype, "x")
    return (_reduce.randomize(x, problem.op, exact),)


def reference(problem: Problem, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the answer on `dst`, and nothing on other ranks."""
    return _reduce.reference(problem.op, parts)[: problem.numel if rank == problem.dst else 0]


def reduce(
    world: World, x: torch.Tensor, dst: int, op: Any = "sum", out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, async_op: bool = False, explain: bool = False,
) -> Any:  # fmt: skip
    """Reduce to rank `dst` like torch's reduce, but into `out`; the others get None.

    `op` and complex tensors as for all_reduce. Only `dst` uses `out`; without it the result is an
    ordinary tensor. An x that is not symmetric is copied to the heap. With `async_op=True`, returns
    a handle; `handle.wait()` returns the result.
    """
    dst = world._check_rank(dst)
    options = CallOptions(algo, config, False, explain)
    if _reduce.is_unusual(x, op):
        from . import _given  # most calls need none of it

        op = _given.name_of(op)
        if _given.has_views(x, op):
            mine = out if world.rank == dst else None
            more = options._asdict() | {"async_op": async_op}
            return _given.by_views(reduce, world, x, mine, dst=dst, op=op, **more)
    x = packed(world, "reduce", x, explain)
    _reduce.check("reduce", op, x.dtype)
    problem = Problem(x.numel(), x.dtype, world.size, op, dst)
    if world.rank != dst:
        out = x.new_empty(0)
    else:
        out = torch.empty_like(x) if out is None else out
        check_out("reduce", x, out, x.numel())

    def run() -> torch.Tensor | None:
        call(world, "reduce", problem, {"x": x, "out": out}, options)
        return out if world.rank == dst else None

    return on_stream(world, ASYNC_STREAM, run, x, out) if async_op else run()


@triton.jit
def _direct_kernel(
    x, out, ready, done, epochs, ctx, numel,
    OP: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
    TRACE: tl.constexpr,
):  # fmt: skip
    """Reduce `numel` elements: all of them on dst, and none on other ranks."""
    program = tl.program_id(0)
    epoch = tl.load(epochs + program) + 1
    # My x is written, since all earlier work on the stream has ended. The program of dst with this
    # number reads it after this barrier.
    signal.barrier_ranks(ready + program * SIZE, epoch, ctx, SIZE, TRACE)
    trace.begin(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    count = tl.cast(numel, tl.int64)
    if count > 0:
        xs = _reduce.everywhere(x, 0, ctx, SIZE)
        _reduce.reduce_span(
            (out,), xs, count, program, tl.num_programs(0), OP, SIZE, 1, BLOCK, ALIGNED
        )
    trace.end(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    # The loads of dst before its flags: a rank may overwrite its x when its kernel has ended.
    signal.barrier_ranks(done + program * SIZE, epoch, ctx, SIZE, TRACE)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes a symmetric x and any contiguous out; only `dst` writes it."""
    agree(world, "reduce.direct", problem, config, valid(problem, config))
    numel = problem.numel * (world.rank == problem.dst)
    return _reduce.plan_framed(world, "reduce", problem, config, _direct_kernel, numel)
