"""GEMM + reduce-scatter in one kernel: rank r gets rows slice r of the sum of all ranks' A @ B.

Programs take tiles in turn: first partials, of every rank's slice, beginning with the next rank's;
each is pushed to the slice's owner as soon as it is computed. Then the own tiles: wait for all
partials of one, add them in rank order. Moves every byte once over each link.

For ranks that share a GPU it does not pay (8 on one H200, docs/measured.md): 2563 us against 2463
for GEMM, then reduce-scatter, at 4096 x 3584 x 8192, 898 against 615 with M=1024, and only with
M=16384 10765 against 10996. The collective is 60 us of that, all that could be hidden; a loop over
K that ends for every tile's stores and flag, where gemm.py's goes on, costs more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..device import context, tiles, trace
from ..op import Cost, Plan, agree
from . import gemm, matmul_reduce
from .call import Options, resident
from .matmul_reduce import Config, Problem, inputs, space, valid

if TYPE_CHECKING:
    from ..world import World

__all__ = [
    "SYMMETRIC", "Config", "Problem", "cases", "cost", "default", "inputs",
    "matmul_reduce_scatter", "plan", "reference", "space", "valid",
]  # fmt: skip

SYMMETRIC = ()
OP = "matmul_reduce_scatter"


def default(problem: Problem, num_sms: int) -> Config:
    return matmul_reduce.default_of(problem, problem.m // problem.size, num_sms)


def cost(problem: Problem) -> Cost:
    item, out = problem.dtype.itemsize, (problem.out_dtype or problem.dtype).itemsize
    m, n, k = problem.m, problem.n, problem.k
    sent = m * n * item * (problem.size - 1) // problem.size
    read = (m * k + k * n + m * n) * item
    return Cost(2 * m * n * k, read, m * n * item + m // problem.size * n * out, sent)


def cases(size: int) -> list[Problem]:
    """Small problems: aligned for descriptors and not."""
    return [
        Problem(24 * size, 16, 24, torch.float16, size),
        Problem(3 * size, 21, 19, torch.bfloat16, size, has_bias=True),
    ]


def reference(
    problem: Problem, rank: int, a: list[torch.Tensor], b: list[torch.Tensor],
    bias: list[torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """The answer on a rank, from all ranks' inputs."""
    return matmul_reduce.sum_of(problem, a, b, bias).chunk(problem.size)[rank]


def matmul_reduce_scatter(
    world: World, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str | None = None, out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    """activation(sum over ranks of a @ b, plus bias), of which rank r gets slice r of the rows.

    Any strides. The bias is added once, to the sum. Without `out` the result is an ordinary tensor.
    """
    options = Options(algo, config, False, explain)
    return matmul_reduce.call_op(
        world, OP, a, b, bias, activation, out_dtype, out, world.size, options
    )


class _Flags(NamedTuple):
    ready: Any  # by rank: its inbox is free
    arrived: Any  # by own tile and rank: its partial is in the inbox
    epochs: Any  # by program: how often it has run


@triton.jit
def _reduce_scatter_kernel(a, b, out, bias, inbox, flags, ctx, K, F, S):
    program, programs = tl.program_id(0), tl.num_programs(0)
    rank = tl.load(ctx + context.RANK).to(tl.int32)
    epoch = tl.load(flags.epochs + program) + 1
    point = 0
    for peer in range(program, F.size, programs):
        # My inbox is free: the call that read it last is over. The peer fills it behind this.
        point = trace.signal(point, flags.ready + rank, peer, epoch, ctx, F.trace)
    rows, cols = tl.cdiv(out.rows, S.tile_m), tl.cdiv(out.cols, S.tile_n)
    owned = rows * cols
    for n in range(program, F.size * owned, programs):
        index, peer = n % owned, (rank + 1 + n // owned) % F.size
        i, j = gemm.swizzle(index, rows, cols, S.group_m)
        row = peer * out.rows + i * S.tile_m
        point, acc = matmul_reduce.product(point, a, b, row, j * S.tile_n, K, ctx, F, S)
        if n == program:
            # They have read the last call's partials.
            point = trace.wait_all(point, flags.ready, epoch, ctx, F.lanes, F.trace)
        else:
            point = _signal(point, n - programs, owned, rank, flags, epoch, ctx, F)
        there = tiles.of_peer(inbox, peer, ctx)
        matmul_reduce.send(there, rank * owned + index, acc, S)
    if program < F.size * owned:
        last = (F.size * owned - 1 - program) // programs * programs + program
        point = _signal(point, last, owned, rank, flags, epoch, ctx, F)
    for index in range(program, owned, programs):
        i, j = gemm.swizzle(index, rows, cols, S.group_m)
        # All ranks' partials of this tile before my loads of them.
        arrived = flags.arrived + index * F.size
        point = trace.wait_all(point, arrived, epoch, ctx, F.lanes, F.trace)
        for strip in range(0, S.tile_m, matmul_reduce.STRIP):
            acc = matmul_reduce.total(inbox, index, owned, strip, F, S)
            acc = gemm.finish(bias, acc, j * S.tile_n, out.cols, S)
            tiles.store(out, i * S.tile_m + strip, j * S.tile_n, acc)
    trace.finish(point, ctx, F.trace)
    tl.store(flags.epochs + program, epoch)  # read by the next call, behind this one on the stream


@triton.jit
def _signal(point, n, owned, rank, flags, epoch, ctx, F):
    """Partial `n`, stored by all warps, before the flag that the owner waits for.

    A product later than it could be: meanwhile the stores have arrived, and a release, which waits
    for them, costs little.
    """
    index, peer = n % owned, (rank + 1 + n // owned) % F.size
    arrived = flags.arrived + index * F.size + rank
    return trace.signal(point, arrived, peer, epoch, ctx, F.trace)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags and the inbox. The plan takes any a, b, bias and out."""
    refused = resident(valid(problem, config), config.programs, world.num_sms)
    agree(world, OP, problem, config, refused)
    owned = triton.cdiv(problem.m // problem.size, config.tile_m) * triton.cdiv(
        problem.n, config.tile_n
    )
    flags = _Flags(
        world.signals(problem.size, f"{OP}.ready"),
        world.signals((owned, problem.size), f"{OP}.arrived"),
        world.signals(config.programs, f"{OP}.epochs"),
    )
    shape = (problem.size * owned * config.tile_m, config.tile_n)
    inbox = world.empty(shape, problem.dtype, f"{OP}.inbox")
    world.barrier()  # everybody's flags are zero before the first signal

    def launch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *added, out = rest
        x, y, shape = matmul_reduce.given(problem, config, a, b, problem.m // problem.size)
        _reduce_scatter_kernel[(config.programs,)](
            x, y, tiles.view(out), added[0] if added else None, tiles.view(inbox), flags,
            world.ctx, problem.k, matmul_reduce.constants(world), shape,
            num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, (*flags, inbox), launch)
