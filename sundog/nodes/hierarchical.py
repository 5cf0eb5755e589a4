"""Collectives over several machines: our kernels inside, transfers between, in chunks.

Every rank talks only to its counterparts, the ranks with its number on other machines. Each byte
that another machine needs crosses the network once, and our kernels spread it inside. Of little
data one rank of a machine sends all. Reductions:

hierarchical    A machine adds what its ranks have, in rank order, by our kernels, and rounds to the
                tensors' dtype. The partial sums of the machines are added in their order, in
                float32, and rounded once more. So bits depend on the number of machines and of the
                ranks of each, and on nothing else. Every rank sends its part of the machine's sum
                to its counterparts: a machine sends no byte twice.
chain           Float32 partial sums go from machine to machine, in rank order, and nothing is
                rounded before the end: the bits of the op on one machine with as many ranks. The
                machines work one after the other, and 16-bit types travel as 32.

Sums of float16 that exceed its range inside one machine are infinite under `hierarchical`; `chain`
has the range of float32 until the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from ..collectives._reduce import accumulated, accumulator, rounded
from .between import Transfer
from .pipeline import Chunk, Levels, NodesConfig, chunks, padded, pipelined

# reductions


def all_reduce(
    levels: Levels, x: torch.Tensor, op: str, out: torch.Tensor, config: NodesConfig
) -> None:
    """Reduce-scatter inside, then between, in the order of machines; then gather back."""
    if _is_whole_average(op, x.dtype):
        wide = torch.empty(x.shape, dtype=torch.int64, device=x.device)
        all_reduce(levels, x.to(torch.int64), "sum", wide, config)
        out.copy_(rounded(op, wide, levels.size, x.dtype))
        return
    if config.led:
        return all_reduce_led(levels, x, op, out, config.one_shot)
    count = levels.between.count
    source, target = x.view(-1), out.view(-1)

    def reduce_inside(chunk: Chunk, _: Any) -> Any:
        part = padded(source[chunk.start : chunk.stop], levels.size)
        mine = levels.local.reduce_scatter(part, _partial(op))
        if config.one_shot:
            return levels.between.all_gather(mine)
        return levels.between.all_to_all(mine.view(count, -1))

    def reduce_between(chunk: Chunk, sums: Any) -> Any:
        mine = _total(levels, sums.wait(), op)
        return mine if config.one_shot else levels.between.all_gather(mine)

    def gather(chunk: Chunk, reduced: Any) -> None:
        mine = reduced if config.one_shot else reduced.wait().view(-1)
        whole = levels.local.all_gather(mine)
        target[chunk.start : chunk.stop] = whole[: chunk.numel]

    pipelined(_cut(source, config, levels.size), reduce_inside, reduce_between, gather)


def all_reduce_chain(
    levels: Levels, x: torch.Tensor, op: str, out: torch.Tensor, config: NodesConfig
) -> None:
    last = levels.between.count - 1
    source, target = x.view(-1), out.view(-1)

    def add(chunk: Chunk, _: Any) -> Any:
        part = padded(source[chunk.start : chunk.stop], levels.local.size)
        slices = levels.local.all_to_all(part).view(levels.local.size, -1)
        return _added(levels, slices, op)

    def spread(chunk: Chunk, made: Any) -> Any:
        sent, mine = made
        return sent, levels.between.broadcast(mine, last)

    def gather(chunk: Chunk, made: Any) -> None:
        sent, coming = made
        whole = levels.local.all_gather(coming.wait())
        if sent is not None:
            sent.wait()
        target[chunk.start : chunk.stop] = whole[: chunk.numel]

    pipelined(_cut(source, config, levels.size), add, spread, gather)


def reduce_scatter(
    levels: Levels, x: torch.Tensor, op: str, out: torch.Tensor, config: NodesConfig
) -> None:
    """Inside, give rank l what all machines' ranks l must get; between, give each its own."""
    if _is_whole_average(op, x.dtype):
        wide = torch.empty(out.shape, dtype=torch.int64, device=x.device)
        reduce_scatter(levels, x.to(torch.int64), "sum", wide, config)
        out.copy_(rounded(op, wide, levels.size, x.dtype))
        return
    if config.led:
        return reduce_scatter_led(levels, x, op, out)
    target = out.view(-1)

    def reduce_inside(chunk: Chunk, _: Any) -> Any:
        mine = levels.local.reduce_scatter(_by_receiver(levels, x, chunk), _partial(op))
        return levels.between.all_to_all(mine.view(levels.between.count, -1))

    def reduce_between(chunk: Chunk, sums: Any) -> None:
        target[chunk.start : chunk.stop] = _total(levels, sums.wait(), op)

    pipelined(_cut(target, config, 1), reduce_inside, reduce_between)


def reduce_scatter_chain(
    levels: Levels, x: torch.Tensor, op: str, out: torch.Tensor, config: NodesConfig
) -> None:
    count = levels.between.count
    target, last = out.view(-1), count - 1

    def add(chunk: Chunk, _: Any) -> Any:
        slices = levels.local.all_to_all(_by_receiver(levels, x, chunk)).view(levels.local.size, -1)
        return _added(levels, slices, op)

    def spread(chunk: Chunk, made: Any) -> Any:
        sent, whole = made
        if levels.between.node < last:
            return [sent, levels.between.receive(target[chunk.start : chunk.stop], last)]
        parts = whole.view(count, -1)
        target[chunk.start : chunk.stop] = parts[last]
        return [levels.between.send(parts[node], node) for node in range(last)]

    def place(chunk: Chunk, transfers: Any) -> None:
        for transfer in transfers:
            got = transfer.wait()
        if levels.between.node < last:
            target[chunk.start : chunk.stop] = got

    pipelined(_cut(target, config, 1), add, spread, place)


def _added(levels: Levels, slices: torch.Tensor, op: str) -> tuple[Any, torch.Tensor]:
    """Add this machine's slices to the sum so far.

    Returns the transfer to the next machine, none from the last, and the result, which only the
    last machine has: the others return room for it.
    """
    node, last = levels.between.node, levels.between.count - 1
    room = torch.empty(slices.shape[1], dtype=slices.dtype, device=slices.device)
    before = None
    if node:
        before = levels.between.receive(room.to(accumulator(room.dtype)), node - 1).wait()
    so_far = accumulated(op, list(slices), before)
    if node == last:
        return None, rounded(op, so_far, levels.size, room.dtype)
    return levels.between.send(so_far, node + 1), room


def _by_receiver(levels: Levels, x: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    """Return a chunk of every rank's slice of x: for each l, those of all machines' ranks l."""
    columns = x.view(*levels.shape, -1)[:, :, chunk.start : chunk.stop]
    return columns.transpose(0, 1).reshape(-1)


def _cut(x: torch.Tensor, config: NodesConfig, multiple: int) -> list[Chunk]:
    return chunks(x.numel(), x.element_size(), config.chunk_bytes, multiple)


def _partial(op: str) -> str:
    """Name the operator inside a machine: an average is a sum until the end."""
    return "sum" if op == "avg" else op


def _total(levels: Levels, sums: torch.Tensor, op: str) -> torch.Tensor:
    """Add the machines' sums in their order, and round once."""
    return rounded(op, accumulated(_partial(op), list(sums)), levels.size, sums.dtype)


def _is_whole_average(op: str, dtype: torch.dtype) -> bool:
    """Return whether it averages integers, whose sum could wrap before the division."""
    return op == "avg" and not dtype.is_floating_point and dtype != torch.int64


# moves


def all_gather(levels: Levels, x: torch.Tensor, out: torch.Tensor, config: NodesConfig) -> None:
    """Gather this machine's tensors while the network brings the others'."""
    if config.led:
        return all_gather_led(levels, x, out)
    source, target = x.view(-1), out.view(*levels.shape, -1)
    node = levels.between.node

    def gather_own(chunk: Chunk, _: Any) -> Transfer:
        part = source[chunk.start : chunk.stop]
        coming = levels.between.all_gather(part)
        own = levels.local.all_gather(part).view(levels.local.size, -1)
        target[node, :, chunk.start : chunk.stop] = own
        return coming

    def gather_others(chunk: Chunk, coming: Transfer) -> None:
        # Slices, no list of numbers: a GPU would fetch that from the host, which no graph can hold.
        arrived = coming.wait()
        others = torch.cat([arrived[:node], arrived[node + 1 :]])
        whole = levels.local.all_gather(others.view(-1))
        parts = whole.view(levels.local.size, len(others), -1).transpose(0, 1)
        target[:node, :, chunk.start : chunk.stop] = parts[:node]
        target[node + 1 :, :, chunk.start : chunk.stop] = parts[node:]

    parts = chunks(x.numel(), x.element_size(), config.chunk_bytes)
    pipelined(parts, gather_own, gather_others)


def broadcast(
    levels: Levels, x: torch.Tensor, src: int, out: torch.Tensor, config: NodesConfig
) -> None:
    """Spread it on the source's machine; then each rank there sends a slice to its counterparts."""
    if config.led:
        return broadcast_led(levels, x, src, out)
    src_node, src_local = divmod(src, levels.local.size)
    is_source = levels.between.node == src_node
    source, target, ranks = x.view(-1), out.view(-1), levels.local.size

    def send(chunk: Chunk, _: Any) -> Transfer:
        part = padded(source[chunk.start : chunk.stop], ranks)
        if is_source:
            part = levels.local.broadcast(part, src_local)
            target[chunk.start : chunk.stop] = part[: chunk.numel]
        return levels.between.broadcast(part.view(ranks, -1)[levels.local.rank], src_node)

    def spread(chunk: Chunk, coming: Transfer) -> None:
        mine = coming.wait()
        if not is_source:
            target[chunk.start : chunk.stop] = levels.local.all_gather(mine)[: chunk.numel]

    pipelined(chunks(x.numel(), x.element_size(), config.chunk_bytes, ranks), send, spread)


def all_to_all(levels: Levels, x: torch.Tensor, out: torch.Tensor, config: NodesConfig) -> None:
    """Inside, give rank l everything for ranks l; between, give each machine its own."""
    if config.led:
        return all_to_all_led(levels, x, out)
    source, target = x.view(*levels.shape, -1), out.view(*levels.shape, -1)

    def collect(chunk: Chunk, _: Any) -> Transfer:
        columns = source[:, :, chunk.start : chunk.stop].transpose(0, 1).reshape(-1)
        mine = levels.local.all_to_all(columns).view(*reversed(levels.shape), -1)
        return levels.between.all_to_all(mine.transpose(0, 1).contiguous())

    def place(chunk: Chunk, coming: Transfer) -> None:
        target[:, :, chunk.start : chunk.stop] = coming.wait()

    part_bytes = max(config.chunk_bytes // levels.size, 1)
    pipelined(chunks(source.shape[2], x.element_size(), part_bytes), collect, place)


def all_to_all_uneven(
    levels: Levels, x: torch.Tensor, out: torch.Tensor, matrix: Sequence[Sequence[int]], rank: int
) -> None:
    """Exchange parts of any sizes in one chunk. `matrix`: elements from each rank (row) to each."""
    count, ranks = levels.shape
    node, local = divmod(rank, ranks)
    starts = [0, *accumulate(matrix[rank])]
    to = [range(number, levels.size, ranks) for number in range(ranks)]  # ranks of that number
    flat = x.view(-1)
    parts = [flat[starts[r] : starts[r + 1]] for each in to for r in each]
    sent = [sum(matrix[rank][r] for r in each) for each in to]
    here = range(node * ranks, (node + 1) * ranks)
    got = [sum(matrix[r][t] for t in to[local]) for r in here]
    inside = levels.local.all_to_all(torch.cat(parts), None, sent, got)
    # From rank r of this machine: a piece for each machine. Sorted by machine, then by r.
    pieces = inside.split([matrix[r][t] for r in here for t in to[local]])
    by_node = torch.cat([pieces[i * count + n] for n in range(count) for i in range(ranks)])
    in_splits = [sum(matrix[r][t] for r in here) for t in to[local]]
    out_splits = [sum(matrix[n * ranks + i][rank] for i in range(ranks)) for n in range(count)]
    coming = levels.between.all_to_all_uneven(by_node, in_splits, out_splits)
    out.view(-1).copy_(coming.wait())


# little data

# A message costs bytes of its own (_MESSAGE in pipeline.py). If every rank sends, a machine sends a
# message for each of them, and most of its bytes are headers. So a kernel collects the machine's
# data on one rank, the leader, it alone meets the other machines' leaders, and a broadcast inside
# gives every rank what came. For all_gather, all_reduce and broadcast that is as many kernels as if
# every rank sends; for reduce_scatter and all_to_all it is one more. All data goes by the leader's
# adapter, in one piece.
_LEADER = 0  # its number on its machine; of a broadcast it is the source's, which has the data


def all_reduce_led(
    levels: Levels, x: torch.Tensor, op: str, out: torch.Tensor, one_shot: bool
) -> None:
    """Add on every machine (one shot), or on machine 0, which sends the sum back to the others.

    Of N machines the first sends N (N - 1) messages at once, the second 2 (N - 1), one after the
    other.
    """
    mine = levels.local.all_reduce(x.view(-1), _partial(op))

    def meet() -> torch.Tensor:
        if one_shot:
            return _total(levels, levels.between.all_gather(mine).wait(), op)
        if levels.between.node:
            sent = levels.between.send(mine, 0)
            coming = levels.between.broadcast(mine, 0)
            sent.wait()
            return coming.wait()
        others = [levels.between.receive(mine, n) for n in range(1, levels.between.count)]
        sums = torch.stack([mine, *(each.wait() for each in others)])
        return levels.between.broadcast(_total(levels, sums, op), 0).wait()

    _spread(levels, _LEADER, meet, out)


def reduce_scatter_led(levels: Levels, x: torch.Tensor, op: str, out: torch.Tensor) -> None:
    """Add whole tensors inside; give each leader what all ranks of its machine must get."""
    mine = levels.local.all_reduce(x.view(-1), _partial(op)).view(levels.between.count, -1)
    whole = torch.empty_like(mine[0])

    def meet() -> torch.Tensor:
        return _total(levels, levels.between.all_to_all(mine).wait(), op)

    _spread(levels, _LEADER, meet, whole)
    out.view(-1).copy_(whole.view(levels.local.size, -1)[levels.local.rank])


def all_gather_led(levels: Levels, x: torch.Tensor, out: torch.Tensor) -> None:
    mine = levels.local.all_gather(x.view(-1))
    _spread(levels, _LEADER, lambda: levels.between.all_gather(mine).wait(), out)


def all_to_all_led(levels: Levels, x: torch.Tensor, out: torch.Tensor) -> None:
    """Gather all of this machine's tensors; exchange all that is for each machine."""
    count, ranks = levels.shape
    mine = levels.local.all_gather(x.view(-1)).view(ranks, count, ranks, -1)
    whole = torch.empty_like(mine).view(count, ranks, ranks, -1)  # from each rank, for each here

    def meet() -> torch.Tensor:
        return levels.between.all_to_all(mine.transpose(0, 1).contiguous()).wait()

    _spread(levels, _LEADER, meet, whole)
    out.view(levels.size, -1).copy_(whole[:, :, levels.local.rank].flatten(0, 1))


def broadcast_led(levels: Levels, x: torch.Tensor, src: int, out: torch.Tensor) -> None:
    """Send it from rank to counterparts; then each of these has it for its machine."""
    node, leader = divmod(src, levels.local.size)
    _spread(levels, leader, lambda: levels.between.broadcast(x, node).wait(), out)


def _spread(
    levels: Levels, leader: int, meet: Callable[[], torch.Tensor], out: torch.Tensor
) -> None:
    """Let the leader meet the others' leaders, and give its ranks what it brings."""
    brought = meet().view(out.shape) if levels.local.rank == leader else out
    levels.local.broadcast(brought, leader, out)
