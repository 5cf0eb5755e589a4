"""Backend `sim`: every rank a thread of this process, memory on the CPU, our own scheduler."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from .. import knobs
from ..device import context
from ..machine.launcher import Installed, current_machine
from ..machine.machine import Machine
from ..machine.queues import switched
from ..machine.recording import Recording
from ..machine.regions import Memory, Region, SplitHeaps
from ..machine.schedule import from_token
from ..machine.tasks import Event, Host, Program
from ..world.backend import Backend, Exchange
from ..world.capture import Graph
from ..world.heap import ALIGNMENT, Allocation, Heap
from ..world.streams import Order
from ..world.world import World
from ._codec import decode, encode

__all__ = ["Sim", "run"]

UNBOUNDED = 1 << 62  # a simulated wait ends by a signal, or time is made to run out (`expire`)
GUARD = ALIGNMENT


@dataclass(frozen=True)
class Sim:
    """How to simulate. `schedule` is a token such as a finding prints: random:7, pct:7:3.

    With `split_heaps` a rank's data and its flags lie in different memories, as on `virtual` with
    link="pcie": a kernel that reaches for one as if it were the other is told so.
    """

    schedule: str = ""
    num_sms: int = 0
    expire: bool = False
    split_heaps: bool = False

    def __post_init__(self) -> None:
        if self.num_sms < 0:
            raise ValueError(f"num_sms {self.num_sms}: at least 1, or 0 for SUNDOG_SIM_SMS's")


class Meeting:
    """Where the members of a group exchange values: the last to come wakes the others."""

    def __init__(self, machine: Machine, ranks: tuple[int, ...]) -> None:
        self._machine = machine
        self._ranks = ranks
        self._values: dict[int, bytes] = {}
        self._waiting: list[Host] = []

    def exchange(self, value: Any, what: str, kind: Exchange = Exchange.VALUES) -> list[Any]:
        machine = self._machine
        # Each rank gets a copy of its own, as it would from another process.
        self._values[machine.host.rank] = encode(value, what, kind.may_pickle)
        missing = [rank for rank in self._ranks if rank not in self._values]
        ranks = ", ".join(map(str, missing))
        waits_for = f"rank{'s' if len(missing) > 1 else ''} {ranks} at a {what}"
        if missing:
            for host in self._waiting:
                host.waits_for = waits_for
            self._waiting.append(machine.host)
            everyone = machine.block(waits_for)
        else:
            everyone = [self._values[rank] for rank in self._ranks]
            waiting, self._waiting, self._values = self._waiting, [], {}
            if machine.checker is not None and kind is Exchange.BARRIER:
                hosts = [*waiting, machine.host]
                streams = [stream for h in hosts for stream in machine.streams.of(h.rank)]
                machine.checker.world_barrier(streams)
            for host in waiting:
                machine.wake(host, everyone)
        return [decode(each, "a value", kind.may_pickle) for each in everyone]


class SimBackend:
    """One rank of a simulated world."""

    name = "sim"
    stream_number = 0
    graph: Graph | None = None
    device = torch.device("cpu")
    guard = GUARD
    polls = UNBOUNDED

    def __init__(self, shared: Shared, rank: int) -> None:
        self.rank = rank
        self.size = len(shared.segments)
        self.num_sms = shared.machine.num_sms
        self.bases = [segment.data_ptr() for segment in shared.segments]
        self.flag_bases = [segment.data_ptr() for segment in shared.flags]
        self.passive = shared.link and rank > 0
        self.order = Order()
        self._shared = shared

    def segment(self, rank: int, is_flags: bool = False) -> torch.Tensor:
        return (self._shared.flags if is_flags else self._shared.segments)[rank]

    def record(self, num_words: int) -> None:
        """The context, on the heap, has room for it."""

    def exchange(
        self,
        value: Any,
        what: str,
        ranks: tuple[int, ...],
        channel: str,
        kind: Exchange = Exchange.VALUES,
    ) -> list[Any]:
        machine = self._shared.machine
        meeting = self._shared.meetings.setdefault(channel, Meeting(machine, ranks))
        return meeting.exchange(value, what, kind)

    def synchronize(self) -> None:
        self._shared.machine.streams.synchronize(self.rank)

    def stream(self, number: int) -> AbstractContextManager[None]:
        return switched(self._shared.machine, number)

    def record_event(self) -> Event:
        machine = self._shared.machine
        return machine.streams.record(machine.host.stream)

    def wait_event(self, event: Any) -> None:
        machine = self._shared.machine
        machine.streams.wait(machine.host.stream, event)

    def begin_capture(self) -> Recording:
        return Recording(self._shared.machine)

    def again(self, run: Callable[[], None], given: tuple[torch.Tensor, ...]) -> None:
        run()  # kernels are interpreted: that alone takes far longer

    def allocated(self, base: int, allocation: Allocation) -> None:
        region = region_of(base, allocation, self.rank)
        self._shared.machine.memory.add(region)
        if self._shared.machine.checker is not None:
            self._shared.machine.checker.allocated(region)

    def freed(self, base: int, allocation: Allocation) -> None:
        self._shared.machine.streams.drain_all(
            self.rank
        )  # freeing is in stream order: this rank's kernels have ended
        self._shared.machine.memory.remove(base + allocation.offset)
        if self._shared.machine.checker is not None:
            self._shared.machine.checker.freed(base + allocation.offset)

    def fail(self, error: BaseException) -> None:
        """The error ends the other hosts too, once it has left this one."""

    def close(self) -> None:
        self.synchronize()


@dataclass
class Shared:
    """What all ranks of one simulated world have in common."""

    machine: Machine
    segments: list[torch.Tensor]
    flags: list[torch.Tensor]  # the same, unless heaps are split
    meetings: dict[str, Meeting]
    link: bool  # all ranks but the first are passive


def region_of(base: int, allocation: Allocation, rank: int) -> Region:
    start = base + allocation.offset
    return Region(
        start,
        start + allocation.nbytes,
        allocation.name,
        rank,
        allocation.itemsize,
        is_heap=True,
        is_context=allocation.is_context,
    )


def make_segments(world_size: int, nbytes: int) -> list[torch.Tensor]:
    """Heaps at aligned addresses, evenly spaced as on `virtual`, with a gap behind each."""
    apart = nbytes + -nbytes % ALIGNMENT + GUARD
    # Pages of its own: they go back to the system with the world, and leave malloc no holes.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    whole = mmap.mmap(-1, world_size * apart + ALIGNMENT, private)
    first = -torch.frombuffer(whole, dtype=torch.uint8).data_ptr() % ALIGNMENT
    # Each with a storage of its own, by which the checker tells them apart.
    return [
        torch.frombuffer(whole, dtype=torch.uint8, count=nbytes, offset=first + r * apart)
        for r in range(world_size)
    ]


def run(
    fn: Callable[[World], Any], world_size: int, heap_size: int, options: Sim, link: str = ""
) -> list[Any]:
    """Run `fn` on every rank, interleaved, until all have returned."""
    token = options.schedule or f"random:{knobs.seed.get()}"
    machine = Machine(from_token(token), options.num_sms or knobs.num_sms.get(), options.expire)
    simulate(machine, fn, world_size, heap_size, options.split_heaps, link)
    if machine.failure is not None:
        raise _with_rank(machine.failure, machine.hosts)
    return [host.result for host in machine.hosts]


def simulate(
    machine: Machine,
    fn: Callable[[World], Any],
    world_size: int,
    heap_size: int,
    split_heaps: bool = False,
    link: str = "",
) -> None:
    """The same on a given machine, whose hosts have the results and `failure` the first error."""
    if current_machine() is not None:
        raise ValueError("sundog.run inside a rank: open the second world after the first is done")
    segments = flags = make_segments(world_size, heap_size)
    if split_heaps or link:
        machine.memory.split = SplitHeaps.make(world_size, heap_size)
        segments, flags = machine.memory.split.data, machine.memory.split.flags
    shared = Shared(machine, segments, flags, {}, bool(link))
    for rank in range(world_size):
        machine.add_host(rank, _host(fn, shared, rank), [])
    machine.on_expire = lambda programs: end_waits(machine.memory, programs)
    with Installed(machine):
        machine.run()
    machine.close()


def _host(fn: Callable[[World], Any], shared: Shared, rank: int) -> Callable[[], Any]:
    return lambda: run_rank(fn, SimBackend(shared, rank))


def run_rank(fn: Callable[[World], Any], backend: Backend) -> Any:
    """What the host of a rank does where ranks are threads."""
    heap = Heap(backend.segment(backend.rank).numel(), backend.guard)
    world = World(backend, tuple(range(backend.size)), "world", heap)
    try:
        world.barrier()
        result = fn(world)
        if not world._closed:
            world.synchronize()
        world.forget()
        return result
    finally:
        world._end("the world was closed")


def end_waits(memory: Memory, programs: list[Program]) -> None:
    """Time runs out: 0 in the word that bounds waits, in the contexts that these programs have."""
    for program in programs:
        for value in program.launch.arguments.values():
            if not isinstance(value, torch.Tensor):
                continue
            with torch._C.DisableTorchFunction():
                address = value.data_ptr()
            region = memory.find(address, address + 1)
            if region is not None and region.is_context:
                word = region.start + 8 * context.POLLS.value
                ctypes.c_int64.from_address(word).value = 0


def _with_rank(error: BaseException, hosts: list[Host]) -> BaseException:
    """Say which rank raised, on the exception itself: its type stays what the rank raised."""
    rank = next((host.rank for host in hosts if host.error is error), None)
    if rank is not None:
        note = f"sundog: raised on rank {rank} of {len(hosts)}"
        if hasattr(error, "add_note"):
            error.add_note(note)
        elif error.args and isinstance(error.args[0], str):  # Python 3.10
            error.args = (f"{error.args[0]} [{note}]", *error.args[1:])
    return error
