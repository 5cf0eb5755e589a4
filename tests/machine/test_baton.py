"""Threads that take turns: those that prepare do so in order, and are gone when they have ended."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
from typing import Any

import pytest

import sundog
from sundog.machine.baton import Runner
from sundog.machine.machine import Machine
from sundog.machine.schedule import from_token

from .machine_kernels import meet

pytestmark = pytest.mark.sim_only


def test_prepared_threads_run_in_any_order_and_end_when_asked() -> None:
    seen: list[tuple[str, int]] = []
    caller = Runner()

    def made(number: int) -> Runner:
        def function() -> Runner:
            seen.append(("runs", number))
            return caller

        return Runner(function, first=lambda: seen.append(("first", number)))

    runners = [made(number) for number in range(3)]
    for runner in runners:
        runner.prepare()
    assert seen == [("first", 0), ("first", 1), ("first", 2)]
    for number in (1, 0):  # the last one never has its turn
        caller.hand_to(runners[number])
    assert seen[3:] == [("runs", 1), ("runs", 0)]
    assert all(runner._thread.is_alive() for runner in runners), "until they are ended"
    for runner in reversed(runners):
        runner.end()
        assert not runner._thread.is_alive()


@pytest.mark.parametrize("is_prepared", [True, False])
def test_end_waits_for_what_a_library_does_when_its_thread_exits(is_prepared: bool) -> None:
    """The library: two keys of pthread, whose destructors sleep 50 ms and then close a file."""
    libc = ctypes.CDLL(None)
    slow, file = ctypes.c_uint(), ctypes.c_uint()
    assert (
        libc.pthread_key_create(ctypes.byref(slow), ctypes.cast(libc.usleep, ctypes.c_void_p)) == 0
    )
    assert (
        libc.pthread_key_create(ctypes.byref(file), ctypes.cast(libc.close, ctypes.c_void_p)) == 0
    )
    read, write = os.pipe()

    def first() -> None:
        libc.pthread_setspecific(slow, ctypes.c_void_p(50_000))
        libc.pthread_setspecific(file, ctypes.c_void_p(write))

    def function() -> Runner:
        if not is_prepared:
            first()
        return caller

    runner = Runner(function, first=first if is_prepared else None)
    caller = Runner()
    runner.prepare()
    caller.hand_to(runner)
    os.fstat(write)  # it is open
    runner.end()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(write)
    os.close(read)
    for key in (slow, file):
        libc.pthread_key_delete(key)


def test_a_rank_that_cannot_prepare_ends_the_machine() -> None:
    ran: list[int] = []
    machine = Machine(from_token("random:0"), 4, expire=False)

    def prepare(rank: int) -> None:
        if rank == 1:
            raise MemoryError("no room for a handle")

    for rank in range(3):
        machine.add_host(
            rank, lambda rank=rank: ran.append(rank), [], functools.partial(prepare, rank)
        )
    machine.run()
    assert isinstance(machine.failure, MemoryError)
    assert [host.error is None for host in machine.hosts] == [True, False, True]
    assert ran == []


def test_a_run_leaves_its_hub_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """greenlet searches all objects of the process for who holds the hub of a thread that ended."""
    looks: list[Any] = []
    search = gc.get_referrers

    def get_referrers(*objects: Any) -> list[Any]:
        looks.append(objects)
        return search(*objects)

    monkeypatch.setattr(gc, "get_referrers", get_referrers)
    for _ in range(3):
        sundog.run(_meet, world_size=2, backend="sim")
    assert not looks


def _meet(world: sundog.World) -> None:
    meet[(1,)](world.signals(2, "flags"), world.ctx, LANES=2)
