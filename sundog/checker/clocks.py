"""Vector clocks: what an actor knows to have happened, and what a release hands on.

A program has three components, since they differ in when they are published: `warps` counts its CTA
barriers, and stamps what many threads do; `zero` counts the steps of thread 0, which makes scalar
atomics and stores; `bulk` stamps what descriptors write, which no release publishes, only the end
of the kernel. A stream (its host's work) has one. When a kernel ends, its programs' components
are replaced by the stream's: who knows that point of the stream knows all of the kernel.

A host knows what it waited for, and hands that on to all that it then puts on any stream. An event
carries what its stream knew, to the streams that wait for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..machine.polling import Site, kernel_frames, site_of
from ..machine.tasks import Launch, Program, Stream

Clock = dict[int, int]  # component -> time
Stamp = tuple[int, int]  # component, time

_HEARD_KEPT = 1024  # signallers that kernels of a stream have heard, for reports


def join(into: Clock, other: Clock) -> None:
    """Learn what the other knows."""
    get = into.get
    for component, time in other.items():
        if get(component, 0) < time:
            into[component] = time


@dataclass(eq=False)
class Actor:
    """A program."""

    rank: int
    index: tuple[int, int, int]
    kernel: str
    launch: int
    number: int
    warps: int
    zero: int
    bulk: int
    clock: Clock  # learnt from others
    proxy: Clock  # what a descriptor may read
    begun: Clock  # what its kernel's launch ordered before it
    unwaited: Clock | None = None  # what it learns from the kernel before, if it waits for it
    fenced: Clock | None = None  # and after the next CTA barrier: a fence is each thread's own
    barriers: int = 1  # the time of tiles, which a CTA barrier or a fence.sc ends
    met: int = 0  # that time when the threads last met at a CTA barrier
    steps: int = 1
    steps_at_barrier: int = 0
    pending: dict[int, Clock] = field(default_factory=dict)  # learnt by single threads, by identity
    pending_from: dict[Actor, None] = field(default_factory=dict)
    heard: dict[object, Any] = field(default_factory=dict)  # signals.Heard, by who signalled
    joined: dict[int, Clock] = field(default_factory=dict)  # clocks already learnt, by identity
    lane: list[Clock] = field(default_factory=list)  # what the lane that acts now has learnt
    before: Clock | None = None  # known before the first scalar acquire since the last CTA barrier
    acquire: Any = None  # the findings.AccessEvent of the last of these
    suspected: set[tuple] = field(default_factory=set)  # loads that the compiler may move
    sent: Any = None  # the latest signals.Signal that it made
    stored: list[Any] = field(default_factory=list)  # machine.Touch of tiles since the last barrier
    fences: tuple[Any, ...] = ()  # signals.FencePast: the widest first, the latest last
    overheard: dict[int, Any] = field(default_factory=dict)  # read, and acquired by a later fence
    called: Site = ()  # of an errand: where it was called
    errands: list[Actor] = field(default_factory=list)  # what a network does for the program

    def stamp(self, tensor: bool, bulk: bool) -> Stamp:
        if bulk:
            return (self.bulk, 1)
        return (self.warps, self.barriers) if tensor else (self.zero, self.steps)

    def barrier(self) -> None:
        for clock in self.pending.values():
            self.learn(clock)
        self.pending, self.pending_from = {}, {}
        self.before = self.acquire = None
        self.stored.clear()
        if self.fenced is not None:
            self.proxy, self.fenced = self.fenced, None
        self.met = self.barriers
        self.barriers += 1
        self.steps_at_barrier = self.steps
        self.steps += 1

    def wait_for_grid(self) -> None:
        """Learn what a kernel knows that was not launched early: the one before it has ended."""
        if self.unwaited is not None:
            join(self.clock, self.unwaited)
            if self.sent is None:  # what it signals from now on stands for the kernel before too
                self.begun = dict(self.begun)
                join(self.begun, self.unwaited)
            self.unwaited = None

    def learn(self, clock: Clock) -> None:
        """Join a published clock. It never changes, so one that was learnt is not joined again."""
        if self.joined.get(id(clock)) is not clock:
            join(self.clock, clock)
            self.joined[id(clock)] = clock

    def acquired(self, event: Any) -> None:
        """Note a scalar acquire, before it learns."""
        if self.before is None:
            self.before = dict(self.clock)
        self.acquire = event

    def published(self, tensor: bool) -> Clock:
        """Return what a release publishes: all before the last CTA barrier, and thread 0's own."""
        clock = dict(self.clock)  # which may hold own parts: what a program signals to itself
        clock[self.warps] = max(self.met, clock.get(self.warps, 0))
        own = self.steps_at_barrier if tensor else self.steps
        clock[self.zero] = max(own, clock.get(self.zero, 0))
        return clock

    def errand(self, components: list[int], called: Site) -> Actor:
        """Return an actor that knows all that the program did until now, and nothing later."""
        warps, zero, bulk = components
        actor = Actor(
            self.rank, self.index, self.kernel, self.launch, self.number, warps, zero, bulk,
            self.all(), self.proxy, self.begun, heard=dict(self.heard), fences=self.fences,
            called=called,
        )  # fmt: skip
        self.errands.append(actor)
        self.barriers += 1
        self.steps += 1
        return actor

    def all(self) -> Clock:
        """Return what the actor knows, and all that its threads did."""
        return self.clock | {self.warps: self.barriers, self.zero: self.steps}

    def owns(self, component: int) -> bool:
        return component in (self.warps, self.zero, self.bulk)


@dataclass(eq=False)
class StreamActor:
    """A stream of a rank: its host's torch operations, and the order of its kernels."""

    rank: int
    component: int
    index: None = None
    kernel: str = "host"
    steps: int = 0
    launch: int = -1
    number: int = -1
    time: int = 1
    clock: Clock = field(default_factory=dict)
    heard: dict[object, Any] = field(default_factory=dict)
    lane: tuple[Clock, ...] = ()
    before: None = None
    begun: Clock | None = None  # what it knew when its latest kernel began
    learnt: Clock | None = None  # the clock that it joined last
    met: int = 0
    fences: tuple[()] = ()
    sent: Any = None  # the latest signals.Signal that it made

    @property
    def zero(self) -> int:
        return self.component

    def stamp(self, tensor: bool, bulk: bool) -> Stamp:
        return (self.component, self.time)

    def published(self, tensor: bool) -> Clock:
        """Return what a copy to a flag publishes: all that the stream has done."""
        return {**self.clock, self.component: self.time}

    def owns(self, component: int) -> bool:
        return component == self.component

    def advance(self) -> None:
        """Begin a new time: who learnt of the stream before does not know what follows."""
        self.clock[self.component] = self.time
        self.time += 1


class Clocks:
    """Components, and which of them a finished kernel has folded into its stream."""

    def __init__(self) -> None:
        self._components = itertools.count()
        self._ended: dict[int, Stamp] = {}

    def component(self) -> int:
        return next(self._components)

    def knows(self, actor: Actor | StreamActor, stamp: Stamp) -> bool:
        """Return whether the stamped access happened before what the actor does now."""
        if self.covers(actor.clock, stamp) or actor.owns(stamp[0]):
            return True
        return bool(actor.lane) and any(self.covers(clock, stamp) for clock in actor.lane)

    def knows_all(self, actor: Actor | StreamActor, marks: Iterable[Any]) -> bool:
        """Return whether all these accesses happened before what the actor does now."""
        get = actor.clock.get
        for mark in marks:
            component, time = mark.stamp
            if get(component, 0) < time and not self.knows(actor, mark.stamp):
                return False
        return True

    def implies(self, actor: Actor | StreamActor, stamp: Stamp, old: Stamp) -> bool:
        """Return whether all who will know this stamp of the actor know the old one too.

        Not if the old one is a tile of the actor since its last CTA barrier and the new one is
        thread 0's: that is published before the tile is. Nor if a descriptor wrote the old one.
        """
        if not actor.owns(old[0]):
            return self.covers(actor.clock, old)
        if isinstance(actor, StreamActor):
            return True
        if old[0] == actor.bulk:
            return stamp[0] == actor.bulk
        return old[1] <= actor.met if old[0] == actor.warps and stamp[0] == actor.zero else True

    def covers(self, clock: Clock, stamp: Stamp) -> bool:
        component, time = stamp
        if component in clock and clock[component] >= time:
            return True
        if component not in self._ended:
            return False
        stream, end = self._ended[component]
        return clock.get(stream, 0) >= end

    def end(self, actors: list[Actor], stream: StreamActor) -> None:
        """End a kernel: the stream knows all that its programs knew and did."""
        for actor in actors:
            own = {who: heard for who, heard in actor.heard.items() if heard.event.actor is actor}
            stream.heard |= own  # not what it inherited: others may have heard newer signals
            join(stream.clock, actor.clock)
            for clock in actor.pending.values():
                join(stream.clock, clock)
        for signaller in [*stream.heard][:-_HEARD_KEPT]:
            del stream.heard[signaller]
        stream.advance()
        end = (stream.component, stream.clock[stream.component])
        for actor in actors:
            self._ended[actor.warps] = self._ended[actor.zero] = self._ended[actor.bulk] = end
        self.trim(stream.clock)

    def trim(self, clock: Clock) -> None:
        """Drop the components of ended programs that the rest of the clock implies."""
        ended = self._ended
        for component in [c for c in clock if c in ended]:
            stream, end = ended[component]
            if clock.get(stream, 0) >= end:
                del clock[component]


class StreamClocks:
    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._streams: dict[Stream, StreamActor] = {}
        self._hosts: dict[int, Clock] = {}  # by rank; replaced, never changed

    def of(self, stream: Stream) -> StreamActor:
        if stream not in self._streams:
            self._streams[stream] = StreamActor(stream.rank, self._clocks.component())
        return self._streams[stream]

    def host(self, rank: int) -> Clock:
        """Return what the host of a rank knows now."""
        return self._hosts.get(rank, {})

    def synchronize(self, rank: int, streams: list[Stream]) -> None:
        """Note that the host has waited for the end of all work on these streams."""
        known = dict(self.host(rank))
        for stream in streams:
            self.of(stream).advance()
            join(known, self.of(stream).clock)
        self._clocks.trim(known)
        self._hosts[rank] = known

    def barrier(self, streams: list[Stream]) -> None:
        """Note that all ranks of these streams have waited for them, and then for each other."""
        everything: Clock = {}
        for stream in streams:
            self.of(stream).advance()
            join(everything, self.of(stream).clock)
        self._clocks.trim(everything)
        for stream in streams:
            self.of(stream).clock = dict(everything)  # which has all of its own
        for rank in {stream.rank for stream in streams}:
            known = dict(everything)
            join(known, self.host(rank))
            self._clocks.trim(known)
            self._hosts[rank] = known

    def record(self, stream: Stream, known: Clock) -> Clock:
        """Return what an event carries, put on the stream by a host that knew this."""
        actor = self.of(stream)
        self.learn(stream, known)
        actor.advance()
        return dict(actor.clock)

    def begin(self, stream: Stream, launch: Launch) -> Clock:
        """Begin a kernel; return what its launch orders before it.

        With `launch_pdl` it begins before the kernel before it has ended.
        """
        actor = self.of(stream)
        before = actor.begun or {}
        actor.advance()
        actor.begun = dict(actor.clock)
        if not launch.options.get("launch_pdl"):
            return actor.begun
        early = dict(before)
        join(early, launch.known)
        return early

    def learn(self, stream: Stream, known: Clock) -> None:
        """Order what `known` covers before what follows. A clock of a host or event is final."""
        actor = self.of(stream)
        if actor.learnt is not known:  # most operations of a host come with nothing new
            join(actor.clock, known)
            actor.learnt = known


class Deputies:
    """Let other actors make a program's accesses for a while."""

    def __init__(self, actors: dict[Program, Actor], clocks: Clocks) -> None:
        self._actors, self._clocks = actors, clocks

    def hand_over(self, program: Program) -> Actor:
        """Return an actor that knows what the program knows now."""
        components = [self._clocks.component() for _ in range(3)]
        return self._actors[program].errand(components, site_of(kernel_frames()))

    def swap(self, program: Program, actor: Actor) -> Actor:
        """Let this actor make the program's accesses from now on; return the one before."""
        before, self._actors[program] = self._actors[program], actor
        return before

    def learn_of(self, program: Program, actor: Actor) -> None:
        """Order all that the actor did before what the program does next."""
        self._actors[program].learn(actor.all())
