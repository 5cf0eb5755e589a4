"""`python -m benchmarks endless`: a serving loop whose shapes never stop changing.

Thousands of calls with thousands of random sizes share a small heap. No call may fail, no result
may be wrong, graphs captured on the way must still replay, and memory must not grow.
"""

from __future__ import annotations

import random
import resource
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from sundog.launch import run
from sundog.world.world import World

from .result_files import Figures

__all__ = ["Endless", "main", "serve"]

OPS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
_KEPT_GRAPHS = 8
_CHECK_EVERY = 50  # calls; a check waits for the GPU


@dataclass(frozen=True)
class Endless:
    calls: int = 10_000
    sizes: int = 2_000
    largest: int = 1_400_000  # bytes of a rank's input
    heap: int = 64 << 20
    seed: int = 0


@dataclass
class _Served:
    """What one rank saw."""

    seconds: float = 0.0
    checked: int = 0
    replayed: int = 0
    wrong: list[str] = field(default_factory=list)
    grown_host: int = 0  # bytes, over the second half
    grown_device: int = 0


def main(how: Endless, size: int, backend: str, json_file: str) -> int:
    """Return the exit status: 1 if a result was wrong or memory grew."""
    served = run(partial(serve, how=how), size, backend, heap_size=how.heap, timeout=30)
    wrong = [line for each in served for line in each.wrong]
    grown = max(each.grown_host for each in served), max(each.grown_device for each in served)
    first = served[0]
    cells = [
        backend, str(size), f"{how.calls:,}", f"{how.sizes:,}", f"{how.heap >> 20} MiB",
        f"{first.seconds:.1f} s", str(first.checked), str(first.replayed), str(len(wrong)),
        f"{grown[0] / (1 << 20):+.1f} MiB", f"{grown[1] / (1 << 20):+.1f} MiB",
    ]  # fmt: skip
    head = ["backend", "ranks", "calls", "sizes", "heap", "time", "checked", "replayed", "wrong",
            "host grew", "GPU grew"]  # fmt: skip
    text = (
        f"{', '.join(OPS)} with random sizes of up to {how.largest:,} bytes. Growth is that of the "
        f"second half of the calls. {_KEPT_GRAPHS} graphs captured on the way are replayed and "
        "checked throughout."
    )
    Figures(f"Endless serving on `{backend}`", text, head, [cells]).show(json_file)
    for line in wrong[:5]:
        print(line)
    return 1 if wrong or grown[0] > how.heap or grown[1] > how.heap else 0


def serve(world: World, how: Endless) -> _Served:
    """Make the calls on one rank. All ranks draw the same random numbers."""
    chance = random.Random(how.seed)
    unit = 2 * world.size  # bytes: bfloat16, divisible by the number of ranks
    sizes = [chance.randint(1, how.largest // unit) * world.size for _ in range(how.sizes)]
    served, graphs = _Served(), _Graphs(world)
    begin, before = time.monotonic(), (0, 0)
    for number in range(how.calls):
        if number == how.calls // 2:
            before = _memory(world)
        op, numel = chance.choice(OPS), chance.choice(sizes)
        x = torch.full((numel,), world.rank + 1.0, dtype=torch.bfloat16, device=world.device)
        out = getattr(world, op)(x)
        if number % _CHECK_EVERY == 0:
            served.checked += 1
            served.wrong += _differences(world, f"call {number}: {op} of {numel}", op, out)
            graphs.turn(op, x, served)
    world.barrier()
    after = _memory(world)
    served.seconds = time.monotonic() - begin
    served.grown_host, served.grown_device = after[0] - before[0], after[1] - before[1]
    return served


class _Graphs:
    """A few graphs from the past. Their plans must outlive thousands of others."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.kept: list[tuple[str, torch.Tensor, Any, Any]] = []

    def turn(self, op: str, x: torch.Tensor, served: _Served) -> None:
        """Replay the oldest, then capture the call that was just made, until there are enough."""
        if self.kept:
            old, given, out, graph = self.kept.pop(0)
            out.fill_(float("nan"))
            graph.replay()
            served.replayed += 1
            served.wrong += _differences(self.world, f"replay of {old} {given.numel()}", old, out)
            self.kept.append((old, given, out, graph))
        if len(self.kept) < _KEPT_GRAPHS:
            with self.world.capture() as graph:
                out = getattr(self.world, op)(x)
            self.kept.append((op, x, out, graph))


def _differences(world: World, what: str, op: str, out: torch.Tensor) -> list[str]:
    """Every rank's input holds its rank + 1."""
    reduced = op in ("all_reduce", "reduce_scatter")
    ranks = torch.arange(1, world.size + 1, dtype=torch.float32, device=out.device)
    parts = out.float().view(1 if reduced else world.size, -1)
    right = ranks.sum()[None] if reduced else ranks
    bad = int((parts != right[:, None]).sum().item())
    return [f"rank {world.rank}, {what}: {bad} of {out.numel()} elements are wrong"] if bad else []


def _memory(world: World) -> tuple[int, int]:
    """Return bytes of this process and of torch on the GPU, when nothing runs."""
    world.barrier()
    host = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    device = torch.cuda.memory_allocated() if world.device.type == "cuda" else 0
    return host, device
