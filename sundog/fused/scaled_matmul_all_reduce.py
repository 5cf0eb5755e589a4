"""An FP8 product with scales, then all-reduce. Partials travel in bfloat16.

As scaled_matmul_reduce_scatter, with the other collective.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..ops.dispatch import CallOptions
from ..ops.op import Plan, agree
from . import matmul_all_reduce_barrier
from ._scaled import Config, default, space
from .matmul_all_reduce import cost
from .scaled_matmul_reduce_scatter import Problem, inputs, planned, run, summed, unfused

if TYPE_CHECKING:
    from ..world.world import World

__all__ = [
    "SYMMETRIC", "Config", "Problem", "cases", "cost", "default", "inputs", "plan", "reference",
    "scaled_matmul_all_reduce", "space", "valid",
]  # fmt: skip

SYMMETRIC = ("out",)
OP = "scaled_matmul_all_reduce"
ACCEPT = matmul_all_reduce_barrier.ACCEPT  # it runs the same collective

valid, reference = unfused, summed


def cases(size: int) -> list[Problem]:
    """Return small problems: every scaling, aligned for descriptors and not."""
    e4m3 = torch.float8_e4m3fn
    return [
        Problem(40, 32, 48, e4m3, size, scaling="row"),
        Problem(8, 136, 160, e4m3, size, scaling="block"),
        Problem(5, 20, 33, e4m3, size, out_dtype=e4m3, scaling="tensor"),
    ]


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate the partial, and plan the collective. The plan takes a symmetric out."""
    agree(world, OP, problem, config, valid(problem, config))
    return planned(world, problem, config, matmul_all_reduce_barrier, problem.m)


def scaled_matmul_all_reduce(
    world: World, a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor,
    out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute matmul_all_reduce of FP8; scales as scaled_matmul_reduce_scatter takes them."""
    if a.dim() != 2:
        raise ValueError(f"{OP}: a of shape {tuple(a.shape)}: expected two dimensions")
    options = CallOptions(algo, config, False, explain)
    return run(world, OP, (a, b, a_scale, b_scale), a.shape[0], out_dtype, out, options)
