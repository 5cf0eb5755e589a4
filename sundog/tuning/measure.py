"""The world that measures: it takes configs from a pipe, one list after the other.

Rank 0 hears the list and tells the others, so that all ranks try the same config; whether a result
is right is what all ranks say together. Several configs in one list are timed in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from triton.errors import TritonError

from ..bench.timing import Times, Variant
from ..bench.timing import measure as time_on_gpu
from ..dataset.machine import hardware
from ..errors import NotResident, WaitTimeout
from ..exercise import expected_here, output
from ..launch import run
from ..op import Plan
from ..target import of
from ..world import World
from .space import Job, fields_text
from .workers import Body, Failure

__all__ = ["WHERE", "Measured", "Place", "Timer", "Where", "serve_world", "time_on_gpu"]

Timer = Callable[[World, Sequence[Variant], int], list[Times]]

WHERE = "where"  # a task: what does the world run on?
_POISON = 0x7B


@dataclass(frozen=True)
class Place:
    """Where it is measured: what a world is opened with."""

    backend: str
    link: str = ""
    timeout: float = 10  # seconds of a wait in a kernel, fewer than a config may take
    samples: int = 20


@dataclass(frozen=True)
class Where:
    """What the world found itself on: the parent must not ask CUDA, or it could not fork again."""

    target: str  # nvidia-h200
    arch: str  # sm_90
    warp_size: int
    num_sms: int  # of a rank
    hardware: dict[str, Any]


@dataclass(frozen=True)
class Measured:
    samples_ms: list[float] = field(default_factory=list)
    failure: Failure | None = None


@dataclass(frozen=True)
class _Set:
    """Inputs, what must come of them, and where it goes."""

    given: tuple
    want: torch.Tensor
    out: torch.Tensor


def serve_world(job: Job, place: Place, timer: Timer = time_on_gpu) -> Body:
    """A worker's body: opens the world, tells what it runs on, then answers lists of configs."""

    def body(pipe: Connection) -> None:
        def main(world: World) -> None:
            _serve(world, pipe, job, place, timer)

        run(main, job.size, place.backend, timeout=place.timeout, link=place.link)

    return body


def _serve(world: World, pipe: Connection, job: Job, place: Place, timer: Timer) -> None:
    with world.scope():
        sets = _sets(world, job)
        while True:
            configs = world.broadcast_object(_next(pipe) if world.rank == 0 else None)
            if configs is None:
                return
            if configs == WHERE:
                reply: Any = _where(world)
            else:
                reply = _measure(world, job, configs, sets, place, timer)
            if world.rank == 0:
                pipe.send(reply)


def _next(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None  # no more tasks


def _where(world: World) -> Where:
    if world.device.type != "cuda":
        return Where("simulator", "sm_90", 32, world.num_sms, hardware())
    gpu = of(world.device)
    return Where(gpu.key, gpu.arch, gpu.warp_size, world.num_sms, hardware())


def _measure(
    world: World, job: Job, configs: list[Any], sets: list[_Set], place: Place, timer: Timer
) -> list[Measured]:
    found: dict[int, Measured] = {}
    plans: dict[int, Plan] = {}
    variants: dict[int, Variant] = {}
    for number, config in enumerate(configs):
        verdict = _try(world, job, config, sets, number, plans)
        if verdict is not None:
            found[number] = Measured(failure=verdict)
        else:
            calls = [_call(plans[number], each) for each in sets]
            variants[number] = Variant(fields_text(config), calls)
    timed = timer(world, list(variants.values()), place.samples) if variants else []
    for number, times in zip(variants, timed, strict=True):
        # Behind a link rank 0 alone is measured; elsewhere an op is done when its last rank is.
        seconds = [ranks[0] for ranks in times.samples] if place.link else times.slowest
        found[number] = Measured([1e3 * second for second in seconds])
    for plan in reversed(plans.values()):
        plan.free()
    return [found[number] for number in range(len(configs))]


def _try(
    world: World, job: Job, config: Any, sets: list[_Set], number: int, plans: dict[int, Plan]
) -> Failure | None:
    """Plan and compare with the reference. What one rank says fails it for all."""
    try:
        plans[number] = job.module.plan(world, job.problem, config)
    except ValueError as error:  # refused, on all ranks alike
        return Failure("error", f"{type(error).__name__}: {error}")
    for each in sets:
        each.out.view(-1).view(torch.uint8).fill_(_POISON)
        world.barrier()
        told = world.exchange(_wrong(world, plans[number], each), "verdict")
        failures = [failure for failure in told if failure is not None]
        if failures:
            world.barrier()  # sets the flags back, if a wait ran out
            return failures[0]
    return None


def _wrong(world: World, plan: Plan, each: _Set) -> Failure | None:
    """What this rank says of one call."""
    try:
        plan(*each.given, each.out)
        world.synchronize()
    except WaitTimeout as error:
        return Failure("timeout", str(error))
    except (NotResident, TritonError) as error:  # too many programs, or too much shared memory
        return Failure("error", f"{type(error).__name__}: {error}")
    bad = int((each.out.view(each.want.shape) != each.want).sum().item())
    text = f"rank {world.rank}: {bad} of {each.want.numel()} elements differ from the reference"
    return Failure("accuracy_error", text) if bad else None


def _call(plan: Plan, each: _Set) -> Callable[[], Any]:
    return lambda: plan(*each.given, each.out)


def _sets(world: World, job: Job) -> list[_Set]:
    """As many inputs as it takes for one to leave the L2 cache."""
    count = 2
    if world.device.type == "cuda":
        moved = max(job.module.cost(job.problem).hbm_bytes * world.size, 1)
        count = min(max(-(-2 * of(world.device).l2_bytes // moved), 2), 8)
    sets = []
    for seed in range(count):
        given = job.module.inputs(world, job.problem, seed)
        want = expected_here(world, job.module, job.problem, given)
        sets.append(_Set(given, want, output(world, want)))
    world.barrier()
    return sets
