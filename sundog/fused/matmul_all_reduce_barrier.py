"""GEMM, then all-reduce: the baseline. It wins by 1 or 2 us with few rows.

The bits are those of the fused kernels. There is no bias, no activation and no other output type:
they belong after the sum, which is rounded here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..ops.op import Plan, agree
from . import _aligned, _unfused, matmul_all_reduce
from ._matmul_reduce import Config, Problem, default, inputs, space
from ._unfused import valid
from .matmul_all_reduce import ACCEPT, cost, reference

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ("out",)
OP = "matmul_all_reduce.barrier"


def cases(size: int) -> list[Problem]:
    wide, odd = matmul_all_reduce.cases(size)
    return [wide, replace(odd, has_bias=False)]


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate the partial, and plan the collective. The plan takes any a, b; a symmetric out."""
    agree(world, OP, problem, config, valid(problem, config))
    rooms = _aligned.Rooms(world, config, config.programs)
    return _unfused.product_then(world, "all_reduce", problem, config, rooms.matmul)
