"""The race checker: docs/memory_model.md as code. Follows every access of kernels and hosts.

For each access: was everything that conflicts with it, in the shadow of those bytes, ordered before
it by what its actor knows? For each atomic: what is published, and who learns. Signals that were
heard but made no edge are kept, so that a report can name the cause.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .clocks import Actor, Clock, Clocks, StreamActor, join
from .findings import SUGGESTIONS, Event, Finding
from .memory import Memory, Region
from .shadow import CLEAN, UNWRITTEN, Mark, Shadow, State, States
from .tasks import Launch, Program, Stream
from .watch import kernel_frames, stack_of

__all__ = ["Checker"]

Side = Actor | StreamActor
_ACQUIRES, _RELEASES = ("acquire", "acq_rel"), ("release", "acq_rel")


@dataclass
class Heard:
    """The latest signal of one actor that another has read, and what was wrong with it."""

    signal: Signal
    event: Event
    fault: str = ""


@dataclass(frozen=True)
class Signal:
    """An atomic that may have been meant to publish."""

    actor: Actor
    event: Event
    barriers: int


@dataclass
class Word:
    """What the atomics on one address have published, and who signalled there."""

    published: dict[tuple, Clock] = field(default_factory=dict)
    signals: dict[Actor, Signal] = field(default_factory=dict)


class Checker:
    def __init__(self, memory: Memory) -> None:
        self.findings: dict[tuple, Finding] = {}
        self.trace: list[tuple] | None = None
        self._memory = memory
        self._clocks = Clocks()
        self._states = States()
        self._shadows: dict[int, Shadow] = {}
        self._streams: dict[Stream, StreamActor] = {}
        self._actors: dict[Program, Actor] = {}
        self._of_launch: dict[Launch, list[Actor]] = {}
        self._words: dict[int, Word] = {}
        self._events: dict[Event, Event] = {}
        self._num_launches = 0

    # order

    def stream(self, stream: Stream) -> StreamActor:
        if stream not in self._streams:
            self._streams[stream] = StreamActor(stream.rank, self._clocks.component())
        return self._streams[stream]

    def start(self, program: Program, stream: Stream) -> None:
        """A program becomes resident: it knows what its stream knew when the kernel began."""
        launch = program.launch
        if launch not in self._of_launch:
            self._of_launch[launch] = []
            self.stream(stream).advance()
            self._note("launch", launch.rank, self._num_launches)
            self._num_launches += 1
        known = dict(self.stream(stream).clock)
        known[self.stream(stream).component] = self.stream(stream).time - 1
        actor = Actor(
            program.rank, program.index, launch.name, self._num_launches - 1, program.number,
            self._clocks.component(), self._clocks.component(), known, dict(known),
        )  # fmt: skip
        if self._of_launch[launch]:
            actor.launch = self._of_launch[launch][0].launch
        self._actors[program] = actor
        self._of_launch[launch].append(actor)

    def end(self, launch: Launch, stream: Stream) -> None:
        actors = self._of_launch.pop(launch, [])
        if actors:
            self._clocks.end(actors, self.stream(stream))
            self._note("end", launch.rank, actors[0].launch)

    def world_barrier(self, streams: list[Stream]) -> None:
        everything: Clock = {}
        for stream in streams:
            self.stream(stream).advance()
            join(everything, self.stream(stream).clock)
        for stream in streams:
            join(self.stream(stream).clock, everything)
        self._note("world_barrier", None, None, addresses=tuple(s.rank for s in streams))

    def cta_barrier(self, program: Program) -> None:
        actor = self._actors[program]
        actor.barrier()
        self._note("barrier", actor.rank, actor.launch, actor)

    def proxy_fence(self, program: Program) -> None:
        actor = self._actors[program]
        actor.proxy = actor.published(tensor=False)

    # accesses

    def load(self, program: Program, addresses: np.ndarray, size: int, tensor: bool, proxy: bool) -> None:
        # a scalar load is made by all threads
        verb = "descriptor load" if proxy else "load"
        event = self._event(program, verb, writes=False, tensor=True, proxy=proxy)
        self._note("load", event.actor.rank, event.actor.launch, event, addresses, size, tensor)
        if not tensor and addresses.size and int(addresses.flat[0]) in self._words:
            self._hear_plainly(event, self._words[int(addresses.flat[0])])
        self._access(event, addresses, size)

    def store(self, program: Program, addresses: np.ndarray, size: int, tensor: bool, proxy: bool) -> None:
        verb = "descriptor store" if proxy else "store"
        event = self._event(program, verb, writes=True, tensor=tensor, proxy=proxy)
        self._note("store", event.actor.rank, event.actor.launch, event, addresses, size, tensor)
        self._access(event, addresses, size)
        self._break_chains(addresses, size)

    def atomic(
        self,
        program: Program,
        addresses: np.ndarray,
        size: int,
        op: str,
        sem: str,
        scope: str,
        tensor: bool,
    ) -> None:
        writes = op != "LOAD"
        event = self._event(program, f"atomic {op}", writes, tensor, sem=sem, scope=scope, atomic=True)
        actor = event.actor
        self._note("atomic", actor.rank, actor.launch, event, addresses, size, tensor)
        self._access(event, addresses, size)
        if op == "STORE":
            self._break_chains(addresses, size)
        for address in addresses.flat:
            self._hear(event, self._words.setdefault(int(address), Word()))
        if writes:
            self._publish(event, addresses)
        if not tensor:
            actor.steps += 1

    def host_access(
        self,
        stream: Stream,
        touched: list[tuple[tuple[int, int, int], np.ndarray, int]],
        writes: bool,
        stack: tuple,
    ) -> None:
        """A torch operation of a host: storage, element addresses and size of each tensor."""
        actor = self.stream(stream)
        verb = "host write" if writes else "host read"
        event = Event(actor, verb, writes, atomic=False, tensor=True, stack=stack)
        for (start, end, itemsize), addresses, size in touched:
            self._note(verb.replace(" ", "_"), actor.rank, None, event, addresses, size)
            lo, hi = int(addresses.min()), int(addresses.max()) + size
            region = self._memory.find(lo, hi)
            if region is None:
                region = Region(start, end, "tensor", actor.rank, itemsize, is_heap=False)
            self._access(event, addresses, size, region)
            if writes:
                self._break_chains(addresses, size)

    # allocations

    def allocated(self, region: Region, written: bool = False) -> None:
        number = CLEAN if written else UNWRITTEN
        self._shadows[region.start] = Shadow(region.start, region.end, region.itemsize, number)

    def fresh(self, storage: tuple[int, int, int], written: bool) -> None:
        """Torch made an ordinary tensor here: what was known of this memory is over."""
        start, end, itemsize = storage
        if end > start and self._memory.find(start, start + 1) is None:
            self.freed(start)
            self.allocated(Region(start, end, "tensor", -1, itemsize, is_heap=False), written)

    def freed(self, start: int) -> None:
        shadow = self._shadows.pop(start, None)
        if shadow is not None:
            for address in [a for a in self._words if shadow.start <= a < shadow.end]:
                del self._words[address]

    # inside

    def _event(
        self,
        program: Program,
        verb: str,
        writes: bool,
        tensor: bool,
        sem: str = "",
        scope: str = "",
        atomic: bool = False,
        proxy: bool = False,
    ) -> Event:
        stack = tuple(stack_of(kernel_frames()))
        actor = self._actors[program]
        key = (actor, verb, tensor, sem, scope, stack)
        found = self._events.get(key)
        if found is None:
            found = Event(actor, verb, writes, atomic, tensor, sem, scope, proxy, stack)
            self._events[key] = found
        return found

    def _access(
        self, event: Event, addresses: np.ndarray, size: int, region: Region | None = None
    ) -> None:
        if addresses.size == 0:
            return
        if region is None:
            lo, hi = int(addresses.min()), int(addresses.max()) + size
            region = self._memory.find(lo, hi)
        if region is None:  # a tile over several allocations
            for address in addresses.flat:
                self._access(event, np.array([address], np.uint64), size)
            return
        shadow = self._shadows.get(region.start)
        if shadow is None or shadow.end != region.end:
            self.allocated(region, written=True)  # made before we looked
            shadow = self._shadows[region.start]
        places = shadow.places(addresses, size)
        numbers = shadow.numbers[places]
        first = int(numbers[0])
        different = [first] if (numbers == first).all() else np.unique(numbers).tolist()
        new = np.empty_like(numbers)
        for number in different:
            here = numbers == number if len(different) > 1 else slice(None)
            span = (region, shadow, places[here])
            new[here] = self._states.number(self._step(self._states[number], event, span))
        shadow.numbers[places] = new

    def _step(self, state: State, event: Event, span: tuple) -> State:
        """Compare one access with the state of the bytes that it touches, and what that becomes."""
        actor = event.actor
        mark = Mark(actor.stamp(event.tensor), event)
        if not state.written and not event.writes or (event.atomic and not state.written):
            self._found_unwritten(event, span)
        if state.write is not None:
            self._compare(state.write, event, span)
            self._compare_proxy(state.write, event, span)
        for other in state.atomics:
            self._compare(other, event, span)
            self._compare_proxy(other, event, span)
        if event.writes:
            for other in state.reads:
                self._compare(other, event, span)
        return self._after(state, mark)

    def _after(self, state: State, mark: Mark) -> State:
        event, actor = mark.event, mark.event.actor
        if event.atomic:
            kept = tuple(m for m in state.atomics if not self._replaces(mark, m))
            return state._replace(written=True, atomics=(*kept, mark))
        if event.writes:
            return State(written=True, write=mark)
        kept = tuple(m for m in state.reads if not self._clocks.knows(actor, m.stamp))
        return state._replace(written=True, reads=(*kept, mark))

    def _replaces(self, new: Mark, old: Mark) -> bool:
        """Whoever must be ordered behind the old atomic must be ordered behind the new one too."""
        a, b = new.event, old.event
        same = a.actor.rank == b.actor.rank and a.scope == b.scope and a.writes >= b.writes
        program = a.scope != "cta" or a.actor is b.actor
        return same and program and self._clocks.knows(a.actor, old.stamp)

    def _compare(self, old: Mark, event: Event, span: tuple) -> None:
        if not (old.event.writes or event.writes):
            return
        if old.event.atomic and event.atomic and _both_reach(old.event, event):
            return
        if not self._clocks.knows(event.actor, old.stamp):
            self._found_race(old, event, span)

    def _compare_proxy(self, old: Mark, event: Event, span: tuple) -> None:
        if not event.proxy or event.writes or not self._clocks.knows(event.actor, old.stamp):
            return
        own = old.event.proxy and old.event.actor is event.actor
        if not own and not self._clocks.covers(event.actor.proxy, old.stamp):
            self._report("proxy", "no proxy fence", old.event, event, span, (
                "the data was written after this kernel was launched, and a descriptor reads "
                "through another proxy, for which no fence stands between"
            ))  # fmt: skip

    # signals

    def _publish(self, event: Event, addresses: np.ndarray) -> None:
        actor = event.actor
        clock = actor.published(event.tensor) if event.sem in _RELEASES else None
        signal = Signal(actor, event, actor.barriers)
        key = (event.scope, actor if event.scope == "cta" else actor.rank)
        for address in addresses.flat:
            word = self._words[int(address)]
            last = word.signals.get(actor)
            word.signals[actor] = signal
            if clock is None:
                continue
            known = word.published.get(key)
            if known is None or (last is not None and len(word.signals) == 1):
                word.published[key] = clock  # alone on this word: the newer clock has the older
            else:
                merged = dict(known)
                join(merged, clock)
                word.published[key] = merged

    def _hear(self, event: Event, word: Word) -> None:
        """An atomic reads the word: learn what reaches, and note what does not."""
        actor = event.actor
        acquires = event.sem in _ACQUIRES
        for signal in word.signals.values():
            if signal.actor is not actor:
                actor.heard[signal.actor] = Heard(signal, event, _fault(signal.event, event))
                if event.tensor and acquires:
                    actor.pending_from[signal.actor] = None
        if not acquires:
            return
        for (scope, who), clock in word.published.items():
            if _reaches(scope, who, actor) and _scope_reaches(event.scope, actor, who):
                if event.tensor:
                    actor.pending[id(clock)] = clock
                else:
                    actor.learn(clock)

    def _hear_plainly(self, event: Event, word: Word) -> None:
        for signal in word.signals.values():
            if signal.actor is not event.actor:
                event.actor.heard[signal.actor] = Heard(signal, event, "plain access to a flag")

    def _break_chains(self, addresses: np.ndarray, size: int) -> None:
        if not self._words or not addresses.size:
            return
        if addresses.size == 1:
            self._words.pop(int(addresses.flat[0]), None)
            return
        lo, hi = int(addresses.min()), int(addresses.max()) + size
        near = [a for a in self._words if lo <= a < hi]
        if near:
            for address in np.intersect1d(addresses, np.array(near, np.uint64)):
                del self._words[int(address)]

    # findings

    def _found_race(self, old: Mark, event: Event, span: tuple) -> None:
        rule, why = self._explain(old, event)
        self._report("race", rule, old.event, event, span, why)

    def _explain(self, old: Mark, event: Event) -> tuple[str, str]:
        actor, other = event.actor, old.event.actor
        if old.event.atomic and event.atomic:
            return "scope does not reach", (
                f"both are atomic, but scope {old.event.scope} and scope {event.scope} do not "
                "both reach both programs, so they are not atomic to each other"
            )
        heard = actor.heard.get(other) or self._heard_through(actor, other)
        if isinstance(heard, Heard):
            return _why(heard, old, actor)
        if old.event.atomic != event.atomic:
            return "plain access to a flag", (
                "one side is atomic, the other is a plain access: a plain one makes no order and "
                "is not atomic to anything"
            )
        return "no order", "no signal, barrier or launch stands between them in either direction"

    def _heard_through(self, actor: Side, other: Side) -> object:
        """A chain of three: the fault may lie between the first and the middle one."""
        for middle in actor.heard:
            heard = getattr(middle, "heard", {}).get(other)
            if isinstance(heard, Heard) and heard.fault:
                return heard
        return None

    def _found_unwritten(self, event: Event, span: tuple) -> None:
        if isinstance(event.actor, Actor):
            why = "nobody has written these bytes since they were allocated"
            self._report("unwritten", "", None, event, span, why)

    def _report(
        self, kind: str, rule: str, first: Event | None, second: Event, span: tuple, why: str
    ) -> None:
        region, shadow, places = span
        indices = _range(region, shadow, places)
        finding = Finding(
            kind, rule, why,
            first.access(region.name, indices) if first is not None else None,
            second.access(region.name, indices),
            SUGGESTIONS.get(rule, ""),
        )  # fmt: skip
        known = self.findings.setdefault(finding.key(), finding)
        if known is not finding:
            known.count += 1

    def _note(
        self,
        what: str,
        rank: int | None,
        launch: int | None,
        event: Any = None,
        addresses: Any = None,
        size: int | None = None,
        tensor: bool | None = None,
    ) -> None:
        """One entry of the trace, for the oracle of the tests."""
        if self.trace is None:
            return
        actor = getattr(event, "actor", event)
        stack = getattr(event, "stack", ())
        self.trace.append((
            what, rank, launch, getattr(actor, "number", None), stack[0][1] if stack else None,
            tuple(int(a) for a in np.ravel(addresses)) if addresses is not None else None, size,
            getattr(event, "sem", None), getattr(event, "scope", None), tensor,
        ))  # fmt: skip


def _scope_reaches(scope: str, own: Actor, who: Any) -> bool:
    """Whether an actor's scope reaches `who`: a rank, or (cta) a program."""
    if scope == "sys":
        return True
    rank = who.rank if isinstance(who, Actor) else who
    return own.rank == rank if scope == "gpu" else who is own


def _reaches(scope: str, who: Any, to: Actor) -> bool:
    if scope == "sys":
        return True
    return who == to.rank if scope == "gpu" else who is to


def _both_reach(a: Event, b: Event) -> bool:
    for scope in (a.scope, b.scope):
        if scope == "gpu" and a.actor.rank != b.actor.rank:
            return False
        if scope == "cta" and a.actor is not b.actor:
            return False
    return True


def _fault(signal: Event, event: Event) -> str:
    if signal.sem not in _RELEASES:
        return "relaxed release"
    if event.sem not in _ACQUIRES:
        return "relaxed acquire"
    return "" if _both_reach(signal, event) else "scope does not reach"


def _why(heard: Heard, old: Mark, actor: Side) -> tuple[str, str]:
    signal, event = heard.signal.event, heard.event
    flag = f"the signal at {_at(signal)} was read at {_at(event)}"
    if heard.fault == "scope does not reach":
        scopes = f"signalled with scope {signal.scope}, read with scope {event.scope}"
        return heard.fault, f"{flag}, but {scopes}: that does not reach the other side"
    if heard.fault == "relaxed release":
        return heard.fault, f"{flag}, but it is {signal.sem}: it publishes nothing"
    if heard.fault == "relaxed acquire":
        return heard.fault, f"{flag}, but that is {event.sem}: nothing behind it is ordered"
    if heard.fault:
        return heard.fault, f"{flag} by a plain load: nothing behind it is ordered"
    if heard.signal.actor in getattr(actor, "pending_from", {}):
        return "no CTA barrier after the acquire", (
            f"{flag} by a tensor atomic: each lane learnt for its own thread only, and no CTA "
            "barrier stands between it and this access by all threads"
        )
    if old.event.tensor and old.event.actor is heard.signal.actor and (
        old.stamp[1] >= heard.signal.barriers
    ):  # fmt: skip
        return "no CTA barrier before the release", (
            f"{flag}, but no CTA barrier stands between the tile and the signal: the release, made "
            "by one thread, does not publish what the other warps did"
        )
    return "no order", f"{flag}, but this access is not behind what that signal published"


def _at(event: Event) -> str:
    access = event.access("", "")
    outer = access.stack[-1].split(" ")[0] if access.stack else ""
    here = f"{access.file}:{access.line}"
    return here if outer == here else f"{here} (called at {outer})"


def _range(region: Region, shadow: Shadow, places: np.ndarray) -> str:
    lo = int(places.min()) * shadow.granule // region.itemsize
    hi = ((int(places.max()) + 1) * shadow.granule - 1) // region.itemsize
    return f"[{lo}]" if lo == hi else f"[{lo}:{hi + 1}]"
