"""Memory that is freed while another stream of its rank may still use it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .clocks import Clock, Clocks
from .encounter import Encounter, Found
from .findings import AccessEvent, Rule
from .shadow import State

__all__ = ["FREED_IN_USE", "RULES", "find_uses", "look"]

FREED_IN_USE = Rule(
    "bad access",
    "freed while a stream uses it",
    "memory is freed while a kernel on another stream of the rank may still use it: the next "
    "allocation gets it at once",
    "Free it after world.synchronize(), or where the current stream has waited for an event of "
    "the other one.",
)
RULES = [FREED_IN_USE]


def look(here: Encounter) -> Iterable[Found]:
    """Find nothing at an access: what matters comes with the end of the memory."""
    return ()


def find_uses(
    states: list[State], event: AccessEvent, clocks: Clocks, host: Clock
) -> Iterator[Found]:
    """Yield the accesses of this rank that neither its host nor its current stream waited for."""
    for state in states:
        for earlier in (*state.writes, *state.reads, *state.atomics):
            if earlier.event.actor.rank != event.actor.rank:
                continue
            if clocks.knows(event.actor, earlier.stamp) or clocks.covers(host, earlier.stamp):
                continue
            yield Found(
                FREED_IN_USE,
                f"the {earlier.event.verb} was put on another stream, and neither the host nor the "
                "stream that is current at the free has waited for it",
                earlier.event,
            )
