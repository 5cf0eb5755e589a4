"""cuBLAS, then all-reduce: where each rank has a GPU to itself. See _cublas.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ops.op import Plan, agree
from . import _cublas, _unfused, matmul_all_reduce
from ._cublas import Config, default, space, valid
from ._matmul_reduce import Problem, inputs
from .matmul_all_reduce import cost, reference

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ("out",)
OWN_GPU = True
AUTO_ON = ("symm",)


def cases(size: int) -> list[Problem]:
    return matmul_all_reduce.cases(size)[:1]


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate the product, and plan the collective."""
    reason = _cublas.refused(world, valid(problem, config))
    agree(world, "matmul_all_reduce.cublas", problem, config, reason)
    return _unfused.product_then(world, "all_reduce", problem, config, _cublas.matmul)
