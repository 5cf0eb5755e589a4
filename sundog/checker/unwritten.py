"""Reads of memory that nobody has written."""

from __future__ import annotations

from collections.abc import Iterable

from .clocks import Actor
from .encounter import Encounter, Found
from .findings import AccessEvent, Rule

NEVER_WRITTEN = Rule("unwritten", "", "a kernel reads memory that nobody has written")
RULES = [NEVER_WRITTEN]
UNUSUAL = True  # see rules.py


def watches(event: AccessEvent) -> bool:
    """Return whether a program reads."""
    only_writes = event.writes and (not event.atomic or event.verb == "atomic STORE")
    return isinstance(event.actor, Actor) and not only_writes


def look(here: Encounter) -> Iterable[Found]:
    if here.state.written:
        return ()
    return (Found(NEVER_WRITTEN, "nobody has written these bytes since they were allocated"),)
