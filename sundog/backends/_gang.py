"""Launches of many ranks on one GPU: held until all that may wait for each other can start.

Loading a kernel while another one spins waits for that one, which may be waiting for it. So a
launch is compiled and loaded first, then held until every other rank's host has also reached a
launch, or waits, or has ended. Then all of them start, each on its own stream. For the same reason
no host ever blocks the process: it waits for an event, and the other hosts continue.

Members of a group may load and capture much before they reach what the other ranks have launched,
and nothing may run meanwhile. So launches whose partners have all arrived start first, and the
others are held until no more arrive.

Co-residency: all programs that wait for each other must run at once. If they don't fit on the GPU
together, none of them starts.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from ..errors import Deadlock, NotResident, WaitTimeout
from ..machine import deadlock
from ..machine.launcher import followers
from ..machine.machine import Machine
from ..machine.tasks import Host
from ..target import Footprint, Target


class Kind(NamedTuple):
    """The properties of a launch that matter for co-residency."""

    name: str
    programs: int
    footprint: Footprint | None  # None: it never waits, so it always ends


def check_resident(
    target: Target, kinds: Mapping[tuple[int, Any], Iterable[Kind]]
) -> NotResident | None:
    """Return the error to raise if what waits doesn't fit. `kinds`: those on each rank's streams.

    Launches on one stream run one after the other, so the largest counts.

    A program finds no place only if every SM is full. A full SM holds at least as many programs as
    would fit of one that takes the most of everything, so up to that many programs per SM always
    find a place.
    """
    most = Footprint(0, 0, 1)
    largest: list[tuple[int, Kind]] = []
    for (rank, _), every in kinds.items():
        waiting = [kind for kind in every if kind.footprint is not None]
        for kind in waiting:
            assert kind.footprint is not None
            most |= kind.footprint
        if waiting:
            largest.append((rank, max(waiting, key=lambda kind: kind.programs)))
    total = sum(kind.programs for _, kind in largest)
    fit = target.programs_per_sm(most)
    if total <= fit * target.num_sms:
        return None
    return NotResident(_refusal(target, largest, most, total, fit))


def _refusal(
    target: Target, largest: list[tuple[int, Kind]], most: Footprint, total: int, per_sm: int
) -> str:
    ranks = len({rank for rank, _ in largest})
    lines = [
        f"  rank {rank}: {kind.name}, {kind.programs} programs of {kind.footprint}"
        for rank, kind in sorted(largest, key=lambda each: each[0])
    ]
    return (
        f"{total} programs of {ranks} ranks wait for each other, and {target.name} holds "
        f"{per_sm * target.num_sms} of {most} at once ({per_sm} on each of {target.num_sms} SMs). "
        "They would hang, so none was started:\n"
        + "\n".join(lines)
        + f"\nLaunch at most {per_sm * target.num_sms // ranks} programs per rank "
        "(world.num_sms always fit), or use smaller tiles."
    )


def complete(partners: Mapping[int, Collection[int]], done: Collection[int]) -> set[int]:
    """Return the largest set of ranks whose partners are all in the set.

    `partners` has, for each rank with a held launch, the ranks that it may wait for, where they are
    known. Nothing is held back for the ranks in `done`, which have ended.
    """
    found = {rank for rank, those in partners.items() if those}
    while True:
        alone = {
            rank
            for rank in found
            for other in set(partners[rank]) - {rank, *done}
            if other not in found or rank not in partners[other]
        }
        if not alone:
            return found
        found -= alone


# A rank that waits for its own kernels usually launches next, so its peers' launches wait for it
# this long, in seconds: longer than most kernels run, far shorter than a timeout.
_GRACE = 0.02
_BUSY_LOOKS = 100  # before the first nap
_MANY = 64  # launches on a stream before finished ones are looked for
_LONGEST_NAP = 2e-4


class GpuEvent(Protocol):
    def query(self) -> bool:
        """Return whether everything that was on the stream when it was recorded has ended."""

    def record(self, stream: Any) -> None:
        """Record again, after what is on the stream now."""


class Prepared(Protocol):
    """A launch that is compiled."""

    name: str
    programs: int

    @property
    def pointers(self) -> Collection[int]:
        """Return the addresses of its tensors."""

    @property
    def loaded(self) -> bool: ...

    def load(self) -> None: ...

    def footprint(self) -> Footprint | None:
        """Return what a program takes, once it is loaded; None if the kernel never waits."""

    def start(self, stream: Any) -> Any: ...


class Device(Protocol):
    """What launching needs of the GPU."""

    target: Target

    def is_capturing(self) -> bool: ...

    def current_stream(self) -> Any: ...

    def event(self, stream: Any) -> GpuEvent: ...

    def show(self, stream: Any) -> None:
        """Let threads that no rank started read what is on this stream."""

    def prepare(self, kernel: Any, grid: Any, args: tuple, kwargs: dict) -> Prepared: ...

    def partners(self, prepared: Prepared) -> Collection[int]:
        """Return the ranks that it may wait for, if there are groups and they are known."""


@dataclass(eq=False)
class Flight:
    """A launch, held or running."""

    host: Host
    prepared: Prepared
    stream: Any
    kind: Kind
    queue: Queue | None = None  # of its stream, once it has started
    fits: object = None  # the `Gang._fit` that includes it

    def __post_init__(self) -> None:
        self.place = (self.host.rank, self.stream)


@dataclass(eq=False)
class Queue:
    """A rank's launches on one stream that may not have ended."""

    rank: int
    flights: deque[tuple[GpuEvent, Kind]] = field(default_factory=deque)
    kinds: Counter[Kind] = field(default_factory=Counter)  # few, of hundreds of launches
    late: Any = None  # the stream, if the last event is from before its latest launches

    def add(self, kind: Kind, stream: Any, device: Device) -> None:
        """Note that a launch has started. Repeats in a row share one event."""
        if self.is_repeat(kind):
            self.late = stream
            return
        if len(self.flights) > _MANY:
            self.look()
        self.flights.append((device.event(stream), kind))
        self.kinds[kind] += 1

    def is_repeat(self, kind: Kind) -> bool:
        return bool(self.flights) and self.flights[-1][1] is kind

    def last(self) -> list[GpuEvent]:
        """Return the event after the last launch, if any. For repeats it is recorded only now."""
        if self.late is not None:
            self.flights[-1][0].record(self.late)
            self.late = None
        return [self.flights[-1][0]] if self.flights else []

    def look(self) -> None:
        """Remove finished launches. They finish in order: if the last has finished, all have;
        otherwise pop finished ones from the front."""
        if any(event.query() for event in self.last()):
            self.flights.clear()
            self.kinds.clear()
        while self.flights and self.flights[0][0].query():
            _, kind = self.flights.popleft()
            self.kinds[kind] -= 1
            if not self.kinds[kind]:
                del self.kinds[kind]


@dataclass(eq=False)
class Waiter:
    host: Host
    events: list[GpuEvent]
    to_load: bool


class Gang:
    """The launches of one world's ranks."""

    def __init__(self, machine: Machine, device: Device) -> None:
        self._machine = machine
        self._device = device
        self._held: list[Flight] = []
        self._queues: dict[tuple[int, Any], Queue] = {}  # by rank and stream
        self._fit: set[tuple[tuple[int, Any], Kind]] = set()  # fit together, and no others
        self._waiters: list[Waiter] = []
        self._idle_since = 0.0
        self._looks = 0
        machine.on_idle = self._idle

    def launch(self, kernel: Any, grid: Any, args: tuple, kwargs: dict) -> Any:
        """Launch from a host. Return when the kernel has started; it may still run."""
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
        """Wait, in a host, until the GPU is idle. Nothing starts meanwhile."""
        self._wait([event for q in self._queues.values() for event in q.last()], what, True)

    def put(self, prepared: Prepared, stream: Any = None) -> Any:
        """Start what is loaded, in a host, together with the others' launches, and return.

        `stream`: default: the current one.
        """
        stream = self._device.current_stream() if stream is None else stream
        return self.go(self.flight(prepared, stream))

    def flight(self, prepared: Prepared, stream: Any) -> Flight:
        """Make a launch of this host, which may `go` more than once."""
        kind = Kind(prepared.name, prepared.programs, prepared.footprint())
        return Flight(self._machine.host, prepared, stream, kind)

    def go(self, flight: Flight) -> Any:
        """Start it, as `put` does."""
        if len(self._machine.hosts) == 1 and self._fits(flight):
            return self._begin(flight)  # there is no other rank to wait for
        self._held.append(flight)
        return self._machine.block(f"the other ranks, to launch {flight.prepared.name} together")

    def synchronize(self, streams: list[Any]) -> None:
        """Wait, in a host, for what its rank launched, and for what is on these streams."""
        if self._device.is_capturing():
            return
        rank = self._machine.host.rank
        events = [e for q in self._queues.values() if q.rank == rank for e in q.last()]
        every = dict.fromkeys([self._device.current_stream(), *streams])
        events += [self._device.event(stream) for stream in every]
        self._wait(events, "its kernels to end", False)

    def read_back(self) -> None:
        """Wait, in a host, for the current stream, before torch does."""
        if not self._device.is_capturing():
            self._wait([self._device.event(self._device.current_stream())], "its stream", False)

    def show(self) -> None:
        """Let a thread that no rank started read what is on the current stream.

        Such a thread uses the default stream, which does not wait for a rank's stream by itself.
        """
        if self._has_readers() and not self._device.is_capturing():
            self._device.show(self._device.current_stream())

    def _has_readers(self) -> bool:
        """Return whether threads run besides those of the hosts, the hub and `run`'s caller.

        Those that a rank started are on its stream. The compiler keeps two of them for ever.
        """
        return threading.active_count() > len(self._machine.hosts) + 2 + len(followers)

    def _wait(self, events: list[GpuEvent], what: str, to_load: bool) -> None:
        if all(event.query() for event in events):
            return
        self._waiters.append(Waiter(self._machine.host, events, to_load))
        self._machine.block(what)

    # in the hub, when no host can run

    def _idle(self) -> bool:
        """Return whether a host can continue now."""
        try:
            self._give_up()
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
            self._machine.failure = Deadlock(*deadlock.deadlock(self._machine))
        return False

    def _wake(self) -> None:
        for waiter in list(self._waiters):
            if all(event.query() for event in waiter.events):
                self._waiters.remove(waiter)
                self._machine.wake(waiter.host)

    def _give_up(self) -> None:
        """Let a rank whose wait has expired report it now, not when a late rank's work has ended.

        It does so where its host waits for others: until the GPU is idle, to launch together, or at
        an exchange. Its own kernels end by themselves.
        """
        alone = [waiter.host for waiter in self._waiters if not waiter.to_load]
        for host in self._machine.hosts:
            error = None if host.done or host in alone else _expired(host)
            if error is not None:
                self._waiters = [waiter for waiter in self._waiters if waiter.host is not host]
                self._held = [flight for flight in self._held if flight.host is not host]
                self._machine.wake(host, error)

    def _may_start(self) -> bool:
        if not self._held or self._machine.ready or any(w.to_load for w in self._waiters):
            return False
        waited = time.monotonic() - self._idle_since if self._idle_since else 0.0
        return not self._waiters or waited > _GRACE

    def _start(self) -> None:
        held = self._next()
        refusal = None
        if not all(self._fits(flight) for flight in held):
            refusal = self._check_resident(held)
        for flight in held:
            answer: Any = refusal
            if refusal is None:
                try:
                    answer = self._begin(flight)
                except Exception as error:  # its own host raises it
                    answer = error
            self._machine.wake(flight.host, answer)

    def _next(self) -> list[Flight]:
        """Take the launches that start now: those whose partners have arrived or are not known.

        Take all if there are none: a rank stays away, and the others' waits will report it.
        """
        held, self._held = self._held, []
        partners = {each.host.rank: self._device.partners(each.prepared) for each in held}
        done = [host.rank for host in self._machine.hosts if host.done]
        found = complete(partners, done)
        if found:
            waiting = [each for each in held if partners[each.host.rank]]
            self._held = [each for each in waiting if each.host.rank not in found]
        return [each for each in held if each not in self._held]

    def _fits(self, flight: Flight) -> bool:
        if flight.fits is not self._fit and (flight.place, flight.kind) in self._fit:
            flight.fits = self._fit
        return flight.fits is self._fit

    def _begin(self, flight: Flight) -> Any:
        if flight.queue is None:
            flight.queue = self._queues.setdefault(flight.place, Queue(flight.host.rank))
        if not flight.queue.is_repeat(flight.kind):
            flight.queue.last()  # or the event of what has run would wait for this one
        answer = flight.prepared.start(flight.stream)
        if self._has_readers():
            self._device.show(flight.stream)
        flight.queue.add(flight.kind, flight.stream, self._device)
        return answer

    def _check_resident(self, held: list[Flight]) -> NotResident | None:
        for queue in self._queues.values():
            queue.look()
        kinds = {place: set(queue.kinds) for place, queue in self._queues.items()}
        for flight in held:
            kinds.setdefault(flight.place, set()).add(flight.kind)
        refusal = check_resident(self._device.target, kinds)
        self._fit = {(p, k) for p, those in kinds.items() for k in those} if not refusal else set()
        return refusal

    def _nap(self) -> None:
        if not self._idle_since:
            self._idle_since, self._looks = time.monotonic(), 0
        self._looks += 1
        if self._looks > _BUSY_LOOKS:
            time.sleep(min(1e-6 * self._looks, _LONGEST_NAP))


def _expired(host: Host) -> WaitTimeout | None:
    """Return the error of an expired wait of this host's rank. It only reads host memory."""
    try:
        host.on_drained()
    except WaitTimeout as error:
        return error
    return None
