"""All-to-all: every rank sends a part of its tensor to each rank, and gets one from each.

What the op is. Equal parts go straight to their place: all_to_all_push.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..op import Cost
from .call import Options, call, check_contiguous, check_out
from .words import random_tensor

if TYPE_CHECKING:
    from ..world import World

__all__ = ["Problem", "all_to_all", "cases", "cost", "inputs", "reference"]


@dataclass(frozen=True)
class Problem:
    numel: int  # of what a rank sends to each rank
    dtype: torch.dtype
    size: int  # ranks

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def cost(problem: Problem) -> Cost:
    nbytes = problem.nbytes
    return Cost(0, nbytes * problem.size, nbytes * problem.size, nbytes * (problem.size - 1))


def cases(size: int) -> list[Problem]:
    return [
        Problem(numel, dtype, size)
        for numel, dtype in ((37, torch.float32), (1, torch.uint8), (3072, torch.bfloat16))
    ]


def inputs(world: World, problem: Problem, seed: int, exact: bool = True) -> tuple[torch.Tensor]:
    return (random_tensor(world, problem.numel * problem.size, problem.dtype, seed),)


def reference(problem: Problem, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
    n = problem.numel
    return torch.cat([part.flatten()[rank * n : (rank + 1) * n] for part in parts])


def all_to_all(
    world: World, x: torch.Tensor, out: torch.Tensor | None = None, *, algo: str = "auto",
    config: Any = None, async_op: bool = False, explain: bool = False,
) -> Any:  # fmt: skip
    """As torch's all_to_all_single: part i of `x` along the first dimension goes to rank i.

    Without `out` the result is an ordinary tensor of the shape of `x`. An `out` that is not
    symmetric is filled by way of one that is. With `async_op` a handle, whose `wait()` gives the
    result.
    """
    check_contiguous("all_to_all", x=x)
    rows = x.shape[0] if x.dim() else 1
    if rows % world.size:
        raise ValueError(
            f"all_to_all: the first dimension of x, {rows}, does not divide by {world.size} ranks; "
            "give in_splits and out_splits"
        )
    if out is None:
        out = torch.empty_like(x)
    check_out("all_to_all", x, out, x.numel())
    problem = Problem(x.numel() // world.size, x.dtype, world.size)
    return call(world, "all_to_all", problem, x, out, Options(algo, config, async_op, explain))
