"""Signals: what atomics publish on a word, who learns it, and which signals made no edge.

A signal that was heard but made no edge is kept too, so that a report can name its fault.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .clocks import Actor, Clock, join
from .findings import AccessEvent

__all__ = ["ACQUIRES", "RELEASES", "Heard", "Signals", "both_reach"]

_WIDEST = 8  # bytes of an atomic
ACQUIRES, RELEASES = ("acquire", "acq_rel"), ("release", "acq_rel")


@dataclass(frozen=True)
class Signal:
    """An atomic that may have been meant to publish."""

    actor: Actor
    event: AccessEvent
    barriers: int
    step: int
    address: int


@dataclass(frozen=True)
class Heard:
    """The latest signal of one actor that another has read."""

    signal: Signal
    event: AccessEvent


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

    def publish(self, event: AccessEvent, addresses: np.ndarray, size: int, changed: bool) -> None:
        """Publish. `changed`: the atomic wrote a new value. A poll that adds 0 is no signal."""
        actor = event.actor
        clock = actor.published(event.tensor) if event.sem in RELEASES else None
        key = (event.scope, actor if event.scope == "cta" else actor.rank)
        for address in addresses.flat:
            word = self._words.setdefault(int(address), Word(size))
            last = word.signals.get(actor)
            released = last is not None and last.event.sem in RELEASES
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

    def hear(self, event: AccessEvent, addresses: np.ndarray) -> None:
        """Read the words by an atomic: learn what reaches its actor, and note what does not."""
        for address in addresses.flat:
            word = self._words.get(int(address))
            if word is not None:
                self._hear_word(event, word)

    def _hear_word(self, event: AccessEvent, word: Word) -> None:
        actor = event.actor
        acquires = event.sem in ACQUIRES
        for signal in word.signals.values():
            if event.sem == "release" and signal.actor in actor.heard:
                continue  # meant to signal, not to wait: what was heard before counts
            if signal.actor is not actor:
                actor.heard[signal.actor] = Heard(signal, event)
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

    def reaching(self, event: AccessEvent, address: int) -> list[Clock]:
        """Return what one lane of a tensor atomic learns, for its own thread."""
        word = self._words.get(address)
        acquires = event.sem in ACQUIRES
        return _reaching(event, word) if word is not None and acquires else []

    def hear_plainly(self, event: AccessEvent, address: int) -> None:
        """Note a plain scalar load of a word that others signal on."""
        word = self._words.get(address)
        for signal in word.signals.values() if word is not None else ():
            if signal.actor is not event.actor:
                event.actor.heard[signal.actor] = Heard(signal, event)

    def break_chains(self, addresses: np.ndarray, size: int) -> None:
        """End the release sequences on the words that a plain store overwrites."""
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


def _reaching(event: AccessEvent, word: Word) -> list[Clock]:
    """Return what has been published on a word for the actor of this event."""
    actor = event.actor
    return [
        clock
        for (scope, who), clock in word.published.items()
        if _reaches(scope, who, actor) and _reaches(event.scope, _same(event, actor), who)
    ]


def _same(event: AccessEvent, actor: Actor) -> Any:
    """Return who an actor is, in terms of its scope: itself for cta, else its rank."""
    return actor if event.scope == "cta" else actor.rank


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
