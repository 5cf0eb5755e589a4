"""A simulated machine that keeps time and runs its programs in the order of their clocks.

The programs run as usual, with real addresses, flags and control flow, and every access advances
the clock of its program (`predict.clock`). Tiles of floats are neither moved nor multiplied, so a
large problem takes only the time of its addresses. A kernel whose branches depend on such tiles
needs `with_data`.

Hosts and their torch operations take no time. A kernel begins when the one before it on its stream
has ended and its host has reached it, plus the time of a start.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...machine.accesses import Accesses
from ...machine.machine import Machine
from ...machine.queues import Streams
from ...machine.regions import Region
from ...machine.tasks import Host, Launch, Program, Task
from ...predict.clock import Clock, Track
from ...predict.parts import Ranks

_AHEAD = 1e-7  # seconds that a program may be ahead of the next one before it yields
_FLAGS = 16  # a store of up to this many elements may be flags that are polled
_WORD = 8
_TRANSACTION = 32  # the fewest bytes that a load moves


class Begin(NamedTuple):
    """When a kernel could start, when its first programs began, and what it came after."""

    asked: float
    first: float
    after: Track | None


class TimedMachine(Machine):
    """All ranks of a world, on a described machine. `late` has the seconds, by rank, by which its
    first kernel starts later."""

    def __init__(self, ranks: Ranks, late: dict[int, float], with_data: bool = False) -> None:
        self.clock = Clock(ranks)
        self.order = _ByTime()
        self._late = dict(late)
        super().__init__(self.order, ranks.num_sms, expire=False)
        self.ready: _Queue = _Queue(self)
        self.accesses = TimedAccesses(self, with_data)
        self.streams = TimedStreams(self)
        self.tracks: dict[Program, Track] = {}
        self.launches: dict[Launch, Begin] = {}
        self._last: Track | None = None  # the program that ended last
        # The SMs of each rank: since when they are free, and after which program.
        self._slots = {
            rank: [(0.0, n, None) for n in range(ranks.num_sms)] for rank in range(ranks.size)
        }  # type: dict[int, list[tuple[float, int, Track | None]]]

    @property
    def track(self) -> Track:
        return self.track_of(self.program)

    def track_of(self, program: Program) -> Track:
        """Return the program's clock. A new program takes the SM that was free first."""
        if program not in self.tracks:
            launch, rank = program.launch, program.rank
            if launch not in self.launches:
                late = self._late.pop(rank, 0.0)
                begins = self.clock.launched(rank, self.order.now + late)
                self.launches[launch] = Begin(self.order.now, begins, self._last)
            begin = self.launches[launch]
            free, _, before = heapq.heappop(self._slots[rank])
            if free <= begin.first:
                before = begin.after
            at, stages = max(begin.first, free), launch.options.get("num_stages", 3)
            self.tracks[program] = Track(
                rank, program.number, launch.name, stages, at, at, before, since=at
            )
        return self.tracks[program]

    def end(self, program: Program) -> None:
        """Free its SM at the time of its clock."""
        track = self.track_of(program)
        self.order.now = self.clock.ended(track)
        self._last = track
        heapq.heappush(self._slots[program.rank], (track.now, len(self.tracks), track))

    def _take(self, place: int) -> Task:
        return self.ready.take()

    def wake(self, host: Host, mail: Any = None) -> None:
        self.order.woke(host)
        super().wake(host, mail)


class TimedStreams(Streams):
    def __init__(self, machine: TimedMachine) -> None:
        super().__init__(machine)
        self._timed = machine

    def program_ended(self, program: Program) -> None:
        self._timed.end(program)
        super().program_ended(program)


class _ByTime:
    """A schedule that runs whatever is furthest back in time. Its queue is in that order."""

    def __init__(self) -> None:
        self.token, self.step, self.residents, self.is_fair = "time", 0, 0, True
        self.now = 0.0
        self.hosts: dict[int, float] = {}

    def choose(self, ready: Sequence[Task]) -> int:
        self.step += 1
        return 0  # the first of the queue

    def woke(self, host: Host) -> None:
        """Let a host continue now at the earliest, since what it waited for has just happened."""
        self.hosts[host.rank] = max(self.hosts.get(host.rank, 0.0), self.now)

    def pick(self, count: int) -> int:
        return 0


class _Queue(list[Task]):
    """Tasks that can run, as a heap by time. A task's clock stands still while it is here."""

    def __init__(self, machine: TimedMachine) -> None:
        super().__init__()
        self._machine = machine
        self._heap: list[tuple[float, int, Task]] = []
        self._count = itertools.count()

    @property
    def horizon(self) -> float:
        """The time of the first one."""
        return self._heap[0][0] if self._heap else float("inf")

    def append(self, task: Task) -> None:
        heapq.heappush(self._heap, (self._time(task), next(self._count), task))

    def extend(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            self.append(task)

    def take(self) -> Task:
        at, _, task = heapq.heappop(self._heap)
        self._machine.order.now = at
        return task

    def _time(self, task: Task) -> float:
        if isinstance(task, Host):
            return self._machine.order.hosts.setdefault(task.rank, 0.0)
        return self._machine.track_of(task).now

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Task]:
        return (task for _, _, task in self._heap)


class TimedAccesses(Accesses):
    """Charges every access to the clock of its program."""

    def __init__(self, machine: TimedMachine, with_data: bool) -> None:
        super().__init__(machine)
        self._timed = machine
        self._changed = False  # memory, by the latest store or atomic
        self.dry = not with_data

    def before_load(
        self, addresses: np.ndarray, size: int, proxy: bool, tensor: bool, first: int = 0
    ) -> None:
        super().before_load(addresses, size, proxy, tensor, first)
        track, clock = self._timed.track, self._timed.clock
        if not addresses.size:
            return
        if addresses.size == 1:
            place = addresses.item()
            region = self._region(place)
            if region.is_context:
                return  # the same words for all programs, in the cache closest to them
            clock.saw(track, [(region.rank, place)])
        for owner, count in self._owners(addresses):
            tile = addresses.flat[0], addresses.flat[-1], addresses.size
            clock.load(track, owner, max(count * size, _TRANSACTION), tile)

    def skipped_load(self, first: int, last: int, count: int, size: int) -> None:
        self.count += 1
        if not count:
            return
        region = self._timed.memory.check(np.array([first, last], np.uint64), size, "load")
        owner = (region or self._region(first)).rank
        self._timed.clock.load(self._timed.track, owner, count * size, (first, last, count))

    def before_store(
        self, addresses: np.ndarray, size: int, proxy: bool, tensor: bool, first: int = 0
    ) -> None:
        super().before_store(addresses, size, proxy, tensor, first)
        track, clock = self._timed.track, self._timed.clock
        for owner, count in self._owners(addresses) if addresses.size else ():
            clock.store(track, owner, max(count * size, _TRANSACTION))
        if addresses.size <= _FLAGS or size == _WORD:
            clock.wrote(track, addresses.ravel().tolist())
        self._give_way(track)

    def product(self, left: tuple[int, ...], right: tuple[int, ...], bits: int) -> bool:
        track = self._timed.track
        batch = int(np.prod(left[:-2], dtype=int))
        self._timed.clock.product(track, (batch * left[-2], right[-1], left[-1]), bits)
        self._give_way(track)
        return self.dry

    def atomic(
        self, execute: Callable[[], np.ndarray], recall: Any, addresses: np.ndarray, size: int,
        operands: tuple[str, bytes], sem: str, scope: str, tensor: bool, proxy: bool,
    ) -> np.ndarray:  # fmt: skip
        program = self._timed.program

        def timed() -> np.ndarray:
            self._changed = False
            return execute()

        old = super().atomic(timed, recall, addresses, size, operands, sem, scope, tensor, proxy)
        places = [(self._region(a).rank, a) for a in addresses.ravel().tolist()]
        if places:
            kind, track = operands[0], self._timed.track_of(program)
            self._timed.clock.atomic(
                track, places, kind, self._changed or kind == "FADD", sem, size
            )
        return old

    def _wrote(self, addresses: np.ndarray, size: int) -> None:
        self._changed = True
        super()._wrote(addresses, size)

    def _give_way(self, track: Track) -> None:
        if track.now > self._timed.ready.horizon + _AHEAD:
            self._timed.give_way()

    def _region(self, address: int) -> Region:
        region = self._timed.memory.find(address, address + 1)
        assert region is not None  # the access was checked
        return region

    def _owners(self, addresses: np.ndarray) -> list[tuple[int, int]]:
        """Return the ranks whose memory it touches, with the number of elements."""
        lo, hi = addresses.flat[0], addresses.flat[-1]
        region = self._timed.memory.find(int(lo), int(lo) + 1)
        if region is not None and int(hi) < region.end:
            return [(region.rank, addresses.size)]
        found: dict[int, int] = {}
        for address in addresses.ravel().tolist():
            rank = self._region(address).rank
            found[rank] = found.get(rank, 0) + 1
        return list(found.items())
