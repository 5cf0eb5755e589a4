"""`python -m benchmarks endless`: a serving loop whose shapes never stop changing.

Thousands of calls with thousands of random sizes share a small heap. No call may fail, no result
may be wrong, graphs captured on the way must still replay, and memory must not grow.
"""

from __future__ import annotations

import math
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from sundog import knobs
from sundog.launch import run
from sundog.world.world import World

from .result_files import Figures

OPS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
_KEPT_GRAPHS = 8
_CHECK_EVERY = 50  # calls; a check waits for the GPU
_TELL_EVERY = 500
# Programs are interpreted one by one, and each has a price: on a CPU a few do the same work sooner.
_SIMULATED_SMS = 2


@dataclass(frozen=True)
class Endless:
    calls: int = 10_000
    sizes: int = 2_000
    largest: int = 1_400_000  # bytes of a rank's input
    heap: int = 64 << 20
    seed: int = 0
    seconds: float = math.inf  # then no more calls, which is a failure


@dataclass
class _Served:
    """What one rank saw."""

    seconds: tuple[float, float] = (0.0, 0.0)  # of the first half of the calls, and of the second
    calls: int = 0
    is_over: bool = False  # the time
    plans: int = 0  # made
    checked: int = 0
    replayed: int = 0
    wrong: list[str] = field(default_factory=list)
    grown_host: int = 0  # bytes, over the second half
    grown_device: int = 0


def main(how: Endless, size: int, backend: str, json_file: str) -> int:
    """Return the exit status: 1 if a result was wrong or memory grew."""
    on_cpu = backend in ("sim", "shm")
    if on_cpu:
        os.environ.setdefault(knobs.num_sms.name, str(_SIMULATED_SMS))
    served = run(partial(serve, how=how), size, backend, heap_size=how.heap, timeout=30)
    wrong = [line for each in served for line in each.wrong]
    grown = max(each.grown_host for each in served), max(each.grown_device for each in served)
    first, half = served[0], how.calls / 2
    row = {
        "ranks": str(size),
        "calls": f"{first.calls:,}",
        "sizes": f"{how.sizes:,}",
        "plans": f"{first.plans:,}",
        "time": f"{sum(first.seconds):.0f} s",
        "calls/s": " → ".join(f"{half / seconds:.0f}" for seconds in first.seconds),
        "checked": str(first.checked),
        "replays": str(first.replayed),
        "wrong": str(len(wrong)),
        "grew": " + ".join(f"{nbytes / (1 << 20):.1f}" for nbytes in grown) + " MiB",
    }
    text = (
        f"{', '.join(OPS)} with random sizes of up to {how.largest:,} bytes, drawn on a "
        f"logarithmic scale, from a heap of {how.heap >> 20} MiB. Nearly every call makes a plan "
        "and evicts another. calls/s: in the first half and in the second. Growth is that of the "
        f"second half, of the process and on the GPU. {_KEPT_GRAPHS} graphs captured on the way "
        "are replayed and checked throughout."
        + (f" {knobs.num_sms.get()} simulated SMs." if on_cpu else "")
    )
    Figures(f"Endless serving on `{backend}`", text, [*row], [[*row.values()]]).show(
        json_file, on_cpu=on_cpu
    )
    for line in wrong[:5]:
        print(line)
    if first.calls < how.calls:
        print(f"{first.calls:,} of {how.calls:,} calls were made: {how.seconds:g} s were over")
    return (
        1 if first.calls < how.calls or wrong or grown[0] > how.heap or grown[1] > how.heap else 0
    )


def serve(world: World, how: Endless) -> _Served:
    """Make the calls on one rank. All ranks draw the same random numbers; rank 0 says how far."""
    served = _Served()
    make = _calls(world, how, served)
    half = how.calls // 2
    begin = time.monotonic()
    make(0, half)
    before, middle = _memory(world), time.monotonic()
    make(half, how.calls)
    after, end = _memory(world), time.monotonic()
    served.seconds = middle - begin, end - middle
    served.plans = world._plans.made
    served.grown_host, served.grown_device = after[0] - before[0], after[1] - before[1]
    return served


def _calls(world: World, how: Endless, served: _Served) -> Callable[[int, int], None]:
    """Return what makes the calls from one number to another."""
    chance = random.Random(how.seed)
    sizes = _sizes(how, world.size, chance)
    graphs, begin = _Graphs(world), time.monotonic()

    def make(start: int, stop: int) -> None:
        for number in range(start, stop):
            if number % _TELL_EVERY == 0 and number:
                served.is_over |= not _goes_on(world, how, number, begin)
            if served.is_over:
                return
            op, numel = chance.choice(OPS), chance.choice(sizes)
            x = torch.full((numel,), world.rank + 1.0, dtype=torch.bfloat16, device=world.device)
            out = getattr(world, op)(x)
            served.calls += 1
            if number % _CHECK_EVERY == 0:
                served.checked += 1
                served.wrong += _differences(world, f"call {number}: {op} of {numel}", op, out)
                graphs.turn(op, x, served)

    return make


def _goes_on(world: World, how: Endless, number: int, begin: float) -> bool:
    """Say how far the loop is, and let rank 0 decide whether its time is over."""
    seconds = time.monotonic() - begin
    if world.rank == 0:
        rate = f"{number / seconds:.0f} calls/s"
        print(f"{number:,} calls, {seconds:.0f} s, {rate}", file=sys.stderr, flush=True)
    return world.exchange(seconds, "time of the serving loop")[0] < how.seconds


def _sizes(how: Endless, ranks: int, chance: random.Random) -> list[int]:
    """Return different sizes in elements of bfloat16, drawn on a logarithmic scale."""
    most = how.largest // (2 * ranks)  # a size is divisible by the number of ranks
    found: set[int] = set()
    while len(found) < min(how.sizes, most):
        found.add(round(most ** chance.random()))
    return [ranks * each for each in sorted(found)]


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
    """Say what is wrong, if anything: every rank's input holds its rank + 1."""
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
