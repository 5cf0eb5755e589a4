"""What tracing costs: the same plan called with its trace points, and without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sundog.launch import run
from sundog.tools.timing import Times, Variant, measure
from sundog.tools.trace.record import Recording
from sundog.tools.trace.trace_subject import Subject
from sundog.world.world import World

__all__ = ["bench_trace"]


def bench_trace(subject: Subject, size: int, backend: str, link: str) -> tuple[str, list[Times]]:
    """What was called, and its times without and with trace points, in turns."""
    found: list[Any] = run(lambda w: _measure(w, subject), size, backend, link=link)
    return found[0]


def _measure(world: World, subject: Subject) -> tuple[str, list[Times]]:
    title, call = subject.call(world)
    recording = Recording(world)
    calls = [_with_clock(world, clock, call) for clock in (0, world.trace)]
    variants = [Variant(name, [each]) for name, each in zip(("off", "on"), calls, strict=True)]
    times = measure(world, variants, at_least=4)
    world.barrier()
    recording.close()
    return title, times


def _with_clock(world: World, clock: int, call: Callable[[], Any]) -> Callable[[], Any]:
    """A call whose kernels have trace points that read this clock; 0: none."""

    def run_once() -> Any:
        world.trace = clock
        return call()

    return run_once
