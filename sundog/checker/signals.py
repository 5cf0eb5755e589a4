"""Signals: what atomics publish on a word, who learns it, and which signals made no edge.

A signal that was heard but made no edge is kept with its fault, so that a report can name it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..callsite import relative
from .clocks import Actor, Clock, join
from .findings import Event
from .shadow import Mark

__all__ = ["ACQUIRES", "Signals", "both_reach", "explain"]

_WIDEST = 8  # bytes of an atomic
ACQUIRES, _RELEASES = ("acquire", "acq_rel"), ("release", "acq_rel")


@dataclass(frozen=True)
class Signal:
    """An atomic that may have been meant to publish."""

    actor: Actor
    event: Event
    barriers: int
    step: int
    address: int


@dataclass(frozen=True)
class Heard:
    """The latest signal of one actor that another has read, and what was wrong with it."""

    signal: Signal
    event: Event
    fault: str


@dataclass
class Word:
    """What the atomics on one address have published, by who can be reached, and who signalled."""

    size: int
    published: dict[tuple[str, Any], Clock] = field(default_factory=dict)
    signals: dict[Actor, Signal] = field(default_factory=dict)


class Signals:
    """All words that atomics have touched."""

    def __init__(self) -> None:
        self._words: dict[int, Word] = {}

    def publish(self, event: Event, addresses: np.ndarray, size: int, changed: bool) -> None:
        """`changed`: it wrote something new. A poll that adds 0 is not meant as a signal."""
        actor = event.actor
        clock = actor.published(event.tensor) if event.sem in _RELEASES else None
        key = (event.scope, actor if event.scope == "cta" else actor.rank)
        for address in addresses.flat:
            word = self._words.setdefault(int(address), Word(size))
            last = word.signals.get(actor)
            released = last is not None and last.event.sem in _RELEASES
            if clock is not None or (changed and not released):
                at = int(address)
                word.signals[actor] = Signal(actor, event, actor.barriers, actor.steps, at)
            if clock is None:
                continue
            known = word.published.get(key)
            alone = last is not None and len(word.signals) == 1
            if known is None or (alone and known.get(actor.zero, 0) <= clock[actor.zero]):
                word.published[key] = clock  # this actor's newer clock has all of its older one
            else:
                merged = dict(known)
                join(merged, clock)
                word.published[key] = merged

    def hear(self, event: Event, addresses: np.ndarray) -> None:
        """An atomic reads the words: learn what reaches, and note what does not."""
        for address in addresses.flat:
            word = self._words.get(int(address))
            if word is not None:
                self._hear_word(event, word)

    def _hear_word(self, event: Event, word: Word) -> None:
        actor = event.actor
        acquires = event.sem in ACQUIRES
        for signal in word.signals.values():
            if event.sem == "release" and signal.actor in actor.heard:
                continue  # meant to signal, not to wait: what was heard before counts
            if signal.actor is not actor:
                actor.heard[signal.actor] = Heard(signal, event, _fault(signal.event, event))
                if event.tensor and acquires:
                    actor.pending_from[signal.actor] = None
        reaching = _reaching(event, word) if acquires else []
        if reaching and not event.tensor:
            actor.acquired(event)
        for clock in reaching:
            if event.tensor:
                actor.pending[id(clock)] = clock
            else:
                actor.learn(clock)

    def reaching(self, event: Event, address: int) -> list[Clock]:
        """What one lane of a tensor atomic learns, for its own thread."""
        word = self._words.get(address)
        acquires = event.sem in ACQUIRES
        return _reaching(event, word) if word is not None and acquires else []

    def hear_plainly(self, event: Event, address: int) -> None:
        """A plain scalar load of a word that others signal on."""
        word = self._words.get(address)
        for signal in word.signals.values() if word is not None else ():
            if signal.actor is not event.actor:
                event.actor.heard[signal.actor] = Heard(signal, event, "plain access to a flag")

    def break_chains(self, addresses: np.ndarray, size: int) -> None:
        """A plain store ends the release sequences on the words that it overwrites."""
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
            if ((begins < word + width) & (begins + np.uint64(size) > word)).any():
                del self._words[start]

    def forget(self, start: int, end: int) -> None:
        for address in [a for a in self._words if start <= a < end]:
            del self._words[address]


def _reaching(event: Event, word: Word) -> list[Clock]:
    """What has been published on a word for the actor of this event."""
    actor = event.actor
    return [
        clock
        for (scope, who), clock in word.published.items()
        if _reaches(scope, who, actor) and _reaches(event.scope, _same(event, actor), who)
    ]


def _same(event: Event, actor: Actor) -> Any:
    """Who an actor is, in terms of its scope: itself for cta, else its rank."""
    return actor if event.scope == "cta" else actor.rank


def _reaches(scope: str, who: Any, other: Any) -> bool:
    """Whether `scope`, used by `who`, takes in `other`; each a rank, or a program."""
    if scope == "sys":
        return True
    if scope == "cta":
        return who is other
    rank, other_rank = (x.rank if isinstance(x, Actor) else x for x in (who, other))
    return rank == other_rank


def both_reach(a: Event, b: Event) -> bool:
    """Whether two atomics are atomic to each other."""
    return _reaches(a.scope, a.actor, b.actor) and _reaches(b.scope, b.actor, a.actor)


def _fault(signal: Event, event: Event) -> str:
    if signal.sem not in _RELEASES:
        return "relaxed release"
    if event.sem not in ACQUIRES:
        return "relaxed acquire"
    return "" if both_reach(signal, event) else "scope does not reach"


def explain(old: Mark, event: Event, lo: int, hi: int) -> tuple[str, str]:
    """Which edge is missing between two accesses to [lo, hi), as a rule and in words."""
    actor, other = event.actor, old.event.actor
    if old.event.atomic and event.atomic:
        return "scope does not reach", (
            f"both are atomic, but scope {old.event.scope} and scope {event.scope} do not both "
            "reach both programs, so they are not atomic to each other"
        )
    heard, learner = actor.heard.get(other), actor
    if heard is None:
        heard, learner = _heard_through(actor, other)
    mixed = old.event.atomic != event.atomic
    if heard is not None and not (mixed and lo <= heard.signal.address < hi):
        return _explain_heard(heard, old, learner)
    if mixed:
        return "plain access to a flag", (
            "one side is atomic, the other is a plain access: a plain one makes no order and is "
            "not atomic to anything"
        )
    return "no order", "no signal, barrier or launch stands between them in either direction"


def _heard_through(actor: Any, other: Any) -> tuple[Heard | None, Any]:
    """A chain of three: the faulty link (first to middle, middle to last), and who learns by it."""
    for middle, last in actor.heard.items():
        first = middle.heard.get(other)
        if first is not None and (first.fault or other in middle.pending_from):
            return first, middle
        if first is not None and last.fault:
            return last, actor
    return None, actor


def _explain_heard(heard: Heard, old: Mark, actor: Any) -> tuple[str, str]:
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
    if old.event.proxy and old.event.writes:
        return "descriptor store before the release", (
            f"{flag}, but what a descriptor writes is published by no release: behind it Triton "
            "waits until its shared memory is free again, not until the data has arrived"
        )
    own = old.event.actor is heard.signal.actor
    if own and old.step > heard.signal.step:
        return "no order", f"{flag}, but the {old.event.verb} stands behind that signal, not before"
    if own and old.event.tensor and old.stamp[1] >= heard.signal.barriers:
        return "no CTA barrier before the release", (
            f"{flag}, but no CTA barrier stands between the tile and the signal: the release, made "
            "by one thread, does not publish what the other warps did"
        )
    return "no order", f"{flag}, but this access is not behind what that signal published"


def _at(event: Event) -> str:
    path, line, _ = event.where
    return f"{relative(path)}:{line}"
