"""What a call costs the host: an eager collective with a cached plan, by the CPU's clock.

A few calls in a row, then the GPU is waited for, so that the queue never fills: what is timed is
Python, Triton's launch and the driver, and nothing of the GPU's work.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from sundog.launch import run
from sundog.tools.timing import Times
from sundog.world.world import World

__all__ = ["bench_host"]

_CALLS = 20  # in a row; the driver queues about a thousand
_NUMEL = 4096
_SAMPLES = 50


def bench_host(size: int, backend: str) -> list[Times]:
    """Seconds per call, of each collective, per sample and rank."""
    found: list[list[Times]] = run(_measure, size, backend)
    return found[0]


def _measure(world: World) -> list[Times]:
    x, out = world.zeros((_NUMEL,), torch.bfloat16), world.zeros((_NUMEL,), torch.bfloat16)
    whole = world.zeros((_NUMEL * world.size,), torch.bfloat16)
    part = world.zeros((_NUMEL // world.size,), torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: world.all_reduce(x, out=out),
        "all_gather": lambda: world.all_gather(x, whole),
        "reduce_scatter": lambda: world.reduce_scatter(x, out=part),
        "all_to_all": lambda: world.all_to_all(x, out),
    }
    return [_time(world, name, call) for name, call in calls.items()]


def _time(world: World, name: str, call: Callable[[], Any]) -> Times:
    call()  # plans, compiles, loads
    mine = []
    for _ in range(_SAMPLES + 2):
        world.barrier()
        begin = time.perf_counter()
        for _ in range(_CALLS):
            call()
        mine.append((time.perf_counter() - begin) / _CALLS)
    everyone = world.exchange(mine[2:], "times")  # the first ones warm up
    return Times(name, [list(ranks) for ranks in zip(*everyone, strict=True)])
