"""Threads of the user beside a rank's: what they read is there, and they call nothing."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog.backends import virtual
from sundog.device import signal
from sundog.errors import SundogError
from sundog.machine.launcher import Installed, followers
from sundog.tools.check.schedules import check

SIZE = 4
N = 5
TOTAL = float(sum(range(1, SIZE + 1)))
Run = Callable[..., list]

pytestmark = pytest.mark.sim_only  # and shm: what runs on a GPU is ordered by CUDA
both = pytest.mark.parametrize("backend", ["sim", "shm"])


def _reduced(world: sundog.World) -> torch.Tensor:
    return world.all_reduce(torch.full((N,), world.rank + 1.0))


@both
@pytest.mark.parametrize("stream", [0, 1])
def test_a_thread_that_waits_for_results_reads_them(backend: str, stream: int) -> None:
    """It was there before the call, as a loader's or an executor's is."""

    def main(world: sundog.World) -> list[float]:
        given: queue.Queue = queue.Queue()
        with ThreadPoolExecutor(1) as threads, world.stream(stream):
            read = threads.submit(lambda: (given.get() + 0.0).tolist())
            given.put(_reduced(world))
            return read.result()

    assert sundog.run(main, SIZE, backend) == [[TOTAL] * N] * SIZE


@both
def test_a_process_that_a_rank_forks_reads_results(backend: str) -> None:
    """As a loader's worker does. There the kernels would never run."""

    def main(world: sundog.World) -> list[float]:
        read, write = os.pipe()
        with world.stream(1):
            out = _reduced(world)
            child = os.fork()
        if child == 0:
            with torch._C.DisableTorchFunction():
                values = (ctypes.c_float * N).from_address(out.data_ptr())[:]
            os.write(write, json.dumps(values).encode())
            os._exit(0)
        os.waitpid(child, 0)
        return json.loads(os.read(read, 4096))

    assert sundog.run(main, SIZE, backend) == [[TOTAL] * N] * SIZE


def test_it_does_so_under_the_checker() -> None:
    def main(world: sundog.World) -> None:
        given: queue.Queue = queue.Queue()
        with ThreadPoolExecutor(1) as threads:
            read = threads.submit(lambda: (given.get() + 0.0).tolist())
            given.put(_reduced(world))
            assert read.result() == [TOTAL] * N

    assert check(main, world_size=SIZE, schedules=2).findings == []


@triton.jit
def await_word(flag, epoch, ctx):
    signal.wait(flag, 0, epoch, ctx)


@triton.jit
def set_word(flag, epoch, ctx):
    signal.signal(flag, tl.load(ctx), epoch, ctx)  # word 0 of a context is the rank


@both
def test_a_thread_is_refused_where_nothing_can_order_it(backend: str) -> None:
    """The kernel waits for what this rank would launch after it has started the thread."""

    def main(world: sundog.World) -> str:
        flag = world.signals(1, "flag")
        world.barrier()
        await_word[(1,)](flag, 7, world.ctx)
        with pytest.raises(SundogError) as caught:
            threading.Thread(target=flag.tolist).start()
        with world.stream(1):
            set_word[(1,)](flag, 7, world.ctx)
        return str(caught.value)

    for rank, text in enumerate(sundog.run(main, 2, backend)):
        assert text.startswith(
            f"rank {rank} starts a thread while its kernels (await_word, stream 0) wait for what "
            "this rank does next"
        )


def test_on_virtual_a_thread_begins_on_the_stream_of_its_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch would put it on the default stream, which waits for no rank's. Here CUDA is played."""
    streams = {}  # by thread
    ident = threading.get_ident
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams.get(ident(), "default"))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: streams.update({ident(): stream}))

    def begun_on() -> str:
        return str(torch.cuda.current_stream())

    def of_its_own_thread() -> str:
        with ThreadPoolExecutor(1) as threads:
            return threads.submit(begun_on).result()

    def main(world: sundog.World) -> list[str]:
        Installed._stack[-1].adopt = virtual.adopt
        torch.cuda.set_stream(f"of rank {world.rank}")  # type: ignore[arg-type]
        with ThreadPoolExecutor(1) as threads:
            assert threads.submit(lambda: threading.get_ident() in followers).result()
            return [threads.submit(each).result() for each in (begun_on, of_its_own_thread)]

    assert sundog.run(main, 2, "sim") == [["of rank 0"] * 2, ["of rank 1"] * 2]
    assert not followers


def test_a_thread_is_started_as_ever_after_the_run() -> None:
    start = threading.Thread.start
    sundog.run(lambda world: world.barrier(), 2, "sim")
    assert threading.Thread.start is start


def test_a_second_thread_may_read_and_not_call(run: Run) -> None:
    def main(world: sundog.World) -> None:
        errors: list[BaseException] = []

        def call() -> None:
            try:
                world.all_reduce(torch.ones(N))
            except sundog.errors.SundogError as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert "a second thread uses a world" in str(errors[0])
        assert _reduced(world).tolist() == [TOTAL] * N

    run(main, SIZE)
