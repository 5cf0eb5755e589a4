"""An FP8 product with scales, then reduce-scatter. Partials travel in bfloat16.

Every rank has its own scales, which are applied before the sum. The sum and each partial are
rounded to bfloat16.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import gpu_limits
from ..ops.dispatch import CallOptions
from ..ops.op import Plan, agree
from ._call import check_tensors
from ._matmul_reduce import uneven
from ._scaled import Config, Problem, call_sum, default, inputs, plan_sum, space, sum_of, valid_sum
from .matmul_reduce_scatter import cost

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ()
OP = "scaled_matmul_reduce_scatter"


def valid(problem: Problem, config: Config) -> str | None:
    return uneven(problem) or valid_sum(problem, config)


def cases(size: int) -> list[Problem]:
    """Return small problems: every scaling, aligned for descriptors and not."""
    e4m3 = gpu_limits.here().fp8
    return [
        Problem(24 * size, 32, 48, e4m3, size, scaling="row"),
        Problem(8 * size, 136, 160, e4m3, size, scaling="block"),
        Problem(3 * size, 20, 33, e4m3, size, out_dtype=e4m3, scaling="tensor"),
    ]


def reference(problem: Problem, rank: int, *given: list[torch.Tensor]) -> torch.Tensor:
    """Return the answer on a rank."""
    return sum_of(problem, rank, *given).chunk(problem.size)[rank]


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate the partial, and plan the collective. The plan takes any tensors."""
    agree(world, OP, problem, config, valid(problem, config))
    rows = problem.m // problem.size
    return plan_sum(world, "reduce_scatter", problem, config, rows)


def scaled_matmul_reduce_scatter(
    world: World, a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor,
    out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute matmul_reduce_scatter of FP8: the sum over ranks of a @ b with both scales.

    Scales are float32 and this rank's own: one number each; [m] and [n]; or one for each 128
    columns of a and each 128 x 128 of b. The result is bfloat16 unless `out_dtype` says otherwise.
    Pass `weight.T` as b.
    """
    check_tensors(world, OP, a=a, b=b)
    if a.dim() != 2 or a.shape[0] % world.size:
        raise ValueError(
            f"{OP}: a of shape {tuple(a.shape)}: expected rows that split into {world.size} slices"
        )
    options = CallOptions(algo, config, False, explain)
    rows = a.shape[0] // world.size
    return call_sum(world, OP, (a, b, a_scale, b_scale), rows, out_dtype, out, options)
