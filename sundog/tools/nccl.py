"""What torch.distributed offers instead of an op: on NCCL (RCCL on AMD), on gloo, on our heap.

NCCL refuses two ranks on one GPU, and does not run on a CPU. There gloo, which goes through the CPU
and cannot be captured in a graph, takes its place. `channels` is the number of CTAs that NCCL may
use for a collective (`--axis channels=4,16`), like our `programs`. Torch's kernels for symmetric
memory run on our heap, which is such memory on `symm`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from ..world.world import World

Inputs = tuple[torch.Tensor, ...]
Call = Callable[[], Any]
Make = Callable[[World, Any, Inputs, torch.Tensor], Call]
Collective = Callable[[Any, torch.Tensor, torch.Tensor, Any], Any]  # problem, out, x, group


def anywhere(world: World, problem: Any) -> bool:
    return True


def _other_bits(problem: Any, out: torch.Tensor, expected: torch.Tensor) -> int:
    return int((out != expected).sum().item())


def is_sum(world: World, problem: Any) -> bool:
    return bool(problem.op == "sum")


def is_plain(world: World, problem: Any) -> bool:
    """Return whether torch.mm can compute it: no bias, no activation, one type."""
    own_type = problem.out_dtype in (None, problem.dtype)
    return not problem.has_bias and problem.activation is None and own_type


@dataclass(frozen=True)
class Baseline:
    make: Make  # of a world, a problem, inputs and an output
    usable: Callable[[World, Any], bool] = anywhere
    graph: bool = True  # can be captured
    wrong: Callable[[Any, torch.Tensor, torch.Tensor], int] = _other_bits  # elements that differ
    by_channels: Callable[[int], Make] | None = None  # NCCL's, for a number of channels


def on_nccl(world: World, problem: Any) -> bool:
    """Return whether each rank has its own GPU."""
    return world.backend == "symm" and world.size <= torch.cuda.device_count()


def on_gloo(world: World, problem: Any) -> bool:
    """Return whether ranks are processes with a group of torch's that can't use NCCL."""
    is_there = world.backend in ("symm", "shm") and dist.is_initialized()
    return is_there and not on_nccl(world, problem)


@functools.cache
def _group(backend: str, channels: int) -> Any:
    """Make torch's group of all ranks, which call this together, once."""
    if backend != "nccl" or not channels:
        return dist.new_group(backend=backend)
    options = dist.ProcessGroupNCCL.Options()
    options.config.min_ctas = options.config.max_ctas = channels
    return dist.new_group(backend=backend, pg_options=options)


# a collective of torch's, by our op's name


def _gather(problem: Any, out: torch.Tensor, x: torch.Tensor, group: Any) -> None:
    is_there = dist.get_rank() == problem.dst
    dist.gather(x, list(out.chunk(problem.size)) if is_there else None, problem.dst, group=group)


def _scatter(problem: Any, out: torch.Tensor, x: torch.Tensor, group: Any) -> None:
    is_there = dist.get_rank() == problem.src
    dist.scatter(out, list(x.chunk(problem.size)) if is_there else None, problem.src, group=group)


def _reduce(problem: Any, out: torch.Tensor, x: torch.Tensor, group: Any) -> None:
    """Reduce. Only `dst` has an output, and torch overwrites what the others pass."""
    dist.reduce(out.copy_(x) if out.numel() else x.clone(), problem.dst, group=group)


_COLLECTIVES: dict[str, Collective] = {
    "all_gather": lambda p, out, x, group: dist.all_gather_into_tensor(out, x, group=group),
    "all_reduce": lambda p, out, x, group: dist.all_reduce(out.copy_(x), group=group),
    "reduce_scatter": lambda p, out, x, group: dist.reduce_scatter_tensor(out, x, group=group),
    "all_to_all": lambda p, out, x, group: dist.all_to_all_single(out, x, group=group),
    "broadcast": lambda p, out, x, group: dist.broadcast(out.copy_(x), p.src, group=group),
    "gather": _gather,
    "scatter": _scatter,
    "reduce": _reduce,
}


def on_group(op: str, backend: str, channels: int = 0) -> Make:
    """Call one of torch's collectives on the group of a backend."""
    collective = _COLLECTIVES[op]

    def make(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
        group = _group(backend, channels)
        return lambda: collective(problem, out, inputs[0], group)

    return make


# the same around a product


def multiply_after(op: str, backend: str, channels: int = 0) -> Make:
    """Gather A by torch, then call torch.mm. Along K a copy puts the parts side by side."""

    def make(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
        (a, b), rows = inputs, problem.shard_shape[0]
        parts = a.new_empty((world.size * rows, a.shape[1]))
        gather = on_group(op, backend, channels)(world, problem, (a,), parts)

        def launch() -> None:
            gather()
            whole = parts
            if problem.shard == "k":
                whole = torch.cat(parts.chunk(world.size), dim=1)
            torch.mm(whole, b, out=out)

        return launch

    return make


def multiply_before(op: str, backend: str, channels: int = 0) -> Make:
    """Call torch.mm, then a collective of torch's."""

    def make(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
        a, b = inputs
        product = a.new_empty((a.shape[0], b.shape[1]))
        then = on_group(op, backend, channels)(world, problem, (product,), out)

        def launch() -> None:
            torch.mm(a, b, out=product)
            then()

        return launch

    return make


def distributed(
    op: str,
    is_for: Callable[[World, Any], bool] = anywhere,
    how: Callable[[str, str, int], Make] = on_group,
    name: str = "{}",
) -> dict[str, Baseline]:
    """Return a call on NCCL or, where that is not possible, on gloo, which no graph captures."""
    return {
        name.format("nccl"): Baseline(
            how(op, "nccl", 0),
            lambda w, p: on_nccl(w, p) and is_for(w, p),
            by_channels=lambda channels: how(op, "nccl", channels),
        ),
        name.format("gloo"): Baseline(
            how(op, "gloo", 0), lambda w, p: on_gloo(w, p) and is_for(w, p), graph=False
        ),
    }


# torch's kernels for symmetric memory


def _in_symmetric_memory(world: World, problem: Any) -> bool:
    return world.backend == "symm" and is_sum(world, problem)


def _name() -> str:
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD.group_name)


def _one_shot(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
    name = _name()
    return lambda: torch.ops.symm_mem.one_shot_all_reduce_out(inputs[0], "sum", name, out)


def _two_shot(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
    """Reduce a copy into `out`, since the kernel leaves a part of the sum in its input."""
    name, copy = _name(), world.empty_like(inputs[0])

    def launch() -> None:
        torch.ops.symm_mem.two_shot_all_reduce_out(copy.copy_(inputs[0]), "sum", name, out)

    return launch


def _fused_gather(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
    """Gather and multiply by torch, which pipelines copies with products and has no `out`."""
    name, fused = _name(), torch.ops.symm_mem.fused_all_gather_matmul
    return lambda: out.copy_(fused(inputs[0], [inputs[1]], 0, name, return_A=False)[1][0])


def _fused_scatter(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
    name, fused = _name(), torch.ops.symm_mem.fused_matmul_reduce_scatter
    return lambda: out.copy_(fused(inputs[0], inputs[1], "sum", 0, name))


def _is_fused_by_torch(world: World, problem: Any) -> bool:
    """Return whether ranks are processes, and rows are what is gathered or scattered."""
    by_rows = getattr(problem, "shard", "m") == "m" and problem.m % world.size == 0
    return world.backend == "symm" and by_rows and is_plain(world, problem)


def _is_far(problem: Any, got: torch.Tensor, wanted: torch.Tensor) -> int:
    """Count what is off by 1 % of the largest: torch rounds each rank's part before it sums."""
    return int(((got - wanted).abs().float() > 0.01 * wanted.abs().float().max()).sum())


IN_SYMMETRIC_MEMORY: dict[str, dict[str, Baseline]] = {
    "all_reduce": {
        "symm_mem.one_shot": Baseline(_one_shot, _in_symmetric_memory),
        "symm_mem.two_shot": Baseline(_two_shot, _in_symmetric_memory),
    },
    "all_gather_matmul": {
        "symm_mem.fused_all_gather_matmul": Baseline(_fused_gather, _is_fused_by_torch, False),
    },
    "matmul_reduce_scatter": {
        "symm_mem.fused_matmul_reduce_scatter": Baseline(
            _fused_scatter, _is_fused_by_torch, False, _is_far
        ),
    },
}


# numbers of channels


def channel_axis(axes: Sequence[str]) -> tuple[list[str], list[int]]:
    """Take 'channels=4,16' out of the axes, since it is for NCCL, not a field of our ops."""
    own = [axis for axis in axes if not axis.startswith("channels=")]
    words = [w for axis in axes if axis not in own for w in axis.partition("=")[2].split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ValueError(f"axis 'channels={','.join(words)}': expected numbers of at least 1")
    return own, [int(word) for word in words]


def with_channels(known: dict[str, Baseline], channels: Sequence[int]) -> dict[str, Baseline]:
    """Add a baseline for each number of channels, where NCCL runs."""
    more = {
        f"{name}, {count} channels": replace(each, make=each.by_channels(count))
        for name, each in known.items()
        for count in channels
        if each.by_channels is not None
    }
    return {**known, **more}
