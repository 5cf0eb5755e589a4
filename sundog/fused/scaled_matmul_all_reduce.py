"""An FP8 product with scales, then all-reduce. Partials travel in bfloat16.

It is scaled_matmul_reduce_scatter with another collective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .. import gpu_limits
from ..ops.dispatch import CallOptions
from ..ops.op import Plan, agree
from ._call import check_tensors
from ._scaled import Config, Problem, call_sum, default, inputs, plan_sum, space
from ._scaled import sum_of as reference
from ._scaled import valid_sum as valid
from .matmul_all_reduce import ACCEPT, cost

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ("out",)
OP = "scaled_matmul_all_reduce"


def cases(size: int) -> list[Problem]:
    """Return small problems: every scaling, aligned for descriptors and not."""
    e4m3 = gpu_limits.here().fp8
    return [
        Problem(40, 32, 48, e4m3, size, scaling="row"),
        Problem(8, 136, 160, e4m3, size, scaling="block"),
        Problem(5, 20, 33, e4m3, size, out_dtype=e4m3, scaling="tensor"),
    ]


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate the partial, and plan the collective. The plan takes a symmetric out."""
    agree(world, OP, problem, config, valid(problem, config))
    return plan_sum(world, "all_reduce", problem, config, problem.m)


def scaled_matmul_all_reduce(
    world: World, a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor,
    out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute matmul_all_reduce of FP8, with scales as in scaled_matmul_reduce_scatter."""
    check_tensors(world, OP, a=a, b=b)
    if a.dim() != 2:
        raise ValueError(f"{OP}: a of shape {tuple(a.shape)}: expected two dimensions")
    options = CallOptions(algo, config, False, explain)
    return call_sum(world, OP, (a, b, a_scale, b_scale), a.shape[0], out_dtype, out, options)
