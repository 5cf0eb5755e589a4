"""torch.mm, then all-reduce: what wins where cuBLAS does, as with a small M or few tiles.

cuBLAS knows nothing of a rank's share of the SMs: ranks that share a GPU get all of it in turns.
The bits of a partial are its own, and may differ from those of our kernels in the last place. No
bias, no activation, no other type of the output, no float32: see `torch_refuses`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..collectives.device_barrier import device_barrier
from ..op import Plan, agree
from .call import torch_mm, torch_refuses, warm_torch
from .matmul_all_reduce import cost, reference
from .matmul_all_reduce_barrier import cases, then_reduce
from .matmul_reduce import Problem, inputs

if TYPE_CHECKING:
    from ..world import World

__all__ = [
    "SYMMETRIC", "Config", "Problem", "cases", "cost", "default", "inputs", "plan", "reference",
    "space", "valid",
]  # fmt: skip

SYMMETRIC = ("out",)
OP = "matmul_all_reduce.torch"


@dataclass(frozen=True)
class Config:
    """Nothing: torch chooses for the product, `auto` for the collective."""


def valid(problem: Problem, config: Config) -> str | None:
    return torch_refuses(problem)


def space(problem: Problem) -> list[Config]:
    return [Config()]


def default(problem: Problem, num_sms: int) -> Config:
    return Config()


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate the partial, and plan the collective. The plan takes any a, b; a symmetric out."""
    agree(world, OP, problem, config, valid(problem, config))
    warm_torch(world, problem)

    def multiply(a: torch.Tensor, b: torch.Tensor, partial: torch.Tensor) -> None:
        torch_mm(a, b, partial)
        device_barrier(world)  # all ranks' products are done: see `warm_torch`

    return then_reduce(world, OP, problem, config, multiply)
