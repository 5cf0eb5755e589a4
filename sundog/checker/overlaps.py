"""Tiles that store to one address twice: two threads write it, in no order."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from .clocks import Actor
from .encounter import Encounter, Found
from .findings import AccessEvent, Rule

EQUAL_ADDRESSES = Rule(
    "race",
    "equal addresses in one tile",
    "two elements of a stored tile have the same address, so two unordered threads write it",
    "Give every element its own address, or mask off all but one of them.",
)
RULES = [EQUAL_ADDRESSES]


def watches(event: AccessEvent) -> bool:
    """Return whether a program stores tiles."""
    stores = event.writes and not event.atomic
    return stores and event.tensor and isinstance(event.actor, Actor)


def look(here: Encounter) -> Iterable[Found]:
    """Look at the first tile that a program stores at a place: the later ones are made alike."""
    event = here.event
    if ("tile", event) in event.actor.suspected:
        return ()
    event.actor.suspected.add(("tile", event))
    addresses = here.touch.addresses
    flat = addresses.ravel()
    if (flat[1:] > flat[:-1]).all():  # most tiles
        return ()
    equal = addresses.size - np.unique(addresses).size
    if not equal:
        return ()
    why = f"{equal} of the tile's {addresses.size} elements have the address of another element"
    return (Found(EQUAL_ADDRESSES, why),)
