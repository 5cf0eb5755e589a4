"""What a user would call instead of an op, on the same ranks and memory, by the op's name.

To add one: write a function here that takes a world, a problem, inputs and an output, and returns
the call; then add its line to BASELINES at the end of this file.

Torch's own kernels on the peers' tensors run everywhere. Where ranks are processes (`symm`) there
are also torch.distributed (nccl.py) and torch's kernels for symmetric memory, which our heap is.
Torch's kernels on peers and its one_shot for symmetric memory have run on a GPU; two_shot and NCCL
have not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ..backends._link import on_host
from ..fused import _gemm, _unfused, all_gather_matmul_barrier, all_reduce_rms_norm
from ..fused._call import fitting
from ..world.world import World
from .moe_baselines import MOE
from .nccl import (
    Baseline,
    Call,
    Make,
    distributed,
    multiply_after,
    multiply_before,
    on_group,
    on_nccl,
)

GEMM_ALONE = "cuBLAS alone"  # part of the limit over a link


def _peers(world: World, tensor: torch.Tensor) -> list[torch.Tensor]:
    return [world.peer(tensor, rank) for rank in range(world.size)]


# torch's kernels on the peers' tensors


def _cat(world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> Call:
    parts = _peers(world, inputs[0])
    return lambda: torch.cat(parts, out=out)


def _copies(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    """Pull each part by torch's copy: a kernel on one GPU, the copy engine between GPUs."""
    return _copy_all(out.chunk(world.size), _peers(world, inputs[0]))


def _copy_parts(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    mine = [part.chunk(world.size)[world.rank] for part in _peers(world, inputs[0])]
    return _copy_all(out.chunk(world.size), mine)


def _copy_all(places: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> Call:
    def launch() -> None:
        for place, part in zip(places, parts, strict=True):
            place.copy_(part, non_blocking=True)

    return launch


def _adds(world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> Call:
    return _add_all(_peers(world, inputs[0]), out)


def _add_parts(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    mine = [part.chunk(world.size)[world.rank] for part in _peers(world, inputs[0])]
    return _add_all(mine, out)


def _add_all(parts: list[torch.Tensor], out: torch.Tensor) -> Call:
    def launch() -> None:
        out.copy_(parts[0])
        for part in parts[1:]:
            out.add_(part)

    return launch


def _is_sum(world: World, problem: Any) -> bool:
    return bool(problem.op == "sum")


# torch's kernels for symmetric memory


def _in_symmetric_memory(world: World, problem: Any) -> bool:
    return world.backend == "symm" and _is_sum(world, problem)


def _name() -> str:
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD.group_name)


def _one_shot(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    name = _name()
    return lambda: torch.ops.symm_mem.one_shot_all_reduce_out(inputs[0], "sum", name, out)


def _two_shot(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    """Reduce a copy into `out`, since the kernel leaves a part of the sum in its input."""
    name, copy = _name(), world.empty_like(inputs[0])

    def launch() -> None:
        torch.ops.symm_mem.two_shot_all_reduce_out(copy.copy_(inputs[0]), "sum", name, out)

    return launch


def _fused_gather(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    """Gather and multiply by torch, which pipelines copies with products and has no `out`."""
    name, fused = _name(), torch.ops.symm_mem.fused_all_gather_matmul
    return lambda: out.copy_(fused(inputs[0], [inputs[1]], 0, name, return_A=False)[1][0])


def _fused_scatter(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    name, fused = _name(), torch.ops.symm_mem.fused_matmul_reduce_scatter
    return lambda: out.copy_(fused(inputs[0], inputs[1], "sum", 0, name))


def _is_fused_by_torch(world: World, problem: Any) -> bool:
    """Return whether ranks are processes, and rows are what is gathered or scattered."""
    by_rows = getattr(problem, "shard", "m") == "m" and problem.m % world.size == 0
    return world.backend == "symm" and by_rows and _is_plain(world, problem)


def _is_far(problem: Any, got: torch.Tensor, wanted: torch.Tensor) -> int:
    """Count what is off by 1 % of the largest: torch rounds each rank's part before it sums."""
    return int(((got - wanted).abs().float() > 0.01 * wanted.abs().float().max()).sum())


# an all-reduce, then the residual and the norm by torch


def _then_norm(start: Callable[..., Call]) -> Make:
    """Sum into the new residual's memory; then torch adds and normalises."""

    def make(
        world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> Call:
        x, residual, weight = inputs
        to = all_reduce_rms_norm.split(problem, out)
        reduce = start(world, problem, (x.view(-1),), to.residual.view(-1))

        def launch() -> None:
            reduce()
            to.residual.add_(residual)
            shape = (problem.hidden,)
            to.normed.copy_(F.rms_norm(to.residual, shape, weight, problem.eps))

        return launch

    return make


def _ours(op: str) -> Make:
    """Run our collective."""

    def make(
        world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> Call:
        plan = _unfused.collective(world, op, inputs[0].numel(), problem.dtype)
        return lambda: plan.launch(inputs[0], out)

    return make


def _is_off(problem: Any, out: torch.Tensor, expected: torch.Tensor) -> int:
    """Count what one byte per element does not explain: more than an eighth of the largest."""
    return int(((out - expected).abs().float() > expected.abs().float().max() / 8).sum())


def _is_plain_norm(world: World, problem: Any) -> bool:
    return not (problem.quant or problem.gemma or problem.has_bias)


def _far_rows(problem: Any, out: torch.Tensor, expected: torch.Tensor) -> int:
    """Count elements that are off by more than torch rounds, which adds in another order."""
    mine, wanted = (all_reduce_rms_norm.split(problem, each) for each in (out, expected))
    bound = 4 * torch.finfo(problem.dtype).eps
    pairs = ((mine.normed, wanted.normed), (mine.residual, wanted.residual))
    return sum(
        int((~torch.isclose(a.float(), b.float(), bound, 16 * bound)).sum().item())
        for a, b in pairs
    )


# the same matrix product before or after a collective
#
# Where ranks share a GPU, cuBLAS takes SMs that belong to other ranks. With torch.mm of 256 rows,
# then our reduce-scatter, 8 ranks on an H200 hung: seven waited in the collective, on 112 of 132
# SMs, for the eighth, whose product found no SM. So a barrier of one warp per rank follows each
# torch.mm, and no rank waits with more than that before all products are done.


def _is_plain(world: World, problem: Any) -> bool:
    """Return whether torch.mm can compute it: no bias, no activation, one type."""
    own_type = problem.out_dtype in (None, problem.dtype)
    return not problem.has_bias and problem.activation is None and own_type


def _gathered(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    """Run our GEMM with A gathered, so that no communication is timed."""
    whole, b = _whole(world, problem, inputs[0]), inputs[1]
    sizes = problem.m, problem.m, problem.n, problem.k
    tiles = _gemm.Tiles(**fitting(*sizes, problem.dtype, world.num_sms))
    return lambda: _gemm.matmul(whole, b, out, None, None, tiles, world.num_sms)


def _torch_gathered(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    """Run cuBLAS with A gathered. It does not keep within the rank's share of the SMs."""
    whole, b = _whole(world, problem, inputs[0]), inputs[1]
    return lambda: torch.mm(whole, b, out=out)


def _gather_then_torch(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    """Run our all-gather, then cuBLAS."""
    a, b = inputs
    gather = all_gather_matmul_barrier.gather(world, problem, world.num_sms)

    def launch() -> None:
        gather.launch(a)
        torch.mm(gather.whole, b, out=out)
        world.device_barrier()  # before the next gather: see above

    return launch


def _torch_then(op: str) -> Callable[..., Call]:
    """Run cuBLAS, then our collective."""

    def make(
        world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
    ) -> Call:
        a, b = inputs
        partial = world.empty((problem.m, problem.n), problem.dtype, "partial")
        slices = problem.size if op == "reduce_scatter" else 1
        numel = problem.m * problem.n // slices
        then = _unfused.collective(world, op, numel, problem.dtype)

        def launch() -> None:
            torch.mm(a, b, out=partial)
            world.device_barrier()  # before the collective: see above
            then.launch(partial.view(-1), out.view(-1))

        return launch

    return make


def _whole(world: World, problem: Any, a: torch.Tensor) -> torch.Tensor:
    return torch.cat(_peers(world, a), dim=1 if problem.shard == "k" else 0)


# over a link: rank 0 is measured, the others are passive (docs/gpu.md)


def _parts_over_link(world: World, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return all ranks' tensors, the peers' at host addresses, so that the copy engine copies."""
    mine, *others = _peers(world, tensor)  # rank 0 asks
    return [mine, *map(on_host, others)]


def _nothing() -> None:
    """Do nothing on a passive rank."""


def _engine_gather(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    if world.passive:
        return _nothing
    return _copy_all(out.chunk(world.size), _parts_over_link(world, inputs[0]))


def _engine_then_gemm(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    """Copy into one matrix, then multiply. Torch copies a part of columns through a buffer, so what
    crosses the link is contiguous on both sides."""
    if world.passive:
        return _nothing
    whole, places = _room_for_all(world, problem)
    gather = _copy_all(places, _parts_over_link(world, inputs[0]))

    def call() -> None:
        gather()
        torch.mm(whole, inputs[1], out=out)

    return call


def _gemm_alone(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    if world.passive:
        return _nothing
    whole, places = _room_for_all(world, problem)
    _copy_all(places, _parts_over_link(world, inputs[0]))()
    return lambda: torch.mm(whole, inputs[1], out=out)


def _room_for_all(world: World, problem: Any) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    whole = torch.empty((problem.m, problem.k), dtype=problem.dtype, device=world.device)
    return whole, whole.chunk(world.size, dim=1 if problem.shard == "k" else 0)


BASELINES: dict[str, dict[str, Baseline]] = {
    "all_gather": {
        "torch.cat": Baseline(_cat),
        "copy_": Baseline(_copies),
        **distributed("all_gather"),
    },
    "all_reduce": {
        "add_": Baseline(_adds, _is_sum),
        **distributed("all_reduce", _is_sum),
        "symm_mem.one_shot": Baseline(_one_shot, _in_symmetric_memory),
        "symm_mem.two_shot": Baseline(_two_shot, _in_symmetric_memory),
    },
    "all_reduce_rms_norm": {
        "our all-reduce, then torch's norm": Baseline(
            _then_norm(_ours("all_reduce")), _is_plain_norm, wrong=_far_rows
        ),
        "add_, then torch's norm": Baseline(_then_norm(_adds), _is_plain_norm, wrong=_far_rows),
        "nccl, then torch's norm": Baseline(
            _then_norm(on_group("all_reduce", "nccl")),
            lambda w, p: on_nccl(w, p) and _is_plain_norm(w, p),
            wrong=_far_rows,
        ),
    },
    "quantized_all_gather": {"our all_gather": Baseline(_ours("all_gather"), wrong=_is_off)},
    "quantized_all_reduce": {
        "our all_reduce": Baseline(_ours("all_reduce"), _is_sum, wrong=_is_off),
    },
    "reduce_scatter": {
        "add_": Baseline(_add_parts, _is_sum),
        **distributed("reduce_scatter", _is_sum),
    },
    "all_to_all": {
        "copy_": Baseline(_copy_parts, lambda w, p: p.splits is None),
        **distributed("all_to_all", lambda w, p: p.splits is None),
    },
    "broadcast": distributed("broadcast"),
    "gather": distributed("gather"),
    "scatter": distributed("scatter"),
    "reduce": distributed("reduce", _is_sum),
    **MOE,
    "all_gather_matmul": {
        "our GEMM, A gathered": Baseline(_gathered, _is_plain),
        "torch.mm, A gathered": Baseline(_torch_gathered, _is_plain),
        "our all-gather, then torch.mm": Baseline(_gather_then_torch, _is_plain),
        **distributed("all_gather", _is_plain, multiply_after, "{}, then torch.mm"),
        "symm_mem.fused_all_gather_matmul": Baseline(_fused_gather, _is_fused_by_torch, False),
    },
    "matmul_reduce_scatter": {
        "symm_mem.fused_matmul_reduce_scatter": Baseline(
            _fused_scatter, _is_fused_by_torch, False, _is_far
        ),
        **distributed("reduce_scatter", _is_plain, multiply_before, "torch.mm, then {}"),
        "torch.mm, then our reduce-scatter": Baseline(_torch_then("reduce_scatter"), _is_plain),
    },
    "matmul_all_gather": {
        **distributed("all_gather", _is_plain, multiply_before, "torch.mm, then {}"),
        "torch.mm, then our all-gather": Baseline(_torch_then("all_gather"), _is_plain),
    },
    "matmul_all_reduce": {
        **distributed("all_reduce", _is_plain, multiply_before, "torch.mm, then {}"),
        "torch.mm, then our all-reduce": Baseline(_torch_then("all_reduce"), _is_plain),
    },
}


OVER_LINK: dict[str, dict[str, Baseline]] = {
    "all_gather": {"copy engine": Baseline(_engine_gather)},
    "all_gather_matmul": {
        "copy engine, then cuBLAS": Baseline(_engine_then_gemm),
        GEMM_ALONE: Baseline(_gemm_alone),
    },
}


def chosen(known: dict[str, Baseline], only: Sequence[str]) -> dict[str, Baseline]:
    """Select baselines by name, or all without a name. "none" selects nothing."""
    for name in only:
        if name not in known and name != "none":
            there = " ".join(f"'{each}'" for each in known)
            raise ValueError(f"baseline '{name}' is not known; there are: {there or 'none'}")
    return {name: each for name, each in known.items() if not only or name in only}
