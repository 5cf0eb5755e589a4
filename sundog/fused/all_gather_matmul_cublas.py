"""All-gather, then cuBLAS: where each rank has a GPU to itself and the link is fast.

The gather is that of `barrier`. _cublas.py says why ranks that share a GPU cannot use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..ops.op import Plan, agree
from . import _cublas
from ._call import resident
from .all_gather_matmul import Problem, cost, inputs, reference, unfit
from .all_gather_matmul import cases as _cases
from .all_gather_matmul_barrier import gather

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ("a",)
OWN_GPU = True
AUTO_ON = ("symm",)
_PROGRAMS = (16, 32, 64, 132)


@dataclass(frozen=True)
class Config:
    programs: int = 132  # of the gather


def valid(problem: Problem, config: Config) -> str | None:
    if config.programs < 1:
        return f"programs {config.programs}: at least one must gather"
    return unfit(problem) or _cublas.valid(problem, _cublas.Config())


def space(problem: Problem) -> list[Config]:
    made = [Config(programs) for programs in _PROGRAMS]
    return [config for config in made if valid(problem, config) is None]


def default(problem: Problem, num_sms: int) -> Config:
    return Config(num_sms)


def cases(size: int) -> list[Problem]:
    return _cases(size)[:1]


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags and the gathered A. The plan takes a symmetric a, any b and out."""
    reason = resident(valid(problem, config), config.programs, world.num_sms)
    agree(world, "all_gather_matmul.cublas", problem, config, _cublas.refused(world, reason))
    gathered = gather(world, problem, config.programs)

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        gathered.launch(a)
        if not world.passive:
            torch.mm(gathered.whole, b, out=out)
        return out

    return Plan(world, problem, config, gathered.workspaces, launch)
