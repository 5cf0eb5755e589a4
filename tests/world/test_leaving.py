"""A rank that leaves its world with an exception does not keep the others waiting."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest
import torch

import sundog
from sundog.errors import PeerLost


@pytest.mark.parametrize("size", [2, 3])
def test_an_exception_inside_with(run, size):
    def main(world: sundog.World) -> None:
        with world:
            world.barrier()
            if world.rank == 1:
                raise KeyError("rank 1 leaves")
            world.barrier()

    begin = time.monotonic()
    with pytest.raises(KeyError, match="rank 1 leaves"):
        run(main, size)
    assert time.monotonic() - begin < 10, "not a timeout later"


def _in_kernels(world: sundog.World) -> None:
    while True:
        world.all_reduce(torch.ones(9))


def _in_python(world: sundog.World) -> None:
    while world.rank == 1:
        pass
    world.barrier()


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.sim_only
@pytest.mark.parametrize("main", [_in_kernels, _in_python])
def test_an_interrupt_ends_all_ranks(main):
    """As Ctrl-C does: a signal whose handler raises, in the thread that waits for the ranks."""

    def raise_error(*_: object) -> None:
        raise LookupError("interrupted")

    sundog.run(lambda world: world.all_reduce(torch.ones(9)), 2, "sim")
    threads = _num_threads()
    before = signal.signal(signal.SIGUSR1, raise_error)
    try:
        for tenths in range(1, 6):
            to_here = [threading.get_ident(), signal.SIGUSR1]
            timer = threading.Timer(tenths / 10, signal.pthread_kill, to_here)
            timer.start()
            with pytest.raises(LookupError, match="interrupted"):
                sundog.run(main, 3, "sim")
            timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    end = time.monotonic() + 10
    while _num_threads() > threads and time.monotonic() < end:
        time.sleep(0.01)
    assert _num_threads() <= threads
    assert sundog.run(lambda world: world.rank, 3, "sim") == [0, 1, 2]


@pytest.mark.sim_only
@pytest.mark.parametrize("backend", ["sim", "shm"])
@pytest.mark.parametrize(("code", "error"), [(3, SystemExit), (0, PeerLost), (None, PeerLost)])
def test_a_rank_that_calls_exit_is_named(capfd, backend, code, error):
    """The status stays what the rank asked for, unless it says that all went well."""

    def main(world: sundog.World) -> None:
        if world.rank == 1:
            sys.exit(code)
        world.barrier()

    with pytest.raises(error) as raised:
        sundog.run(main, 3, backend, timeout=20)
    text = f"rank 1 of 3 called sys.exit({code!r}), which ended the other ranks too"
    if code:
        assert raised.value.code == code
        assert f"sundog: {text}" in capfd.readouterr().err
    else:
        assert str(raised.value).startswith(text)
