"""Backend `virtual`: every rank on one GPU, in one process. One heap and one stream per rank.

The hosts are threads that take turns, as on `sim`. The kernels of all ranks run on the GPU at the
same time, each rank's on its share of the SMs. `Gang` starts them together.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import knobs
from ..errors import SundogError
from ..machine.launcher import Installed, followers
from ..machine.machine import Machine
from ..machine.schedule import from_token
from ..target import Target
from ..world.backend import Exchange, Ranks
from ..world.heap import ALIGNMENT, Allocation
from ..world.streams import Order
from ..world.world import World
from . import Capabilities, WorldOptions
from ._cuda_graph import CudaRecording
from ._gang import Flight, Gang
from ._gpu import Contexts, Gpu, OnGpu, SynchronizeFirst, pinned_words
from ._hosts import Meeting, print_unraised, refuse_inside_a_rank, run_rank, with_rank
from ._link import check_host_memory, on_host, pinned_heap
from ._measured import polls_per_second
from ._relaunch import Again, again, is_hooked

CAPABILITIES = Capabilities(on_gpu=True, processes=False, links=("", "pcie", "host"))

# Streams beyond the number of hardware queues share a queue, where a kernel that spins would block
# the one that it waits for. CUDA has at most 32.
_QUEUES = 32
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass
class VirtualShared:
    """What all ranks of one world share."""

    machine: Machine
    gpu: Gpu
    gang: Gang
    segments: list[torch.Tensor]
    flags: list[torch.Tensor]  # the same, unless a link separates them
    contexts: list[Contexts]
    streams: list[torch.cuda.Stream]
    meetings: dict[str, Meeting]
    polls: int
    num_sms: int
    has_link: bool
    # Records of expired waits, which kernels write: rank, the ranks of its world or group, words.
    records: list[tuple[int, tuple[int, ...], torch.Tensor]] = field(default_factory=list)


class VirtualBackend(OnGpu):
    """One rank of a world on one GPU."""

    name = "virtual"

    def __init__(self, shared: VirtualShared, rank: int) -> None:
        self.rank = rank
        self.size = len(shared.segments)
        self.device = shared.segments[rank].device
        self.num_sms = shared.num_sms
        self.polls = shared.polls
        self.bases = [segment.data_ptr() for segment in shared.segments]
        self.flag_bases = [segment.data_ptr() for segment in shared.flags]
        self.passive = shared.segments[rank] is not shared.flags[rank]
        # Alone, or rank 0 of a link, whose peers only signal that their data may be read.
        self.owns_gpu = self.size == 1 or shared.segments[-1] is not shared.flags[-1]
        self._shared = shared
        self.order = Order()
        self._streams = {0: shared.streams[rank]}
        self._failed = False
        self._sharing: tuple[int, ...] = ()  # the ranks of the latest context

    def segment(self, rank: int, is_flags: bool = False) -> torch.Tensor:
        return (self._shared.flags if is_flags else self._shared.segments)[rank]

    def copied_from(self, view: torch.Tensor, rank: int) -> torch.Tensor:
        return on_host(view) if self._shared.has_link and rank > 0 else view

    def record(self, num_words: int) -> torch.Tensor:
        words = pinned_words(num_words)
        self._shared.records.append((self.rank, self._sharing, words))
        return words

    def exchange(
        self, value: Any, what: str, ranks: Ranks, channel: str, kind: Exchange = Exchange.VALUES
    ) -> list[Any]:
        shared = self._shared
        meeting = shared.meetings.setdefault(channel, Meeting(shared.machine, ranks))
        return meeting.exchange(value, what, kind)

    def synchronize(self) -> None:
        self._shared.gang.synchronize(list(self._streams.values()))

    def stream(self, number: int) -> AbstractContextManager[None]:
        if number not in self._streams:
            if self.size * (number + 1) > _QUEUES:
                raise ValueError(
                    f"stream {number} of {self.size} ranks on one GPU: it has {_QUEUES} queues, so "
                    f"each rank may have streams 0 to {_QUEUES // self.size - 1}"
                )
            place = number * self.size + self.rank
            self._streams[number] = _stream(self.device.index, place)
        return torch.cuda.stream(self._streams[number])

    def begin_capture(self) -> CudaRecording:
        """Begin when nothing runs, and keep the other hosts waiting until the capture ends.

        Making a graph while a kernel spins would wait for that kernel, like loading one.
        """
        gang = self._shared.gang
        gang.wait_for_all("to capture a graph")
        stream = torch.cuda.current_stream()
        return CudaRecording(self._shared.machine.host, stream, gang.put)

    def relaunch(
        self, run: Callable[[], None], given: tuple[torch.Tensor, ...]
    ) -> Callable[[], bool] | None:
        return again(run, given, functools.partial(self._start_again, []))

    def _start_again(self, flights: list[Flight], launches: list[Again]) -> bool:
        """Start the launches again; from the second time on, `flights` has them as `Gang` has."""
        shared = self._shared
        if shared.machine.host.recording is not None or shared.gpu.is_capturing() or is_hooked():
            return False
        stream = shared.gpu.current_stream()
        if not flights or flights[0].stream is not stream:
            flights[:] = [shared.gang.flight(launch, stream) for launch in launches]
        for flight in flights:
            shared.gang.go(flight)
        return True

    def after_drain(self, check: Callable[[], None]) -> None:
        """Note it for hosts that wait for other ranks. Calls, synchronize and close raise too."""
        self._shared.machine.hosts[self.rank].on_drained = check

    def allocated(self, base: int, allocation: Allocation) -> None:
        self._shared.contexts[self.rank].allocated(base, allocation)
        if allocation.is_context:
            self._sharing = allocation.ranks
            self._shared.gpu.sharing[base + allocation.offset] = allocation.ranks

    def freed(self, base: int, allocation: Allocation) -> None:
        self._shared.contexts[self.rank].freed(base, allocation)

    def fail(self, error: BaseException) -> None:
        """Note the error, which ends the other hosts and all kernels once it has left this host."""
        self._failed = True

    def close(self) -> None:
        if not self._failed:
            self.synchronize()


def run(fn: Callable[[World], Any], world_size: int, options: WorldOptions) -> list[Any]:
    """Run `fn` on every rank, interleaved, until all have returned."""
    refuse_inside_a_rank()
    link = options.link
    shared = _open(world_size, options.heap_size, options.timeout, link)
    machine = shared.machine
    hosts = []
    for rank in range(world_size):
        in_host_memory = bool(link) and rank > 0
        mode = SynchronizeFirst(shared.gang.read_back, in_host_memory, shared.gang.show)
        prepare = functools.partial(_make_blas_handle, shared.streams[rank])
        hosts.append(machine.add_host(rank, _host(fn, shared, rank), [mode], prepare))
    try:
        with (
            Installed(machine, shared.gang.launch, adopt=adopt),
            print_unraised(shared.records),
        ):
            machine.run()
        if machine.failure is not None:
            _end_kernels(shared)
            raise with_rank(machine.failure, hosts)
        return [host.result for host in hosts]
    finally:
        # Hosts and what they hold form cycles: without this, heaps wait for the collector.
        shared.segments.clear()
        shared.flags.clear()
        shared.contexts.clear()
        for host in hosts:
            host.result = None


def _open(world_size: int, heap_size: int, timeout: float, link: str) -> VirtualShared:
    device = _device()
    _finish_earlier()
    gpu = Gpu(device)
    num_sms = _sms_of_a_rank(gpu.target, world_size, link)
    machine = Machine(from_token(f"random:{knobs.seed.get()}"), num_sms, expire=False)
    flags = _heaps(world_size, heap_size, device)
    segments = list(flags)
    if link:
        check_host_memory(world_size - 1, heap_size)
        segments[1:] = [pinned_heap(heap_size, device) for _ in flags[1:]]
    if link == "host":
        flags = segments
    return VirtualShared(
        machine,
        gpu,
        Gang(machine, gpu),
        segments,
        flags,
        [Contexts(segment) for segment in flags],
        [_stream(device.index, rank) for rank in range(world_size)],
        {},
        max(int(timeout * polls_per_second(device.index)), 1),
        num_sms,
        bool(link),
    )


def _sms_of_a_rank(gpu: Target, world_size: int, link: str) -> int:
    """Share the SMs. All ranks get the same number, so that they make the same plans.

    With a link, passive ranks need one SM each, and rank 0 may fill the others.
    """
    num_sms = gpu.num_sms // world_size
    if link == "pcie":
        num_sms = gpu.num_sms - (world_size - 1)
    if num_sms <= 0 or world_size > _QUEUES:
        raise ValueError(
            f"{world_size} ranks on one {gpu.name}: it has {gpu.num_sms} SMs and {_QUEUES} queues, "
            "and every rank needs one of each"
        )
    return num_sms


def _device() -> torch.device:
    if not torch.cuda.is_available():
        raise SundogError(
            "backend 'virtual' needs a GPU, and torch finds none. The same program runs on the "
            "CPU with backend='sim'."
        )
    index = torch.cuda.current_device()
    _make_context(index)
    return torch.device("cuda", index)


@functools.cache
def _make_context(index: int) -> None:
    """Make CUDA's context with all queues, unless the process has made it already.

    Child processes must not inherit the variable: each would take as many queues, under MPS from
    one pool, and the fourth would be refused as "out of memory".
    """
    given = os.environ.get(_CONNECTIONS)
    os.environ.setdefault(_CONNECTIONS, str(_QUEUES))
    try:
        torch.cuda.synchronize(index)  # the first call that needs the context makes it
    finally:
        if given is None:
            del os.environ[_CONNECTIONS]


def _heaps(world_size: int, heap_size: int, device: torch.device) -> list[torch.Tensor]:
    """Make evenly spaced heaps, so that one descriptor reaches them all (`world.rank_stride`)."""
    apart = heap_size + -heap_size % ALIGNMENT
    try:
        whole = torch.empty(world_size * apart, dtype=torch.uint8, device=device)
        return [whole[rank * apart :][:heap_size] for rank in range(world_size)]
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info(device)
        raise ValueError(
            f"heap_size {heap_size:,} for {world_size} ranks is {heap_size * world_size:,} bytes; "
            f"of the {total:,} of {device} {free:,} are free. Ask for less with heap_size= or "
            "SUNDOG_HEAP_SIZE."
        ) from None


def _stream(index: int, place: int) -> torch.cuda.Stream:
    """Return one of _QUEUES distinct streams, the same for every world.

    Torch hands out that many, round robin, to all callers: the next may be one that we have.
    """
    made = _streams(index)
    if place not in made:
        tried = [torch.cuda.Stream(index)]
        while tried[-1] in made.values() and len(tried) <= _QUEUES:
            tried.append(torch.cuda.Stream(index))
        made[place] = tried[-1]
    return made[place]


@functools.cache
def _streams(index: int) -> dict[int, torch.cuda.Stream]:
    return {}


def _host(fn: Callable[[World], Any], shared: VirtualShared, rank: int) -> Callable[[], Any]:
    def host() -> Any:
        torch.cuda.set_stream(shared.streams[rank])
        return run_rank(fn, VirtualBackend(shared, rank))

    return host


def adopt(thread: threading.Thread) -> None:
    """Start a thread of a rank on the rank's stream, so that what it reads has been written.

    Torch would start it on the default stream, which does not wait for the ranks' streams.
    """
    stream, run = torch.cuda.current_stream(), thread.run

    def run_on_stream() -> None:
        torch.cuda.set_stream(stream)
        followers.add(threading.get_ident())
        try:
            run()
        finally:
            followers.discard(threading.get_ident())

    thread.run = run_on_stream  # type: ignore[method-assign]


def _make_blas_handle(stream: torch.cuda.Stream) -> None:
    """Make the cuBLAS handle of a rank's thread now: making one while a kernel spins may hang.

    torch keeps 32 MiB for each pair of handle and stream forever. Ranks that take handles in order
    and return them in the opposite order have the same pairs in the next world.
    """
    torch.cuda.set_device(stream.device)
    torch.cuda.set_stream(stream)
    torch.cuda.current_blas_handle()


def ends_soon(is_idle: Callable[[], bool], seconds: float = 0.5) -> bool:
    """Return whether the GPU becomes idle within this time."""
    end = time.monotonic() + seconds
    while not is_idle():
        if time.monotonic() > end:
            return False
        time.sleep(1e-3)
    return True


# Streams of failed worlds on which a rank was late, and the host memory that kernels there write.
_unfinished: list[tuple[list[torch.cuda.Stream], list[torch.Tensor]]] = []


def leave_running(shared: VirtualShared, streams: list[torch.cuda.Stream]) -> None:
    """Leave a world while a rank's kernels still run, so that its error is raised now.

    torch does not reuse the heaps' memory before these streams have ended. The rest is kept until
    the next world, which waits for the same streams.
    """
    heaps = [*shared.segments, *shared.flags]
    for heap in heaps:
        for stream in streams:
            heap.record_stream(stream)
    pinned = [heap for heap in shared.segments if shared.has_link]
    if not _unfinished:  # under MPS a process that leaves its kernels running spoils the others
        atexit.register(_finish_earlier)
    records = [words for _, _, words in shared.records]
    _unfinished.append((streams, [*records, *pinned]))
    failure = shared.machine.failure
    assert failure is not None
    if hasattr(failure, "add_note"):
        failure.add_note(
            "sundog: a rank is late, and the GPU still runs what it launched. The next world on "
            "this GPU waits for that."
        )


def _finish_earlier() -> None:
    """Wait for what failed worlds left on the streams that this one will use."""
    while _unfinished:
        streams, _ = _unfinished[-1]
        for stream in streams:
            stream.synchronize()
        _unfinished.pop()
    atexit.unregister(_finish_earlier)


def _end_kernels(shared: VirtualShared) -> None:
    """End the waits of what still runs after a failure, before its memory is freed.

    A kernel that does not wait can't be ended, and a rank may be late because of one.
    """
    # From another pool than the ranks' streams, so that it does not wait for their kernels.
    side = torch.cuda.Stream(shared.segments[0].device, priority=-1)
    try:
        for contexts in shared.contexts:
            contexts.end_waits(side)
        streams = list(_streams(shared.segments[0].device.index).values())
        if ends_soon(lambda: all(stream.query() for stream in streams)):
            torch.cuda.synchronize()
        else:
            leave_running(shared, [stream for stream in streams if not stream.query()])
    except RuntimeError as error:  # a failed GPU fails here too; report the first error
        assert shared.machine.failure is not None
        if hasattr(shared.machine.failure, "add_note"):
            shared.machine.failure.add_note(f"sundog: afterwards the GPU reported {error}")
