"""GEMM, then all-reduce: the baseline. Wins by 1 or 2 us with few rows.

The bits are those of the fused kernels. No bias, no activation, and no other type of the output:
they belong after the sum, which is rounded here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..ops.op import Plan, agree
from . import _aligned, _matmul_reduce, matmul_all_reduce
from ._matmul_reduce import Config, Problem, default, inputs, space
from .matmul_all_reduce import cost, reference

if TYPE_CHECKING:
    from ..world.world import World

__all__ = [
    "SYMMETRIC", "Config", "Problem", "cases", "cost", "default", "inputs", "plan", "planned",
    "reference", "space", "valid",
]  # fmt: skip

SYMMETRIC = ("out",)
OP = "matmul_all_reduce.barrier"
ACCEPT = {
    "_one_shot_kernel: mask at < body: one less": (
        "a loop over more tiles than programs, which no default makes of products this small; "
        "`sundog check all_reduce.one_shot --mutate` kills it"
    ),
}

valid = _matmul_reduce.valid_unfused


def cases(size: int) -> list[Problem]:
    wide, odd = matmul_all_reduce.cases(size)
    return [wide, replace(odd, has_bias=False)]


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate the partial, and plan the collective. The plan takes any a, b; a symmetric out."""
    agree(world, OP, problem, config, valid(problem, config))
    rooms = _aligned.Rooms(world, config, config.programs)
    return planned(world, problem, config, rooms.matmul)


def planned(world: World, problem: Problem, config: Any, multiply: Callable[..., None]) -> Plan:
    """Plan it, for any way to multiply."""
    partial = world.empty((problem.m, problem.n), problem.dtype, f"{OP}.partial")
    numel = problem.m * problem.n
    then = _matmul_reduce.collective(world, "all_reduce", numel, problem.dtype)

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        multiply(a, b, partial)
        flat = out.is_contiguous()
        then.launch(partial.view(-1), (out if flat else partial).view(-1))
        if not flat:
            out.detach().copy_(partial)
        return out

    return Plan(world, problem, config, (partial, *then.workspaces), launch)
