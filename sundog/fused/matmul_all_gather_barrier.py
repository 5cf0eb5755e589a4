"""GEMM, then all-gather: the baseline. The bits are those of the fused kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..ops.op import Plan, agree
from . import _aligned, _matmul_reduce
from ._matmul_reduce import Config, Problem, default, inputs, space, valid
from .matmul_all_gather import cases, cost, reference

if TYPE_CHECKING:
    from ..world.world import World

__all__ = [
    "SYMMETRIC", "Config", "Problem", "cases", "cost", "default", "inputs", "plan", "planned",
    "reference", "space", "valid",
]  # fmt: skip

SYMMETRIC = ("out",)
OP = "matmul_all_gather.barrier"


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate the product, and plan the collective. Takes any a, b, bias; a symmetric out."""
    agree(world, OP, problem, config, valid(problem, config))
    rooms = _aligned.Rooms(world, config, config.programs)
    return planned(world, problem, config, rooms.matmul)


def planned(world: World, problem: Problem, config: Any, multiply: Callable[..., None]) -> Plan:
    """Plan it, for any way to multiply."""
    kind = problem.out_dtype or problem.dtype
    product = world.empty((problem.m, problem.n), kind, f"{OP}.product")
    then = _matmul_reduce.collective(world, "all_gather", product.numel(), kind)
    whole = world.empty((problem.size * problem.m, problem.n), kind, f"{OP}.whole")

    def launch(a: torch.Tensor, b: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        *added, out = rest
        multiply(a, b, product, added[0] if added else None, problem.activation)
        flat = out.is_contiguous()
        then.launch(product.view(-1), (out if flat else whole).view(-1))
        if not flat:
            out.detach().copy_(whole)
        return out

    return Plan(world, problem, config, (product, whole, *then.workspaces), launch)
