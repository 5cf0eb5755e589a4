"""Mutants of hosts: `world.barrier()` left out, one call at a time, on all ranks.

A host is Python, not a kernel, so the barrier is replaced and not the source: the mutant's does
nothing where it is called from that line. Barriers that sundog itself calls are not mutated.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..callsite import relative
from ..world.world import World

__all__ = ["HostMutant", "barriers"]

Site = tuple[str, int, str]  # file, line and function
_LIBRARY = "sundog."


@dataclass(frozen=True)
class HostMutant:
    """A rank's function without one of its barriers."""

    site: Site

    @property
    def owner(self) -> str:
        return self.site[2]

    @property
    def what(self) -> str:
        return f"{self._line}: dropped"

    @property
    def where(self) -> str:
        return f"{relative(self.site[0])}:{self.site[1]}"

    @property
    def diff(self) -> str:
        return f"--- {self.where}\n+++ mutant\n-{self._line}\n+pass"

    @property
    def _line(self) -> str:
        return linecache.getline(self.site[0], self.site[1]).partition("#")[0].strip()

    def applied(self) -> Any:
        """Run hosts as this mutant."""
        return _watched(lambda site: site != self.site)


@contextmanager
def barriers() -> Iterator[list[HostMutant]]:
    """Collect the mutants of the hosts that run inside."""
    found: dict[Site, None] = {}

    def look(site: Site) -> bool:
        found[site] = None
        return True

    mutants: list[HostMutant] = []
    with _watched(look):
        yield mutants
    mutants.extend(HostMutant(site) for site in found)


@contextmanager
def _watched(look: Callable[[Site], bool]) -> Iterator[None]:
    """Ask `look` for every barrier of the ranks' own code whether it is to be made."""
    original = World.barrier

    def barrier(self: World, *given: Any, **named: Any) -> Any:
        frame = sys._getframe(1)
        module = f"{frame.f_globals.get('__name__', '')}."
        site = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        if module.startswith(_LIBRARY) or look(site):
            return original(self, *given, **named)
        return None

    World.barrier = barrier  # type: ignore[method-assign]
    try:
        yield
    finally:
        World.barrier = original  # type: ignore[method-assign]
