"""Schedules decide who runs next. Each is a pure function of its seed, so its token replays a run.

`random` takes any runnable task with equal probability. `pct` gives every task a random priority
and always runs the highest; at `depth` - 1 random steps the running task falls to the bottom. These
steps are in a window, which should be as long as the run, since a change after its end is lost. It
finds bugs of that depth with a known probability (Burckhardt et al., "A randomized scheduler with
probabilistic guarantees of finding bugs", ASPLOS 2010), also ones that random rarely meets. `ranks`
does the same with whole ranks, so that one is late, or far ahead, with everything it does.

`rounds` looks for livelocks (see there).

A token path:N.N.N has the decisions of one run of `check --exhaustive` (see `paths`).

A token that ends in @N keeps N programs of a kernel resident at a time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Protocol

from .paths import PathSchedule
from .rounds import RoundSchedule

_WINDOW = 2000  # steps: about the length of a small op, if no run has shown a better number


class Schedule(Protocol):
    token: str
    step: int  # how many tasks it has chosen so far
    residents: int  # programs of a kernel at a time; 0: as many as the GPU has SMs
    is_fair: bool  # True: every runnable task gets its turn

    def choose(self, ready: Sequence[Any]) -> int:
        """Return the index in `ready` of the task to run next."""

    def pick(self, count: int) -> int:
        """Return which of this many values an atomic reads; 0 is the newest."""


class RandomSchedule:
    def __init__(self, seed: int) -> None:
        self.token = f"random:{seed}"
        self.step = 0
        self.residents = 0
        self.is_fair = True
        self._random = random.Random(seed)
        self._picks = random.Random(~seed)  # so that reads do not change the order of tasks

    def choose(self, ready: Sequence[Any]) -> int:
        self.step += 1
        # int(random() * n) is three times as fast as randrange, and this runs at every switch
        return int(self._random.random() * len(ready))

    def pick(self, count: int) -> int:
        """Take the newest half of the time, else any older one with equal probability."""
        chance = 2 * self._picks.random()
        return 0 if chance < 1 else 1 + int((chance - 1) * (count - 1))


class PctSchedule(RandomSchedule):
    def __init__(self, seed: int, depth: int = 3, window: int = 0) -> None:
        super().__init__(seed)
        self.token = f"pct:{seed}:{depth}:{window}" if window else f"pct:{seed}:{depth}"
        self.is_fair = False
        self._priority: dict[Any, float] = {}
        self._changes = {self._random.randrange(window or _WINDOW) for _ in range(depth - 1)}
        self._lowest = 0.0

    def choose(self, ready: Sequence[Any]) -> int:
        if self.is_fair:
            return super().choose(ready)
        for task in ready:
            if self._party(task) not in self._priority:
                self._priority[self._party(task)] = self._random.random()
        best = self._best(ready)
        if self.step in self._changes:
            self._lowest -= 1.0
            self._priority[self._party(ready[best])] = self._lowest
        self.step += 1
        return best

    def _party(self, task: Any) -> Any:
        """Return what has a priority."""
        return task

    def _best(self, ready: Sequence[Any]) -> int:
        return max(range(len(ready)), key=lambda i: self._priority[ready[i]])


class RankSchedule(PctSchedule):
    def __init__(self, seed: int, depth: int = 3, window: int = 0) -> None:
        super().__init__(seed, depth, window)
        self.token = f"ranks{self.token.removeprefix('pct')}"

    def _party(self, task: Any) -> Any:
        return task.rank

    def _best(self, ready: Sequence[Any]) -> int:
        first = max((task.rank for task in ready), key=lambda rank: self._priority[rank])
        places = [place for place, task in enumerate(ready) if task.rank == first]
        return places[int(self._random.random() * len(places))]


def from_token(token: str) -> Schedule:
    """Read random or rounds:SEED, or pct or ranks:SEED:DEPTH[:WINDOW], as a finding prints it."""
    if token.startswith("path:"):
        return PathSchedule([int(n) for n in token[5:].split(".") if n])
    name, _, few = token.partition("@")
    kind, _, rest = name.partition(":")
    numbers = rest.split(":")
    schedule: RandomSchedule | RoundSchedule | None = None
    if all(n.isdigit() for n in [*numbers, few or "0"]):
        if kind == "random" and len(numbers) == 1:
            schedule = RandomSchedule(int(numbers[0]))
        if kind == "rounds" and len(numbers) == 1:
            schedule = RoundSchedule(int(numbers[0]))
        if kind in ("pct", "ranks") and len(numbers) in (2, 3):
            schedule = (PctSchedule if kind == "pct" else RankSchedule)(*map(int, numbers))
    if schedule is None:
        raise ValueError(
            f"schedule {token!r}: expected random:SEED or pct:SEED:DEPTH[:WINDOW] (or rounds: "
            "and ranks: instead), and @N after it if only N programs of a kernel are to be resident"
        )
    schedule.token, schedule.residents = token, int(few or 0)
    return schedule
