"""A copy of words into flags, on a stream, is a signal: a release at system scope."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog.device import local, signal
from sundog.tools.check.schedules import Report, check

pytestmark = pytest.mark.sim_only
N = 16
Main = Callable[[sundog.World], torch.Tensor]


@triton.jit
def consume(inbox, out, flags, epochs, ctx, SYS: tl.constexpr, N: tl.constexpr):
    epoch = tl.load(epochs)
    if SYS:
        signal.wait(flags, 0, epoch, ctx)  # the copies before the flag, before the loads below
    else:
        local.wait(flags, epoch, ctx)
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def relaxed(inbox, out, flags, epochs, ctx, SYS: tl.constexpr, N: tl.constexpr):
    while tl.atomic_add(flags, 0, sem="relaxed", scope="sys") < tl.load(epochs):
        pass
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def advance(epochs):
    tl.store(epochs, tl.load(epochs) + 1)


def fetching(
    kernel: object, order: str = "data flag", sys: bool = True, graph: bool = False
) -> Main:
    """A side stream copies data and the epoch, in some order, while a kernel waits for the flag."""

    def main(world: sundog.World) -> torch.Tensor:
        x, inbox = world.empty((N,)), world.empty((N,), name="inbox")
        flags, epochs = world.signals(1, "flags"), world.signals(1, "epochs")
        out = world.empty((N,), name="out")
        world.barrier()

        def call() -> None:
            advance[(1,)](epochs)
            begun = world.record_event()
            with world.stream(1):
                world.wait_event(begun)
                for what in order.split():
                    if what == "data":
                        inbox.copy_(x)
                    elif what == "flag":
                        flags.copy_(epochs)
                    else:
                        flags.fill_(2)
                ended = world.record_event()
            kernel[(1,)](inbox, out, flags, epochs, world.ctx, SYS=sys, N=N)
            world.wait_event(ended)

        seen = []
        x.fill_(1.0)
        call()
        seen.append(out.clone())
        x.fill_(2.0)
        if graph:
            with world.capture() as captured:
                call()
            captured.replay()
        else:
            call()
        return torch.stack([*seen, out])

    return main


def findings(main: Main) -> Report:
    return check(main, 1, schedules=5)


@pytest.mark.parametrize("graph", [False, True])
def test_what_was_copied_before_the_flag_is_ordered(graph: bool) -> None:
    report = findings(fetching(consume, graph=graph))
    assert report.findings == [], report
    for got in report.results:
        assert torch.equal(got, torch.tensor([[1.0] * N, [2.0] * N]))


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (fetching(consume, "flag data"), "no order"),
        (fetching(consume, "flag data", graph=True), "no order"),
        (fetching(consume, sys=False), ""),
        (fetching(relaxed), "relaxed acquire"),
        (fetching(consume, "data fill"), "plain access to a flag"),
    ],
    ids=["flag first", "flag first, captured", "gpu scope", "relaxed", "a fill is no signal"],
)
def test_what_is_not_ordered_is_reported(main: Main, words: str) -> None:
    report = findings(main)
    assert any(f.kind == "race" and words in f.rule for f in report.findings), report
