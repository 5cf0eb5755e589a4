"""Who runs next. A schedule is a pure function of its seed, so its token replays an interleaving.

`random` takes any runnable task with equal chance. `pct` gives every task a random priority and
always runs the highest; at `depth` - 1 random steps the running task falls to the bottom. These
steps lie in a window, which should be as long as the run: a change after its end is lost. It finds
bugs of that depth with a known probability (Burckhardt et al., "A randomized scheduler with
probabilistic guarantees of finding bugs", ASPLOS 2010), also ones that random rarely meets.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

__all__ = ["PctSchedule", "RandomSchedule", "Schedule", "from_token"]

_WINDOW = 2000  # steps: about the length of a small op, where no run has shown a better number


class Schedule(Protocol):
    token: str
    step: int  # how many tasks it has chosen so far

    def choose(self, ready: Sequence[object]) -> int:
        """The place in `ready` of the task to run next."""

    def pick(self, count: int) -> int:
        """Which of this many values an atomic reads; 0 is the newest."""


class _Picking:
    """Half of the reads see the newest value, the others any older one with equal chance."""

    def __init__(self, seed: int) -> None:
        self._picks = random.Random(~seed)  # its own, so that the reads do not move the tasks

    def pick(self, count: int) -> int:
        chance = 2 * self._picks.random()
        return 0 if chance < 1 else 1 + int((chance - 1) * (count - 1))


class RandomSchedule(_Picking):
    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.token = f"random:{seed}"
        self.step = 0
        self._random = random.Random(seed)

    def choose(self, ready: Sequence[object]) -> int:
        self.step += 1
        # int(random() * n) is three times as fast as randrange, and this runs at every switch
        return int(self._random.random() * len(ready))


class PctSchedule(_Picking):
    def __init__(self, seed: int, depth: int = 3, window: int = 0) -> None:
        super().__init__(seed)
        self.token = f"pct:{seed}:{depth}:{window}" if window else f"pct:{seed}:{depth}"
        self.step = 0
        self._random = random.Random(seed)
        self._priority: dict[int, float] = {}
        self._keep: list[object] = []  # ids stay unique while we hold the tasks
        self._changes = {self._random.randrange(window or _WINDOW) for _ in range(depth - 1)}
        self._lowest = 0.0

    def choose(self, ready: Sequence[object]) -> int:
        for task in ready:
            if id(task) not in self._priority:
                self._priority[id(task)] = self._random.random()
                self._keep.append(task)
        best = max(range(len(ready)), key=lambda i: self._priority[id(ready[i])])
        if self.step in self._changes:
            self._lowest -= 1.0
            self._priority[id(ready[best])] = self._lowest
        self.step += 1
        return best


def from_token(token: str) -> Schedule:
    """Read 'random:SEED', 'pct:SEED:DEPTH' or 'pct:SEED:DEPTH:WINDOW', as a finding prints it."""
    kind, _, rest = token.partition(":")
    numbers = rest.split(":")
    if kind == "random" and len(numbers) == 1 and numbers[0].isdigit():
        return RandomSchedule(int(numbers[0]))
    if kind == "pct" and len(numbers) in (2, 3) and all(n.isdigit() for n in numbers):
        return PctSchedule(*map(int, numbers))
    raise ValueError(f"schedule {token!r}: expected random:SEED or pct:SEED:DEPTH[:WINDOW]")
