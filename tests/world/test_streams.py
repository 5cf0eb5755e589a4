"""Streams and events: what runs beside what, and what the checker makes of a missing event."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog.backends import symm
from sundog.checker.findings import Finding
from sundog.device import signal
from sundog.errors import Deadlock, NotOrdered
from sundog.tools.check.schedules import check
from sundog.world.streams import Order

N = 37


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    total = tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n)
    tl.store(out + at, total, mask=at < n)


@triton.jit
def await_word(flag, epoch, ctx):
    signal.wait(flag, 0, epoch, ctx)


@triton.jit
def set_word(flag, epoch, ctx):
    signal.signal(flag, tl.load(ctx), epoch, ctx)  # word 0 of a context is the rank


def _sum(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    add[(1,)](x, y, out, N, BLOCK=64)
    return out


def _values(world: sundog.World, seed: int) -> torch.Tensor:
    torch.manual_seed(10 * seed + world.rank)
    return torch.randint(-99, 99, (N,)).float().to(world.device)


def _verbs(finding: Finding) -> tuple[str, str]:
    assert finding.first
    assert finding.second
    return finding.first.verb, finding.second.verb


@pytest.mark.parametrize("size", [1, 3])
def test_events_order_two_streams(run, size):
    """x + y on stream 1, after both are made; then twice that on stream 0."""

    def main(world: sundog.World) -> bool:
        x, y, out, twice = (_values(world, seed) for seed in range(4))
        ready = world.record_event()
        with world.stream(1):
            world.wait_event(ready)
            _sum(x, y, out)
            done = world.record_event()
        world.wait_event(done)
        _sum(out, out, twice)
        return torch.equal(twice.cpu(), 2 * (x + y).cpu())

    assert run(main, size) == [True] * size


def test_streams_run_side_by_side(run):
    """Stream 0 waits for a word that stream 1 sets: in one queue that would never end."""

    def main(world: sundog.World) -> int:
        flag = world.signals(1, "flag")
        world.barrier()
        for kernel in (await_word, set_word):  # loaded before one of them waits for the other
            kernel[(1,)](flag, -7, world.ctx)  # compiled as for 7: neither 1 nor a multiple of 16
        world.synchronize()
        await_word[(1,)](flag, 7, world.ctx)
        with world.stream(1):
            set_word[(1,)](flag, 7, world.ctx)
        world.synchronize()
        return int(flag[0])

    assert run(main, 2) == [7, 7]


def test_what_waits_for_an_event_stays_behind_it(run, backend):
    """Stream 1 waits for stream 0, which waits for stream 1: the wait runs out, or is a deadlock.
    A wait that did nothing would let both end."""

    def main(world: sundog.World) -> None:
        flag = world.signals(1, "flag")
        world.barrier()
        for kernel in (await_word, set_word):
            kernel[(1,)](flag, -7, world.ctx)  # compiled as for 7: neither 1 nor a multiple of 16
        await_word[(1,)](flag, 7, world.ctx)
        event = world.record_event()
        with world.stream(1):
            world.wait_event(event)
            set_word[(1,)](flag, 7, world.ctx)
        world.synchronize()

    kind = Deadlock if backend == "sim" else sundog.errors.WaitTimeout
    with pytest.raises(kind, match="flag"):
        run(main, 1, **({} if backend == "sim" else {"timeout": 2}))


def test_the_stream_is_what_it_was_after_the_block(run):
    def main(world: sundog.World) -> bool:
        x = _values(world, 0)
        with world.stream(2), world.stream(1):
            pass
        with pytest.raises(KeyError), world.stream(2):
            raise KeyError
        return torch.equal(_sum(x, x, torch.empty_like(x)).cpu(), 2 * x.cpu())

    assert run(main, 2) == [True, True]


def test_synchronize_waits_for_every_stream(run):
    def main(world: sundog.World) -> bool:
        x, y = _values(world, 0), _values(world, 1)
        outs = [torch.zeros_like(x) for _ in range(3)]
        world.synchronize()
        for number, out in enumerate(outs):
            with world.stream(number):
                _sum(x, y, out)
        world.synchronize()
        return all(torch.equal(out.cpu(), (x + y).cpu()) for out in outs)

    assert run(main, 2) == [True, True]


def test_wrong_streams_and_events_are_refused(run):
    def main(world: sundog.World) -> None:
        for number in (-1, 1.5, True):
            with pytest.raises(ValueError, match="expected a number, 0 or more"):
                world.stream(number)  # type: ignore[arg-type]

    run(main, 1)


@pytest.mark.sim_only
def test_an_event_of_another_rank_is_refused():
    events: list[Any] = []

    def main(world: sundog.World) -> None:
        if world.rank == 0:
            events.append(world.record_event())
        world.barrier()
        if world.rank == 1:
            with pytest.raises(ValueError, match="is not an event of this rank"):
                world.wait_event(events[0])

    sundog.run(main, 2, "sim")


def _on_stream_1(before: bool, after: bool, read_back: bool = False, barrier: bool = False) -> Any:
    """out = x + x on stream 1, with or without its events; then out is read on stream 0."""

    def main(world: sundog.World) -> None:
        x, out = torch.ones(N), torch.zeros(N)
        if read_back:
            x.tolist(), out.tolist()  # the host has seen them: whatever it launches comes after
        if barrier:
            world.barrier()
        ready = world.record_event()
        with world.stream(1):
            if before:
                world.wait_event(ready)
            _sum(x, x, out)
            done = world.record_event()
        if after:
            world.wait_event(done)
        _sum(out, out, torch.zeros(N))
        world.synchronize()

    return main


@pytest.mark.sim_only
@pytest.mark.parametrize(
    ("main", "clean"),
    [
        (_on_stream_1(before=True, after=True), True),
        (_on_stream_1(before=False, after=True), False),
        (_on_stream_1(before=True, after=False), False),
        (_on_stream_1(before=False, after=True, read_back=True), True),
        (_on_stream_1(before=False, after=True, barrier=True), True),
        (_on_stream_1(before=False, after=False, barrier=True), False),
    ],
    ids=["both", "none before", "none after", "read back", "barrier", "barrier, none after"],
)
def test_a_missing_event_is_a_race(main, clean):
    report = check(main, world_size=2, schedules=6)
    assert [f.kind for f in report.findings if f.kind != "race"] == []
    assert bool(report.findings) is not clean, report


@pytest.mark.sim_only
def test_an_event_orders_nothing_that_came_after_it():
    """out is written on stream 1 again, after the event that stream 0 waits for."""

    def main(world: sundog.World) -> None:
        x, out = torch.ones(N), torch.zeros(N)
        world.barrier()
        with world.stream(1):
            _sum(x, x, out)
            done = world.record_event()
            _sum(x, x, out)
        world.wait_event(done)
        _sum(out, out, torch.zeros(N))
        world.synchronize()

    report = check(main, world_size=1, schedules=6)
    assert [f.kind for f in report.findings] == ["race"] * 2
    # Whichever of the two comes first.
    assert {_verbs(f) for f in report.findings} == {("load", "store"), ("store", "load")}


@pytest.mark.sim_only
def test_torch_operations_are_on_the_stream_too():
    def main(world: sundog.World) -> None:
        x = torch.ones(N)
        world.barrier()
        with world.stream(1):
            x.add_(1)
        x.mul_(2)  # nothing orders it after the addition

    report = check(main, world_size=1, schedules=2)
    assert [f.kind for f in report.findings] == ["race"] * 2
    # The product reads x, and writes it.
    written = "host write"
    assert [_verbs(f) for f in report.findings] == [(written, "host read"), (written, written)]


@pytest.mark.sim_only
@pytest.mark.parametrize("barrier", [True, False])
def test_a_barrier_orders_the_streams_of_all_ranks(barrier):
    """What the peer wrote on its stream 0 is read on a stream that was not used before."""

    def main(world: sundog.World) -> None:
        x = world.empty((N,)).fill_(world.rank)
        if barrier:
            world.barrier()
        else:
            world.synchronize()
            world.exchange(None)
        with world.stream(1):
            theirs = world.peer(x, 1 - world.rank)
            _sum(theirs, theirs, torch.zeros(N))
            world.synchronize()

    report = check(main, world_size=2, schedules=4)
    assert (report.findings == []) is barrier, report


def _in_thread(call: Callable[[], None], name: str) -> str:
    """Run it in a thread to its end; what it raised."""
    raised: list[str] = []

    def target() -> None:
        try:
            call()
        except NotOrdered as error:
            raised.append(str(error))

    thread = threading.Thread(target=target, name=name)
    thread.start()
    thread.join()
    return raised[0] if raised else ""


def test_a_stream_takes_the_calls_of_one_thread() -> None:
    order = Order()
    order.claim(0)
    told = _in_thread(lambda: order.claim(0), "second")
    assert told.startswith(
        "threads 'MainThread' and 'second' both call ops on stream 0: they could"
    )
    assert "world.synchronize()" in told
    assert _in_thread(lambda: order.claim(1), "beside") == ""
    order.claim(1)  # that thread has ended
    order.synchronize()  # this one hands both over

    def take_over() -> None:
        order.claim(0)
        with pytest.raises(RuntimeError, match="'taker' and 'late'"):
            raise RuntimeError(_in_thread(lambda: order.claim(0), "late"))

    assert _in_thread(take_over, "taker") == ""


def test_a_backward_pass_counts_as_the_thread_that_started_it() -> None:
    """Its nodes run in a thread of autograd's on a GPU. Here they run in any."""
    order, told = Order(), []
    order.claim(0)
    x = torch.ones(2, requires_grad=True)
    y = 2 * x
    y.register_hook(lambda grad: order.claim(0))
    outside = _in_thread(lambda: order.claim(0), "other")
    told.append(_in_thread(lambda: y.sum().backward(), "autograd"))
    assert "'other'" in outside
    assert told == [""]


def test_a_backward_pass_that_comes_first_claims_no_stream() -> None:
    order, told = Order(), []
    y = 2 * torch.ones(2, requires_grad=True)
    y.register_hook(lambda grad: order.claim(0))

    def backward_and_stay() -> None:
        y.sum().backward()
        told.append(_in_thread(lambda: order.claim(0), "who started it"))

    assert _in_thread(backward_and_stay, "autograd") == ""
    assert told == [""]


def test_every_call_of_an_op_claims_its_stream(run: Any) -> None:
    """Op, plan and replay; making a plan waits for the streams, and does not hand them over."""

    def main(world: sundog.World) -> list[str]:
        order, out = world._backend.order, world.zeros(4)
        world.barrier()
        world.all_reduce(out, out=world.zeros(4))  # loads and makes a plan
        with world.capture() as graph:
            pass
        world.synchronize()
        end = threading.Event()
        other = threading.Thread(target=end.wait, name="other", daemon=True)
        other.start()
        order.callers[0] = other.ident or 0
        calls = (lambda: world.all_reduce(out), lambda: world.all_gather(out), graph.replay)
        told = []
        for call in calls:
            with pytest.raises(NotOrdered) as caught:
                call()
            told.append(str(caught.value).split(" both ")[0])
        order.callers.clear()
        end.set()
        return told

    for told in run(main, 2):
        assert len(told) == 3
        assert all("'other'" in each for each in told)


def test_threads_of_a_rank_of_symm_have_streams_of_their_own() -> None:
    """One that `world.stream` has not switched is on torch's current stream, as autograd's are."""
    backend = object.__new__(symm.SymmBackend)
    backend._here = threading.local()
    backend._numbered = {n: SimpleNamespace(cuda_stream=100 + n) for n in range(3)}  # type: ignore[misc]
    backend._gpu = SimpleNamespace(current_handle=lambda: 102)  # type: ignore[assignment]
    backend.stream_number = 1
    seen = []
    assert _in_thread(lambda: seen.append(backend.stream_number), "autograd") == ""
    assert (backend.stream_number, seen) == (1, [2])
