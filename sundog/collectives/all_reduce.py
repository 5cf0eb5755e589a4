"""All-reduce: every rank gets the sum (average, minimum, maximum, product) of all ranks' tensors.

This file says what the op is. Its algorithms are in the files all_reduce_*.py beside it:
low_latency for the smallest tensors, one_shot for small ones, two_shot for large ones. These three
accumulate in rank order and give the same bits at every grid and config.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..ops.dispatch import CallOptions, call, check_contiguous, check_out, is_same, packed, repeated
from ..ops.op import Cost, World, is_dense
from . import _reduce


@dataclass(frozen=True)
class Problem:
    numel: int  # of each rank's tensor
    dtype: torch.dtype
    size: int  # ranks
    op: str = "sum"


def cost(problem: Problem) -> Cost:
    """Count: each rank sends all slices but its own, then its own slice, reduced, to the others."""
    nbytes = problem.numel * problem.dtype.itemsize
    others = problem.size - 1
    return Cost(problem.numel * others, nbytes, nbytes, 2 * nbytes * others // problem.size)


def cases(size: int) -> list[Problem]:
    return [
        Problem(37, torch.bfloat16, size, "sum"),
        Problem(6151, torch.float32, size, "avg"),  # several tiles in a slice, up to 6 ranks
        Problem(1, torch.int64, size, "prod"),
    ]


def inputs(world: World, problem: Problem, seed: int, exact: bool = True) -> tuple[torch.Tensor]:
    torch.manual_seed(seed * 1000 + world.rank)
    skew = int(problem.numel == 1)  # off a multiple of 16 bytes, so that narrow loads run too
    x = world.empty((skew + problem.numel,), problem.dtype, "x")[skew:]
    return (_reduce.randomize(x, problem.op, exact),)


def reference(problem: Problem, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
    return _reduce.reference(problem.op, parts)


def all_reduce(
    world: World, x: torch.Tensor, op: Any = "sum", out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, async_op: bool = False, explain: bool = False,
) -> Any:  # fmt: skip
    """Reduce over the ranks like torch's all_reduce, but into `out`; `out=x` works in place.

    `op` is sum, avg, min, max or prod, or a value of torch.distributed.ReduceOp. Complex tensors
    have a sum and an average. An integer average rounds towards zero, as in NCCL; for bool, sum is
    `or` and prod is `and`. Without `out` the result is an ordinary tensor. Tensors that must be on
    the symmetric heap are staged through a copy if they are not: two_shot needs both there, ring
    and atomic need `out`, one_shot and low_latency neither. With `async_op=True`, returns a handle;
    `handle.wait()` returns the result. ring and atomic add in their own order, so their bits
    differ, and they run only if `algo` names them.
    """
    options = CallOptions(algo, config, async_op, explain)
    if _reduce.is_unusual(x, op):
        from . import _given  # most calls need none of it

        op = _given.name_of(op)
        if _given.has_views(x, op):
            return _given.by_views(all_reduce, world, x, out, op=op, **options._asdict())
    asked = ("all_reduce", op, out is None)
    if out is None and is_dense(x):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if repeated(world, asked, x, out, options):
        return out
    x = packed(world, "all_reduce", x, explain)
    check_contiguous("all_reduce", out=out)
    assert out is not None
    _reduce.check("all_reduce", op, x.dtype)
    if not is_same(x, out):
        check_out("all_reduce", x, out, x.numel())
    elif algo == "atomic":
        raise ValueError(
            "all_reduce: algo='atomic' accumulates into out, so out must not be x; omit out or "
            "pass another tensor"
        )
    problem = Problem(x.numel(), x.dtype, world.size, op)
    return call(world, "all_reduce", problem, {"x": x, "out": out}, options, asked)
