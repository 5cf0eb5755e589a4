"""An FP8 product with scales, then reduce-scatter. Partials travel in bfloat16.

Every rank's scales are its own: they are multiplied before the sum, which is rounded to bfloat16 as
each partial is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..ops.dispatch import CallOptions, call
from ..ops.op import Plan, agree
from . import _aligned, _matmul_reduce, _scaled, matmul_reduce_scatter_barrier
from ._matmul_reduce import uneven
from ._scaled import Config, default, space
from .matmul_reduce_scatter import cost

if TYPE_CHECKING:
    from ..world.world import World

__all__ = [
    "SYMMETRIC", "Config", "Problem", "cases", "cost", "default", "inputs", "plan", "planned",
    "reference", "run", "scaled_matmul_reduce_scatter", "space", "summed", "unfused", "valid",
]  # fmt: skip

SYMMETRIC = ()
OP = "scaled_matmul_reduce_scatter"


@dataclass(frozen=True)
class Problem(_matmul_reduce.Problem):
    scaling: str = "row"  # what a scale is for: a tensor, a row or a block


def unfused(problem: Problem, config: Config) -> str | None:
    """Say why not: bias and activation belong after the sum, which is rounded here."""
    if problem.has_bias or problem.activation:
        return f"bias or activation {problem.activation!r} after a sum that is rounded to bfloat16"
    return _scaled.valid(problem, config)


def valid(problem: Problem, config: Config) -> str | None:
    return uneven(problem) or unfused(problem, config)


def cases(size: int) -> list[Problem]:
    """Return small problems: every scaling, aligned for descriptors and not."""
    e4m3 = torch.float8_e4m3fn
    return [
        Problem(24 * size, 32, 48, e4m3, size, scaling="row"),
        Problem(8 * size, 136, 160, e4m3, size, scaling="block"),
        Problem(3 * size, 20, 33, e4m3, size, out_dtype=e4m3, scaling="tensor"),
    ]


def inputs(
    world: World, problem: Problem, seed: int, exact: bool = True
) -> tuple[torch.Tensor, ...]:
    """Make a rank's parts of A and B, and their scales."""
    shapes = (problem.m, problem.k), (problem.k, problem.n)
    return _scaled.inputs(world, problem, shapes, seed, exact)


def summed(problem: Problem, rank: int, *given: list[torch.Tensor]) -> torch.Tensor:
    """Return all of the result, from all ranks' inputs; partials rounded as they travel."""
    out_dtype = problem.out_dtype or torch.bfloat16
    if given[0][rank].is_meta:  # only its shape is asked for
        return given[0][rank].new_empty((problem.m, problem.n), dtype=out_dtype)
    parts = [
        _scaled.product(a, b, a_scale, b_scale, problem.scaling).bfloat16().double()
        for a, b, a_scale, b_scale in zip(*given, strict=True)
    ]
    return _scaled.saturated(torch.stack(parts).sum(0).bfloat16(), out_dtype)


def reference(problem: Problem, rank: int, *given: list[torch.Tensor]) -> torch.Tensor:
    """Return the answer on a rank."""
    return summed(problem, rank, *given).chunk(problem.size)[rank]


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate the partial, and plan the collective. The plan takes any tensors."""
    agree(world, OP, problem, config, valid(problem, config))
    rows = problem.m // problem.size
    return planned(world, problem, config, matmul_reduce_scatter_barrier, rows)


def planned(world: World, problem: Problem, config: Config, unscaled: object, rows: int) -> Plan:
    """Plan it for any collective: that of an `unscaled` op with `rows` rows of the result."""
    rooms = _aligned.Rooms(world, config, config.programs)

    def multiply(a: tuple, b: tuple, partial: torch.Tensor) -> None:
        x, y = rooms.wide(a[0], b[0])
        _scaled.matmul(x, y, (a[1], b[1]), partial, None, problem, config)

    plain = dataclasses.replace(problem, dtype=torch.bfloat16)
    then: Plan = unscaled.planned(world, plain, config, multiply)  # type: ignore[attr-defined]
    is_same = (problem.out_dtype or torch.bfloat16) == torch.bfloat16
    shape = (rows, problem.n)
    spare = None if is_same else world.empty(shape, torch.bfloat16, f"{OP}.sum")

    def launch(
        a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor,
        out: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        total = out if spare is None else spare
        then.launch((a, a_scale), (b, b_scale), total)
        if spare is not None:
            if out.dtype in _scaled.FP8:  # a wider type has infinities, or no number too large
                most = torch.finfo(out.dtype).max
                spare.clamp_(-most, most)
            out.detach().copy_(spare)
        return out

    workspaces = then.workspaces if spare is None else (*then.workspaces, spare)
    return Plan(world, problem, config, workspaces, launch)


def scaled_matmul_reduce_scatter(
    world: World, a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor,
    out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute matmul_reduce_scatter of FP8: the sum over ranks of a @ b with both scales.

    Scales are float32 and this rank's own: one number each; [m] and [n]; or one for each 128
    columns of a and each 128 x 128 of b. The result is bfloat16 unless `out_dtype` says otherwise.
    Pass `weight.T` as b.
    """
    if a.dim() != 2 or a.shape[0] % world.size:
        raise ValueError(
            f"{OP}: a of shape {tuple(a.shape)}: expected rows that split into {world.size} slices"
        )
    options = CallOptions(algo, config, False, explain)
    return run(
        world, OP, (a, b, a_scale, b_scale), a.shape[0] // world.size, out_dtype, out, options
    )


def run(
    world: World, op: str, given: tuple[torch.Tensor, ...], rows: int,
    out_dtype: torch.dtype | None, out: torch.Tensor | None, options: CallOptions,
) -> torch.Tensor:  # fmt: skip
    """Check the tensors and run the op."""
    a, b, *pair = given
    k = a.shape[-1]
    scaling, *scales, out = _scaled.check(world, op, a, b, pair, None, k, out, rows, out_dtype)
    problem = Problem(
        a.shape[0], b.shape[1], k, a.dtype, world.size, out_dtype=out.dtype, scaling=scaling
    )
    tensors = {"a": a, "b": b, "a_scale": scales[0], "b_scale": scales[1], "out": out}
    result: torch.Tensor = call(world, op, problem, tensors, options, is_flat=False)
    return result
