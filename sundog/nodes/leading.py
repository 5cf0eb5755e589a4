"""Collectives of little data: on each machine one rank, the leader, sends for all of its ranks.

A message costs bytes of its own (_MESSAGE in pipeline.py). If every rank sends, a machine sends a
message for each of them, and most of its bytes are headers. So a kernel collects the machine's data
on the leader, the leader alone meets the other machines' leaders, and a broadcast inside gives
every rank what came. For all_gather, all_reduce and broadcast that is as many kernels as if every
rank sends; for reduce_scatter and all_to_all it is one more. All data goes by the leader's adapter,
in one piece. The order of adding, and so the bits, are those of hierarchical.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .pipeline import Levels, partial, total

_LEADER = 0  # its number on its machine; of a broadcast it is the source's, which has the data


def all_reduce(levels: Levels, x: torch.Tensor, op: str, out: torch.Tensor, one_shot: bool) -> None:
    """Add on every machine (one shot), or on machine 0, which sends the sum back to the others.

    Of N machines the first sends N (N - 1) messages at once, the second 2 (N - 1), one after the
    other.
    """
    mine = levels.local.all_reduce(x.view(-1), partial(op))

    def meet() -> torch.Tensor:
        if one_shot:
            return total(levels, levels.between.all_gather(mine).wait(), op)
        if levels.between.node:
            sent = levels.between.send(mine, 0)
            coming = levels.between.broadcast(mine, 0)
            sent.wait()
            return coming.wait()
        others = [levels.between.receive(mine, n) for n in range(1, levels.between.count)]
        sums = torch.stack([mine, *(each.wait() for each in others)])
        return levels.between.broadcast(total(levels, sums, op), 0).wait()

    _spread(levels, _LEADER, meet, out)


def reduce_scatter(levels: Levels, x: torch.Tensor, op: str, out: torch.Tensor) -> None:
    """Add whole tensors inside; give each leader what all ranks of its machine must get."""
    mine = levels.local.all_reduce(x.view(-1), partial(op)).view(levels.between.count, -1)
    whole = torch.empty_like(mine[0])

    def meet() -> torch.Tensor:
        return total(levels, levels.between.all_to_all(mine).wait(), op)

    _spread(levels, _LEADER, meet, whole)
    out.view(-1).copy_(whole.view(levels.local.size, -1)[levels.local.rank])


def all_gather(levels: Levels, x: torch.Tensor, out: torch.Tensor) -> None:
    mine = levels.local.all_gather(x.view(-1))
    _spread(levels, _LEADER, lambda: levels.between.all_gather(mine).wait(), out)


def all_to_all(levels: Levels, x: torch.Tensor, out: torch.Tensor) -> None:
    """Gather all of this machine's tensors; exchange all that is for each machine."""
    count, ranks = levels.shape
    mine = levels.local.all_gather(x.view(-1)).view(ranks, count, ranks, -1)
    whole = torch.empty_like(mine).view(count, ranks, ranks, -1)  # from each rank, for each here

    def meet() -> torch.Tensor:
        return levels.between.all_to_all(mine.transpose(0, 1).contiguous()).wait()

    _spread(levels, _LEADER, meet, whole)
    out.view(levels.size, -1).copy_(whole[:, :, levels.local.rank].flatten(0, 1))


def broadcast(levels: Levels, x: torch.Tensor, src: int, out: torch.Tensor) -> None:
    """Send it from rank to counterparts; then each of these has it for its machine."""
    node, leader = divmod(src, levels.local.size)
    _spread(levels, leader, lambda: levels.between.broadcast(x, node).wait(), out)


def _spread(
    levels: Levels, leader: int, meet: Callable[[], torch.Tensor], out: torch.Tensor
) -> None:
    """Let the leader meet the others' leaders, and give its ranks what it brings."""
    brought = meet().view(out.shape) if levels.local.rank == leader else out
    levels.local.broadcast(brought, leader, out)
