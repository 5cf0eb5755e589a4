"""What a rank does in each column of the probe: warm up, capture, replay with fresh data, compare.

Nothing waits between two replays: results are kept in stream order and compared at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl

from ...callsite import raised_at
from ...errors import CaptureError
from ...world.capture import Graph, refusal
from ...world.tensors import poison_tensor
from ...world.world import World
from .fresh_data import Observed, Seen, Subject, Tensors, as_tuple, judge, rounds

_BLOCKS = (256, 256, 512, 1024, 1024, 2048, 4096, 16384, 65536)  # likely to include what was freed
_DELAY = {"cpu": 500, "cuda": 20_000}  # atomics: some microseconds to some milliseconds


@dataclass
class Bench:
    """One rank's tensors and results."""

    world: World
    subject: Subject
    call: Callable[..., Any]
    inputs: Tensors
    rounds: list[tuple[Tensors, Tensors]]  # values of the inputs, and the answer
    seen: list[Seen] = field(default_factory=list)
    replays: int = 0

    def capture(self, inputs: Tensors) -> tuple[Graph, Tensors]:
        try:
            with self.world.capture() as graph:
                return graph, self.run(inputs)
        except CaptureError:
            raise
        except Exception as error:  # the reason why it can't be captured
            reason = f"it raised {type(error).__name__}"
            raise refusal("this call", reason, str(error), raised_at(error)) from error

    def run(self, inputs: Tensors) -> Tensors:
        result = self.call(*inputs)
        return inputs if result is None else as_tuple(result)

    def load(self, inputs: Tensors, number: int) -> None:
        for tensor, value in zip(inputs, self.rounds[number][0], strict=True):
            tensor.copy_(value)

    def replay(self, graph: Graph, inputs: Tensors, outs: Tensors, number: int) -> None:
        """Replay once, on new inputs and poisoned outputs, and keep the result."""
        for out in outs:
            poison_tensor(out) if out.is_contiguous() else out.zero_()
        self.load(inputs, number)
        graph.replay()
        self.replays += 1
        self.keep(outs, number)

    def eager(self, inputs: Tensors, number: int) -> None:
        self.load(inputs, number)
        self.keep(self.run(inputs), number)

    def keep(self, outs: Tensors, number: int) -> None:
        self.seen.append((self.replays, number, tuple(out.clone() for out in outs)))


def run_column(column: str, replays: int, world: World, subject: Subject) -> Observed:
    """Run a column. Every rank calls this."""
    numbers = 2 * replays if column in ("two graphs", "eager between") else replays
    bench = Bench(
        world,
        subject,
        subject.prepare(world),
        subject.make_inputs(world, 0),
        rounds(world, subject, numbers + 2),
    )
    world.barrier()
    for number in (numbers, numbers + 1):  # this loads kernels and makes plans
        bench.eager(bench.inputs, number)
    world.barrier()
    COLUMNS[column](bench, replays)
    world.synchronize()
    return judge(world.rank, subject, [answer for _, answer in bench.rounds], bench.seen)


# the columns


def _many(bench: Bench, replays: int) -> None:
    graph, outs = bench.capture(bench.inputs)
    for number in range(replays):
        bench.replay(graph, bench.inputs, outs, number)


def _two_graphs(bench: Bench, replays: int) -> None:
    """Replay two graphs of the same function, on their own tensors, in changing order."""
    both = [bench.inputs, bench.subject.make_inputs(bench.world, 0)]
    bench.world.barrier()  # peers' memory may be touched now
    bench.eager(both[1], 1)
    graphs = [bench.capture(inputs) for inputs in both]
    for number in range(replays):
        for place in (0, 1) if number % 3 else (1, 0):
            graph, outs = graphs[place]
            bench.replay(graph, both[place], outs, 2 * number + place)


def _eager_between(bench: Bench, replays: int) -> None:
    other = bench.subject.make_inputs(bench.world, 0)
    bench.world.barrier()
    bench.eager(other, 1)
    graph, outs = bench.capture(bench.inputs)
    for number in range(replays):
        bench.replay(graph, bench.inputs, outs, 2 * number)
        bench.eager(other, 2 * number + 1)


def _second_stream(bench: Bench, replays: int) -> None:
    """Replay on stream 1 while another graph runs on stream 0, if the subject allows it."""
    world, subject = bench.world, bench.subject
    beside = None
    if subject.beside:
        beside = Bench(
            world, subject, subject.prepare(world), subject.make_inputs(world, 0), bench.rounds
        )
        world.barrier()
        beside.eager(beside.inputs, 0)
    graph, outs = bench.capture(bench.inputs)
    ready = world.record_event()
    for number in range(replays):
        if beside is not None:
            beside.run(beside.inputs)
        with world.stream(1):
            world.wait_event(ready)
            bench.replay(graph, bench.inputs, outs, number)
            done = world.record_event()
    world.wait_event(done)
    if beside is not None:
        beside.keep(beside.run(beside.inputs), 0)
        bench.seen += beside.seen


def _after_others(bench: Bench, replays: int) -> None:
    """Replay after other ops used the heap, and freed memory was overwritten."""
    world = bench.world
    graph, outs = bench.capture(bench.inputs)
    for number in range(replays):
        if number in (0, replays // 2):
            with world.scope():
                for nbytes in _BLOCKS:
                    world.empty((nbytes,), torch.uint8, "probe.overwritten").fill_(0xA5)
                world.barrier()
            world.all_gather(torch.full((5 + number,), 1.0 + number, device=world.device))
        bench.replay(graph, bench.inputs, outs, number)


def _skew(bench: Bench, replays: int) -> None:
    """Replay late on one rank after the other."""
    world = bench.world
    word = torch.zeros(1, dtype=torch.int64, device=world.device)
    _delay[(1,)](word, 1)
    graph, outs = bench.capture(bench.inputs)
    for number in range(replays):
        if number % world.size == world.rank:
            _delay[(1,)](word, _DELAY[world.device.type])
        bench.replay(graph, bench.inputs, outs, number)


@triton.jit
def _delay(word, times):  # type: ignore[no-untyped-def]
    for _ in range(times):
        tl.atomic_add(word, 1, sem="relaxed", scope="gpu")


COLUMNS: dict[str, Callable[[Bench, int], None]] = {
    "replays": _many,
    "two graphs": _two_graphs,
    "eager between": _eager_between,
    "second stream": _second_stream,
    "after others": _after_others,
    "rank skew": _skew,
}
