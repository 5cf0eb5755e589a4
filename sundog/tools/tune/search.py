"""Which configs to try next. Each search is a short function over one evaluator.

An evaluator takes configs, and the number of their generation, and returns what each takes, in
milliseconds, None where it failed. It knows what it was asked before: asking again costs nothing,
which is also how a run is resumed, by doing it again with the same seed.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .space import Space

__all__ = [
    "SEARCHES", "Evaluate", "around_the_best", "by_model", "exhaustive", "first_asked", "pattern",
    "proposals", "random_search",
]  # fmt: skip

Evaluate = Callable[[list[Any], int], list[float | None]]
Search = Callable[[Space, Evaluate, int, random.Random], None]

_FIRST_SHARE = 5  # pattern: this part of the budget is spent on random configs first
_TOGETHER = 4  # and a generation tries the neighbours of this many of the best
_PROPOSED = 4  # by the model, for a generation; the first has the default as well


def exhaustive(space: Space, evaluate: Evaluate, budget: int, rng: random.Random) -> None:
    """Try the default, then the others in random order, as far as the budget goes.

    In a space's own order neighbours differ in the grid alone, so compilers side by side would all
    make the same kernel; and what drifts while it is measured would look like a field's doing.
    """
    first, *others = space.configs[:budget]
    evaluate([first, *rng.sample(others, len(others))], 0)


def random_search(space: Space, evaluate: Evaluate, budget: int, rng: random.Random) -> None:
    """Try the default config, then random ones."""
    evaluate(_default_and_random(space, budget, rng), 0)


def pattern(space: Space, evaluate: Evaluate, budget: int, rng: random.Random) -> None:
    """Try random configs, then neighbours of the best, until the budget or the space is spent.

    A generation tries the neighbours of the best few that have some left, so that a search that is
    stuck at one goes on around the next.
    """
    times: dict[Any, float | None] = {}

    def ask(configs: list[Any], generation: int) -> None:
        configs = configs[: budget - len(times)]
        times.update(zip(configs, evaluate(configs, generation), strict=True))

    ask(_default_and_random(space, max(budget // _FIRST_SHARE, min(budget, 8)), rng), 0)
    generation = 0
    while len(times) < min(budget, len(space.configs)):
        generation += 1
        ask(around_the_best(space, times) or _untried(space, times, rng), generation)


def by_model(space: Space, evaluate: Evaluate, budget: int, rng: random.Random) -> None:
    """Try the default and what the model expects to be fast, then what it expects after that.

    The model proposes, the GPU decides, and what was measured corrects the model nearby. Where it
    knows nothing, the pattern search runs.
    """
    if not space.scores:
        pattern(space, evaluate, budget, rng)
        return
    times: dict[Any, float | None] = {}
    generation = 0
    while len(times) < min(budget, len(space.configs)):
        wanted = proposals(space, times, _PROPOSED)
        if not times:
            wanted = list(dict.fromkeys([space.configs[0], *wanted]))
        wanted = wanted[: budget - len(times)]
        times.update(zip(wanted, evaluate(wanted, generation), strict=True))
        generation += 1


SEARCHES: dict[str, Search] = {
    "pattern": pattern,
    "model": by_model,
    "random": random_search,
    "exhaustive": exhaustive,
}


def first_asked(search: str, space: Space, budget: int, seed: int) -> list[Any]:
    """List what a search will ask for before it knows anything."""
    asked: list[Any] = []

    def evaluate(configs: list[Any], generation: int) -> list[float | None]:
        asked.extend(configs)
        raise StopIteration

    with suppress(StopIteration):
        SEARCHES[search](space, evaluate, budget, random.Random(seed))
    return asked


def _default_and_random(space: Space, count: int, rng: random.Random) -> list[Any]:
    first, *others = space.configs
    return [first, *rng.sample(others, min(max(count - 1, 0), len(others)))][:count]


def around_the_best(space: Space, times: dict[Any, float | None]) -> list[Any]:
    """List new neighbours of the best configs that have any left."""
    ranked = sorted((t, n) for n, t in enumerate(times.values()) if t is not None)
    tried = list(times)
    found: dict[Any, None] = {}
    centres = 0
    for _, number in ranked:
        new = [c for c in space.neighbours(tried[number]) if c not in times]
        found.update(dict.fromkeys(new))
        centres += bool(new)
        if centres == _TOGETHER:
            break
    return list(found)


def _untried(space: Space, times: dict[Any, float | None], rng: random.Random) -> list[Any]:
    left = [config for config in space.configs if config not in times]
    return rng.sample(left, min(len(left), 8))


def proposals(space: Space, times: dict[Any, float | None], count: int) -> list[Any]:
    """Return untried configs by the model's score, corrected by the error at those near them."""
    scores = dict(zip(space.configs, space.scores, strict=True))
    logs = {c: math.log(t) for c, t in times.items() if t is not None and c in scores}
    middle = sum(logs[c] - scores[c] for c in logs) / max(len(logs), 1)
    errors = [(_values(c), logs[c] - scores[c] - middle) for c in logs]
    left = [config for config in space.configs if config not in times]
    return sorted(left, key=lambda config: scores[config] + _error_near(config, errors))[:count]


def _error_near(config: Any, errors: list[tuple[tuple[Any, ...], float]]) -> float:
    """Return the mean error of what was measured, near configs first, drawn towards nothing."""
    mine = _values(config)
    total = weight = 0.0
    for values, error in errors:
        near = math.exp(-sum(a != b for a, b in zip(mine, values, strict=True)))
        total, weight = total + near * error, weight + near
    return total / (weight + math.exp(-2))


def _values(config: Any) -> tuple[Any, ...]:
    return tuple(getattr(config, field.name) for field in dataclasses.fields(config))
