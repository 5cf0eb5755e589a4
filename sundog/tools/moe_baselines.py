"""Baselines of MoE dispatch and combine: torch's index kernels and our all-to-all.

One baseline moves as many bytes in equal parts, which no routing can beat. The other is what users
write without the ops: sort by expert, read the counts on the host, send unequal parts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..fused import _unfused, moe_dispatch
from ..world.world import World
from .nccl import Baseline, Call


def _same_bytes(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
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


def _torch_dispatch(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
    x, ids, _ = inputs
    counts, tokens = moe_dispatch.split(problem, out)
    rooms = tokens.view(problem.local, world.size, problem.slots, problem.hidden)

    def launch() -> None:
        routes = _routes(world, problem, ids)
        rows = x[routes.order // problem.topk]
        rooms[routes.places] = world.all_to_all(rows, None, routes.sent, routes.received)
        counts.copy_(routes.counts.T)

    return launch


def _torch_combine(
    world: World, problem: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor
) -> Call:
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


MOE: dict[str, dict[str, Baseline]] = {
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
}
