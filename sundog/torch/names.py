"""Find worlds by name, for code that can carry a string but no World: torch's ops, compiled graphs.

A name is unique among the open worlds of one rank. Ranks that make the same worlds in the same
order get the same names, and after a close the next world gets the name again, so a compiled
function need not be recompiled for another rank or another run. On `sim` and `virtual` a rank is a
thread. Elsewhere it is the process, whose other threads (such as autograd's) find its worlds too.
"""

from __future__ import annotations

import weakref
from _thread import get_ident
from typing import TYPE_CHECKING

from ..errors import WorldClosed

if TYPE_CHECKING:
    from ..world.world import World

_worlds: dict[str, dict[int, weakref.ref[World]]] = {}  # by name, then by the rank's thread


def name_for(world: World, wanted: str) -> str:
    """Return the name by which `find_world` finds this world: the wanted one, or wanted#2."""
    thread, name, count = get_ident(), wanted, 1
    while _open(_worlds.get(name, {}).get(thread)) is not None:
        count += 1
        name = f"{wanted}#{count}"
    _worlds.setdefault(name, {})[thread] = weakref.ref(world)
    return name


def forget(world: World) -> None:
    """Free the name of a world that has ended."""
    by_thread = _worlds.get(world.name, {})
    for thread, each in list(by_thread.items()):
        if each() is world:
            del by_thread[thread]
    if not by_thread:
        _worlds.pop(world.name, None)


def find_world(name: str) -> World:
    """Return the calling rank's open world of this name. Raise WorldClosed if there is none."""
    try:
        world = _worlds[name][get_ident()]()
    except KeyError:  # a thread that no rank started: of the one rank of its process
        alone = [*_worlds.get(name, {}).values()]
        world = alone[0]() if len(alone) == 1 else None
    if world is not None and not world._closed:
        return world
    known = ", ".join(map(repr, _worlds)) or "none"
    raise WorldClosed(
        f"there is no open world named {name!r} on this rank (open: {known}): it was closed, or "
        "belongs to another rank. Open a world with sundog.run or sundog.init, and pass that one."
    )


def open_worlds() -> list[World]:
    """Return the open worlds of this process, of all its ranks."""
    found = [_open(each) for by_thread in _worlds.values() for each in by_thread.values()]
    return [world for world in found if world is not None]


def _open(found: weakref.ref[World] | None) -> World | None:
    world = found() if found is not None else None
    return None if world is None or world._closed else world
