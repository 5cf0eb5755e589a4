"""The checker: docs/memory_model.md as code. Follows every access of kernels and hosts.

What an actor knows (`clocks`) comes from launches, barriers and signals (`signals`). Each access
meets the history of its bytes (`shadow`), and the rules (`rules`) look at both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..machine.accesses import MAKE, READ, Touch
from ..machine.polling import Site, read, stack_of
from ..machine.regions import Memory, Region
from ..machine.tasks import Launch, Program, Stream
from .clocks import Actor, Clocks, Deputies, StreamActor, StreamClocks
from .encounter import Encounter, Found
from .failures import Missed, find_uses, stale_read, torn_read
from .findings import AccessEvent, Finding
from .history import History
from .pipelined import Suspicion, confirm, suspect
from .races import PLAIN_FLAG
from .rules import Look, looks_at
from .shadow import UNWRITTEN, Shadows, Span, bounds, each_place, index_range
from .signals import ACQUIRES, RELEASES, Signals
from .words import COPIED, READS, VOLATILE, VOLATILE_TILE, VOLATILES


class Checker:
    """An observer of the machine, which collects findings."""

    def __init__(self, memory: Memory, pick: Callable[[int], int] = lambda count: 0) -> None:
        """Watch this memory. `pick` chooses which of several values an atomic reads; 0: newest."""
        self.findings: dict[tuple, Finding] = {}
        self._suspicions: list[Suspicion] = []
        self._memory = memory
        self._clocks = Clocks()
        self.streams = StreamClocks(self._clocks)
        self._actors: dict[Program, Actor] = {}
        self.deputies = Deputies(self._actors, self._clocks)
        self._launches: dict[Launch, tuple[int, list[Program]]] = {}  # number, started programs
        self._signals = Signals(self._clocks, pick)
        self._history = History(memory, self._clocks, self._signals.forget, self._meet)
        self._events = Events()
        self._num_launches = 0
        self.widest = 0  # programs of the largest launch
        self._running: dict[Actor, Launch] = {}
        self._missed: dict[AccessEvent, Region | None] = {}  # where it last read an older value

    @property
    def shadows(self) -> Shadows:
        return self._history.shadows

    # order

    def start(self, program: Program, stream: Stream) -> None:
        """Make a program resident: it knows what its stream knew when the kernel began."""
        launch = program.launch
        if launch not in self._launches:
            self._launches[launch] = self._num_launches, []
            self.streams.learn(stream, launch.known)
            launch.begun = self.streams.begin(stream, launch)
            self._note("launch", launch.rank, self._num_launches)
            self._num_launches += 1
            self.widest = max(self.widest, launch.total)
        number, programs = self._launches[launch]
        begun = launch.begun
        actor = Actor(
            program.rank, program.index, launch.name, number, program.number,
            self._clocks.component(), self._clocks.component(), self._clocks.component(),
            dict(begun), begun, begun,
        )  # fmt: skip
        actor.heard = dict(self.streams.of(stream).heard)  # by the kernels before it
        if launch.options.get("launch_pdl"):
            actor.unwaited = dict(self.streams.of(stream).clock)
        self._actors[program] = actor
        self._running[actor] = launch
        programs.append(program)

    def end(self, launch: Launch, stream: Stream) -> None:
        if launch in self._launches:  # not so for an empty grid
            number, programs = self._launches.pop(launch)
            actors = [self._actors.pop(program) for program in programs]
            for actor in actors:
                del self._running[actor]
            errands = [errand for actor in actors for errand in actor.errands]
            self._clocks.end([*actors, *errands], self.streams.of(stream))
            self._note("end", launch.rank, number)

    def world_barrier(self, streams: list[Stream]) -> None:
        self.streams.barrier(streams)

    def cta_barrier(self, program: Program) -> None:
        actor = self._actors[program]
        actor.barrier()
        self._note("barrier", actor.rank, actor.launch, actor)

    def grid_wait(self, program: Program) -> None:
        self._actors[program].wait_for_grid()

    def fence(self, program: Program, sem: str, scope: str, everyone: bool) -> None:
        """Note a fence of this program, by all its threads or by some."""
        self._signals.fence(self._actors[program], sem, scope, everyone)

    def proxy_fence(self, program: Program) -> None:
        actor = self._actors[program]
        actor.fenced = actor.published(tensor=False)

    # accesses

    def load(self, program: Program, touch: Touch, tensor: bool, proxy: bool) -> None:
        # a scalar load is made by all threads
        verb = "descriptor load" if proxy else "load"
        event = self._event(program, verb, writes=False, tensor=True, proxy=proxy)
        self._note("load", event.actor.rank, event.actor.launch, event, touch, tensor)
        if not tensor and touch.addresses.size:
            self._signals.hear_plainly(event, touch.addresses.item(0))
        self._history.access(event, touch)

    def store(self, program: Program, touch: Touch, tensor: bool, proxy: bool) -> None:
        verb = "descriptor store" if proxy else "store"
        event = self._event(program, verb, writes=True, tensor=tensor, proxy=proxy, size=touch.size)
        self._note("store", event.actor.rank, event.actor.launch, event, touch, tensor)
        self._history.access(event, touch)
        if tensor and not proxy and touch.addresses.size > 1:
            event.actor.stored.append(touch)
        self._signals.break_chains(touch.addresses, touch.size)

    def observe(
        self, program: Program, touch: Touch, held: bytes, operands: tuple[str, bytes], sem: str,
        site: tuple | None,
    ) -> bytes | None:  # fmt: skip
        """Return the older values that an atomic reads; None: what the memory holds.

        `site` identifies the place of a poll; it is None where the atomic is in no `while` loop.
        """
        self._signals.begin(site, touch.addresses)
        if sem in RELEASES or not touch.addresses.size:  # see `words`
            return None
        return self._signals.observe(self._actors[program], held, operands, program.site)

    def atomic(
        self, program: Program, touch: Touch, op: str, sem: str, scope: str, tensor: bool,
        proxy: bool, before: bytes, after: bytes,
    ) -> None:  # fmt: skip
        """Note an atomic that found `before` in the memory and left `after` there."""
        writes = op not in READS
        # all threads make a volatile load; one makes a scalar atomic
        verb, by_all = f"atomic {op}", tensor
        if op == VOLATILE:
            verb, by_all = VOLATILES[tensor], True
        event = self._event(program, verb, writes, by_all, sem, scope, True, proxy, touch.size)
        actor = event.actor
        what = "volatile" if op == VOLATILE else "atomic"
        self._note(what, actor.rank, actor.launch, event, touch, tensor)
        # An acquire comes after what it learns, so it learns first.
        if op != "STORE":
            self._signals.hear(event)
            if self._signals.is_stale(event):
                self._missed[event] = touch.region
        self._history.access(event, touch)
        if op == "STORE":
            self._signals.break_chains(touch.addresses, touch.size, plain=False)
        if writes:
            self._signals.publish(event, touch, before, after)
        actor.steps += 1

    def host_access(
        self, stream: Stream, touch: Touch, verb: str, at: tuple, held: bytes = b""
    ) -> None:
        """Note that a host's torch operation touched a tensor: READ, WRITE or MAKE (its result).

        `held`: what a copy of whole words has overwritten. Into flags it is a signal.
        """
        actor = self.streams.of(stream)
        where = touch.addresses
        lo, hi = (where.item(),) * 2 if where.size == 1 else (int(where.min()), int(where.max()))
        known = self._memory.find(lo, hi + touch.size)  # on a heap: not the whole storage
        if held and known is not None and known.is_flags:
            self._host_signal(actor, touch, at, held, known)
            return
        event = self._events.of_host(actor, verb, at)
        if verb != MAKE:
            self._note(verb.replace(" ", "_"), actor.rank, None, event, touch)
        if known is None and self._history.write_down(event, touch):
            return
        self._history.access(event, touch if known is None else touch._replace(region=known))
        if event.writes:
            self._signals.break_chains(touch.addresses, touch.size)

    def _host_signal(
        self, actor: StreamActor, touch: Touch, at: tuple, held: bytes, flags: Region
    ) -> None:
        """Note a copy into flags: a release of each word, of all that the stream has done."""
        first = int(touch.addresses[0])
        words = Touch(np.arange(first, first + len(held), 8, dtype=np.uint64), 8, flags)
        event = self._events.of_host(actor, COPIED, at)
        self._note("host_write", actor.rank, None, event, words)
        self._history.access(event, words)
        self._signals.break_chains(words.addresses, words.size, plain=False)
        self._signals.begin(None, words.addresses)
        self._signals.publish(event, words, held, read(words.addresses, words.size))
        actor.advance()  # what follows on the stream was not published
        actor.steps += 1

    # allocations

    def allocated(self, region: Region) -> None:
        self.shadows.allocated(region, UNWRITTEN)

    def meet(self, storage: torch.UntypedStorage, unwritten: int = 0) -> None:
        """Note an ordinary tensor before it is touched; an `unwritten` one was made just now."""
        self.shadows.meet(storage, unwritten)

    def freed(self, start: int, stream: Stream, at: tuple) -> None:
        """Report the rank's own accesses that nothing orders before the end of this memory."""
        shadow, region = self.shadows.get(start), self._memory.find(start, start + 1)
        if shadow is not None and region is not None:
            actor, host = self.streams.of(stream), self.streams.host(stream.rank)
            event = AccessEvent(actor, "free", True, atomic=False, tensor=True, stack=(at,))
            states = self._history.states_of(shadow)
            for found in find_uses(states, event, self._clocks, host):
                self._report(found, event, (region, shadow, slice(0, shadow.numbers.size)))
        self.shadows.freed(start)

    # inside

    def forget(self) -> None:
        """Drop all histories after the run: collecting them as garbage would take longer."""
        self._history = History(self._memory, self._clocks, self._signals.forget, self._meet)
        self._events.clear()

    def _event(
        self, program: Program, verb: str, writes: bool, tensor: bool, sem: str = "",
        scope: str = "", atomic: bool = False, proxy: bool = False, size: int = 0,
    ) -> AccessEvent:  # fmt: skip
        actor = self._actors[program]
        site = actor.called or program.site
        return self._events.of(actor, site, verb, writes, tensor, sem, scope, atomic, proxy, size)

    def _meet(self, here: Encounter, looks: Iterable[Look]) -> None:
        """Let the rules look at an access and the history that it meets."""
        for stored in here.payloads() if here.event.verb == VOLATILE_TILE else ():
            self._signals.hear_payload(here.event, stored, bounds(here.span)[0])
        for look in looks:
            if found := look(here):
                self._found(look, list(found), here)

    def _found(self, look: Look, found: list[Found], here: Encounter) -> None:
        event = here.event
        if found and event.tensor and event.sem in ACQUIRES:
            found = [*self._look_by_lane(look, here)]
        for each in found:
            stored = each.earlier if each.rule is PLAIN_FLAG and event.atomic else None
            if stored is not None and stored.writes and stored.actor is not event.actor:
                self._signals.hear_store(event, stored)
            if each.acquire is None:
                self._report(each, event, here.span)
            else:
                self._suspicions.append(suspect(each, event, here.span, self._running[event.actor]))

    def _look_by_lane(self, look: Look, here: Encounter) -> Iterator[Found]:
        """Look again at each lane of a tensor acquire: what it learns orders its own access."""
        _, shadow, places = here.span
        starts = [shadow.start + place * shadow.granule for place in each_place(places)]
        for address in here.touch.addresses.ravel().tolist():
            if any(address <= start < address + here.touch.size for start in starts):
                here.event.actor.lane = self._signals.reaching(here.event, address)
                yield from look(here)
        here.event.actor.lane = []

    # findings

    def _report(self, found: Found, event: AccessEvent, span: Span) -> None:
        """Add a finding, or count it if these two lines have one already."""
        region, indices = span[0], index_range(span)
        first = found.earlier.access(region.name, indices) if found.earlier is not None else None
        finding = found.rule.finding(found.why, first, event.access(region.name, indices))
        known = self.findings.setdefault(finding.key(), finding)
        if known is not finding:
            known.absorb(finding)

    def atomics(self) -> set[tuple[str, int, str, str]]:
        """Return the atomics that ran: file and line of every caller, semantics and scope."""
        return {
            (path, line, event.sem, event.scope)
            for event in self._events
            if event.sem
            for path, line, _ in event.stack
        }

    def stale_reads(self) -> list[Missed]:
        """Say which atomics read an older value at last, and which write they missed."""
        return [
            stale_read(event, self._word(event, address), read, newest)
            for event, address, read, newest in self._signals.stale()
            if not event.is_ours and not event.waits
        ]

    def torn_reads(self) -> list[str]:
        """Say which tile atomics saw a part of another one at last."""
        return [torn_read(event, writer) for event, writer in self._signals.torn.items()]

    def _word(self, event: AccessEvent, address: int) -> str:
        """Name a word that an atomic read. Its memory may have been freed since."""
        region = self._missed.get(event)
        if region is None or not region.start <= address < region.end:
            region = self._memory.find(address, address + 1)
        return "a word of a tensor" if region is None else region.index(address)

    def ask_compiler(self) -> list[str]:
        """Report the loads that moved, after the run; return notes on what did not compile."""
        notes: dict[str, None] = {}
        for suspicion in self._suspicions:
            found, unknown = confirm(suspicion)
            notes |= dict.fromkeys(unknown)
            if found is not None:
                self._report(found, suspicion.event, suspicion.span)
        self._suspicions.clear()
        return list(notes)

    def _note(
        self, what: str, rank: int | None, launch: int | None, event: Any = None,
        touch: Touch | None = None, tensor: bool | None = None,
    ) -> None:  # fmt: skip
        """Do nothing; a checker that keeps what it is shown gets it here."""


Stack = tuple[tuple[str, int, str], ...]


@dataclass(eq=False, slots=True)
class _Place:
    """How an access is made, and where. Many programs make it, each with an event of its own."""

    fields: tuple[Any, ...]  # of AccessEvent, after the actor
    events: dict[Any, AccessEvent] = field(default_factory=dict)

    def event(self, actor: Any) -> AccessEvent:
        found = self.events.get(actor)
        if found is None:
            found = self.events[actor] = AccessEvent(actor, *self.fields)
        return found


class Events:
    """The events of accesses: one for each actor and each place of its code."""

    def __init__(self) -> None:
        self._places: dict[tuple, _Place] = {}
        self._stacks: dict[Site, Stack] = {}

    def of(
        self, actor: Actor, site: Site, verb: str, writes: bool, tensor: bool, sem: str = "",
        scope: str = "", atomic: bool = False, proxy: bool = False, size: int = 0,
    ) -> AccessEvent:  # fmt: skip
        """Return the event of a program at a site."""
        key = (verb, tensor, sem, scope, size, site)
        place = self._places.get(key)
        if place is None:
            stack = self._stacks.get(site)
            if stack is None:
                stack = self._stacks[site] = tuple(stack_of(site))
            how = AccessEvent(actor, verb, writes, atomic, tensor, sem, scope, proxy, size, stack)
            place = self._places[key] = _place(how)
        return place.event(actor)

    def of_host(self, actor: StreamActor, verb: str, at: tuple) -> AccessEvent:
        """Return the event of a host at a line."""
        key = (verb, at)
        place = self._places.get(key)
        if place is None:
            how = AccessEvent(actor, verb, verb != READ, atomic=False, tensor=True, stack=(at,))
            if verb == COPIED:
                how.atomic, how.sem, how.scope, how.size = True, "release", "sys", 8
            place = self._places[key] = _place(how)
        return place.event(actor)

    def __iter__(self) -> Iterator[AccessEvent]:
        return (event for place in self._places.values() for event in place.events.values())

    def clear(self) -> None:
        for event in self:
            event.latest = None  # it refers to the event: only the garbage collection could tell
        self._places.clear()


def _place(how: AccessEvent) -> _Place:
    volatile = how.verb in VOLATILES
    alike = how.size if how.atomic and how.scope == "sys" and not volatile else 0
    return _Place((
        how.verb, how.writes, how.atomic, how.tensor, how.sem, how.scope, how.proxy, how.size,
        how.stack, looks_at(how), alike,
    ))  # fmt: skip
