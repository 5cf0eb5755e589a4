"""Errands: what a SHMEM call leaves to the network, done late and in no order of the program's.

A call returns before what it does is done. The rest is an errand, which knows what the program
knew when it called. The program knows of it after `quiet`, and of what it puts after `fence`. So a
buffer that is used before is a race, whenever the errand happens to run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class Errand:
    """One piece of work. A fence orders what puts; a context has a quiet of its own."""

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
    """Do all that was left. The program does not know it: it may have been done later."""
    late = builder.machine.program.late
    while late:
        late.pop(0)()


def complete(builder: Any, puts_only: bool = False, context: int | None = None) -> None:
    """Do all that was left; the program knows that it is done, or that what puts is."""
    deliver(builder)
    program = builder.machine.program
    for errand in [*program.errands]:
        if (errand.puts or not puts_only) and context in (None, errand.context):
            builder.machine.accesses.learn_of(errand.actor)
            program.errands.remove(errand)
