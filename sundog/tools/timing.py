"""The one timer: every figure that sundog reports comes from `measure`.

Each variant is a list of calls that only launch, one per set of inputs, so that a set has left the
L2 cache before it is used again. They are captured in a graph and replayed (or, where that is not
possible, called). Variants are interleaved, sample by sample, so that a slow moment hits all of
them.

On every rank the timed part follows a gate, a kernel that waits until all hosts have put their work
on their streams and all ranks have arrived. So only the GPU's work is timed, and ranks start
together.
"""

from __future__ import annotations

import itertools
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from ..device import context, signal
from ..errors import PeerLost, SundogError, VariantFailed
from ..world.world import World

_POLLS = context.POLLS
_WARM = 2  # samples that warm a variant up and are not reported


@dataclass(frozen=True)
class Variant:
    """One way to do the work. Each call does all of it, on its own inputs."""

    name: str
    calls: Sequence[Callable[[], Any]]
    graph: bool = True
    ready: bool = False  # each call was made before: nothing is left to compile, load or allocate


@dataclass(frozen=True)
class Times:
    """Seconds per call, per sample and rank."""

    name: str
    samples: list[list[float]] = field(default_factory=list)

    @property
    def slowest(self) -> list[float]:
        """The slowest rank's time per sample: an op is done when its last rank is."""
        return [max(ranks) for ranks in self.samples]

    @property
    def median(self) -> float:
        return statistics.median(self.slowest)

    def percentile(self, percent: int) -> float:
        ordered = sorted(self.slowest)
        return ordered[round(percent / 100 * (len(ordered) - 1))]

    @property
    def skew(self) -> float:
        """How much sooner the fastest rank is typically done."""
        return statistics.median(max(ranks) - min(ranks) for ranks in self.samples)


def times_json(times: Times) -> dict[str, Any]:
    """Return nanoseconds per sample and rank."""
    return {
        "name": times.name,
        "samples_ns": [[round(t * 1e9, 1) for t in ranks] for ranks in times.samples],
    }


def times_of(content: dict[str, Any]) -> Times:
    """Read what `times_json` has written."""
    samples = [[1e-9 * t for t in ranks] for ranks in content["samples_ns"]]
    return Times(content["name"], samples)


def machine() -> dict[str, str]:
    """Describe the machine, the versions and the command, for every file of measurements."""
    from .. import __version__

    # The name of a file elsewhere is enough.
    words = [Path(word).name if word[:1] == "/" else word for word in sys.argv[1:]]
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "sundog": __version__,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": " ".join(["sundog", *words]),
    }


def _commit() -> str:
    if "SUNDOG_COMMIT" in os.environ:  # for a copy of the tree, which may lie in another repository
        return os.environ["SUNDOG_COMMIT"]
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


@contextmanager
def blame(name: str) -> Iterator[None]:
    """Name this variant in errors of the world inside.

    Everything launched inside must end inside: by a barrier, or `synchronize`.
    """
    try:
        yield
    except (PeerLost, VariantFailed):  # the other ranks report a lost rank
        raise
    except SundogError as error:
        raise VariantFailed(name, f"{type(error).__name__}: {error}") from error


def measure(
    world: World, variants: Sequence[Variant], samples: int = 30, at_least: int = 20,
    step: Callable[[str], None] = lambda name: None, in_a_row: bool = False, warmup: int = _WARM,
) -> list[Times]:  # fmt: skip
    """Time all variants on all ranks together. Every rank gets all ranks' times.

    A sample has at least `at_least` calls, equally many for each input set. `step` is called after
    each sample. VariantFailed names a variant in which a wait expires, or that fails otherwise.
    `warmup` samples come first and are not reported. `in_a_row` takes all samples of a variant
    after one opening of the gate, for a tuner's first look: a round of all hosts takes
    milliseconds, but what is measured in one moment shares its noise.
    """
    gate = Gate(world)
    replays = []
    for variant in variants:
        with blame(variant.name):
            replays.append(_replay(world, variant, at_least))
    mine: list[list[float]] = [[] for _ in variants]
    rounds, each = (1, samples + warmup) if in_a_row else (samples + warmup, 1)
    for _ in range(rounds):
        for number, (replay, calls) in enumerate(replays):
            with blame(variants[number].name):
                mine[number] += [seconds / calls for seconds in gate.times(replay, each)]
            if len(mine[number]) > warmup:
                step(variants[number].name)
    everyone = world.exchange([times[warmup:] for times in mine], "times")
    gate.free()
    return [
        Times(variant.name, [list(ranks) for ranks in zip(*(e[n] for e in everyone), strict=True)])
        for n, variant in enumerate(variants)
    ]


def _replay(world: World, variant: Variant, at_least: int) -> tuple[Callable[[], Any], int]:
    """Return a function that repeats the calls, and how many calls it makes."""
    rounds = -(-at_least // len(variant.calls))

    def all_calls() -> None:
        for _ in range(rounds):
            for call in variant.calls:
                call()

    for call in () if variant.ready else variant.calls:  # compiles, loads, allocates
        call()
    world.barrier()
    if not variant.graph:
        return all_calls, rounds * len(variant.calls)
    graph = torch.cuda.CUDAGraph()
    # The default stream of a process can't be captured; a rank of `virtual` has its own.
    stream = torch.cuda.current_stream()
    if stream == torch.cuda.default_stream():
        stream = torch.cuda.Stream()
    # Not by torch.cuda.graph, which first frees all cached memory, on every rank.
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            all_calls()
        finally:
            graph.capture_end()
    world.barrier()
    graph.replay()  # the first one loads it
    world.barrier()
    return graph.replay, rounds * len(variant.calls)


class Gate:
    """Holds all ranks' streams until every host has put its work on its own stream.

    A host opens its gate by a word in pinned memory, which needs no stream. A copy on a separate
    stream hung, it seems because that stream shared a hardware queue with a kernel that waits.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._flags = world.signals(world.size, "bench.arrived")
        self._go = torch.zeros(1, dtype=torch.int64).pin_memory()
        self._distance = (self._go.data_ptr() - world.ctx.data_ptr()) // 8
        self._epoch = 0
        world.barrier()

    def time(self, work: Callable[[], Any]) -> float:
        """Return the seconds that the work took on this rank's stream."""
        return self.times(work, 1)[0]

    def times(self, work: Callable[[], Any], count: int) -> list[float]:
        """Time the work `count` times in a row. The ranks start together."""
        world = self._world
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        world.barrier()
        self._epoch += 1
        lanes = triton.next_power_of_2(world.size)
        _gate[(1,)](self._distance, self._flags, self._epoch, world.ctx, LANES=lanes)
        events[0].record()
        for event in events[1:]:
            work()
            event.record()
        with torch._C.DisableTorchFunction():  # no function mode may wait for the gate first
            self._go.fill_(self._epoch)
        world.synchronize()
        return [begin.elapsed_time(end) * 1e-3 for begin, end in itertools.pairwise(events)]

    def free(self) -> None:
        self._world.free(self._flags)


@triton.jit(do_not_specialize=["distance", "epoch"])
def _gate(distance, flags, epoch, ctx, LANES: tl.constexpr):  # type: ignore[no-untyped-def]
    # The host writes this word, so the kernel must not: it polls by a load, not by an atomic.
    go = tl.load(ctx + distance, volatile=True)
    polls = tl.load(ctx + _POLLS)
    while (go < epoch) & (polls > 0):
        go = tl.load(ctx + distance, volatile=True)
        polls -= 1
    signal.barrier_ranks(flags, epoch, ctx, LANES)
