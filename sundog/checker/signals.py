"""Signals: what atomics publish on a word, who reads and learns it, which signals made no edge.

A signal that was heard but made no edge is kept too, so that a report can name its fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..machine.accesses import Touch
from .clocks import Actor, Clock, Clocks, join
from .findings import AccessEvent
from .scopes import narrower, reaches, same
from .shadow import PastAccess
from .words import STORES, Choices, Message, Word, Words, is_poll, leaves_unchanged

_WIDEST = 8  # bytes of an atomic
_FENCES_KEPT = 1024  # programs whose fence.sc orders later ones
ACQUIRES, RELEASES = ("acquire", "acq_rel"), ("release", "acq_rel")


class Signal(NamedTuple):
    """An atomic that may have been meant to publish."""

    actor: Actor
    event: AccessEvent
    barriers: int
    step: int
    addresses: list[int]
    number: int  # of its message
    releases: bool  # by its own semantics, or by a fence before it
    validates_itself: bool = False  # a plain store that a volatile load has read
    scope: str = "sys"  # how far what it publishes reaches: its own, or that of a fence before it
    earlier: Any = None  # the actor's signal before it on this word, for who reads that one late

    @property
    def is_fenced(self) -> bool:
        return self.releases and self.event.sem not in RELEASES


class Heard(NamedTuple):
    """The latest signal of one actor that another has read."""

    signal: Signal
    event: AccessEvent
    acquires: bool  # by its own semantics, or by a fence after it
    barriers: int = 0  # the reader's time of CTA barriers when it read
    scope: str = "sys"  # its own, or that of a fence after it

    @property
    def actor(self) -> Actor:
        return self.event.actor

    def stays(self, signal: Signal, again: AccessEvent) -> bool:
        """Return whether this is how its actor learnt of a signal that it reads again."""
        weaker = self.event.atomic and again.sem not in ACQUIRES
        return weaker and self.actor is again.actor and self.signal == signal


@dataclass(frozen=True)
class FencePast:
    """What an actor's writes publish after a fence: thread 0's, and those of many threads."""

    scope: str
    alone: Clock
    together: Clock
    met: int  # the actor's, at the fence


@dataclass(frozen=True)
class Overheard:
    """What a relaxed read has found published; a fence after it may acquire it."""

    clock: Clock
    who: Any  # published it, in terms of its scope
    by_lane: bool


class Signals:
    """All words that atomics have touched. For `pick` see `Choices`."""

    def __init__(self, clocks: Clocks, pick: Callable[[int], int]) -> None:
        self._clocks = clocks
        self._choices = Choices(pick)
        self._words = Words()
        self._chosen: dict[int, Message] = {}  # older messages that the current atomic reads
        self._site: tuple | None = None  # of the current atomic, if it is in a `while` loop
        self._places: list[int] = []  # the addresses of the current atomic
        self._touched: list[tuple[int, Word | None]] | None = None  # and its words
        # reads of older messages and the newest, with the values there; the last of each address
        self._stale: dict[AccessEvent, dict[int, tuple[Message, Message, bytes, bytes]]] = {}
        # of these, reads of tiles that saw one part of what another tile wrote, by who wrote it
        self.torn: dict[AccessEvent, AccessEvent] = {}
        self._ordered: dict[Actor, tuple[str, Clock]] = {}  # each fence.sc: scope, and published

    def is_stale(self, event: AccessEvent) -> bool:
        """Return whether the event has ever read another value than the newest."""
        return event in self._stale

    def stale(self) -> Iterator[tuple[AccessEvent, int, Message, Message]]:
        """Yield such reads: the event, the address, what it read last and what it missed."""
        for event, missed in self._stale.items():
            for address, (read, newest, mine, theirs) in missed.items():
                yield event, address, read._replace(value=mine), newest._replace(value=theirs)

    def begin(self, site: tuple | None, addresses: np.ndarray) -> None:
        """Begin an atomic. `site` is its place in the code if it may be a poll."""
        self._chosen, self._site = {}, site
        self._choices.begin()
        self._places, self._touched = addresses.ravel().tolist(), None

    def _each(self) -> list[tuple[int, Word | None]]:
        """Return the words of the current atomic: looked up once, unless they change."""
        if self._touched is None:
            self._touched = self._words.each(self._places)
        return self._touched

    def _drop(self, addresses: list[int]) -> None:
        self._touched = None
        self._words.drop(addresses)

    def observe(
        self, actor: Actor, held: bytes, operands: tuple[str, bytes], place: tuple
    ) -> bytes | None:
        """Choose what an atomic that does not release reads; None: what the memory holds."""
        polls, lanes = is_poll(*operands), len(self._places)
        if lanes > 1 and not polls:
            return None
        size = len(held) // lanes
        values = []
        for lane, word in self._each():
            count = 1 if word is None else len(word.addresses)
            value = held[lane * size : (lane + count) * size]
            if word is None or len(word.messages) == 1:
                values.append(value)
            elif word.messages[-1].value != value:  # changed by an atomic of another size
                self._drop(word.addresses)
                values.append(value)
            else:
                found = word.readable(actor, self._clocks, self._site)
                if len(found) > 1 and not polls:
                    found[1:] = [m for m in found[1:] if leaves_unchanged(*operands, m.value)]
                newest = len(found) == 1
                values.append(found[0].value if newest else self._choose(word, found, place))
        if not self._chosen:
            return None
        self._choices.read_older(place)
        return b"".join(values)

    def _choose(self, word: Word, found: list[Message], place: tuple) -> bytes:
        """Choose what each lane of a word reads."""
        values = []
        lanes = self._choices.each(len(word.addresses), len(found), len(self._places), place)
        for lane, choice in enumerate(lanes):
            if choice:
                self._chosen[word.addresses[lane]] = found[choice]
            values.append(word.value(found[choice], lane))
        return b"".join(values)

    def publish(self, event: AccessEvent, touch: Touch, before: bytes, after: bytes) -> None:
        """Append to the words what an atomic wrote. A poll that adds 0 writes no message."""
        size = touch.size
        said = _published(event)
        if not said and before == after:
            return
        for lane, word in self._known(size, before):
            lanes = slice(lane * size, (lane + len(word.addresses)) * size)
            old, new = before[lanes], after[lanes]
            if said or old != new:
                self._append(event, word, new, said)

    def _known(self, size: int, before: bytes) -> list[tuple[int, Word]]:
        """Return the words of an access, each with its first lane; make those that are new."""
        addresses, found = self._places, self._each()
        known = [(lane, w) for lane, w in found if w is not None and w.size == size]
        if addresses and not known and len(set(addresses)) == len(addresses):
            return [(0, self._new(addresses, size, before))]
        found = found or [(lane, None) for lane in range(len(addresses))]
        if len(known) == len(found):
            return known
        made = []
        for lane, old in found:
            word = self._words.get(addresses[lane])  # an address may occur twice
            if word is None or word.size != size:
                at = addresses[lane : lane + (1 if old is None else len(old.addresses))]
                value = before[lane * size : (lane + len(at)) * size]
                word = self._new(at, size, value)
            made.append((lane, word))
        return made

    def _new(self, addresses: list[int], size: int, value: bytes) -> Word:
        """Make a word that no atomic of this size has touched."""
        self._drop(self._words.among(addresses))
        word = Word(size, addresses, [Message(0, value)])
        self._words.add(word)
        return word

    def _append(self, event: AccessEvent, word: Word, value: bytes, said: dict[str, Clock]) -> None:
        actor, newest = event.actor, word.newest
        last = word.signals.get(actor)
        number = newest.number + 1
        released = last is not None and last.releases
        if event.verb in STORES:
            word.signals.clear()
        published = newest.published if event.verb not in STORES else {}
        for scope, clock in said.items():
            key = (scope, same(scope, actor))
            known = published.get(key)
            alone = last is not None and len(word.signals) == 1
            if known is not None and not (alone and known.get(actor.zero, 0) <= clock[actor.zero]):
                clock = {**clock}  # unless this actor's newer clock has all of its older one
                join(clock, known)
            published = {**published, key: clock}
        if said or not released:
            fenced = event.sem not in RELEASES and actor.fences
            barriers = 1 + (actor.fences[0].met if fenced else actor.met)
            reach = next(iter(said), event.scope)
            signal = Signal(
                actor, event, barriers, actor.steps, word.addresses, number, bool(said),
                scope=reach, earlier=last and last._replace(earlier=None),
            )  # fmt: skip
            word.signals[actor] = actor.sent = signal
        stamp = actor.stamp(event.tensor, event.proxy)
        word.append(Message(number, value, stamp, event, published, newest.releases + bool(said)))

    def hear(self, event: AccessEvent) -> None:
        """Read the words by an atomic: learn what reaches its actor, and note what does not."""
        if (missed := self._stale.get(event)) is not None:
            for address in self._places:
                missed.pop(address, None)
        for _, word in self._each():
            if word is None:
                continue
            newest = word.messages[-1]
            if not self._chosen:
                self._hear_word(event, word, newest)
                continue
            self._note_stale(event, word)
            read = {m.number: m for m in (self._chosen.get(a, newest) for a in word.addresses)}
            for number in sorted(read):
                self._hear_word(event, word, read[number])
        if event.tensor and (self._chosen or self.torn):
            self._note_torn(event)

    def _note_stale(self, event: AccessEvent, word: Word) -> None:
        """Note the lanes that read an older value than there is."""
        for lane, address in enumerate(word.addresses):
            if address in self._chosen:
                read, newest = self._chosen[address], word.messages[-1]
                values = word.value(read, lane), word.value(newest, lane)
                if values[0] != values[1]:
                    self._stale.setdefault(event, {})[address] = (read, newest, *values)

    def _note_torn(self, event: AccessEvent) -> None:
        """Note whether a tile read the newest of some words, and not of others, of one writer."""
        self.torn.pop(event, None)
        if not self._chosen:
            return
        read, missed = set(), set()
        for word in (word for _, word in self._each() if word is not None):
            writer = word.messages[-1].event
            stale = [address in self._chosen for address in word.addresses]
            if any(stale):
                missed.add(writer)
            if not all(stale):
                read.add(writer)
        for writer in read & missed:
            if writer is not None and writer.tensor:
                self.torn[event] = writer

    def _hear_word(self, event: AccessEvent, word: Word, message: Message) -> None:
        actor = event.actor
        acquires = event.sem in ACQUIRES
        by_lane = event.tensor or _of_own_lane(actor, message)
        word.note_read(actor, actor.stamp(event.tensor, False), message, self._site)
        for latest in word.signals.values():
            signal = latest if latest.number <= message.number else latest.earlier
            if signal is None or signal.number > message.number:
                continue  # not read yet
            known = actor.heard.get(signal.actor)
            if known is not None and (event.sem == "release" or known.stays(signal, event)):
                continue  # meant to signal, not to wait, or read once more: what was heard counts
            if signal.actor is not actor:
                heard = Heard(signal, event, acquires, actor.barriers, event.scope)
                actor.heard[signal.actor] = heard
                if by_lane and acquires:
                    actor.pending_from[signal.actor] = None
        if not message.published:
            return
        reaching = _reaching(event, message)
        if not acquires:
            by_lane = by_lane and event.verb != "volatile load"
            for clock, who in reaching:
                actor.overheard[id(clock)] = Overheard(clock, who, by_lane)
            return
        if reaching and not by_lane:
            actor.acquired(event)
        for clock, _ in reaching:
            if by_lane:
                actor.pending[id(clock)] = clock
            else:
                actor.learn(clock)

    def reaching(self, event: AccessEvent, address: int) -> list[Clock]:
        """Return what one lane of a tensor atomic learns, for its own thread."""
        word = self._words.get(address)
        if word is None or event.sem not in ACQUIRES:
            return []
        found = _reaching(event, self._chosen.get(address, word.newest))
        return [clock for clock, _ in found]

    def fence(self, actor: Actor, sem: str, scope: str, everyone: bool) -> None:
        """Acquire what was read before, and let later writes release, within the fence's scope."""
        if sem != "release":
            self._acquire_overheard(actor, scope, everyone)
        if sem == "sc":
            self._put_in_order(actor, scope, everyone)
        if sem != "acquire":
            alone, together = actor.published(tensor=False), actor.published(tensor=True)
            wider = [f for f in actor.fences if narrower(f.scope, scope) != f.scope]
            actor.fences = (*wider, FencePast(scope, alone, together, actor.met))
        actor.steps += 1

    def _acquire_overheard(self, actor: Actor, scope: str, everyone: bool) -> None:
        for key, each in [*actor.overheard.items()]:
            if not reaches(scope, same(scope, actor), each.who):
                continue  # a wider fence may follow
            del actor.overheard[key]
            if everyone and not each.by_lane:
                actor.learn(each.clock)
            else:
                actor.pending[id(each.clock)] = each.clock
        for signaller, heard in actor.heard.items():
            if heard.event.actor is actor and heard.event.atomic:
                reach = narrower(scope, heard.event.scope)
                if heard.acquires and narrower(heard.scope, reach) == reach:
                    continue  # as far already
                actor.heard[signaller] = heard._replace(acquires=True, scope=reach)

    def _put_in_order(self, actor: Actor, scope: str, everyone: bool) -> None:
        """Order a fence.sc after those before it whose scopes reach: fences have one order."""
        for other, (theirs, clock) in self._ordered.items():
            if reaches(theirs, same(theirs, other), actor) and reaches(
                scope, same(scope, actor), other
            ):
                if everyone:
                    actor.learn(clock)
                else:
                    actor.pending[id(clock)] = clock
        published = actor.published(tensor=False)
        if everyone:  # each thread's fence publishes what that thread has done
            published[actor.warps] = actor.barriers
            actor.barriers += 1
        self._ordered.pop(actor, None)
        self._ordered[actor] = scope, published
        for old in [*self._ordered][:-_FENCES_KEPT]:
            del self._ordered[old]

    def hear_plainly(self, event: AccessEvent, address: int) -> None:
        """Note a plain scalar load of a word that others signal on."""
        word = self._words.get(address)
        for signal in word.signals.values() if word is not None else ():
            if signal.actor is not event.actor:
                event.actor.heard[signal.actor] = Heard(signal, event, acquires=False)

    def hear_store(self, event: AccessEvent, stored: AccessEvent) -> None:
        """Note an atomic read of a word that another actor wrote plainly: it meant to signal."""
        signal = Signal(stored.actor, stored, 0, 0, [], 0, False)
        event.actor.heard.setdefault(stored.actor, Heard(signal, event, event.sem in ACQUIRES))

    def hear_payload(self, event: AccessEvent, stored: PastAccess, address: int) -> None:
        """Note a volatile load of a word that a plain store wrote: its payload is its flag."""
        sender = stored.event.actor
        signal = Signal(
            sender, stored.event, stored.stamp[1], stored.step, [address], 0, False, True
        )
        event.actor.heard[sender] = Heard(signal, event, acquires=False)

    def break_chains(self, addresses: np.ndarray, size: int, plain: bool = True) -> None:
        """End the release sequences on the words that a store overwrites.

        An atomic one is a message of the words that it overwrites as a whole.
        """
        if not self._words or not addresses.size:
            return
        begins = addresses.ravel()
        ends = (begins[0], begins[0]) if begins.size == 1 else (begins.min(), begins.max())
        near = self._words.near(int(ends[0]) - _WIDEST + 1, int(ends[1]) + size)
        if not near:
            return
        starts = np.array(near, np.uint64)
        widths = np.array([self._words.size_at(a) for a in near], np.uint64)
        overlaps = _overlaps(starts, widths, np.sort(begins), size)
        if not plain:
            overlaps &= ~(np.isin(starts, begins) & (widths == size))
        self._drop([a for a, gone in zip(near, overlaps.tolist(), strict=True) if gone])

    def forget(self, start: int, end: int) -> None:
        self._drop(self._words.near(start, end))


def _overlaps(starts: np.ndarray, widths: np.ndarray, begins: np.ndarray, size: int) -> np.ndarray:
    """Say which words overlap one of these elements; their addresses come in order."""
    # the last element that begins before the end of a word is the one that reaches furthest
    places = np.searchsorted(begins, starts + widths, "left")
    before = begins[np.maximum(places - 1, 0)]
    return (places > 0) & (before + np.uint64(size) > starts)


def _of_own_lane(actor: Actor, message: Message) -> bool:
    """Return whether one lane of the reader wrote it: others may read earlier, up to a barrier."""
    event, stamp = message.event, message.stamp
    mine = event is not None and event.actor is actor and event.tensor
    return bool(mine and stamp is not None and stamp[1] > actor.met)


def _published(event: AccessEvent) -> dict[str, Clock]:
    """Return what a write publishes by its own semantics or fences before it, by how far."""
    actor = event.actor
    if event.sem in RELEASES:
        return {event.scope: actor.published(event.tensor)}
    return {
        narrower(fence.scope, event.scope): fence.together if event.tensor else fence.alone
        for fence in actor.fences
    }


def _reaching(event: AccessEvent, message: Message) -> list[tuple[Clock, Any]]:
    """Return what a message has for the actor of this event, and who published it."""
    actor = event.actor
    if event.scope == "sys" and all([scope == "sys" for scope, _ in message.published]):  # most
        return [(clock, who) for (_, who), clock in message.published.items()]
    return [
        (clock, who)
        for (scope, who), clock in message.published.items()
        if reaches(scope, who, actor) and reaches(event.scope, same(event.scope, actor), who)
    ]
