"""Errands: what a SHMEM call leaves to the network, done late and in any order.

A call returns before its work is done. The rest is an errand, ordered after what the program did
before the call. `quiet` orders errands before what the program does next, and `fence` orders puts.
So a use of the buffer before that is a race, whenever the errand happens to run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Errand:
    """One piece of work. A fence orders only puts; a context has its own quiet."""

    accesses: Any
    actor: Any  # of the checker
    work: Callable[[], None]
    puts: bool
    context: int = 0

    def __call__(self) -> None:
        with self.accesses.acting(self.actor):
            self.work()


def leave(builder: Any, work: Callable[[], None], puts: bool, context: int = 0) -> Errand:
    """Leave work to the network."""
    accesses, program = builder.machine.accesses, builder.machine.program
    errand = Errand(accesses, accesses.hand_over(), work, puts, context)
    program.late.append(errand)
    program.errands.append(errand)
    return errand


def deliver(builder: Any) -> None:
    """Do everything that is left, without ordering it: it might have been done later."""
    late = builder.machine.program.late
    while late:
        late.pop(0)()


def complete(builder: Any, puts_only: bool = False, context: int | None = None) -> None:
    """Do everything that is left; order it, or only the puts, before the program's next work."""
    deliver(builder)
    program = builder.machine.program
    for errand in [*program.errands]:
        if (errand.puts or not puts_only) and context in (None, errand.context):
            builder.machine.accesses.learn_of(errand.actor)
            program.errands.remove(errand)
