"""Reads of memory that nobody has written."""

from __future__ import annotations

from collections.abc import Iterable

from .clocks import Actor
from .encounter import Encounter, Found
from .findings import Rule

__all__ = ["NEVER_WRITTEN", "RULES", "look"]

NEVER_WRITTEN = Rule("unwritten", "", "a kernel reads memory that nobody has written")
RULES = [NEVER_WRITTEN]


def look(here: Encounter) -> Iterable[Found]:
    event = here.event
    if here.state.written or not isinstance(event.actor, Actor):
        return ()
    if event.writes and (not event.atomic or event.verb == "atomic STORE"):
        return ()
    return (Found(NEVER_WRITTEN, "nobody has written these bytes since they were allocated"),)
