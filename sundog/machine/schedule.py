"""Who runs next. A schedule is a pure function of its seed, so its token replays an interleaving.

`random` takes any runnable task with equal chance. `pct` gives every task a random priority and
always runs the highest; at `depth` - 1 random steps the running task falls to the bottom. It finds
bugs of that depth with a known probability (Burckhardt et al., "A randomized scheduler with
probabilistic guarantees of finding bugs", ASPLOS 2010), also ones that random rarely meets.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

__all__ = ["PctSchedule", "RandomSchedule", "Schedule", "from_token"]

_PCT_STEPS = 2000  # the window in which priorities change: about the length of a small op


class Schedule(Protocol):
    token: str

    def choose(self, ready: Sequence[object]) -> int:
        """The place in `ready` of the task to run next."""


class RandomSchedule:
    def __init__(self, seed: int) -> None:
        self.token = f"random:{seed}"
        self._random = random.Random(seed)

    def choose(self, ready: Sequence[object]) -> int:
        # int(random() * n) is three times as fast as randrange, and this runs at every switch
        return int(self._random.random() * len(ready))


class PctSchedule:
    def __init__(self, seed: int, depth: int = 3) -> None:
        self.token = f"pct:{seed}:{depth}"
        self._random = random.Random(seed)
        self._priority: dict[int, float] = {}
        self._keep: list[object] = []  # ids stay unique while we hold the tasks
        self._changes = {self._random.randrange(_PCT_STEPS) for _ in range(depth - 1)}
        self._lowest = 0.0
        self._step = 0

    def choose(self, ready: Sequence[object]) -> int:
        for task in ready:
            if id(task) not in self._priority:
                self._priority[id(task)] = self._random.random()
                self._keep.append(task)
        best = max(range(len(ready)), key=lambda i: self._priority[id(ready[i])])
        if self._step in self._changes:
            self._lowest -= 1.0
            self._priority[id(ready[best])] = self._lowest
        self._step += 1
        return best


def from_token(token: str) -> Schedule:
    """'random:SEED' or 'pct:SEED:DEPTH', as a finding prints it."""
    kind, _, rest = token.partition(":")
    numbers = rest.split(":")
    if kind == "random" and len(numbers) == 1 and numbers[0].isdigit():
        return RandomSchedule(int(numbers[0]))
    if kind == "pct" and len(numbers) == 2 and all(n.isdigit() for n in numbers):
        return PctSchedule(int(numbers[0]), int(numbers[1]))
    raise ValueError(f"schedule {token!r}: expected random:SEED or pct:SEED:DEPTH")
