"""All-to-all: every rank sends a part of its tensor to each rank, and gets one from each.

This file says what the op is. Equal parts go straight to their destination (all_to_all_push.py),
unequal ones through mailboxes (all_to_all_mail.py): where a part belongs in the peer's output
depends on what the others send there, which a rank does not know.
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
    """`numel` is of what a rank sends to each rank, if all parts are equal."""

    splits: tuple[tuple[int, ...], ...] | None = None  # else elements from rank (row) to rank

    @property
    def matrix(self) -> tuple[tuple[int, ...], ...]:
        return self.splits or ((self.numel,) * self.size,) * self.size


def cost(problem: Problem) -> Cost:
    """Return the cost of the rank that sends the most."""
    most = max(sum(row) for row in problem.matrix) * problem.dtype.itemsize
    away = max(sum(r) - r[i] for i, r in enumerate(problem.matrix)) * problem.dtype.itemsize
    return Cost(0, most, most, away)


def cases(size: int) -> list[Problem]:
    return [
        Problem(numel, dtype, size)
        for numel, dtype in ((37, torch.float32), (1, torch.uint8), (3072, torch.bfloat16))
    ]


def inputs(world: World, problem: Problem, seed: int, exact: bool = True) -> tuple[torch.Tensor]:
    most = max(sum(row) for row in problem.matrix)
    x = random_tensor(world, most, problem.dtype, seed, exact)
    return (x[: sum(problem.matrix[world.rank])],)


def reference(problem: Problem, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
    splits = [part.flatten().split(row) for part, row in zip(parts, problem.matrix, strict=True)]
    return torch.cat([each[rank] for each in splits])


def all_to_all(
    world: World, x: torch.Tensor, out: torch.Tensor | None = None,
    in_splits: Sequence[int] | None = None, out_splits: Sequence[int] | None = None, *,
    algo: str = "auto", config: Any = None, async_op: bool = False, explain: bool = False,
) -> Any:  # fmt: skip
    """Send part i of `x` along the first dimension to rank i, like torch's all_to_all_single.

    Parts are equal, or `in_splits[i]` rows go to rank i and `out_splits[i]` come from it: pass
    both, on all ranks. Without `out` the result is an ordinary tensor. Equal parts go straight to a
    symmetric `out`, or through a symmetric copy if it is not. Unequal ones go through mailboxes
    (_mailbox.py), from and to any tensor. With `async_op=True`, returns a handle; `handle.wait()`
    returns the result.
    """
    asked, options = ("all_to_all", out is None), CallOptions(algo, config, async_op, explain)
    if in_splits is None is out_splits:
        out = new_output(x) if out is None and isinstance(x, torch.Tensor) and x.dim() else out
        if repeated(world, asked, x, out, options):
            return out
    x = packed(world, "all_to_all", x, explain)
    if in_splits is not None or out_splits is not None:
        from ._unequal import send_unequal  # most calls have no splits

        return send_unequal(world, x, out, in_splits, out_splits, options)
    rows = x.shape[0] if x.dim() else 1
    if rows % world.size:
        raise ValueError(
            f"all_to_all: the first dimension of x, {rows}, does not divide by {world.size} ranks; "
            "give in_splits and out_splits"
        )
    out = torch.empty_like(x) if out is None else out
    check_out("all_to_all", x, out, x.numel())
    problem = Problem(x.numel() // world.size, x.dtype, world.size)
    return call(world, "all_to_all", problem, {"x": x, "out": out}, options, asked)
