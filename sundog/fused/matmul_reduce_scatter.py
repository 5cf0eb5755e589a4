"""GEMM + reduce-scatter in one kernel: rank r gets rows slice r of the sum of all ranks' A @ B.

Programs take tiles in turn, beginning with the next rank's rows. Each product is stored to the
owner of its rows while the next one is multiplied. When all ranks have sent everything, programs
add what this rank owns. Every byte crosses each link once, hidden by the products.

8 ranks on one H200 (docs/measured.md) take 0.95 to 1.00 times as long as with GEMM, then
reduce-scatter, on six large shapes (2431 us against 2428 with 4096 x 3584 x 8192, 604 against 607
with M=1024, 10286 against 10857 with M=16384), and 0.97 to 0.98 with M=16, 64 and 256. It saves a
launch and a barrier of ranks; adding reads as much as the collective does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from ..device import signal
from ..ops.dispatch import CallOptions
from ..ops.op import Cost, Plan, agree
from . import _matmul_reduce
from ._call import resident
from ._matmul_reduce import Config, Problem, default, inputs, space, uneven

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ()
OP = "matmul_reduce_scatter"


def valid(problem: Problem, config: Config) -> str | None:
    return uneven(problem) or _matmul_reduce.valid(problem, config)


def cost(problem: Problem) -> Cost:
    item, out = problem.dtype.itemsize, (problem.out_dtype or problem.dtype).itemsize
    m, n, k = problem.m, problem.n, problem.k
    sent = m * n * item * (problem.size - 1) // problem.size
    read = (m * k + k * n + m * n) * item
    return Cost(2 * m * n * k, read, m * n * item + m // problem.size * n * out, sent)


def cases(size: int) -> list[Problem]:
    """Return small problems: aligned for descriptors and not."""
    return [
        Problem(24 * size, 16, 24, torch.float16, size),
        Problem(3 * size, 21, 19, torch.bfloat16, size, has_bias=True),
    ]


def reference(
    problem: Problem, rank: int, a: list[torch.Tensor], b: list[torch.Tensor],
    bias: list[torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the answer on a rank, from all ranks' inputs."""
    return _matmul_reduce.sum_of(problem, a, b, bias).chunk(problem.size)[rank]


def matmul_reduce_scatter(
    world: World, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str | None = None, out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return slice r of the rows of activation(sum over ranks of a @ b, plus bias) on rank r.

    `a` is [..., k] and the result [..., n]; both are taken as rows, by views. Strides are free. The
    bias is added once, to the sum. Without `out` the result is an ordinary tensor.
    """
    options = CallOptions(algo, config, False, explain)
    return _matmul_reduce.call_op(
        world, OP, a, b, bias, activation, out_dtype, out, options, slices=world.size
    )


@triton.jit
def _reduce_scatter_kernel(a, b, out, bias, inbox, flags, ctx, K, cfg, shape):
    program, programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(flags.epochs + program) + 1
    here = _matmul_reduce.half_of(inbox, epoch, cfg)
    _matmul_reduce.push(a, b, here, out.rows * cfg.size, out.cols, K, ctx, cfg, shape)
    # The partials, stored by all warps, before the counts that their owners wait for.
    _matmul_reduce.count_all(flags.sent, epoch, ctx, cfg)
    # All ranks' partials before my loads of them.
    signal.wait_all(flags.sent, epoch * programs, ctx, cfg.size, cfg.trace)
    _matmul_reduce.add_all(out, bias, here, ctx, cfg, shape)
    tl.store(flags.epochs + program, epoch)  # read by the next call on the stream


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags and the inbox. The plan takes any a, b, bias and out."""
    refused = resident(valid(problem, config), config.programs, world.num_sms)
    agree(world, OP, problem, config, refused)
    flags = _matmul_reduce.flags_of(world, problem, config, OP)
    rows = _matmul_reduce.slice_rows(problem)
    return _matmul_reduce.plan_inbox(
        world, OP, problem, config, _reduce_scatter_kernel, flags, rows, parts=2
    )
