"""Schedules that are given as a path: the decision at every point that has one.

Hosts run first, in the order of their ranks, so a decision is which program runs next, or which
value an atomic reads. Programs are named by rank, launch and number, which are the same in every
run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .tasks import Launch, Program

Name = tuple[int, int, int]  # rank, launch of that rank, program


class PathSchedule:
    """Takes these decisions, and after them the first choice."""

    def __init__(self, decisions: Sequence[int] = ()) -> None:
        self.token = "path:" + ".".join(map(str, decisions))
        self.step = 0
        self.residents = 0
        self.is_fair = True
        self._decisions = [*decisions]
        self._launches: dict[Launch, tuple[int, int]] = {}

    def choose(self, ready: Sequence[Any]) -> int:
        self.step += 1
        hosts = [(task.rank, i) for i, task in enumerate(ready) if not isinstance(task, Program)]
        if hosts:
            return min(hosts)[1]
        places = {self._name(task): place for place, task in enumerate(ready)}
        names = sorted(places)
        return places[names[self.decide_program(names)]]

    def _name(self, program: Program) -> Name:
        launch = program.launch
        if launch not in self._launches:
            number = sum(rank == launch.rank for rank, _ in self._launches.values())
            self._launches[launch] = launch.rank, number
        return *self._launches[launch], program.number

    def pick(self, count: int) -> int:
        return self.decide_value(count)

    def decide_program(self, names: list[Name]) -> int:
        """Return which of these programs runs next."""
        return self._decided(len(names))

    def decide_value(self, count: int) -> int:
        """Return which of this many values an atomic reads; 0 is the newest."""
        return self._decided(count)

    def _decided(self, count: int) -> int:
        return min(self._decisions.pop(0), count - 1) if self._decisions else 0
