"""Launches of many ranks on one GPU: held until all that may wait for each other can start.

A kernel that is loaded while another one spins waits for that one, which may be waiting for it. So
a launch is compiled and loaded first, then held until every other rank's host has come to a launch
too, or waits, or has ended; then all of them start, each on its own stream. For the same reason no
host ever blocks the process: it waits for an event, and the other hosts run on.

If the programs that wait for each other don't fit on the GPU together, none of them starts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

from ..errors import Deadlock, NotResident
from ..sim import report
from ..sim.machine import Machine
from ..sim.tasks import Host
from ..target import Footprint, Target

__all__ = ["Device", "Event", "Gang", "Prepared", "check_resident"]

# A rank that waits for its own kernels usually launches next: for so long its peers' launches wait
# for it, in seconds. Longer than most kernels run, far shorter than a timeout.
_GRACE = 0.02
_BUSY_LOOKS = 100  # before the first nap
_LONGEST_NAP = 2e-4


class Event(Protocol):
    def query(self) -> bool:
        """Has all that was on the stream when it was recorded ended?"""


class Prepared(Protocol):
    """A launch that is compiled."""

    name: str
    programs: int

    @property
    def loaded(self) -> bool: ...

    def load(self) -> None: ...

    def footprint(self) -> Footprint | None:
        """What a program takes, once it is loaded; None if the kernel waits for nobody."""

    def start(self, stream: Any) -> Any: ...


class Device(Protocol):
    """The GPU, as far as launching goes."""

    target: Target

    def is_capturing(self) -> bool: ...

    def current_stream(self) -> Any: ...

    def event(self, stream: Any) -> Event: ...

    def prepare(self, kernel: Any, grid: Any, args: tuple, kwargs: dict) -> Prepared: ...


@dataclass(eq=False)
class Flight:
    """A launch, held back or on its way."""

    host: Host
    prepared: Prepared
    stream: Any
    footprint: Footprint | None
    event: Event | None = None

    @property
    def ended(self) -> bool:
        return self.event is not None and self.event.query()


@dataclass(eq=False)
class Waiter:
    host: Host
    events: list[Event]
    to_load: bool


class Gang:
    """The launches of one world's ranks."""

    def __init__(self, machine: Machine, device: Device) -> None:
        self._machine = machine
        self._device = device
        self._held: list[Flight] = []
        self._flying: list[Flight] = []
        self._waiters: list[Waiter] = []
        self._idle_since = 0.0
        self._looks = 0
        machine.on_idle = self._idle

    def launch(self, kernel: Any, grid: Any, args: tuple, kwargs: dict) -> Any:
        """In a host: returns when the kernel has been started, not when it has ended."""
        prepared = self._device.prepare(kernel, grid, args, kwargs)
        stream = self._device.current_stream()
        capturing = self._device.is_capturing()
        if self._machine.host.recording is not None:
            self._machine.host.recording.launched(prepared, stream, capturing)
        if capturing:  # nothing starts now
            return prepared.start(stream)
        if not prepared.loaded:
            self.wait_for_all(f"to load {prepared.name}")
            prepared.load()
        return self.put(prepared, stream)

    def wait_for_all(self, what: str) -> None:
        """In a host: until nothing runs on the GPU, and nothing starts before this host goes on."""
        self._wait([f.event for f in self._flying if f.event], what, True)

    def put(self, prepared: Prepared, stream: Any) -> Any:
        """In a host: returns when what is loaded has been started, together with the others'."""
        self._held.append(Flight(self._machine.host, prepared, stream, prepared.footprint()))
        answer = self._machine.block(f"the other ranks, to launch {prepared.name} together")
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def synchronize(self, streams: list[Any]) -> None:
        """In a host: until all that its rank launched, and what is on these streams, has ended."""
        if self._device.is_capturing():
            return
        host = self._machine.host
        events = [f.event for f in self._flying if f.host is host and f.event]
        every = dict.fromkeys([self._device.current_stream(), *streams])
        events += [self._device.event(stream) for stream in every]
        self._wait(events, "its kernels to end", False)

    def read_back(self) -> None:
        """In a host: until the current stream has ended, as torch will wait for it."""
        if not self._device.is_capturing():
            self._wait([self._device.event(self._device.current_stream())], "its stream", False)

    def _wait(self, events: list[Event], what: str, to_load: bool) -> None:
        if all(event.query() for event in events):
            return
        self._waiters.append(Waiter(self._machine.host, events, to_load))
        answer = self._machine.block(what)
        if isinstance(answer, BaseException):
            raise answer

    # in the hub, when no host can run

    def _idle(self) -> bool:
        """True if a host can go on now."""
        try:
            self._wake()
        except RuntimeError as error:  # the GPU reports what a kernel did
            self._machine.failure = error
            return True
        if self._may_start():
            self._start()
        if self._machine.ready:
            self._idle_since = 0.0
            return True
        if self._waiters:
            self._nap()
        elif not all(host.done for host in self._machine.hosts):
            self._machine.failure = Deadlock(*report.deadlock(self._machine))
        return False

    def _wake(self) -> None:
        for waiter in list(self._waiters):
            if all(event.query() for event in waiter.events):
                self._waiters.remove(waiter)
                self._machine.wake(waiter.host)

    def _may_start(self) -> bool:
        if not self._held or self._machine.ready or any(w.to_load for w in self._waiters):
            return False
        waited = time.monotonic() - self._idle_since if self._idle_since else 0.0
        return not self._waiters or waited > _GRACE

    def _start(self) -> None:
        held, self._held = self._held, []
        self._flying = _still_flying(self._flying)
        refusal = check_resident(self._device.target, self._flying + held)
        for flight in held:
            answer: Any = refusal
            if refusal is None:
                try:
                    answer = flight.prepared.start(flight.stream)
                    flight.event = self._device.event(flight.stream)
                    self._flying.append(flight)
                except Exception as error:  # its own host raises it
                    answer = error
            self._machine.wake(flight.host, answer)

    def _nap(self) -> None:
        if not self._idle_since:
            self._idle_since, self._looks = time.monotonic(), 0
        self._looks += 1
        if self._looks > _BUSY_LOOKS:
            time.sleep(min(1e-6 * self._looks, _LONGEST_NAP))


def _still_flying(flights: list[Flight]) -> list[Flight]:
    """Those that have not ended. On a stream they end in turn, so one look at each is enough."""
    busy: set[Any] = set()
    still = []
    for flight in flights:
        if flight.stream in busy or not flight.ended:
            busy.add(flight.stream)
            still.append(flight)
    return still


def check_resident(target: Target, flights: list[Flight]) -> NotResident | None:
    """Do the programs that may wait for each other all fit, wherever the GPU puts them?

    A program finds no place only if every SM is full for it. An SM that is full holds at least as
    many programs as fit of one that takes the most of everything, so no more than that many per SM
    always find one. A rank's launches on one stream run one after the other: its largest counts.
    """
    waiting = [f for f in flights if f.footprint is not None]
    if not waiting:
        return None
    most = Footprint(0, 0, 1)
    largest: dict[tuple[int, Any], Flight] = {}
    for flight in waiting:
        assert flight.footprint is not None
        most |= flight.footprint
        place = (flight.host.rank, flight.stream)
        if place not in largest or largest[place].prepared.programs < flight.prepared.programs:
            largest[place] = flight
    total = sum(flight.prepared.programs for flight in largest.values())
    fit = target.programs_per_sm(most)
    if total <= fit * target.num_sms:
        return None
    return NotResident(_refusal(target, list(largest.values()), most, total, fit))


def _refusal(
    target: Target, largest: list[Flight], most: Footprint, total: int, per_sm: int
) -> str:
    ranks = len({flight.host.rank for flight in largest})
    lines = [
        f"  rank {f.host.rank}: {f.prepared.name}, {f.prepared.programs} programs of {f.footprint}"
        for f in sorted(largest, key=lambda f: f.host.rank)
    ]
    return (
        f"{total} programs of {ranks} ranks wait for each other, and {target.name} holds "
        f"{per_sm * target.num_sms} of {most} at once ({per_sm} on each of {target.num_sms} SMs). "
        "They would hang, so none was started:\n"
        + "\n".join(lines)
        + f"\nLaunch at most {per_sm * target.num_sms // ranks} programs per rank "
        "(world.num_sms always fit), or use smaller tiles."
    )
