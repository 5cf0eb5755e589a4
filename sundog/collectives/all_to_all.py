"""All-to-all: every rank sends a part of its tensor to each rank, and gets one from each.

What the op is. Equal parts go straight to their place (all_to_all_push.py), others through
mailboxes (all_to_all_mail.py): where a part goes in the peer's output depends on what the others
send there, which a rank does not know.

All-to-all of unequal parts, as a rank calls it: it knows its own splits and nobody else's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from ..errors import RankMismatch
from ..ops.dispatch import (
    ASYNC_STREAM,
    CallOptions,
    call,
    check_contiguous,
    check_out,
    on_stream,
    repeated,
)
from ..ops.op import Cost
from ._copy import random_tensor
from ._mailbox import Message

if TYPE_CHECKING:
    from ..world.world import World

__all__ = ["Problem", "all_to_all", "by_mail", "cases", "cost", "inputs", "messages", "reference"]


@dataclass(frozen=True)
class Problem:
    numel: int  # of what a rank sends to each rank, if all is equal
    dtype: torch.dtype
    size: int  # ranks
    splits: tuple[tuple[int, ...], ...] | None = None  # else elements from rank (row) to rank

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def matrix(self) -> tuple[tuple[int, ...], ...]:
        return self.splits or ((self.numel,) * self.size,) * self.size


def cost(problem: Problem) -> Cost:
    """Of the rank that sends the most."""
    most = max(sum(row) for row in problem.matrix) * problem.dtype.itemsize
    away = max(sum(r) - r[i] for i, r in enumerate(problem.matrix)) * problem.dtype.itemsize
    return Cost(0, most, most, away)


def cases(size: int) -> list[Problem]:
    """Small problems with awkward sizes: what check, probe and tests run."""
    return [
        Problem(numel, dtype, size)
        for numel, dtype in ((37, torch.float32), (1, torch.uint8), (3072, torch.bfloat16))
    ]


def inputs(world: World, problem: Problem, seed: int, exact: bool = True) -> tuple[torch.Tensor]:
    most = max(sum(row) for row in problem.matrix)
    x = random_tensor(world, most, problem.dtype, seed, exact)
    return (x[: sum(problem.matrix[world.rank])],)


def reference(problem: Problem, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
    """The answer on a rank, from all ranks' inputs."""
    splits = [part.flatten().split(row) for part, row in zip(parts, problem.matrix, strict=True)]
    return torch.cat([each[rank] for each in splits])


def all_to_all(
    world: World, x: torch.Tensor, out: torch.Tensor | None = None,
    in_splits: Sequence[int] | None = None, out_splits: Sequence[int] | None = None, *,
    algo: str = "auto", config: Any = None, async_op: bool = False, explain: bool = False,
) -> Any:  # fmt: skip
    """As torch's all_to_all_single: part i of `x` along the first dimension goes to rank i.

    Parts are equal, or `in_splits[i]` rows for rank i and `out_splits[i]` from it: give both, on
    all ranks. Without `out` the result is an ordinary tensor. Equal parts go straight to a
    symmetric `out`, and by way of one if it is not; others through mailboxes (_mailbox.py), from
    and to any tensor. With `async_op=True`, returns a handle; `handle.wait()` returns the result.
    """
    asked, options = ("all_to_all",), CallOptions(algo, config, async_op, explain)
    if in_splits is None is out_splits and repeated(world, asked, x, out, options):
        return out
    check_contiguous("all_to_all", x=x)
    if in_splits is not None or out_splits is not None:
        return by_mail(world, x, out, in_splits, out_splits, options)
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
    return call(world, "all_to_all", problem, {"x": x, "out": out}, options, asked)


def messages(sent: Sequence[int], received: Sequence[int], nbytes: int) -> tuple[Message, ...]:
    """One per peer, from the splits, in units of `nbytes`."""
    starts = [nbytes * n for n in accumulate(sent, initial=0)]
    places = [nbytes * n for n in accumulate(received, initial=0)]
    return tuple(
        (starts[peer], nbytes * sent[peer], places[peer], nbytes * received[peer])
        for peer in range(len(sent))
    )


def by_mail(
    world: World, x: torch.Tensor, out: torch.Tensor | None, in_splits: Sequence[int] | None,
    out_splits: Sequence[int] | None, options: CallOptions,
) -> Any:  # fmt: skip
    from ._unequal import mail_plan  # only where parts are not equal

    if in_splits is None or out_splits is None:
        raise ValueError("all_to_all: give in_splits and out_splits, or neither")
    rows, row = (x.shape[0], math.prod(x.shape[1:])) if x.dim() else (1, 1)
    _check_splits(world, "in_splits", in_splits, rows, "x")
    num_out = sum(out_splits)
    if out is None:
        out = torch.empty((num_out, *x.shape[1:]), dtype=x.dtype, device=x.device)
    _check_splits(world, "out_splits", out_splits, out.shape[0] if out.dim() else 1, "out")
    check_out("all_to_all", x, out, num_out * row)
    told = messages(in_splits, out_splits, row * x.itemsize)
    result = out

    def run() -> torch.Tensor:
        plan = mail_plan(world, "all_to_all", options, told, _compare_splits)
        plan.launch(x.view(-1), result.view(-1), told)
        return result

    return on_stream(world, ASYNC_STREAM, run, x) if options.async_op else run()


def _compare_splits(everyone: list[Any]) -> None:
    """The first splits are compared here, later ones by the kernel."""
    for i, ours in enumerate(everyone):
        for j, theirs in enumerate(everyone):
            if ours[j][1] != theirs[i][3]:
                raise RankMismatch(
                    f"all_to_all: rank {i} sends {ours[j][1]} bytes to rank {j}, which expects "
                    f"{theirs[i][3]}: in_splits[{j}] here must be out_splits[{i}] there"
                )


def _check_splits(world: World, name: str, splits: Sequence[int], rows: int, tensor: str) -> None:
    if len(splits) != world.size or any(n < 0 for n in splits):
        raise ValueError(
            f"all_to_all: {name} {list(splits)} must be {world.size} numbers, 0 or more"
        )
    if sum(splits) != rows:
        raise ValueError(
            f"all_to_all: {name} {list(splits)} add up to {sum(splits)}, but {tensor} has {rows} "
            "rows"
        )
