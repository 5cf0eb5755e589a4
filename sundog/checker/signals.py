"""Signals: what atomics publish on a word, who reads and learns it, which signals made no edge.

A signal that was heard but made no edge is kept too, so that a report can name its fault.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..machine.accesses import Touch
from .clocks import Actor, Clock, Clocks, join
from .findings import AccessEvent
from .shadow import PastAccess
from .words import Message, Word, is_poll, leaves_unchanged

__all__ = ["ACQUIRES", "RELEASES", "Heard", "Signals", "both_reach"]

_WIDEST = 8  # bytes of an atomic
_SCOPES = ("cta", "gpu", "sys")  # from the narrowest
_FENCES_KEPT = 1024  # programs whose fence.sc orders later ones
ACQUIRES, RELEASES = ("acquire", "acq_rel"), ("release", "acq_rel")


class Signal(NamedTuple):
    """An atomic that may have been meant to publish."""

    actor: Actor
    event: AccessEvent
    barriers: int
    step: int
    address: int
    number: int  # of its message
    releases: bool  # by its own semantics, or by a fence before it
    validates_itself: bool = False  # a plain store that a volatile load has read


class Heard(NamedTuple):
    """The latest signal of one actor that another has read."""

    signal: Signal
    event: AccessEvent
    acquires: bool  # by its own semantics, or by a fence after it
    barriers: int = 0  # the reader's time of CTA barriers when it read


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
    """All words that atomics have touched.

    `pick` gets the number of values that an atomic may read, and chooses one; 0 is the newest.
    """

    def __init__(self, clocks: Clocks, pick: Callable[[int], int]) -> None:
        self._clocks = clocks
        self._pick = pick
        self._words: dict[int, Word] = {}
        self._chosen: dict[int, Message] = {}  # older messages that the current atomic reads
        self._site: tuple | None = None  # of the current atomic, if it is in a `while` loop
        # reads that did not return the newest value, and what they missed; the last of each place
        self.stale: dict[tuple[AccessEvent, int], tuple[Message, Message]] = {}
        # of these, reads of tiles that saw one part of what another tile wrote, by who wrote it
        self.torn: dict[AccessEvent, AccessEvent] = {}
        self._ordered: dict[
            Actor, tuple[str, Clock]
        ] = {}  # what each fence.sc published, and scope

    def begin(self, site: tuple | None) -> None:
        """Begin an atomic. `site` is its place in the code if it may be a poll."""
        self._chosen, self._site = {}, site

    def observe(
        self, actor: Actor, addresses: np.ndarray, held: bytes, operands: tuple[str, bytes]
    ) -> bytes | None:
        """Choose what an atomic that does not release reads; None: what the memory holds."""
        if not self._words or (addresses.size > 1 and not is_poll(*operands)):
            return None
        size = len(held) // addresses.size
        values = []
        for place, address in enumerate(addresses.ravel().tolist()):
            value = held[place * size : (place + 1) * size]
            values.append(self._observe_word(actor, address, value, operands))
        return b"".join(values) if self._chosen else None

    def _observe_word(
        self, actor: Actor, address: int, held: bytes, operands: tuple[str, bytes]
    ) -> bytes:
        word = self._words.get(address)
        if word is None or len(word.messages) == 1:
            return held
        if word.newest.value != held:  # changed by an atomic of another size
            del self._words[address]
            return held
        found = word.readable(actor, self._clocks, self._site)
        if len(found) > 1 and not is_poll(*operands):
            found[1:] = [m for m in found[1:] if leaves_unchanged(*operands, m.value)]
        choice = self._pick(len(found)) if len(found) > 1 else 0
        if choice:
            self._chosen[address] = found[choice]
        return found[choice].value

    def publish(self, event: AccessEvent, touch: Touch, before: bytes, after: bytes) -> None:
        """Append to the words what an atomic wrote. A poll that adds 0 writes no message."""
        size = touch.size
        clock, scope = _published(event)
        if clock is None and before == after:
            return
        for place, address in enumerate(touch.addresses.ravel().tolist()):
            lane = slice(place * size, (place + 1) * size)
            old, new = before[lane], after[lane]
            word = self._words.get(address)
            if word is None or word.size != size:
                word = self._words[address] = Word(size, [Message(0, old)])
            if clock is not None or old != new:
                self._append(event, word, address, new, clock, scope)

    def _append(
        self, event: AccessEvent, word: Word, address: int, value: bytes, clock: Clock | None,
        scope: str,
    ) -> None:  # fmt: skip
        actor, newest = event.actor, word.newest
        last = word.signals.get(actor)
        number = newest.number + 1
        released = last is not None and last.releases
        if event.verb == "atomic STORE":  # it reads nothing, so no release sequence goes through
            word.signals.clear()
        published = newest.published if event.verb != "atomic STORE" else {}
        if clock is not None:
            key = (scope, _same(scope, actor))
            known = published.get(key)
            alone = last is not None and len(word.signals) == 1
            if known is not None and not (alone and known.get(actor.zero, 0) <= clock[actor.zero]):
                clock = {**clock}  # unless this actor's newer clock has all of its older one
                join(clock, known)
            published = {**published, key: clock}
        if clock is not None or not released:
            fenced = event.sem not in RELEASES and actor.fence is not None
            barriers = 1 + (actor.fence.met if fenced else actor.met)
            says = clock is not None
            signal = Signal(actor, event, barriers, actor.steps, address, number, says)
            word.signals[actor] = actor.sent = signal
        stamp = actor.stamp(event.tensor, event.proxy)
        releases = newest.releases + (clock is not None)
        word.append(Message(number, value, stamp, event, published, releases))

    def hear(self, event: AccessEvent, addresses: np.ndarray) -> None:
        """Read the words by an atomic: learn what reaches its actor, and note what does not."""
        for address in addresses.ravel().tolist():
            word = self._words.get(address)
            if word is not None:
                newest = word.messages[-1]
                message = self._chosen.get(address, newest) if self._chosen else newest
                if message is not newest and message.value != newest.value:
                    self.stale[event, address] = message, newest
                elif self.stale:
                    self.stale.pop((event, address), None)
                self._hear_word(event, word, message)
        if event.tensor:
            self._note_torn(event, addresses)

    def _note_torn(self, event: AccessEvent, addresses: np.ndarray) -> None:
        """Note whether a tile read the newest of some words, and not of others, of one writer."""
        self.torn.pop(event, None)
        if not self._chosen:
            return
        found = {int(a): self._words.get(int(a)) for a in addresses.flat}
        words = {address: word for address, word in found.items() if word is not None}
        new = {word.newest.event for address, word in words.items() if address not in self._chosen}
        for address in self._chosen.keys() & words.keys():
            writer = words[address].newest.event
            if writer is not None and writer.tensor and writer in new:
                self.torn[event] = writer

    def _hear_word(self, event: AccessEvent, word: Word, message: Message) -> None:
        actor = event.actor
        acquires = event.sem in ACQUIRES
        by_lane = event.tensor or _of_own_lane(actor, message)
        word.note_read(actor, actor.stamp(event.tensor, False), message, self._site)
        for signal in word.signals.values():
            if signal.number > message.number:
                continue  # not read yet
            if event.sem == "release" and signal.actor in actor.heard:
                continue  # meant to signal, not to wait: what was heard before counts
            if signal.actor is not actor:
                actor.heard[signal.actor] = Heard(signal, event, acquires, actor.barriers)
                if by_lane and acquires:
                    actor.pending_from[signal.actor] = None
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
            actor.fence = FencePast(scope, alone, together, actor.met)
        actor.steps += 1

    def _acquire_overheard(self, actor: Actor, scope: str, everyone: bool) -> None:
        for each in actor.overheard.values():
            if not _reaches(scope, _same(scope, actor), each.who):
                continue
            if everyone and not each.by_lane:
                actor.learn(each.clock)
            else:
                actor.pending[id(each.clock)] = each.clock
        actor.overheard.clear()
        for signaller, heard in actor.heard.items():
            if heard.event.actor is actor and heard.event.atomic:
                actor.heard[signaller] = heard._replace(acquires=True)

    def _put_in_order(self, actor: Actor, scope: str, everyone: bool) -> None:
        """Order a fence.sc after those before it whose scopes reach: fences have one order."""
        for other, (theirs, clock) in self._ordered.items():
            if _reaches(theirs, _same(theirs, other), actor) and _reaches(
                scope, _same(scope, actor), other
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

    def lags(self, addresses: np.ndarray) -> tuple[int, ...]:
        """Return how many releases each lane of the current atomic has missed."""
        return tuple([self._lag(int(address)) for address in addresses.flat])

    def _lag(self, address: int) -> int:
        read = self._chosen.get(address)
        return 0 if read is None else self._words[address].newest.releases - read.releases

    def hear_plainly(self, event: AccessEvent, address: int) -> None:
        """Note a plain scalar load of a word that others signal on."""
        word = self._words.get(address)
        for signal in word.signals.values() if word is not None else ():
            if signal.actor is not event.actor:
                event.actor.heard[signal.actor] = Heard(signal, event, acquires=False)

    def hear_payload(self, event: AccessEvent, stored: PastAccess, address: int) -> None:
        """Note a volatile load of a word that a plain store wrote: its payload is its flag."""
        sender = stored.event.actor
        signal = Signal(sender, stored.event, stored.stamp[1], stored.step, address, 0, False, True)
        event.actor.heard[sender] = Heard(signal, event, acquires=False)

    def break_chains(self, addresses: np.ndarray, size: int, plain: bool = True) -> None:
        """End the release sequences on the words that a store overwrites.

        An atomic one is a message of the words that it overwrites as a whole.
        """
        if not self._words or not addresses.size:
            return
        if addresses.size == 1:
            at = int(addresses.flat[0])
            near = [a for a in range(at - _WIDEST + 1, at + size) if a in self._words]
        else:
            lo, hi = int(addresses.min()) - _WIDEST, int(addresses.max()) + size
            near = [a for a in self._words if lo < a < hi]
        for start in near:
            width = np.uint64(self._words[start].size)
            begins, word = addresses.ravel(), np.uint64(start)
            if not plain and width == size and (begins == word).any():
                continue
            if ((begins < word + width) & (begins + np.uint64(size) > word)).any():
                del self._words[start]

    def forget(self, start: int, end: int) -> None:
        for address in [a for a in self._words if start <= a < end]:
            del self._words[address]


def _of_own_lane(actor: Actor, message: Message) -> bool:
    """Whether one lane of the reader wrote it: other threads may read earlier, up to a barrier."""
    event = message.event
    if event is None or event.actor is not actor or not event.tensor:
        return False
    return message.stamp is not None and message.stamp[1] > actor.met


def _published(event: AccessEvent) -> tuple[Clock | None, str]:
    """Return what a write publishes, by its own semantics or by a fence before it, and how far."""
    actor = event.actor
    if event.sem in RELEASES:
        return actor.published(event.tensor), event.scope
    fence = actor.fence
    if fence is None:
        return None, event.scope
    narrower = min(fence.scope, event.scope, key=_SCOPES.index)
    return (fence.together if event.tensor else fence.alone), narrower


def _reaching(event: AccessEvent, message: Message) -> list[tuple[Clock, Any]]:
    """Return what a message has for the actor of this event, and who published it."""
    actor = event.actor
    return [
        (clock, who)
        for (scope, who), clock in message.published.items()
        if _reaches(scope, who, actor) and _reaches(event.scope, _same(event.scope, actor), who)
    ]


def _same(scope: str, actor: Actor) -> Any:
    """Return who an actor is, in terms of its scope: itself for cta, else its rank."""
    return actor if scope == "cta" else actor.rank


def _reaches(scope: str, who: Any, other: Any) -> bool:
    """Whether `scope`, used by `who`, takes in `other`; each a rank, or a program."""
    if scope == "sys":
        return True
    if scope == "cta":
        return who is other
    rank, other_rank = (x.rank if isinstance(x, Actor) else x for x in (who, other))
    return rank == other_rank


def both_reach(a: AccessEvent, b: AccessEvent) -> bool:
    """Whether two atomics are atomic to each other."""
    return _reaches(a.scope, a.actor, b.actor) and _reaches(b.scope, b.actor, a.actor)
