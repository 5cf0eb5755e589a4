"""All-gather, then an FP8 product with scales: half the bytes of bfloat16 cross the links.

One kernel pulls all ranks' parts of A, and a second one their scales where these differ by rank:
row and block scales along M, block scales along K. Along K the scales of a tensor or of rows belong
to all of A and are the same on every rank. The product follows on the stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import gpu_limits
from ..ops.dispatch import CallOptions, call, packed
from ..ops.op import Plan, agree
from . import _aligned, _scaled, _unfused, all_gather_matmul
from ._call import check_shard, check_tensors, resident
from ._scaled import Config, default, inputs, space
from .all_gather_matmul import cost
from .all_gather_matmul_barrier import gather

if TYPE_CHECKING:
    from ..world.world import World

SYMMETRIC = ("a",)
OP = "scaled_all_gather_matmul"
ACCEPT = {
    "_push_kernel: signal.barrier_ranks(ready + program * SIZE, epoch, ctx, SIZE, TRACE): "
    "dropped": ("the gather of A ends with a barrier right before it, which orders the same"),
}


@dataclass(frozen=True)
class Problem(all_gather_matmul.Problem):
    scaling: str = "row"  # what a scale is for: a tensor, a row or a block


def valid(problem: Problem, config: Config) -> str | None:
    blocks = problem.shard == "k" and problem.scaling == "block"
    if blocks and problem.shard_shape[1] % _scaled.BLOCK.value:
        return f"{problem.shard_shape[1]} columns of a rank's A are not a multiple of 128"
    return all_gather_matmul.unsplit(problem) or _scaled.valid(problem, config)


def cases(size: int) -> list[Problem]:
    """Return small problems: every scaling, both shards, aligned for descriptors and not."""
    e4m3 = gpu_limits.here().fp8
    return [
        Problem(20 * size, 32, 160, e4m3, size, "m", scaling="row"),
        Problem(24, 136, 128 * size, e4m3, size, "k", scaling="block"),
        Problem(9 * size, 20, 48, e4m3, size, "m", out_dtype=e4m3, scaling="tensor"),
        Problem(12, 20, 48 * size, e4m3, size, "k", scaling="tensor"),  # gathers no scales
    ]


def reference(
    problem: Problem, rank: int, a: list[torch.Tensor], b: list[torch.Tensor],
    a_scales: list[torch.Tensor], b_scales: list[torch.Tensor],
) -> torch.Tensor:  # fmt: skip
    """Return the answer on a rank, from all ranks' inputs."""
    out_dtype = problem.out_dtype or torch.bfloat16
    if a[rank].is_meta:  # only its shape is wanted
        return a[rank].new_empty((problem.m, problem.n), dtype=out_dtype)
    scaling = problem.scaling
    if problem.shard == "m":
        parts = [
            _scaled.product(x, b[rank], scale, b_scales[rank], scaling)
            for x, scale in zip(a, a_scales, strict=True)
        ]
        whole = torch.cat(parts)
    else:
        joined = torch.cat(a_scales, 1) if scaling == "block" else a_scales[rank]
        whole = _scaled.product(torch.cat(a, 1), b[rank], joined, b_scales[rank], scaling)
    if problem.activation == "silu":
        whole = torch.nn.functional.silu(whole)
    return _scaled.saturated(whole, out_dtype)


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags, the gathered A and its scales. The plan takes a symmetric contiguous a."""
    refused = resident(valid(problem, config), config.programs, world.num_sms)
    agree(world, OP, problem, config, refused)
    # As words, since a thread would load bytes one at a time.
    kind = torch.int32 if problem.shard_shape[1] % 4 == 0 else torch.uint8
    words = dataclasses.replace(problem, dtype=kind, k=problem.k // kind.itemsize)
    _, padded, workspaces, fill = gather(world, words, config.programs, config.descriptors)
    rooms = _aligned.Rooms(world, config, config.programs)
    scales_of, more = _gather_scales(world, problem)

    def launch(
        a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor,
        *rest: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        *bias, out = rest
        [y] = rooms.wide(b)
        fill(a.view(kind))
        scales = scales_of(a_scale), b_scale
        x = padded.view(problem.dtype)
        return _scaled.matmul(x, y, scales, out, bias[0] if bias else None, problem, config)

    return Plan(world, problem, config, (*workspaces, *more), launch)


def _gather_scales(
    world: World, problem: Problem
) -> tuple[Callable[[torch.Tensor], torch.Tensor], tuple[torch.Tensor, ...]]:
    """Return a function that gathers the scales of all of A, and its memory."""
    if problem.shard == "k" and problem.scaling != "block":
        return lambda scale: scale, ()
    rows, cols = problem.shard_shape
    width = _scaled.scale_shapes(problem.scaling, rows, problem.n, cols)[0][1:]
    mine = world.empty((rows, *width), torch.float32, f"{OP}.scale")
    all_of_them = world.empty((world.size, rows, *width), torch.float32, f"{OP}.scales")
    then = _unfused.collective(world, "all_gather", mine.numel(), torch.float32)
    by_row = torch.empty((rows, world.size, *width), device=world.device)

    def gathered(scale: torch.Tensor) -> torch.Tensor:
        mine.copy_(scale)  # or one number for all rows
        then.launch(mine.view(-1), all_of_them.view(-1))
        if problem.shard == "m":
            return all_of_them.flatten(0, 1)
        return by_row.copy_(all_of_them.transpose(0, 1)).flatten(1)

    return gathered, (mine, all_of_them, *then.workspaces)


def scaled_all_gather_matmul(
    world: World, a: torch.Tensor, b: torch.Tensor, a_scale: torch.Tensor, b_scale: torch.Tensor,
    bias: torch.Tensor | None = None, activation: str | None = None,
    out_dtype: torch.dtype | None = None, shard: str = "k", out: torch.Tensor | None = None, *,
    algo: str = "auto", config: Any = None, explain: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute all_gather_matmul of FP8: activation(A @ b + bias) with the scales of both.

    Scales are float32: one number each; [rows] and [n]; or one for each 128 columns of a and each
    128 x 128 of b. Along K the scales of a tensor or of rows belong to all of A. The result is
    bfloat16 unless `out_dtype` says otherwise. Pass `weight.T` as b.
    """
    check_tensors(world, OP, a=a, b=b)
    check_shard(OP, shard)
    if a.dim() != 2:
        raise ValueError(f"{OP}: a of shape {tuple(a.shape)}: expected two dimensions")
    a = packed(world, OP, a, explain, "a")
    m, k = a.shape
    m, k = (m, k * world.size) if shard == "k" else (m * world.size, k)
    scaling, *scales, out = _scaled.check(
        world, OP, a, b, (a_scale, b_scale), bias, k, out, m, out_dtype
    )
    problem = Problem(
        m, b.shape[1], k, a.dtype, world.size, shard, bias is not None, activation, out.dtype,
        scaling,
    )  # fmt: skip
    given = {"a": a, "b": b, "a_scale": scales[0], "b_scale": scales[1]}
    more = {"out": out} if bias is None else {"bias": bias, "out": out}
    options = CallOptions(algo, config, False, explain)
    result: torch.Tensor = call(world, OP, problem, {**given, **more}, options, is_flat=False)
    return result
