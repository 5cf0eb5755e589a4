"""GEMM, then reduce-scatter: the baseline.

The bits are those of the fused kernel. There is no bias, no activation and no other output type:
they belong after the sum, which is rounded here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ops.op import Plan, agree
from . import _aligned, _unfused, matmul_reduce_scatter
from ._matmul_reduce import Config, Problem, default, inputs, space, uneven
from .matmul_reduce_scatter import cost, reference

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ()
OP = "matmul_reduce_scatter.barrier"


def valid(problem: Problem, config: Config) -> str | None:
    return uneven(problem) or _unfused.valid(problem, config)


def cases(size: int) -> list[Problem]:
    return matmul_reduce_scatter.cases(size)[:1]


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate the partial, and plan the collective. The plan takes any a, b and out."""
    agree(world, OP, problem, config, valid(problem, config))
    rooms = _aligned.Rooms(world, config, config.programs)
    return _unfused.product_then(world, "reduce_scatter", problem, config, rooms.matmul)
