"""Scatter: each rank gets its part of rank `src`'s tensor. `src` pushes; the others wait for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..ops.dispatch import CallOptions, call, check_contiguous, check_out, packed
from ..ops.op import Cost, Plan, World, agree
from ._copy import Config, Moved, Span, plan_spans, random_tensor
from ._copy import default_spans as default
from ._copy import space_spans as space
from ._copy import valid_spans as valid

SYMMETRIC = ("out",)


@dataclass(frozen=True)
class Problem(Moved):
    """`numel` is of each rank's part."""

    src: int


def cost(problem: Problem) -> Cost:
    """Return the cost of the rank that sends."""
    nbytes = problem.nbytes * problem.size
    return Cost(0, nbytes, nbytes, nbytes - problem.nbytes)


def cases(size: int) -> list[Problem]:
    return [Problem(n, d, size, size - 1) for n, d in ((37, torch.int16), (1024, torch.float32))]


def inputs(world: World, problem: Problem, seed: int, exact: bool = True) -> tuple[torch.Tensor]:
    return (random_tensor(world, problem.numel * problem.size, problem.dtype, seed, exact),)


def reference(problem: Problem, rank: int, parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[problem.src].flatten().chunk(problem.size)[rank]


def scatter(
    world: World, x: torch.Tensor | None, src: int = 0, out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, async_op: bool = False, explain: bool = False,
) -> Any:  # fmt: skip
    """Send part i of rank `src`'s `x`, along the first dimension, to rank i, like torch's scatter.

    Other ranks than `src` pass None and their `out`, or a tensor with the shape of `x`. Without
    `out` the result is an ordinary tensor. An `out` that is not symmetric is filled through one
    that is. With `async_op=True`, returns a handle; `handle.wait()` returns the result.
    """
    src = world._check_rank(src)
    x = None if x is None else packed(world, "scatter", x, explain)
    if x is None and (out is None or world.rank == src):
        what = "x, of which it is the source" if world.rank == src else "x nor out"
        raise ValueError(f"scatter: rank {world.rank} gives no {what}")
    if x is not None:
        if not x.dim() or x.shape[0] % world.size:
            raise ValueError(
                f"scatter: x of shape {tuple(x.shape)} does not split into {world.size} equal parts"
            )
        if out is None:
            shape = (x.shape[0] // world.size, *x.shape[1:])
            out = torch.empty(shape, dtype=x.dtype, device=x.device)
        check_out("scatter", x, out, x.numel() // world.size)
    assert out is not None
    check_contiguous("scatter", out=out)
    problem = Problem(out.numel(), out.dtype, world.size, src)
    options = CallOptions(algo, config, async_op, explain)
    tensors = {"x": out if x is None else x, "out": out}
    return call(world, "scatter", problem, tensors, options)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Plan for any contiguous x, only read on `src`, and a symmetric out."""
    agree(world, "scatter.push", problem, config, valid(problem, config))
    nbytes = problem.nbytes
    sent = nbytes if world.rank == problem.src else 0
    spans = [
        Span(sent and peer * nbytes, 0, sent, nbytes if peer == problem.src else 0)
        for peer in range(problem.size)
    ]
    return plan_spans(world, "scatter", problem, config, spans)
