"""Broadcast: every rank gets rank `src`'s tensor. `src` pushes; the others wait only for it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from ..ops.dispatch import CallOptions, call, check_contiguous, check_out, is_same, packed
from ..ops.op import Cost, Plan, World, agree
from ._copy import Config, Moved, Span, plan_spans, random_tensor
from ._copy import default_spans as default
from ._copy import space_spans as space
from ._copy import valid_spans as valid

SYMMETRIC = ("out",)


@dataclass(frozen=True)
class Problem(Moved):
    src: int


def cost(problem: Problem) -> Cost:
    """Return the cost of the rank that sends."""
    nbytes = problem.nbytes
    return Cost(0, nbytes, nbytes * problem.size, nbytes * (problem.size - 1))


def cases(size: int) -> list[Problem]:
    return [Problem(n, d, size, size // 2) for n, d in ((37, torch.int16), (2048, torch.half))]


def inputs(world: World, problem: Problem, seed: int, exact: bool = True) -> tuple[torch.Tensor]:
    return (random_tensor(world, problem.numel, problem.dtype, seed, exact),)


def reference(problem: Problem, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[problem.src].flatten()


def broadcast(
    world: World, x: torch.Tensor, src: int = 0, out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, async_op: bool = False, explain: bool = False,
) -> Any:  # fmt: skip
    """Copy rank `src`'s x to all, like torch's broadcast, but into `out`; `out=x` overwrites x.

    `x` has the same size on every rank; only its values on rank `src` count. Without `out` the
    result is an ordinary tensor. An `out` that is not symmetric is filled through one that is. With
    `async_op=True`, returns a handle; `handle.wait()` returns the result.
    """
    src = world._check_rank(src)
    x = packed(world, "broadcast", x, explain)
    if out is None:
        out = torch.empty_like(x)
    check_contiguous("broadcast", out=out)
    if not is_same(x, out):
        check_out("broadcast", x, out, x.numel())
    problem = Problem(x.numel(), x.dtype, world.size, src)
    options = CallOptions(algo, config, async_op, explain)
    return call(world, "broadcast", problem, {"x": x, "out": out}, options)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Plan for any contiguous x, only read on `src`, and a symmetric out, which may be x."""
    agree(world, "broadcast.push", problem, config, valid(problem, config))
    is_src = world.rank == problem.src
    sent = problem.nbytes if is_src else 0
    others = [peer != world.rank for peer in range(problem.size)]
    spans = [
        Span(0, 0, sent * others[peer], problem.nbytes * (peer == problem.src) * others[peer])
        for peer in range(problem.size)
    ]
    pushed = plan_spans(world, "broadcast", problem, config, spans)

    def launch(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        if is_src and x.data_ptr() != out.data_ptr():
            # Not by the kernel, whose programs would race if out is x.
            out.detach().copy_(x.detach())
        pushed.launch(x, out)
        return out

    return dataclasses.replace(pushed, launch=launch)
