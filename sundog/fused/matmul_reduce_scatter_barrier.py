"""GEMM, then reduce-scatter: the baseline.

The bits are those of the fused kernel. No bias, no activation, and no other type of the output:
they belong after the sum, which is rounded here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..ops.op import Plan, agree
from . import _aligned, _matmul_reduce, matmul_reduce_scatter
from ._matmul_reduce import Config, Problem, default, inputs, space, uneven
from .matmul_reduce_scatter import cost, reference

if TYPE_CHECKING:
    from ..world.world import World

__all__ = [
    "SYMMETRIC", "Config", "Problem", "cases", "cost", "default", "inputs", "plan", "planned",
    "reference", "space", "valid",
]  # fmt: skip

SYMMETRIC = ()
OP = "matmul_reduce_scatter.barrier"


def valid(problem: Problem, config: Config) -> str | None:
    return uneven(problem) or _matmul_reduce.valid_unfused(problem, config)


def cases(size: int) -> list[Problem]:
    return matmul_reduce_scatter.cases(size)[:1]


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate the partial, and plan the collective. The plan takes any a, b and out."""
    agree(world, OP, problem, config, valid(problem, config))
    rooms = _aligned.Rooms(world, config, config.programs)
    return planned(world, problem, config, rooms.matmul)


def planned(world: World, problem: Problem, config: Any, multiply: Callable[..., None]) -> Plan:
    """Plan it, for any way to multiply."""
    shape = problem.m, problem.n
    partial = world.empty(shape, problem.dtype, f"{OP}.partial")
    numel = problem.m // problem.size * problem.n
    then = _matmul_reduce.collective(world, "reduce_scatter", numel, problem.dtype)
    spare = torch.empty(numel, dtype=problem.dtype, device=world.device)

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        multiply(a, b, partial)
        flat = out.is_contiguous()
        then.launch(partial.view(-1), out.view(-1) if flat else spare)
        if not flat:
            out.detach().copy_(spare.view(out.shape))
        return out

    return Plan(world, problem, config, (partial, *then.workspaces), launch)
