"""The world that measures takes lists of configs from a pipe.

Rank 0 receives the list and passes it to the others, so that all ranks try the same config. All
ranks together judge whether a result is right. A single config is timed in one go, which is quick;
several in one list are timed interleaved, with more samples.

One world serves all algorithms of an op: opening one takes longer than measuring twenty configs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from triton.errors import TritonError

from ...dataset.hardware import hardware
from ...errors import NotResident, OutOfHeap, WaitTimeout
from ...launch import run
from ...ops.op import Plan
from ...target import of
from ...world.world import World
from .._pool import Body, Failure
from .._subject import expected_here, normal_inputs, output
from ..timing import Times, Variant, measure
from .space import Job, fields_text

Timer = Callable[[World, Sequence[Variant], int, int], list[Times]]  # samples, calls in each
Task = tuple[int, list[Any]]  # which of the jobs, and its configs

WHERE = "where"  # the task that asks what the world runs on
_POISON = 0x7B
_MOST_SETS = 4
_SAMPLE_S, _MOST_CALLS = 1e-3, 20  # a sample is about this long, but has at most this many calls
# The longest sample, unless one call takes longer. A config of one program may be 90 times as slow
# as the best: with 20 calls a sample it took 2.6 s, as long as 40 others.
_LONGEST_S = 10e-3
# Roughly what today's GPUs do in a second, only to choose how many calls make a sample.
_BYTES, _LINK_BYTES, _FLOPS, _LEAST_S = 4e12, 5e10, 7e14, 5e-6


@dataclass(frozen=True)
class TunePlace:
    """Where configs are measured: the arguments of the world."""

    backend: str
    link: str = ""
    timeout: float = 10  # seconds of a wait in a kernel, fewer than a config may take
    samples: int = 8
    final_samples: int = 12  # of a finalist


@dataclass(frozen=True)
class Where:
    """What the world runs on. The parent must not ask CUDA, or it could not fork again."""

    target: str  # nvidia-h200
    arch: str  # sm_90
    num_sms: int  # of a rank
    hardware: dict[str, Any]


@dataclass(frozen=True)
class Measured:
    samples_ms: list[float] = field(default_factory=list)
    failure: Failure | None = None


@dataclass(frozen=True)
class _Set:
    """Inputs, the expected results, and the outputs.

    `given` are whole numbers, for comparing results; `normal` are for timing.
    """

    given: tuple
    want: torch.Tensor
    out: torch.Tensor
    normal: tuple


def time_on_gpu(world: World, variants: Sequence[Variant], samples: int, calls: int) -> list[Times]:
    """Measure one alone in one go, several interleaved."""
    return measure(world, variants, samples, calls, in_a_row=len(variants) == 1)


def serve_world(jobs: Sequence[Job], place: TunePlace, timer: Timer = time_on_gpu) -> Body:
    """Make a worker's body, which opens the world, reports what it runs on, and answers tasks."""

    def body(pipe: Connection) -> None:
        def main(world: World) -> None:
            _serve(world, pipe, jobs, place, timer)

        run(main, jobs[0].size, place.backend, timeout=place.timeout, link=place.link)

    return body


def _serve(
    world: World, pipe: Connection, jobs: Sequence[Job], place: TunePlace, timer: Timer
) -> None:
    task = _hear(world, pipe)
    while task is not None:
        if task == WHERE:  # at once, so that configs are compiled while inputs are made
            _tell(world, pipe, _where(world))
        job = jobs[0 if task == WHERE else task[0]]
        with world.scope():
            sets = _sets(world, job)
            if task == WHERE:
                task = _hear(world, pipe)
            while task is not None and _same_inputs(jobs[task[0]], job):
                _tell(world, pipe, _measure(world, jobs[task[0]], task[1], sets, place, timer))
                task = _hear(world, pipe)


def _hear(world: World, pipe: Connection) -> Any:
    return world.broadcast_object(_next(pipe) if world.rank == 0 else None)


def _tell(world: World, pipe: Connection, reply: Any) -> None:
    if world.rank == 0:
        pipe.send(reply)


def _same_inputs(a: Job, b: Job) -> bool:
    """Return whether they take the same inputs, as algorithms of one op do."""
    mine, other = a.module, b.module
    same = mine.inputs is other.inputs and mine.reference is other.reference
    return same and a.problem == b.problem


def _next(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None  # no more tasks


def _where(world: World) -> Where:
    if world.device.type != "cuda":
        return Where("simulator", "sm_90", world.num_sms, hardware())
    gpu = of(world.device)
    return Where(gpu.key, gpu.arch, world.num_sms, hardware())


def _measure(
    world: World, job: Job, configs: list[Any], sets: list[_Set], place: TunePlace, timer: Timer
) -> list[Measured]:
    """Measure all interleaved, or as many at a time as the heap has room for."""
    samples = place.samples if len(configs) == 1 else place.final_samples
    found: list[Measured] = []
    while len(found) < len(configs):
        left = configs[len(found) :]
        with world.scope():  # frees what a plan took that did not fit
            found += _in_turns(world, job, left, sets, place, timer, samples)
    return found


def _in_turns(
    world: World, job: Job, configs: list[Any], sets: list[_Set], place: TunePlace, timer: Timer,
    samples: int,
) -> list[Measured]:  # fmt: skip
    """Measure the first of them whose plans fit the heap together, at least one."""
    found: dict[int, Measured] = {}
    plans: dict[int, Plan] = {}
    variants: dict[int, Variant] = {}
    slowest = 0.0
    for number, config in enumerate(configs):
        verdict = _try(world, job, config, sets, number, plans)
        if verdict is None:
            break
        if isinstance(verdict, Failure):
            found[number] = Measured(failure=verdict)
        else:
            slowest = max(slowest, verdict)
            timed_sets = sets[: _sets_to_time(world, job)]
            calls = [_call(plans[number], each) for each in timed_sets]
            variants[number] = Variant(fields_text(config), calls, ready=True)
    num_calls = _calls(job, place, slowest)
    timed = timer(world, list(variants.values()), samples, num_calls) if variants else []
    for number, times in zip(variants, timed, strict=True):
        # Over a link only rank 0 is measured; elsewhere an op is done when its last rank is.
        seconds = [ranks[0] for ranks in times.samples] if place.link else times.slowest
        found[number] = Measured([1e3 * second for second in seconds])
    for plan in reversed(plans.values()):
        plan.free()
    return [found[number] for number in sorted(found)]


def _try(
    world: World, job: Job, config: Any, sets: list[_Set], number: int, plans: dict[int, Plan]
) -> Failure | float | None:
    """Plan and compare with the reference. A failure on one rank counts for all.

    If it is right, return roughly the seconds of a call, or more, the same on all ranks; None if
    there is no room for it beside the other plans.
    """
    try:
        plans[number] = job.module.plan(world, job.problem, config)
    except (ValueError, OutOfHeap) as error:  # on all ranks
        if plans and isinstance(error, OutOfHeap):
            return None
        return Failure("error", f"{type(error).__name__}: {error}")
    told = world.exchange(_wrong(world, plans[number], sets), "verdict")
    failures = [verdict for verdict in told if isinstance(verdict, Failure)]
    if failures:
        world.barrier()  # resets the flags if a wait expired
        return failures[0]
    return min(verdict for verdict in told if not isinstance(verdict, Failure))


def _wrong(world: World, plan: Plan, sets: list[_Set]) -> Failure | float:
    """Call with each set in a row. Return what is wrong on this rank, or the last call's seconds.

    These include the time in which all ranks' hosts put it on their streams.
    """
    clock = _Clock(world)
    for each in sets:
        each.out.view(-1).view(torch.uint8).fill_(_POISON)
    world.barrier()
    try:
        for each in sets:
            clock.begin()
            plan(*each.given, each.out)
        clock.end()
        world.synchronize()
    except WaitTimeout as error:
        return Failure("timeout", str(error))
    except (NotResident, TritonError) as error:  # too many programs, or too much shared memory
        return Failure("error", f"{type(error).__name__}: {error}")
    if world.passive:  # over a link, a stand-in computes nothing
        return clock.seconds
    unequal = [(each.out.view(each.want.shape) != each.want).sum() for each in sets]
    counts = torch.stack(unequal).tolist()  # one wait for all of them
    for each, bad in zip(sets, counts, strict=True):
        if bad:
            text = f"{bad} of {each.want.numel()} elements differ from the reference"
            return Failure("accuracy_error", f"rank {world.rank}: {text}")
    return clock.seconds


class _Clock:
    """The GPU's clock on this rank's stream, which stands still without a GPU."""

    def __init__(self, world: World) -> None:
        is_gpu = world.device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * is_gpu)]

    def begin(self) -> None:
        for event in self._events[:1]:
            event.record()

    def end(self) -> None:
        for event in self._events[1:]:
            event.record()

    @property
    def seconds(self) -> float:
        return self._events[0].elapsed_time(self._events[1]) * 1e-3 if self._events else 0.0


def _calls(job: Job, place: TunePlace, slowest: float) -> int:
    """Count the calls of a sample. For a large problem or a slow config one is long enough."""
    cost = job.module.cost(job.problem)
    seconds = max(cost.hbm_bytes * job.size / _BYTES, cost.flops * job.size / _FLOPS, _LEAST_S)
    if place.link:
        seconds = max(seconds, cost.link_bytes / _LINK_BYTES)
    most = min(_MOST_CALLS, int(_LONGEST_S / max(slowest, _LEAST_S)))
    return max(1, min(int(_SAMPLE_S / seconds), most))


def _call(plan: Plan, each: _Set) -> Callable[[], Any]:
    return lambda: plan(*each.normal, each.out)


def _sets_to_time(world: World, job: Job) -> int:
    """Count the sets that it takes for one to leave the L2 cache; a large one leaves by itself."""
    if world.device.type != "cuda":
        return 1
    moved = max(job.module.cost(job.problem).hbm_bytes * world.size, 1)
    return min(-(-2 * of(world.device).l2_bytes // moved), _MOST_SETS)


def _sets(world: World, job: Job) -> list[_Set]:
    """Make at least two sets, so that a second call right after the first is also compared."""
    sets = []
    timed = _sets_to_time(world, job)
    for seed in range(max(timed, 2)):
        given = job.module.inputs(world, job.problem, seed)
        want = expected_here(world, job.module, job.problem, given)
        normal = normal_inputs(world, job.module, job.problem, seed) if seed < timed else given
        sets.append(_Set(given, want, output(world, want), normal))
    world.barrier()
    return sets
