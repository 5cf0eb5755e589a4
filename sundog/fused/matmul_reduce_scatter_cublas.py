"""cuBLAS, then reduce-scatter: where each rank has a GPU to itself. See _cublas.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..ops.op import Plan, agree
from . import _cublas, _unfused, matmul_reduce_scatter
from ._cublas import Config, default
from ._matmul_reduce import Problem, inputs, uneven
from .matmul_reduce_scatter import cost, reference

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ()
OWN_GPU = True
AUTO_ON = ("symm",)


def valid(problem: Problem, config: Config) -> str | None:
    return uneven(problem) or _cublas.valid(problem, config)


def space(problem: Problem) -> list[Config]:
    return [Config()] if valid(problem, Config()) is None else []


def cases(size: int) -> list[Problem]:
    return matmul_reduce_scatter.cases(size)[:1]


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate the product, and plan the collective."""
    reason = _cublas.refused(world, valid(problem, config))
    agree(world, "matmul_reduce_scatter.cublas", problem, config, reason)
    return _unfused.product_then(world, "reduce_scatter", problem, config, _cublas.matmul)
