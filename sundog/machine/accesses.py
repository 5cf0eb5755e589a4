"""Every memory access of the running program, called by the builder.

It checks bounds, lets other programs run, calls the observer, and notices polling: a program that
makes the same access in a `while` loop and finds the same value is parked until that changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .polling import (
    differs,
    forget_changed,
    kernel_frames,
    may_poll,
    owed_by,
    read,
    site_of,
    stack_of,
    state_of,
)
from .regions import Region
from .tasks import Poll

if TYPE_CHECKING:
    from .machine import Machine

POLLS_BEFORE_PARKING = 2
_LOADS_BEFORE_PARKING = 64  # a plain load in a loop is more often work than a poll
_MOST_MOVES = 1 << 14  # turns of a loop that computes, but reads only what it has read before
_MET_KEPT = 4096

READ, WRITE, MAKE = "host read", "host write", "host result"


class Touch(NamedTuple):
    """The elements of one access. `region` holds them all, or is None if there are several."""

    addresses: np.ndarray
    size: int
    region: Region | None
    first: int = 0  # the first one's place in the tile: a mask may leave out some before it


class Accesses:
    """The memory side of a machine."""

    dry = False  # a machine that keeps time moves no tiles of floats, computes no products

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.count = 0  # accesses of all programs so far: the simulator's clock

    def product(self, left: tuple[int, ...], right: tuple[int, ...], bits: int) -> bool:
        """Do nothing: products touch no memory, and only a machine that keeps time notes them."""
        return False

    def skipped_load(self, first: int, last: int, count: int, size: int) -> None:
        """Note a load that `dry` skips."""

    def before_load(
        self, addresses: np.ndarray, size: int, proxy: bool, tensor: bool, first: int = 0
    ) -> None:
        """Check a load. `first` is the place in the tile of the first element that it reads."""
        self.count += 1
        region = self._machine.memory.check(addresses, size, "load")
        if addresses.size == 1:
            key = self._park_if_stuck(addresses, ("LOAD", b""), _LOADS_BEFORE_PARKING)
            if key is not None:
                seen = read(addresses, size)
                self._found(key, addresses, size, seen)
                self._machine.repeats.looked(key, "load", size, seen)
        elif self._machine.program.polls and addresses.size:
            self._met((addresses.size, addresses.flat[0], addresses.flat[-1]))
        if self._machine.checker is not None:
            program = self._machine.program
            if addresses.size != 1:
                program.site = site_of(kernel_frames())
            touch = Touch(addresses, size, region, first)
            self._machine.checker.load(program, touch, tensor, proxy)

    def before_store(
        self, addresses: np.ndarray, size: int, proxy: bool, tensor: bool, first: int = 0
    ) -> None:
        self.count += 1
        region = self._machine.memory.check(addresses, size, "store")
        if self._machine.checker is not None:
            program = self._machine.program
            program.site = site_of(kernel_frames())
            self._machine.repeats.spins |= may_poll(program.site)
            touch = Touch(addresses, size, region, first)
            self._machine.checker.store(program, touch, tensor, proxy)

    def after_store(self, addresses: np.ndarray, size: int) -> None:
        self._wrote(addresses, size)

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
        self.count += 1
        if self._machine.rounds is not None:
            self._give_way_foreseen(addresses, size, operands)
        else:
            self._machine.give_way()
        region = self._machine.memory.check(addresses, size, "atomic")
        key = self._park_if_stuck(addresses, operands, POLLS_BEFORE_PARKING)
        before = read(addresses, size)
        program, checker, touch = self._machine.program, self._machine.checker, None
        older = None
        if checker is not None:
            touch = Touch(addresses, size, region)
            site = key[0] if key is not None else None
            older = checker.observe(program, touch, before, operands, sem, site)
        old = execute() if older is None else recall(older)
        after = read(addresses, size)
        if checker is not None and touch is not None:
            checker.atomic(program, touch, operands[0], sem, scope, tensor, proxy, before, after)
        if after != before:
            self._wrote(addresses, size)
            self._machine.repeats.spins |= key is not None
        elif key is not None:
            self._found(key, addresses, size, before if older is None else older)
        if key is not None:
            seen = before if older is None else older
            self._machine.repeats.looked(key, f"atomic {operands[0]}", size, seen)
        return old

    def turned(self) -> None:
        """Note that a `while` loop of the running program begins another turn, or ends."""
        self._machine.repeats.turned()

    def cta_barrier(self) -> None:
        """Do nothing: a program runs as one here, and only a checker looks at its barriers."""
        if self._machine.checker is not None:
            self._machine.checker.cta_barrier(self._machine.program)

    def grid_wait(self) -> None:
        """Do nothing: kernels run one after the other here, and only a checker looks at this."""
        if self._machine.checker is not None:
            self._machine.checker.grid_wait(self._machine.program)

    def fence(self, sem: str, scope: str, everyone: bool) -> None:
        """Order what a program did before what it does next: acq_rel or sc, for this scope."""
        if self._machine.checker is not None:
            self._machine.checker.fence(self._machine.program, sem, scope, everyone)

    def proxy_fence(self) -> None:
        if self._machine.checker is not None:
            self._machine.checker.proxy_fence(self._machine.program)

    def hand_over(self) -> Any:
        """Return an actor for what the program leaves to a network, or None without a checker."""
        checker, program = self._machine.checker, self._machine.program
        return None if checker is None else checker.deputies.hand_over(program)

    @contextmanager
    def acting(self, actor: Any) -> Iterator[None]:
        """Let an actor make the accesses inside."""
        checker, program = self._machine.checker, self._machine.program
        if checker is None:
            yield
            return
        before = checker.deputies.swap(program, actor)
        try:
            yield
        finally:
            checker.deputies.swap(program, before)

    def learn_of(self, actor: Any) -> None:
        """Order everything that the actor did before what the program does next."""
        if self._machine.checker is not None:
            self._machine.checker.deputies.learn_of(self._machine.program, actor)

    def _give_way_foreseen(
        self, addresses: np.ndarray, size: int, operands: tuple[str, bytes]
    ) -> None:
        """Note what the running program polls, look for a livelock, and let others run."""
        program, site = self._machine.program, site_of(kernel_frames())
        program.next_poll = None
        if may_poll(site) and self._machine.rounds is not None:
            program.next_poll = (tuple(stack_of(site)), addresses, size, operands)
            self._machine.rounds.returned(program, program.next_poll[0])
        self._machine.repeats.look_back()
        self._machine.give_way()
        self._machine.cycles.took_turn(program)

    def _park_if_stuck(
        self, addresses: np.ndarray, operands: tuple[str, bytes], limit: int
    ) -> tuple | None:
        """Park the running program if it made this access often enough and nothing has changed.

        Returns what identifies the access, or None if it can't be a poll.
        """
        program = self._machine.program
        frames = kernel_frames()
        program.site = site = site_of(frames)
        if not may_poll(site):
            program.polls.clear()
            return None
        key = (site, addresses.tobytes(), operands)
        poll = program.polls.get(key)
        if poll is not None and poll.count >= limit:
            if program.patience > 0:
                program.patience -= 1
            elif any(differs(each) for each in program.polls.values()):
                forget_changed(program)
            elif limit == _LOADS_BEFORE_PARKING and _moves(poll, frames):
                self._machine.give_way()
            else:
                program.stuck = poll
                self._machine.park(program)
        return key

    def _found(self, key: tuple, addresses: np.ndarray, size: int, seen: bytes) -> None:
        program = self._machine.program
        program.awaits_comparison = True
        poll = program.polls.get(key)
        if poll is not None and poll.seen == seen:
            poll.count += 1
            return
        self._met(key)
        program.polls[key] = Poll(addresses, size, seen, stack_of(key[0]), owed_by(kernel_frames()))

    def _met(self, access: tuple) -> None:
        """Note a read: a program that reads something new since its last write is not stuck."""
        program = self._machine.program
        if access in program.met:
            return
        if len(program.met) == _MET_KEPT:
            program.met.clear()
        program.met.add(access)
        program.polls.clear()

    def _wrote(self, addresses: np.ndarray, size: int) -> None:
        program = self._machine.program
        program.polls.clear()
        program.met.clear()
        self._machine.wrote(addresses, size)


def _moves(poll: Poll, frames: list[FrameType]) -> bool:
    """Return whether the program has computed something since it last made this access."""
    before, poll.state = poll.state, state_of(frames)
    poll.moves += 1
    return poll.state != before and poll.moves <= _MOST_MOVES
