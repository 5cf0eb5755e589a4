"""What GEMM + reduce-scatter and GEMM + all-reduce share on the host.

Rank r has a part A_r of the columns of A and B_r of the rows of B; wanted is the sum of A_r @ B_r,
plus bias, activated. What the fused kernels share is in _partials.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from ..ops.dispatch import CallOptions, decide
from ..ops.op import Plan, find
from . import _gemm
from ._call import call_matrices, check_matrices, check_tensors, fitting

if TYPE_CHECKING:
    from ..world.world import World

__all__ = [
    "Config", "Problem", "call_op", "collective", "default_of", "given", "inputs", "slice_rows",
    "space", "sum_of", "uneven", "valid", "valid_unfused",
]  # fmt: skip


@dataclass(frozen=True)
class Problem:
    m: int
    n: int
    k: int  # of a rank's part
    dtype: torch.dtype
    size: int  # ranks
    has_bias: bool = False
    activation: str | None = None
    out_dtype: torch.dtype | None = None  # None: as the input


@dataclass(frozen=True)
class Config(_gemm.Grid):
    """A type of its own: it says which algorithms take a config."""


def valid(problem: Problem, config: Config) -> str | None:
    return _gemm.unfit(problem) or _gemm.valid_grid(config, problem.dtype)


def uneven(problem: Problem) -> str | None:
    """Why its rows can't be scattered."""
    even = problem.m % problem.size == 0
    return None if even else f"m {problem.m} does not divide by {problem.size} ranks"


def valid_unfused(problem: Problem, config: Config) -> str | None:
    """Of the algorithms that round the sum before anything is added to it."""
    wanted = problem.out_dtype or problem.dtype
    if problem.has_bias or problem.activation or wanted != problem.dtype:
        return (
            f"bias, activation {problem.activation!r} or output {wanted} would come after a sum "
            f"that is rounded to {problem.dtype}"
        )
    return valid(problem, config)


def space(problem: Problem) -> list[Config]:
    made = [
        Config(tile_m, tile_n, 64, group_m, num_stages=num_stages)
        for tile_m, tile_n in ((64, 64), (64, 128), (128, 128), (128, 256))
        for group_m in (1, 4, 8)
        for num_stages in (3, 4)
    ]
    return [config for config in made if valid(problem, config) is None]


def default_of(problem: Problem, num_sms: int) -> Config:
    """Tiles as for a GEMM alone."""
    base = fitting(problem.m, problem.m, problem.n, problem.k, problem.dtype, num_sms)
    most = triton.cdiv(problem.m, base["tile_m"]) * triton.cdiv(problem.n, base["tile_n"])
    return Config(**base, programs=max(1, min(num_sms, most)))


def slice_rows(problem: Problem) -> int:
    """Rows of the result that a rank adds; the last ranks may have fewer."""
    return triton.cdiv(problem.m, problem.size)


def inputs(
    world: World, problem: Problem, seed: int, exact: bool = True
) -> tuple[torch.Tensor, ...]:
    """A rank's parts of A and B, and the bias, which all ranks have."""
    torch.manual_seed(seed * 1000 + world.rank)
    shapes = [(problem.m, problem.k), (problem.k, problem.n)]
    made = [torch.empty(s, dtype=problem.dtype, device=world.device) for s in shapes]
    made = [tensor.random_(-2, 3) if exact else tensor.normal_() for tensor in made]
    if problem.has_bias:
        torch.manual_seed(seed)
        made.append(torch.empty_like(made[1][0]).random_(-9, 9))
    return tuple(made)


def sum_of(
    problem: Problem, a: list[torch.Tensor], b: list[torch.Tensor],
    bias: list[torch.Tensor] | None,
) -> torch.Tensor:  # fmt: skip
    """All of the result, from all ranks' inputs; partials rounded as they travel."""
    partials = [(x.double() @ y.double()).to(problem.dtype) for x, y in zip(a, b, strict=True)]
    whole = torch.stack([partial.double() for partial in partials]).sum(0)
    if bias is not None:
        whole = whole + bias[0].double()
    if problem.activation == "silu":
        whole = torch.nn.functional.silu(whole)
    return whole.to(problem.out_dtype or problem.dtype)


def call_op(
    world: World, op: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None,
    activation: str | None, out_dtype: torch.dtype | None, out: torch.Tensor | None, slices: int,
    options: CallOptions,
) -> torch.Tensor:  # fmt: skip
    """Check the tensors and run the op; a rank's result has one of `slices` slices of the rows."""
    check_tensors(world, op, a=a, b=b, bias=bias, out=out)
    if a.dim() != 2:
        raise ValueError(f"{op}: a of shape {tuple(a.shape)}: expected two dimensions")
    m, k = a.shape
    if m % slices:
        raise ValueError(
            f"{op}: the {m} rows of a do not split into {slices} equal slices; pad a to "
            f"{triton.cdiv(m, slices) * slices}"
        )
    dtype = out_dtype or a.dtype
    out = check_matrices(op, a, b, k, bias, activation, out, m // slices, dtype)
    problem = Problem(m, b.shape[1], k, a.dtype, world.size, bias is not None, activation, dtype)
    return call_matrices(world, op, problem, a, b, bias, out, options)


def collective(world: World, op: str, numel: int, dtype: torch.dtype) -> Plan:
    """A plan of a collective, with the algorithm and config that a call of it would choose."""
    problem = find(op).Problem(numel, dtype, world.size)
    _, module, config, _ = decide(world, op, problem, CallOptions())
    made: Plan = module.plan(world, problem, config)
    return made


def given(
    problem: Problem, config: Config, a: torch.Tensor, b: torch.Tensor
) -> tuple[Any, Any, _gemm.Shape]:
    """The operands, and what the kernel is compiled for."""
    x, a_kind = _gemm.operand(a, (config.tile_m, config.tile_k), config.descriptors)
    y, b_kind = _gemm.operand(b, (config.tile_k, config.tile_n), config.descriptors)
    flat = _gemm.room_beside(config, a.itemsize, a.itemsize)
    return x, y, _gemm.shape_of(config, a_kind, b_kind, problem.activation, flat)
