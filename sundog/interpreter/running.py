"""What the interpreter needs from the machine that runs its programs, as protocols.

The interpreter computes. The machine says which program is running, and makes or delays each memory
access.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import triton.language as tl


class RunningLaunch(Protocol):
    """The launch that a program belongs to."""

    num_warps: int
    warp_size: int  # as the first layout of a Gluon kernel says; 0 before

    @property
    def grid(self) -> tuple[int, int, int]: ...


class RunningProgram(Protocol):
    """The program whose code runs now."""

    mask: np.ndarray | None  # the threads that are in a branch which only some take
    number: int

    @property
    def index(self) -> tuple[int, int, int]: ...

    @property
    def launch(self) -> RunningLaunch: ...

    @property
    def expired(self) -> bool:
        """Whether its bounded waits have expired."""

    def compared_with(self, sign: str, other: np.ndarray) -> None:
        """Note a comparison, which shows what a poll waits for."""


class MemoryPort(Protocol):
    """Every memory access of a program, before or while it is made."""

    dry: bool  # tiles of floats are not moved: see `product`

    def product(self, left: tuple[int, ...], right: tuple[int, ...], bits: int) -> bool:
        """Note a product of tiles of these shapes. Return True if it must not be computed."""

    def skipped_load(self, first: int, last: int, count: int, size: int) -> None:
        """Note a load of elements between two addresses whose values are not needed."""

    @property
    def count(self) -> int:
        """Return the number of accesses so far: the simulator's clock."""

    def before_load(
        self, addresses: np.ndarray, size: int, proxy: bool, tensor: bool, first: int = 0
    ) -> None:
        """Check a load. `first` is the place in the tile of the first element that it reads."""

    def before_store(
        self, addresses: np.ndarray, size: int, proxy: bool, tensor: bool, first: int = 0
    ) -> None: ...

    def after_store(self, addresses: np.ndarray, size: int) -> None: ...

    def atomic(
        self,
        execute: Callable[[], np.ndarray],
        recall: Callable[[bytes], np.ndarray],
        addresses: np.ndarray,
        size: int,
        operands: tuple[str, bytes],
        sem: str,
        scope: str,
        tensor: bool,
        proxy: bool,
    ) -> np.ndarray:
        """Make an atomic: `execute` it, or `recall` older values for it to read."""

    def turned(self) -> None:
        """Note a turn of a `while` loop, so that one that never ends is noticed."""

    def cta_barrier(self) -> None: ...

    def fence(self, sem: str, scope: str, everyone: bool) -> None: ...

    def proxy_fence(self) -> None: ...

    def grid_wait(self) -> None:
        """Wait for the previous kernel, in one that was launched before that has ended."""


class Multicast(Protocol):
    """Addresses that stand for the memory of several ranks."""

    def multicast(self, addresses: np.ndarray) -> list[np.ndarray]:
        """Return the addresses in each rank's memory that these stand for."""


class UndefinedLanes(Protocol):
    def fill(self, chosen: np.ndarray, element: tl.dtype, verb: str = "load") -> np.ndarray:
        """Return a tile for the current access, with the lanes that it leaves undefined filled."""


class RunningMachine(Protocol):
    @property
    def program(self) -> RunningProgram: ...

    @property
    def accesses(self) -> MemoryPort: ...

    @property
    def num_sms(self) -> int: ...

    @property
    def memory(self) -> Multicast: ...

    @property
    def undefined(self) -> UndefinedLanes: ...
