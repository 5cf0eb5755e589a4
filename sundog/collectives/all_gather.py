"""All-gather: every rank gets all ranks' tensors, one after the other.

This file says what the op is. Its algorithms are in the files all_gather_*.py beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..ops.dispatch import CallOptions, call, check_out, packed, repeated
from ..ops.op import Cost, World, new_output
from ._copy import Moved, random_tensor


@dataclass(frozen=True)
class Problem(Moved):
    """`numel` is of each rank's input."""


def cost(problem: Problem) -> Cost:
    nbytes = problem.nbytes
    return Cost(0, nbytes, nbytes * problem.size, nbytes * (problem.size - 1))


def cases(size: int) -> list[Problem]:
    return [
        Problem(numel, dtype, size)
        for numel, dtype in (
            (37, torch.float32), (4099, torch.int16), (1, torch.int64), (1536, torch.bfloat16),
        )
    ]  # fmt: skip


def inputs(world: World, problem: Problem, seed: int, exact: bool = True) -> tuple[torch.Tensor]:
    return (random_tensor(world, problem.numel, problem.dtype, seed, exact),)


def reference(problem: Problem, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten() for part in parts])


def all_gather(
    world: World, x: torch.Tensor, out: torch.Tensor | None = None, *, algo: str = "auto",
    config: Any = None, async_op: bool = False, explain: bool = False,
    splits: Sequence[int] | None = None,
) -> Any:  # fmt: skip
    """Gather the ranks' tensors along the first dimension, like torch's all_gather_into_tensor.

    The tensors are equal in size, or rank r has splits[r] rows: pass the same splits on all ranks.
    Unequal ones go through mailboxes, from and to any tensor.

    Without `out` the result is an ordinary tensor. Tensors that must be on the symmetric heap are
    staged through a copy if they are not: push, partitioned and gluon need `out` there, pull needs
    `x`. With `async_op=True`, returns a handle; `handle.wait()` returns the result.
    """
    asked, options = ("all_gather", out is None), CallOptions(algo, config, async_op, explain)
    if splits is not None:
        from ._unequal import gather_unequal  # most calls have no splits

        return gather_unequal(world, x, out, splits, options)
    out = new_output(x, world.size) if out is None else out
    if repeated(world, asked, x, out, options):
        return out
    x = packed(world, "all_gather", x, explain)
    assert out is not None  # packed has refused what has none
    check_out("all_gather", x, out, world.size * x.numel())
    problem = Problem(x.numel(), x.dtype, world.size)
    return call(world, "all_gather", problem, {"x": x, "out": out}, options, asked)
