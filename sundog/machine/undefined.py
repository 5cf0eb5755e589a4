"""What the lanes hold that a masked load without `other`, or a masked atomic, leaves undefined.

They hold poison, so that a result that relies on them shows it. Today's compilers fill them with
zeros, and a machine can do so too: for all loads, or for all but some, to see which ones matter.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import triton.language as tl

from .. import knobs
from ..interpreter.numerics import np_dtype, poison_like
from .polling import Site, kernel_frames, site_of, stack_of
from .tasks import Program

if TYPE_CHECKING:
    from .machine import Machine

Stack = tuple[tuple[str, int, str], ...]  # file, line and function of each frame, innermost first


class Undefined:
    def __init__(self, machine: Machine, poisoned: Collection[Stack] | None = None) -> None:
        """Fill lanes with poison; if `poisoned` is given, only those of these loads."""
        if poisoned is None and knobs.undefined_lanes.get() == "zeros":
            poisoned = ()
        self._machine = machine
        self._poisoned = poisoned
        self._stacks: dict[Site, Stack] = {}
        self.loads: dict[Stack, tuple[Program, str]] = {}  # with such lanes: who was first, and how

    def fill(self, chosen: np.ndarray, element: tl.dtype, verb: str = "load") -> np.ndarray:
        """Return a tile for the current load, or atomic, of the `chosen` lanes, and note it."""
        kind = np_dtype(element)
        if chosen.all():
            return np.empty(chosen.shape, kind)
        site = site_of(kernel_frames())
        stack = self._stacks.get(site)
        if stack is None:
            stack = self._stacks[site] = tuple(stack_of(site))
            self.loads.setdefault(stack, (self._machine.program, verb))
        if self._poisoned is None or stack in self._poisoned:
            return poison_like(chosen.shape, kind, element)
        return np.zeros(chosen.shape, kind)
