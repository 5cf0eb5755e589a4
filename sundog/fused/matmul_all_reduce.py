"""GEMM + all-reduce: activation(sum over ranks of A @ B, plus bias) on every rank.

one_shot    every rank sends its partials to all ranks, and each rank adds them all
two_shot    a row has one owner, who adds the partials and sends the result to all ranks
barrier     GEMM, then all_reduce
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..ops.dispatch import CallOptions
from ..ops.op import Cost
from . import _matmul_reduce
from ._matmul_reduce import Problem, inputs

if TYPE_CHECKING:
    from ..world.world import World

OP = "matmul_all_reduce"
# For the algorithms that call all_reduce.
ACCEPT = {
    "_one_shot_kernel: mask at < body: one less": (
        "a loop over more tiles than programs, which no default makes of products this small; "
        "`sundog check all_reduce.one_shot --mutate` kills it"
    ),
}


def cost(problem: Problem) -> Cost:
    """Count the least: two_shot sends this much, one_shot size/2 times as much."""
    item, out = problem.dtype.itemsize, (problem.out_dtype or problem.dtype).itemsize
    m, n, k = problem.m, problem.n, problem.k
    sent = m * n * (item + out) * (problem.size - 1) // problem.size
    read = (m * k + k * n + m * n) * item
    return Cost(2 * m * n * k, read, m * n * (item + out), sent)


def cases(size: int) -> list[Problem]:
    """Return small problems: aligned for descriptors or not; fewer tiles than ranks."""
    return [
        Problem(40, 32, 24, torch.float16, size),
        Problem(5, 21, 19, torch.bfloat16, size, has_bias=True),
    ]


def reference(
    problem: Problem, rank: int, a: list[torch.Tensor], b: list[torch.Tensor],
    bias: list[torch.Tensor] | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the answer on every rank, from all ranks' inputs."""
    return _matmul_reduce.sum_of(problem, a, b, bias)


def matmul_all_reduce(
    world: World, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None,
    activation: str | None = None, out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Return activation(sum over ranks of a @ b, plus bias), with the same bits on every rank.

    `a` is [..., k] and the result [..., n]; both are taken as rows, by views. Strides are free. The
    bias is added once, to the sum, and must be the same on all ranks. Without `out` the result is
    an ordinary tensor; two_shot wants `out` on the heap, else it copies.
    """
    options = CallOptions(algo, config, False, explain)
    return _matmul_reduce.call_op(world, OP, a, b, bias, activation, out_dtype, out, options)
