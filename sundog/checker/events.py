"""The events of accesses: one for each actor and each place of its code, and what places share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..machine.accesses import READ
from ..machine.polling import Site, stack_of
from .clocks import Actor, StreamActor
from .findings import AccessEvent
from .rules import looks_at
from .words import COPIED, VOLATILES

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
