"""torch.mm, then all-reduce: what wins where cuBLAS does, as with a small M or few tiles.

cuBLAS knows nothing of a rank's share of the SMs: where ranks share a GPU, a product that is wider
than its share might find no place beside the kernels of others that wait for it. So a barrier of
one warp a rank stands between: nobody waits with more before all products are done. With that
barrier it has not run on a GPU, so `auto` never takes it. Without it, with 8 ranks on one GPU, all
large products ran; a wait of matmul_reduce_scatter ran out at the first replay of a graph with
M=16, 64 or 256, of which it is not known whether this is why, nor whether it was this algorithm.

The bits of a partial are cuBLAS's own, and may differ from those of our kernels in the last place.
No bias, no activation, no other type of the output, no float32: see `torch_refuses`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ..collectives.device_barrier import make_barrier
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
    meet = make_barrier(world)
    warm_torch(world, problem)

    def multiply(a: torch.Tensor, b: torch.Tensor, partial: torch.Tensor) -> None:
        torch_mm(a, b, partial)
        meet.launch()  # all ranks' products are done

    made = then_reduce(world, OP, problem, config, multiply)
    return replace(made, workspaces=(*made.workspaces, *meet.workspaces))
