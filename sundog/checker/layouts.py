"""Tiles that other threads read back: a tile's layout says which thread has which element.

The compiler gives two tiles of the same addresses the same layout. Any other tile over these bytes
may have another one, and then another thread loads what a thread of this program has just stored.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..machine.accesses import Touch
from .clocks import Actor
from .encounter import Encounter, Found
from .findings import AccessEvent, Rule
from .shadow import PastAccess

READ_BACK_TILE = Rule(
    "race",
    "no CTA barrier before the tile is read back",
    "a program stores a tile and loads the bytes as a different tile, so that other threads may "
    "load them: only a CTA barrier orders one thread's store before another thread's load",
    "Put tl.debug_barrier() between the store and the load, or keep the value.",
)
RULES = [READ_BACK_TILE]


def watches(event: AccessEvent) -> bool:
    """Return whether a program loads by pointers."""
    loads = not (event.writes or event.atomic or event.proxy)
    return loads and isinstance(event.actor, Actor)


def look(here: Encounter) -> Iterable[Found]:
    event = here.event
    if not event.actor.stored or not here.state.writes:
        return ()
    mine = [earlier for earlier in here.state.writes if _is_recent(earlier, event.actor)]
    if not mine:
        return ()
    tile = next((t for t in reversed(event.actor.stored) if _overlap(t, here.touch)), None)
    if tile is None or _same_layout(tile, here.touch):
        return ()
    why = (
        f"this program stored these bytes as a tile of {tile.addresses.size} elements and loads "
        f"them as another of {here.touch.addresses.size}, whose elements other threads may have; "
        "no CTA barrier stands between them"
    )
    return (Found(READ_BACK_TILE, why, mine[-1].event),)


def _is_recent(earlier: PastAccess, actor: Actor) -> bool:
    """Return whether it is this program's own tile since its last CTA barrier."""
    component, time = earlier.stamp
    return component == actor.warps and time > actor.met and not earlier.event.proxy


def _overlap(stored: Touch, loaded: Touch) -> bool:
    a, b = stored.addresses, loaded.addresses
    if int(a.max()) + stored.size <= int(b.min()) or int(b.max()) + loaded.size <= int(a.min()):
        return False
    if stored.size != loaded.size:
        return True
    return bool(np.isin(b, a).any())


def _same_layout(stored: Touch, loaded: Touch) -> bool:
    """Return whether the places that both have are the same: masks may have cut both ends."""
    if stored.size != loaded.size:
        return False
    first = max(stored.first, loaded.first)
    a = stored.addresses.ravel()[first - stored.first :]
    b = loaded.addresses.ravel()[first - loaded.first :]
    length = min(a.size, b.size)
    return length > 0 and bool((a[:length] == b[:length]).all())
