"""All-gather, then torch.mm: what wins where cuBLAS does, as with a small M or few tiles.

The gather is that of `barrier`.

cuBLAS knows nothing of a rank's share of the SMs: where ranks share a GPU, a product that is wider
than its share might find no place beside the kernels of others that wait for it. So a barrier of
one warp a rank stands between: nobody waits with more before all products are done. With that
barrier it has not run on a GPU, so `auto` never takes it. Without it, with 8 ranks on one GPU, all
large products ran; a wait of matmul_reduce_scatter ran out at the first replay of a graph with
M=16, 64 or 256, of which it is not known whether this is why, nor whether it was this algorithm.

The bits are cuBLAS's own, and may differ from those of our kernels in the last place. No bias, no
activation, no other type of the output: they would come behind a product that is rounded. No
float32 either, for which torch's settings may say tf32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton

from ..collectives.device_barrier import make_barrier
from ..op import Plan, agree
from .all_gather_matmul import Problem, cost, inputs, reference
from .all_gather_matmul import cases as all_cases
from .all_gather_matmul_barrier import LEAST_TILE, gather
from .call import resident, torch_mm, torch_refuses, warm_torch

if TYPE_CHECKING:
    from ..world import World

__all__ = [
    "SYMMETRIC", "Config", "Problem", "cases", "cost", "default", "inputs", "plan", "reference",
    "space", "valid",
]  # fmt: skip

SYMMETRIC = ("a",)


@dataclass(frozen=True)
class Config:
    programs: int = 132  # of the gather


def valid(problem: Problem, config: Config) -> str | None:
    if config.programs < 1:
        return f"programs {config.programs}: at least one must gather"
    return torch_refuses(problem)


def space(problem: Problem) -> list[Config]:
    return [Config(programs) for programs in (8, 16, 33, 66, 132)]


def default(problem: Problem, num_sms: int) -> Config:
    tiles = triton.cdiv(problem.m * problem.k, LEAST_TILE)
    return Config(max(1, min(num_sms, tiles)))


def cases(size: int) -> list[Problem]:
    return all_cases(size)[:1]


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags and the gathered A. The plan takes a symmetric a, any b and out."""
    refused = resident(valid(problem, config), config.programs, world.num_sms)
    agree(world, "all_gather_matmul.torch", problem, config, refused)
    whole, workspaces, fill = gather(world, problem, config.programs)
    meet = make_barrier(world)
    warm_torch(world, problem)

    def launch(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        meet.launch()  # the last call's products are done, on all ranks
        fill(a)
        if not world.passive:
            torch_mm(whole, b, out)
        return out

    return Plan(world, problem, config, (*workspaces, *meet.workspaces), launch)
