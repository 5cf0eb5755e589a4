"""GEMM, then all-gather: the baseline. It has the bits of the fused kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ops.op import Plan, agree
from . import _aligned, _unfused
from ._matmul_reduce import Config, Problem, default, inputs, space, valid
from .matmul_all_gather import cases, cost, reference

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ("out",)
OP = "matmul_all_gather.barrier"


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate the product, and plan the collective. Takes any a, b, bias; a symmetric out."""
    agree(world, OP, problem, config, valid(problem, config))
    rooms = _aligned.Rooms(world, config, config.programs)
    return _unfused.product_then(world, "all_gather", problem, config, rooms.matmul)
