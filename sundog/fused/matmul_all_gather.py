"""GEMM + all-gather in one kernel: every rank gets all ranks' products, one below the other.

Programs take tiles in turn. Each product, with bias and activation, is stored to all ranks while
the next one is multiplied. It mirrors matmul_reduce_scatter. Every byte of a product crosses each
link once, hidden by the products, and nothing is copied afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from ..device import context, signal, tiles, trace
from ..ops.dispatch import CallOptions
from ..ops.op import Cost, Plan, agree, barrier_flags
from . import _aligned, _gemm, _matmul_reduce
from ._call import resident
from ._matmul_reduce import Config, Problem, default, inputs, space, valid

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ("out",)
OP = "matmul_all_gather"


def cost(problem: Problem) -> Cost:
    """Count: a rank's product has `m` rows."""
    item, out = problem.dtype.itemsize, (problem.out_dtype or problem.dtype).itemsize
    m, n, k = problem.m, problem.n, problem.k
    product = m * n * out
    others = problem.size - 1
    return Cost(2 * m * n * k, (m * k + k * n) * item, problem.size * product, others * product)


def cases(size: int) -> list[Problem]:
    """Return small problems: aligned or not, several tiles, and fewer rows than one tile."""
    return [
        Problem(24, 16, 24, torch.float16, size),
        Problem(3, 21, 19, torch.bfloat16, size, has_bias=True),
    ]


def reference(
    problem: Problem, rank: int, a: list[torch.Tensor], b: list[torch.Tensor],
    bias: list[torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the answer on every rank, from all ranks' inputs, in float64."""
    parts = [x.double() @ y.double() for x, y in zip(a, b, strict=True)]
    if bias is not None:
        parts = [part + each.double() for part, each in zip(parts, bias, strict=True)]
    whole = torch.cat(parts)
    if problem.activation == "silu":
        whole = torch.nn.functional.silu(whole)
    return whole.to(problem.out_dtype or problem.dtype)


def matmul_all_gather(
    world: World, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str | None = None, out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return activation(a @ b + bias) of every rank: rank r's m rows are rows r m to (r + 1) m.

    `a` is [..., k] and the result [..., n]; both are taken as rows, by views. Strides are free. b
    and bias are this rank's own. Without `out` the result is an ordinary tensor; an `out` that is
    not on the heap is copied from one that is.
    """
    options = CallOptions(algo, config, False, explain)
    return _matmul_reduce.call_op(
        world, OP, a, b, bias, activation, out_dtype, out, options, times=world.size
    )


@triton.jit
def _all_gather_kernel(a, b, out, bias, ready, done, epochs, ctx, M, K, cfg, shape):
    program, rank = tl.program_id(0), tl.load(ctx + context.RANK).to(tl.int32)
    epoch = tl.load(epochs + program) + 1
    away = tiles.distances(ctx, cfg.size)
    rows, cols = tl.cdiv(M, shape.tile_m), tl.cdiv(out.cols, shape.tile_n)
    # My out is free: what read it last came before this kernel on the stream. The peers' programs
    # with this number write it only after this barrier.
    signal.barrier_ranks(ready + program * cfg.size, epoch, ctx, cfg.size, cfg.trace)
    trace.begin(trace.COMPUTE, program, 0, rank, ctx, cfg.trace)
    for n in range(program, rows * cols, tl.num_programs(0)):
        i, j = _gemm.swizzle(n, rows, cols, shape.group_m)
        row, col = i * shape.tile_m, j * shape.tile_n
        acc = _matmul_reduce.product(a, b, row, col, K, shape)
        acc = _gemm.finish(bias, acc, col, out.cols, shape)
        for step in range(cfg.size):  # each rank begins with a different peer
            there = tiles.of_rank(out, (rank + step) % cfg.size, away)
            _matmul_reduce.store(tiles.part(there, rank * M, M), row, col, acc, shape)
    trace.end(trace.COMPUTE, program, 0, rank, ctx, cfg.trace)
    # My products at the peers, stored by all warps, before the flags; theirs here before whatever
    # follows this kernel on the stream.
    signal.barrier_ranks(done + program * cfg.size, epoch, ctx, cfg.size, cfg.trace)
    tl.store(epochs + program, epoch)  # read by the next call on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes any a, b and bias, and a symmetric out."""
    refused = resident(valid(problem, config), config.programs, world.num_sms)
    agree(world, f"{OP}.push", problem, config, refused)
    flags = barrier_flags(world, OP, config.programs, "ready", "done")
    rooms = _aligned.Rooms(world, config, config.programs)

    def launch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *added, out = rest
        x, y, shape = _matmul_reduce.given(problem, config, *rooms.wide(a, b))
        constants = _matmul_reduce.constants(world, problem, config, problem.m)
        _all_gather_kernel[(config.programs,)](
            x, y, tiles.view(out), added[0] if added else None, *flags, world.ctx, problem.m,
            problem.k, constants, shape, num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, tuple(flags), launch)
