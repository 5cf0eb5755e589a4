"""Run a rank's function once under the checker, and keep all that the checker was shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sundog import knobs
from sundog.checker.checker import Checker
from sundog.machine.accesses import Touch
from sundog.machine.machine import Machine
from sundog.machine.schedule import from_token
from sundog.machine.tasks import Stream
from sundog.tools.check.schedules import Report, run_on
from sundog.world.world import World

Trace = list[tuple]


class TracingChecker(Checker):
    """A checker that appends everything to a list, in its order."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.trace: Trace = []

    def world_barrier(self, streams: list[Stream]) -> None:
        super().world_barrier(streams)
        ranks = tuple(dict.fromkeys(stream.rank for stream in streams))
        self.trace.append(("world_barrier", *[None] * 4, ranks, *[None] * 4, ()))

    def _note(
        self, what: str, rank: int | None, launch: int | None, event: Any = None,
        touch: Touch | None = None, tensor: bool | None = None,
    ) -> None:  # fmt: skip
        addresses = tuple(int(a) for a in touch.addresses.flat) if touch is not None else None
        lags = tuple(map(self._lag, addresses or ())) if what in ("atomic", "volatile") else ()
        actor = getattr(event, "actor", event)
        stack = getattr(event, "stack", ())
        self.trace.append((
            what, rank, launch, getattr(actor, "number", None), stack[0][1] if stack else None,
            addresses, touch.size if touch is not None else None,
            getattr(event, "sem", None), getattr(event, "scope", None), tensor, lags,
        ))  # fmt: skip

    def _lag(self, address: int) -> int:
        """Return how many releases the current atomic has missed at an address."""
        read = self._signals._chosen.get(address)
        word = self._signals._words.get(address)
        return 0 if read is None or word is None else word.newest.releases - read.releases


def traced(
    fn: Callable[[World], Any], world_size: int, schedule: str = "random:0", num_sms: int = 0,
    strict: bool = False,
) -> tuple[Report, Trace]:  # fmt: skip
    """Run one schedule, as `check_once` does."""
    machine = Machine(from_token(schedule), num_sms or knobs.num_sms.get(), expire=False)
    checker = TracingChecker(machine.memory, machine.schedule.pick)
    return run_on(machine, checker, fn, world_size, strict=strict), checker.trace
