"""Ops that can't be captured, or that go wrong in a graph: each right, or nearly, without one.

`LABELS` says what the probe must find: the verdict and the column in which it shows, written down
before it was run, and what the explanation must name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

import sundog
from sundog.collectives import all_gather_push
from sundog.tools.probe.probe import Subject

from .kernels import (
    N,
    await_word,
    copy,
    scale,
    shift,
    shift_from_host,
    shift_in_haste,
    shift_no_done,
    tally,
)

__all__ = ["LABELS", "SUBJECTS"]

Call = Callable[[torch.Tensor], Any]

LABELS: dict[str, tuple[str, str, str]] = {
    "right": ("CAPTURABLE", "", ""),
    "right_torch": ("CAPTURABLE", "", ""),
    "right_branch": ("CAPTURABLE", "", ""),
    # what can't be captured
    "reads_item": ("NOT CAPTURABLE", "replays", "host synchronisation"),
    "copies_to_host": ("NOT CAPTURABLE", "replays", "copy between CPU and device"),
    "copies_from_host": ("NOT CAPTURABLE", "replays", "copy between CPU and device"),
    "synchronizes": ("NOT CAPTURABLE", "replays", "host synchronisation"),
    "allocates": ("NOT CAPTURABLE", "replays", "allocation"),
    "meets_on_the_host": ("NOT CAPTURABLE", "replays", "host barrier"),
    "talks_on_the_host": ("NOT CAPTURABLE", "replays", "collective on the host"),
    "plans_every_time": ("NOT CAPTURABLE", "replays", "plan made during capture"),
    "compiles_every_time": ("NOT CAPTURABLE", "replays", "kernel loaded during capture"),
    "stream_not_forked": ("NOT CAPTURABLE", "replays", "stream outside the capture"),
    "stream_not_joined": ("NOT CAPTURABLE", "replays", "stream outside the capture"),
    # what is captured, and does not see new data
    "baked_value": ("STALE", "replays", "did not see"),
    "staged_outside": ("STALE", "replays", "did not see"),
    "remembered": ("STALE", "replays", "did not see"),
    # what sees it, and goes wrong
    "baked_epoch": ("WRONG", "replays", "race"),
    "baked_half": ("WRONG", "replays", "race"),
    "reset_outside": ("WRONG", "replays", "race"),
    "no_done_flag": ("WRONG", "replays", "race"),
    "wrong_after_three": ("WRONG", "replays", "replay 4"),
    "adds_up": ("WRONG", "replays", "replay 1"),
    "own_counters": ("WRONG", "two graphs", "race"),
    "two_counters": ("WRONG", "eager between", "race"),
    "shared_scratch": ("WRONG", "second stream", "race"),
    "freed_too_early": ("WRONG", "after others", "replay 1"),
    "in_haste": ("WRONG", "rank skew", "elements are wrong"),
    # what waits for ever
    "nobody_answers": ("HANGS", "replays", "word"),
    "exact_count": ("HANGS", "replays", "count"),
    "one_rank_stays_out": ("HANGS", "replays", "ready"),
}


class Shift:
    """The workspaces of the ops below: an inbox, flags for both directions, epochs."""

    def __init__(self, world: sundog.World) -> None:
        self.world = world
        self.inbox = world.empty((2, N), name="inbox")
        self.ready, self.done = world.signals(2, "ready"), world.signals(2, "done")
        self.epochs = world.signals(1, "epochs")
        self.out = torch.zeros(N, device=world.device)
        self.calls = 0
        world.barrier()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        flags = (self.ready, self.done, self.epochs)
        shift[(1,)](x, self.inbox, self.out, *flags, self.world.ctx, N)
        return self.out


def right(world: sundog.World) -> Call:
    return Shift(world)


def right_torch(world: sundog.World) -> Call:
    op = Shift(world)
    return lambda x: op(x.clone()).mul(1).clone()


def right_branch(world: sundog.World) -> Call:
    """The op on another stream, which an event forks off and another one joins."""
    op = Shift(world)

    def call(x: torch.Tensor) -> torch.Tensor:
        fork = world.record_event()
        with world.stream(1):
            world.wait_event(fork)
            out = op(x)
            joined = world.record_event()
        world.wait_event(joined)
        return out

    return call


# what can't be captured


def reads_item(world: sundog.World) -> Call:
    op = Shift(world)
    return lambda x: op(x) if x.abs().sum().item() >= 0 else x


def copies_to_host(world: sundog.World) -> Call:
    op = Shift(world)
    return lambda x: op(x.cpu().to(world.device))


def copies_from_host(world: sundog.World) -> Call:
    op = Shift(world)
    return lambda x: op(x * torch.tensor([1.0], device=world.device))


def synchronizes(world: sundog.World) -> Call:
    op = Shift(world)

    def call(x: torch.Tensor) -> torch.Tensor:
        out = op(x)
        world.synchronize()
        return out

    return call


def allocates(world: sundog.World) -> Call:
    op = Shift(world)

    def call(x: torch.Tensor) -> torch.Tensor:
        with world.scope():
            return op(world.as_symmetric(x, "copy"))

    return call


def meets_on_the_host(world: sundog.World) -> Call:
    op = Shift(world)

    def call(x: torch.Tensor) -> torch.Tensor:
        shift_no_done[(1,)](x, op.inbox, op.out, op.ready, op.epochs, world.ctx, N)
        world.barrier()
        return op.out

    return call


def talks_on_the_host(world: sundog.World) -> Call:
    op = Shift(world)

    def call(x: torch.Tensor) -> torch.Tensor:
        world.broadcast_object("go")
        return op(x)

    return call


def plans_every_time(world: sundog.World) -> Call:
    problem = all_gather_push.Problem(N, torch.float32, world.size)
    out = world.empty((world.size, N))

    def call(x: torch.Tensor) -> torch.Tensor:
        plan = all_gather_push.plan(world, problem, all_gather_push.default(problem, 1))
        plan(x, out)
        return out[(world.rank - 1) % world.size].clone()

    return call


def compiles_every_time(world: sundog.World) -> Call:
    op = Shift(world)
    tables = [
        torch.ones(8, dtype=kind, device=world.device)
        for kind in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    ]

    def call(x: torch.Tensor) -> torch.Tensor:
        op.calls += 1
        scale[(1,)](x, op.out.clone(), tables[op.calls % 4], torch.zeros_like(op.epochs), N)
        return op(x)

    return call


def stream_not_forked(world: sundog.World) -> Call:
    op = Shift(world)

    def call(x: torch.Tensor) -> torch.Tensor:
        with world.stream(1):
            return op(x)

    return call


def stream_not_joined(world: sundog.World) -> Call:
    op = Shift(world)

    def call(x: torch.Tensor) -> torch.Tensor:
        fork = world.record_event()
        with world.stream(1):
            world.wait_event(fork)
            return op(x)

    return call


# what is captured, and does not see new data


def baked_value(world: sundog.World) -> Call:
    """The host looks at the data where it may, and what it saw then stays in the graph."""
    op, table = Shift(world), {}

    def call(x: torch.Tensor) -> torch.Tensor:
        if not world.is_capturing:
            table[0] = op(x).tolist()
        for at, value in enumerate(table[0]):
            op.out[at].fill_(value)
        return op.out

    return call


def staged_outside(world: sundog.World) -> Call:
    """The input goes through a staging buffer, which only calls without a graph fill."""
    op, staging = Shift(world), torch.empty(N, device=world.device)

    def call(x: torch.Tensor) -> torch.Tensor:
        if not world.is_capturing:
            staging.copy_(x)
        return op(staging)

    return call


def remembered(world: sundog.World) -> Call:
    """Computes only for data that it has not seen, by a version that graphs do not count."""
    op, seen = Shift(world), {}

    def call(x: torch.Tensor) -> torch.Tensor:
        if seen.get("version") != x._version:
            op(x)
            seen["version"] = x._version
        return op.out

    return call


# what sees it, and goes wrong


def baked_epoch(world: sundog.World) -> Call:
    op = Shift(world)

    def call(x: torch.Tensor) -> torch.Tensor:
        op.calls += 1
        flags = (op.ready, op.done, op.calls)
        shift_from_host[(1,)](x, op.inbox, op.out, *flags, world.ctx, N)
        return op.out

    return call


def baked_half(world: sundog.World) -> Call:
    """Two inboxes in turn make a done flag unnecessary, if the host counts, and not in a graph."""
    op = Shift(world)

    def call(x: torch.Tensor) -> torch.Tensor:
        op.calls += 1
        inbox = op.inbox[op.calls % 2]
        shift_no_done[(1,)](x, inbox, op.out, op.ready, op.epochs, world.ctx, N)
        return op.out

    return call


def reset_outside(world: sundog.World) -> Call:
    """Flags are set back before every call, and that needs a host barrier: not in the graph."""
    op = Shift(world)

    def call(x: torch.Tensor) -> torch.Tensor:
        if not world.is_capturing:
            world.barrier()
            op.ready.zero_(), op.done.zero_()
            world.barrier()
        shift_from_host[(1,)](x, op.inbox, op.out, op.ready, op.done, 1, world.ctx, N)
        return op.out

    return call


def no_done_flag(world: sundog.World) -> Call:
    op = Shift(world)

    def call(x: torch.Tensor) -> torch.Tensor:
        shift_no_done[(1,)](x, op.inbox, op.out, op.ready, op.epochs, world.ctx, N)
        if not world.is_capturing:
            world.barrier()  # without a graph this hides it
        return op.out

    return call


def wrong_after_three(world: sundog.World) -> Call:
    """The probe calls it twice before the capture; its sixth call is the first that is wrong."""
    op, table = Shift(world), torch.ones(8, device=world.device)
    table[6:] = 0
    calls = torch.zeros_like(op.epochs)

    def call(x: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(x)
        scale[(1,)](op(x), result, table, calls, N)
        return result

    return call


def adds_up(world: sundog.World) -> Call:
    """A sum that only calls without a graph set back."""
    op, total = Shift(world), torch.zeros(N, device=world.device)

    def call(x: torch.Tensor) -> torch.Tensor:
        if not world.is_capturing:
            total.zero_()
        return total.add_(op(x)).clone()

    return call


def own_counters(world: sundog.World) -> Call:
    """Every graph counts its replays for itself, and the flags are those of all of them."""
    op = Shift(world)
    counters = [torch.zeros_like(op.epochs) for _ in range(4)]
    used = []  # a graph does not keep them

    def call(x: torch.Tensor) -> torch.Tensor:
        if world.is_capturing:
            counter = counters.pop()
            used.append(counter)
            shift[(1,)](x, op.inbox, op.out, op.ready, op.done, counter, world.ctx, N)
            return op.out
        op(x)
        for counter in counters:
            counter.copy_(op.epochs)
        return op.out

    return call


def two_counters(world: sundog.World) -> Call:
    """A graph counts on the device, calls without one on the host: neither knows of the other."""
    op = Shift(world)
    shift[(1,)](torch.zeros(N, device=world.device), op.inbox, op.out, op.ready, op.done,
                op.epochs, world.ctx, N)  # fmt: skip
    op.calls = 1

    def call(x: torch.Tensor) -> torch.Tensor:
        if world.is_capturing:
            return op(x)
        op.calls += 1
        op.epochs.fill_(op.calls)
        flags = (op.ready, op.done, op.calls)
        shift_from_host[(1,)](x, op.inbox, op.out, *flags, world.ctx, N)
        return op.out

    return call


_scratch: WeakKeyDictionary[sundog.World, torch.Tensor] = WeakKeyDictionary()


def shared_scratch(world: sundog.World) -> Call:
    """All instances of it have one scratch buffer: two on two streams get in each other's way."""
    op = Shift(world)
    if world not in _scratch:
        _scratch[world] = torch.empty(N, device=world.device)
    scratch = _scratch[world]

    def call(x: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(x)
        copy[(1,)](op(x), scratch, N)
        copy[(1,)](scratch, result, N)
        return result

    return call


def freed_too_early(world: sundog.World) -> Call:
    """What it keeps on the heap was freed, and stays as it is until somebody else gets it."""
    op = Shift(world)
    with world.scope():
        ones = world.full((N,), 1, name="ones")
    return lambda x: op(x) * ones


def in_haste(world: sundog.World) -> Call:
    """Does not wait for a rank that is late."""
    op, polls = Shift(world), {"cpu": 100, "cuda": 5000}[world.device.type]

    def call(x: torch.Tensor) -> torch.Tensor:
        flags = (op.ready, op.done, op.epochs)
        shift_in_haste[(1,)](x, op.inbox, op.out, *flags, world.ctx, N, POLLS=polls)
        return op.out

    return call


# what waits for ever


def nobody_answers(world: sundog.World) -> Call:
    """The host sets the word that the kernel waits for, where it is not captured."""
    op, word = Shift(world), world.signals(1, "word")
    waits = torch.zeros_like(op.epochs)

    def call(x: torch.Tensor) -> torch.Tensor:
        op.calls += 1
        if not world.is_capturing:
            word.fill_(op.calls)
        await_word[(1,)](word, waits, world.ctx)
        return op(x)

    return call


def exact_count(world: sundog.World) -> Call:
    op, count = Shift(world), world.signals(1, "count")

    def call(x: torch.Tensor) -> torch.Tensor:
        op.calls += 1
        tally[(1,)](count, op.calls, world.ctx)
        return op(x)

    return call


def one_rank_stays_out(world: sundog.World) -> Call:
    op = Shift(world)
    return lambda x: op.out if world.is_capturing and world.rank == 0 else op(x)


def _values(world: sundog.World, seed: int) -> tuple[torch.Tensor]:
    torch.manual_seed(seed * 1000 + world.rank)
    return (torch.randint(-99, 99, (N,)).float().to(world.device),)


def _shifted(rank: int, xs: list[torch.Tensor]) -> torch.Tensor:
    return xs[(rank - 1) % len(xs)]


SUBJECTS = {
    name: Subject(
        name,
        globals()[name],
        _values,
        _shifted,
        expected=label[0],
        beside=label[1] == "second stream",
    )
    for name, label in LABELS.items()
}
