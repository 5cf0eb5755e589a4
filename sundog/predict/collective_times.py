"""The time of every collective's algorithm, composed of parts.py.

`problem` and `config` are those of the op's module, of which only fields are read, so the module
need not be loaded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .parts import (
    Part,
    Ranks,
    Round,
    Traffic,
    barrier,
    copied,
    flags,
    launch,
    together,
    waves,
    words,
)

Model = Callable[[Any, Any, Ranks], list[Part]]

_LINE = 128  # bytes: slices of a reduction are whole lines
_PER_CHUNK = 3.0  # flags in flight: the slot is free, it is full; and the fence before each


def _nbytes(problem: Any) -> float:
    return float(problem.numel * problem.dtype.itemsize)


def _block(problem: Any, config: Any) -> int:
    """Return the bytes of a tile of a reduction, whose configs count elements."""
    return int(config.block * problem.dtype.itemsize)


def _others(ranks: Ranks) -> float:
    return (ranks.size - 1) / ranks.size


# that move


def all_gather_push(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Barrier; load a tile, store it to every rank; barrier."""
    n, size = _nbytes(problem), ranks.size
    block = min(_tile_bytes(config), n)
    traffic = Traffic(n, n * size, 0, 0, n * (size - 1))
    rounds = waves(n, config.programs * block)
    tile = Round(block, block * size)
    return [
        launch(ranks),
        barrier(ranks),
        copied(ranks, "stores", traffic, tile, rounds),
        barrier(ranks),
    ]


def _tile_bytes(config: Any) -> int:
    """Gluon tiles have two dimensions."""
    return int(config.block if hasattr(config, "block") else config.block_m * config.block_n)


def all_gather_pull(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Barrier; every rank's tensor, one after the other; barrier."""
    n, size = _nbytes(problem), ranks.size
    # All ranks read the same tensors, from the cache if those fit beside what is written.
    reread = n * (size - 1) if 2 * n * ranks.per_gpu <= ranks.hardware.gpu.cache_bytes else 0
    return _pulled(n, reread, config, ranks)


def _pulled(n: float, reread: float, config: Any, ranks: Ranks) -> list[Part]:
    size = ranks.size
    block = min(config.block, n)
    traffic = Traffic(n * size - reread, n * size, reread, n * (size - 1))
    rounds = size * waves(n, config.programs * block)
    tile = Round(block, block, is_there=True)
    return [
        launch(ranks),
        barrier(ranks),
        copied(ranks, "loads", traffic, tile, rounds),
        barrier(ranks),
    ]


def _spans(n: float, read: float, config: Any, ranks: Ranks) -> list[Part]:
    """Split programs by peer; each waits for two flags, per peer if it has several."""
    size, sent = ranks.size, n * ranks.size
    parts = max(config.programs // size, 1)
    turns = waves(size * parts, config.programs)
    block = min(config.block, n)
    traffic = Traffic(read, sent, sent - read, 0, n * (size - 1))
    rounds = turns * waves(n, parts * block)
    copy = copied(ranks, "stores", traffic, Round(block, block), rounds)
    return [launch(ranks), flags(ranks, 2.0 * turns), copy]


def all_gather_partitioned(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    n = _nbytes(problem)
    return _spans(n, n, config, ranks)  # all programs read the same tensor


def all_to_all_push(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    n = _nbytes(problem)
    return _spans(n, n * ranks.size, config, ranks)


def all_to_all_pull(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Barrier; this rank's part from every rank, one after the other; barrier."""
    return _pulled(_nbytes(problem), 0, config, ranks)  # no other rank reads this part


def all_to_all_mail(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Chunk by chunk: fill a slot, signal; wait, empty the slot, signal.

    While some programs wait for a flag, others copy.
    """
    size = ranks.size
    n = sum(problem.matrix[0]) * problem.dtype.itemsize / size
    parts = max(config.programs // size, 1)
    chunks = waves(size * parts, config.programs) * waves(n, parts * config.block)
    block = min(config.block, n)
    traffic = Traffic(2 * n * size, 2 * n * size, written_there=n * (size - 1))
    copy = copied(ranks, "copies", traffic, Round(2 * block, 2 * block, 2.0), chunks)
    waits = flags(ranks, _PER_CHUNK * chunks)
    return [launch(ranks), together("chunks", [waits, copy])]


def broadcast_push(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Expect that one rank's programs do all of it."""
    return _from_one(_nbytes(problem), config, ranks)


def scatter_push(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    return _from_one(_nbytes(problem), config, ranks)


def _from_one(n: float, config: Any, ranks: Ranks) -> list[Part]:
    size = ranks.size
    parts = max(config.programs // size, 1)
    turns = waves(size * parts, config.programs)
    block = min(config.block, n)
    moved = n * size / ranks.per_gpu  # by one of the ranks that share the GPU
    traffic = Traffic(moved, moved, written_there=n * (size - 1))
    rounds = turns * waves(n, parts * block)
    copy = copied(ranks, "stores", traffic, Round(block, block), rounds)
    return [launch(ranks), flags(ranks, 2.0 * turns), copy]


def gather_pull(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    n, size = _nbytes(problem), ranks.size
    block = min(config.block, n)
    moved = n * size / ranks.per_gpu
    traffic = Traffic(moved, moved, read_there=n * (size - 1))
    rounds = size * waves(n, config.programs * block)
    copy = copied(ranks, "loads", traffic, Round(block, block, is_there=True), rounds)
    return [launch(ranks), barrier(ranks), copy, barrier(ranks)]


# that reduce


def all_reduce_one_shot(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Copy my tensor to where all see it; barrier; read and reduce all."""
    n, size = _nbytes(problem), ranks.size
    block = min(_block(problem, config), n)
    rounds = waves(n, config.programs * block)
    shown = copied(ranks, "copy", Traffic(n, n), Round(block, block), rounds)
    traffic = Traffic(n, n, n * (size - 1), n * (size - 1))
    tile = Round(block * size, block, is_there=True)
    return [launch(ranks), shown, barrier(ranks), copied(ranks, "reduce", traffic, tile, rounds)]


def all_reduce_low_latency(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Send words with their flags to all ranks; poll until all are there."""
    per_word = 2 if problem.dtype.itemsize == 2 else 1
    return words(ranks, problem.numel / per_word * (ranks.size - 1))


def all_reduce_two_shot(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Barrier; reduce my slice and store it to all; barrier."""
    n, size = _nbytes(problem), ranks.size
    slice_bytes = max(math.ceil(n / size / _LINE) * _LINE, 1)
    block = min(_block(problem, config), slice_bytes)
    rounds = waves(slice_bytes, config.programs * block)
    far = n * _others(ranks)
    traffic = Traffic(n, n, 0, far, far)
    tile = Round(block * size, block * size, is_there=True)
    reduced = copied(ranks, "reduce and store", traffic, tile, rounds)
    return [launch(ranks), barrier(ranks), reduced, barrier(ranks)]


def all_reduce_two_shot_pull(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Barrier; reduce my slice; barrier; load all slices."""
    n, size = _nbytes(problem), ranks.size
    slice_bytes = max(math.ceil(n / size / _LINE) * _LINE, 1)
    block = min(_block(problem, config), slice_bytes)
    rounds = waves(slice_bytes, config.programs * block)
    far = n * _others(ranks)
    tile = Round(block * size, block, is_there=True)
    reduced = copied(ranks, "reduce", Traffic(n, n / size, 0, far), tile, rounds)
    # A slice was written just before, so it comes out of the cache.
    traffic = Traffic(n / size, n, n - n / size, far)
    pulled = copied(ranks, "loads", traffic, Round(block, block, is_there=True), rounds * size)
    return [launch(ranks), barrier(ranks, 2.0, "barriers"), reduced, pulled]


def all_reduce_ring(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """2 (W - 1) steps: a slice goes on to the next rank, a flag after it."""
    n, size = _nbytes(problem), ranks.size
    slice_bytes = max(math.ceil(n / size / _LINE) * _LINE, 1)
    block = min(_block(problem, config), slice_bytes)
    rounds = 2 * size * waves(slice_bytes, config.programs * block)
    sent = 2 * n * _others(ranks)
    traffic = Traffic(1.5 * sent + n, sent + n / size, 0, 0, sent)
    copy = copied(ranks, "slices", traffic, Round(1.5 * block, block), rounds)
    return [launch(ranks), flags(ranks, 2.0 * (size - 1)), copy]


def all_reduce_atomic(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Zero my output; barrier; add my tensor to all outputs; barrier."""
    n, size = _nbytes(problem), ranks.size
    block = min(_block(problem, config), n)
    rounds = waves(n, config.programs * block)
    zeroed = copied(ranks, "zeros", Traffic(0, n), Round(0, block), rounds)
    traffic = Traffic(n + n * size, n * size, 0, 0, n * (size - 1))
    added = copied(ranks, "atomics", traffic, Round(block, 2 * block * size), rounds)
    return [launch(ranks), zeroed, barrier(ranks), added, barrier(ranks)]


def reduce_scatter_direct(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Barrier; read my slice from all ranks and reduce it; barrier."""
    n, size = _nbytes(problem), ranks.size
    return _reduced(n, n * size, problem, config, ranks)


def reduce_direct(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Expect what reduce_scatter takes, but on one rank."""
    n, size = _nbytes(problem), ranks.size
    return _reduced(n, n * size / ranks.per_gpu, problem, config, ranks)


def _reduced(n: float, read: float, problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    block = min(_block(problem, config), n)
    rounds = waves(n, config.programs * block)
    traffic = Traffic(read, read / ranks.size, 0, n * (ranks.size - 1))
    tile = Round(block * ranks.size, block, is_there=True)
    reduced = copied(ranks, "reduce", traffic, tile, rounds)
    return [launch(ranks), barrier(ranks), reduced, barrier(ranks)]


def quantized_all_gather_push(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Load a tile, store its bytes to every rank; barrier; restore all that has arrived."""
    n, wire, size = _nbytes(problem), float(problem.wire_bytes), ranks.size
    tile = min(config.groups * 128.0 * problem.dtype.itemsize, n)
    rounds = waves(problem.groups, config.programs * config.groups)
    sent = Traffic(n, wire * size, 0, 0, wire * (size - 1))
    stores = copied(ranks, "stores", sent, Round(tile, tile * size * wire / max(n, 1)), rounds)
    last = _restored(wire * size, n * size, tile, rounds * size, ranks)
    return [launch(ranks), stores, barrier(ranks), last]


def quantized_all_reduce_two_shot(problem: Any, config: Any, ranks: Ranks) -> list[Part]:
    """Store each slice to its rank; barrier; add and store to all; barrier; restore all."""
    n, size = _nbytes(problem), ranks.size
    wire = size * problem.groups * 132.0
    far, rounds = wire * _others(ranks), waves(problem.groups, config.programs * config.groups)
    tile = min(config.groups * 128.0 * problem.dtype.itemsize, n)
    sent = copied(ranks, "slices", Traffic(n, wire, 0, 0, far), Round(tile, tile), rounds * size)
    added = Traffic(0, wire, wire, 0, far)
    sums = copied(ranks, "sums", added, Round(tile * size, tile * size), rounds)
    last = _restored(wire, n, tile, rounds * size, ranks)
    return [launch(ranks), sent, barrier(ranks), sums, barrier(ranks), last]


def _restored(wire: float, nbytes: float, tile: float, rounds: float, ranks: Ranks) -> Part:
    """Read what has just arrived out of the cache."""
    return copied(ranks, "restored", Traffic(0, nbytes, wire), Round(tile, tile), rounds)


COLLECTIVES: dict[str, Model] = {
    "quantized_all_gather.push": quantized_all_gather_push,
    "quantized_all_reduce.two_shot": quantized_all_reduce_two_shot,
    "all_gather.push": all_gather_push,
    "all_gather.gluon": all_gather_push,
    "all_gather.pull": all_gather_pull,
    "all_gather.partitioned": all_gather_partitioned,
    "all_to_all.push": all_to_all_push,
    "all_to_all.pull": all_to_all_pull,
    "all_to_all.mail": all_to_all_mail,
    "broadcast.push": broadcast_push,
    "scatter.push": scatter_push,
    "gather.pull": gather_pull,
    "all_reduce.one_shot": all_reduce_one_shot,
    "all_reduce.low_latency": all_reduce_low_latency,
    "all_reduce.two_shot": all_reduce_two_shot,
    "all_reduce.two_shot_pull": all_reduce_two_shot_pull,
    "all_reduce.ring": all_reduce_ring,
    "all_reduce.atomic": all_reduce_atomic,
    "reduce_scatter.direct": reduce_scatter_direct,
    "reduce.direct": reduce_direct,
}
