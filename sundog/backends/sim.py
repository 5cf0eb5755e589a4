"""Backend `sim`: every rank is a thread of this process, memory is on the CPU, and we schedule."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .. import knobs
from ..callsite import caller_frame
from ..device import context
from ..machine.graph import Recording
from ..machine.launcher import Installed
from ..machine.machine import Machine
from ..machine.queues import switched
from ..machine.regions import Memory, Region, SplitHeaps
from ..machine.schedule import from_token
from ..machine.tasks import Event, Program
from ..world.backend import Backend, Exchange, Ranks
from ..world.heap import ALIGNMENT, Allocation
from ..world.streams import Order
from ..world.world import World
from . import Capabilities, WorldOptions
from ._hosts import Meeting, refuse_inside_a_rank, run_rank, with_rank

CAPABILITIES = Capabilities(on_gpu=False, processes=False, links=("", "pcie"), takes_sim=True)

UNBOUNDED = 1 << 62  # a simulated wait ends by a signal, or by `expire`


@dataclass(frozen=True)
class Sim:
    """How to simulate. `schedule` is a token such as a finding prints: random:7, pct:7:3.

    With `split_heaps` a rank's data and its flags are in different memories, as on `virtual` with
    link="pcie", so a kernel that takes one for the other raises.
    """

    schedule: str = ""
    num_sms: int = 0
    expire: bool = False
    split_heaps: bool = False

    def __post_init__(self) -> None:
        if self.num_sms < 0:
            raise ValueError(f"num_sms {self.num_sms}: at least 1, or 0 for SUNDOG_SIM_SMS's")


class OnMachine(Backend):
    """What `sim` and `shm` share: kernels run on a simulated machine, memory is on the CPU."""

    machine: Machine
    device = torch.device("cpu")
    owns_gpu = True  # a rank's products run one after the other, on the CPU
    guard = ALIGNMENT
    polls = UNBOUNDED  # a simulated wait ends by a signal, or by `expire`

    def synchronize(self) -> None:
        self.machine.streams.synchronize(self.rank)

    def stream(self, number: int) -> AbstractContextManager[None]:
        return switched(self.machine, number)

    def record_event(self) -> Event:
        return self.machine.streams.record(self.machine.host.stream)

    def wait_event(self, event: Any) -> None:
        self.machine.streams.wait(self.machine.host.stream, event)

    def begin_capture(self) -> Recording:
        return Recording(self.machine)

    def relaunch(self, run: Callable[[], None], given: tuple[torch.Tensor, ...]) -> None:
        run()  # interpreting the kernels takes far longer anyway


class SimBackend(OnMachine):
    """One rank of a simulated world."""

    name = "sim"

    def __init__(self, shared: SimShared, rank: int) -> None:
        self.rank = rank
        self.size = len(shared.segments)
        self.machine = shared.machine
        self.num_sms = shared.machine.num_sms
        self.bases = [segment.data_ptr() for segment in shared.segments]
        self.flag_bases = [segment.data_ptr() for segment in shared.flags]
        self.passive = shared.link and rank > 0
        self.order = Order()
        self._shared = shared

    def segment(self, rank: int, is_flags: bool = False) -> torch.Tensor:
        return (self._shared.flags if is_flags else self._shared.segments)[rank]

    def exchange(
        self, value: Any, what: str, ranks: Ranks, channel: str, kind: Exchange = Exchange.VALUES
    ) -> list[Any]:
        meeting = self._shared.meetings.setdefault(channel, Meeting(self.machine, ranks))
        return meeting.exchange(value, what, kind)

    def after_drain(self, check: Callable[[], None]) -> None:
        self.machine.hosts[self.rank].on_drained = check

    def allocated(self, base: int, allocation: Allocation) -> None:
        region = region_of(base, allocation, self.rank)
        self.machine.memory.add(region)
        if self.machine.checker is not None:
            self.machine.checker.allocated(region)

    def freed(self, base: int, allocation: Allocation) -> None:
        machine, start = self.machine, base + allocation.offset
        machine.streams.drain_all(self.rank)  # freeing is in stream order: its kernels have ended
        if machine.checker is not None:
            machine.checker.freed(start, machine.hosts[self.rank].stream, caller_frame())
        machine.memory.remove(start)

    def fail(self, error: BaseException) -> None:
        """Do nothing: once the error has left this host, it ends the others too."""

    def close(self) -> None:
        self.synchronize()


@dataclass
class SimShared:
    """What all ranks of one simulated world share."""

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
        is_flags=allocation.is_flags and not allocation.is_context,
    )


def make_segments(world_size: int, nbytes: int) -> list[torch.Tensor]:
    """Make heaps at aligned addresses, evenly spaced as on `virtual`, with a gap after each."""
    apart = nbytes + -nbytes % ALIGNMENT + ALIGNMENT
    # Its own pages, which go back to the system with the world and leave malloc no holes.
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    whole = mmap.mmap(-1, world_size * apart + ALIGNMENT, private)
    first = -torch.frombuffer(whole, dtype=torch.uint8).data_ptr() % ALIGNMENT
    # Each has its own storage, by which the checker tells them apart.
    return [
        torch.frombuffer(whole, dtype=torch.uint8, count=nbytes, offset=first + r * apart)
        for r in range(world_size)
    ]


def run(fn: Callable[[World], Any], world_size: int, options: WorldOptions) -> list[Any]:
    """Run `fn` on every rank, interleaved, until all have returned."""
    how = options.sim or Sim()
    token = how.schedule or f"random:{knobs.seed.get()}"
    machine = Machine(from_token(token), how.num_sms or knobs.num_sms.get(), how.expire)
    simulate(machine, fn, world_size, options.heap_size, how.split_heaps, options.link)
    if machine.failure is not None:
        raise with_rank(machine.failure, machine.hosts)
    return [host.result for host in machine.hosts]


def simulate(
    machine: Machine,
    fn: Callable[[World], Any],
    world_size: int,
    heap_size: int,
    split_heaps: bool = False,
    link: str = "",
) -> None:
    """Do the same on a given machine, whose hosts get the results and `failure` the first error."""
    refuse_inside_a_rank()
    segments = flags = make_segments(world_size, heap_size)
    if split_heaps or link:
        machine.memory.split = SplitHeaps.make(world_size, heap_size)
        segments, flags = machine.memory.split.data, machine.memory.split.flags
    shared = SimShared(machine, segments, flags, {}, bool(link))
    for rank in range(world_size):
        machine.add_host(rank, partial(run_rank, fn, SimBackend(shared, rank)), [])
    machine.on_expire = lambda programs: end_waits(machine.memory, programs)
    with Installed(machine):
        machine.run()
    machine.close()


def end_waits(memory: Memory, programs: list[Program]) -> None:
    """End these programs' waits: write 0 to the word in their contexts that bounds them."""
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
