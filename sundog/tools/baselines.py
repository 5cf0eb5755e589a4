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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ..backends._link import on_host
from ..fused import _gemm, _unfused, all_gather_matmul_barrier, all_reduce_rms_norm, moe_dispatch
from ..fused._fitting import fitting
from ..world.world import World
from .nccl import (
    IN_SYMMETRIC_MEMORY,
    Baseline,
    Call,
    Inputs,
    Make,
    distributed,
    is_plain,
    is_sum,
    multiply_after,
    multiply_before,
    on_group,
    on_nccl,
)

GEMM_ALONE = "cuBLAS alone"  # part of the limit over a link


def _peers(world: World, tensor: torch.Tensor) -> list[torch.Tensor]:
    return [world.peer(tensor, rank) for rank in range(world.size)]


# torch's kernels on the peers' tensors


def _cat(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
    parts = _peers(world, inputs[0])
    return lambda: torch.cat(parts, out=out)


def _copies(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
    """Pull each part by torch's copy: a kernel on one GPU, the copy engine between GPUs."""
    return _copy_all(out.chunk(world.size), _peers(world, inputs[0]))


def _copy_parts(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
    mine = [part.chunk(world.size)[world.rank] for part in _peers(world, inputs[0])]
    return _copy_all(out.chunk(world.size), mine)


def _copy_all(places: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> Call:
    def launch() -> None:
        for place, part in zip(places, parts, strict=True):
            place.copy_(part, non_blocking=True)

    return launch


def _adds(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
    return _add_all(_peers(world, inputs[0]), out)


def _add_parts(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
    mine = [part.chunk(world.size)[world.rank] for part in _peers(world, inputs[0])]
    return _add_all(mine, out)


def _add_all(parts: list[torch.Tensor], out: torch.Tensor) -> Call:
    def launch() -> None:
        out.copy_(parts[0])
        for part in parts[1:]:
            out.add_(part)

    return launch


# an all-reduce, then the residual and the norm by torch


def _then_norm(start: Callable[..., Call]) -> Make:
    """Sum into the new residual's memory; then torch adds and normalises."""

    def make(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
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

    def make(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
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


def _gathered(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
    """Run our GEMM with A gathered, so that no communication is timed."""
    whole, b = _whole(world, problem, inputs[0]), inputs[1]
    sizes = problem.m, problem.m, problem.n, problem.k
    tiles = _gemm.Tiles(**fitting(*sizes, problem.dtype, world.num_sms))
    return lambda: _gemm.matmul(whole, b, out, None, None, tiles, world.num_sms)


def _torch_gathered(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
    """Run cuBLAS with A gathered. It does not keep within the rank's share of the SMs."""
    whole, b = _whole(world, problem, inputs[0]), inputs[1]
    return lambda: torch.mm(whole, b, out=out)


def _gather_then_torch(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
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

    def make(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
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


# MoE dispatch and combine by torch's index kernels and our all-to-all
#
# One baseline moves as many bytes in equal parts, which no routing can beat. The other is what
# users write without the ops: sort by expert, read the counts on the host, send unequal parts.


def _same_bytes(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
    """Run an all-to-all of as many bytes in equal parts, without routing and without an answer."""
    numel = -(-problem.max_tokens * problem.topk * problem.hidden // world.size)
    sent = world.empty(world.size * numel, problem.dtype, "sent").zero_()
    got = world.empty_like(sent)
    plan = _unfused.collective(world, "all_to_all", numel, problem.dtype)
    return lambda: plan.launch(sent, got)


class _Routes(NamedTuple):
    order: torch.Tensor  # this rank's entries of ids, by expert
    sent: list[int]  # rows to each rank
    received: list[int]
    places: tuple[torch.Tensor, ...]  # local expert, source and slot of each row that comes here
    counts: torch.Tensor  # of those rows, by source and local expert


def _routes(world: World, problem: Any, ids: torch.Tensor) -> _Routes:
    """Sort by expert and exchange the counts; the host reads them."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)[int((flat < 0).sum()) :]  # -1 is no expert
    sent = torch.bincount(flat + 1, minlength=problem.experts + 1)[1:]
    counts = world.all_to_all(sent)
    room = torch.arange(problem.experts, device=ids.device).repeat_interleave(counts)
    slot = torch.arange(room.numel(), device=ids.device) - (counts.cumsum(0) - counts)[room]
    places = (room % problem.local, room // problem.local, slot)
    to, of = (each.view(world.size, -1).sum(1).tolist() for each in (sent, counts))
    return _Routes(order, to, of, places, counts.view(world.size, -1))


def _torch_dispatch(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
    x, ids, _ = inputs
    counts, tokens = moe_dispatch.split(problem, out)
    rooms = tokens.view(problem.local, world.size, problem.slots, problem.hidden)

    def launch() -> None:
        routes = _routes(world, problem, ids)
        rows = x[routes.order // problem.topk]
        rooms[routes.places] = world.all_to_all(rows, None, routes.sent, routes.received)
        counts.copy_(routes.counts.T)

    return launch


def _torch_combine(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
    y, ids, _, weights = inputs
    rooms = y.view(problem.local, world.size, problem.slots, problem.hidden)

    def launch() -> None:
        routes = _routes(world, problem, ids)
        rows = world.all_to_all(rooms[routes.places], None, routes.received, routes.sent)
        weighted = rows.float() * weights.flatten()[routes.order, None]
        total = torch.zeros(out.shape, device=out.device)
        out.copy_(total.index_add_(0, routes.order // problem.topk, weighted))

    return launch


def _no_answer(problem: Any, out: torch.Tensor, expected: torch.Tensor) -> int:
    """Compare nothing, since this baseline computes no answer."""
    return 0


# over a link: rank 0 is measured, the others are passive (docs/gpu.md)


def _parts_over_link(world: World, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return all ranks' tensors, the peers' at host addresses, so that the copy engine copies."""
    mine, *others = _peers(world, tensor)  # rank 0 asks
    return [mine, *map(on_host, others)]


def _nothing() -> None:
    """Do nothing on a passive rank."""


def _engine_gather(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
    if world.passive:
        return _nothing
    return _copy_all(out.chunk(world.size), _parts_over_link(world, inputs[0]))


def _engine_then_gemm(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
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


def _gemm_alone(world: World, problem: Any, inputs: Inputs, out: torch.Tensor) -> Call:
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
        "add_": Baseline(_adds, is_sum),
        **distributed("all_reduce", is_sum),
        **IN_SYMMETRIC_MEMORY["all_reduce"],
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
        "our all_reduce": Baseline(_ours("all_reduce"), is_sum, wrong=_is_off),
    },
    "reduce_scatter": {
        "add_": Baseline(_add_parts, is_sum),
        **distributed("reduce_scatter", is_sum),
    },
    "all_to_all": {
        "copy_": Baseline(_copy_parts, lambda w, p: p.splits is None),
        **distributed("all_to_all", lambda w, p: p.splits is None),
    },
    "broadcast": distributed("broadcast"),
    "gather": distributed("gather"),
    "scatter": distributed("scatter"),
    "reduce": distributed("reduce", is_sum),
    "moe_dispatch": {
        "our all_to_all, equal parts": Baseline(_same_bytes, wrong=_no_answer),
        "torch index, our all_to_all": Baseline(
            _torch_dispatch, graph=False, wrong=moe_dispatch.wrong
        ),
    },
    "moe_combine": {
        "our all_to_all, equal parts": Baseline(_same_bytes, wrong=_no_answer),
        "torch index, our all_to_all": Baseline(_torch_combine, graph=False),
    },
    "all_gather_matmul": {
        "our GEMM, A gathered": Baseline(_gathered, is_plain),
        "torch.mm, A gathered": Baseline(_torch_gathered, is_plain),
        "our all-gather, then torch.mm": Baseline(_gather_then_torch, is_plain),
        **distributed("all_gather", is_plain, multiply_after, "{}, then torch.mm"),
        **IN_SYMMETRIC_MEMORY["all_gather_matmul"],
    },
    "matmul_reduce_scatter": {
        **IN_SYMMETRIC_MEMORY["matmul_reduce_scatter"],
        **distributed("reduce_scatter", is_plain, multiply_before, "torch.mm, then {}"),
        "torch.mm, then our reduce-scatter": Baseline(_torch_then("reduce_scatter"), is_plain),
    },
    "matmul_all_gather": {
        **distributed("all_gather", is_plain, multiply_before, "torch.mm, then {}"),
        "torch.mm, then our all-gather": Baseline(_torch_then("all_gather"), is_plain),
    },
    "matmul_all_reduce": {
        **distributed("all_reduce", is_plain, multiply_before, "torch.mm, then {}"),
        "torch.mm, then our all-reduce": Baseline(_torch_then("all_reduce"), is_plain),
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
            there = ", ".join(f"'{each}'" for each in known)
            raise ValueError(f"baseline '{name}' is not known; there are: {there or 'none'}")
    return {name: each for name, each in known.items() if not only or name in only}
