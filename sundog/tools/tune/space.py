"""The search space: an algorithm, a problem, the configs that may be tried; and the searches.

Each search is a short function over one evaluator. That takes configs, and the number of their
generation, and returns each one's milliseconds, or None if it failed. It remembers its answers, so
asking again costs nothing. A run is resumed by running it again with the same seed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy
import torch

from ... import gpu_limits
from ...dataset.files import check_base
from .._launches import NUM_SMS
from .._subject import algorithms_of, problem_of

_PROGRAMS = ("programs", "fetchers", "first_fetchers")  # fields of configs that count them


@dataclass(frozen=True)
class Job:
    """One algorithm on one problem."""

    op: str  # all_gather.push
    module: ModuleType
    problem: Any
    size: int

    def __str__(self) -> str:
        return f"{self.op} {fields_text(self.problem)}"


def jobs(op: str, problem: str, size: int) -> list[Job]:
    """List an op's algorithms that run without being named, or the one that is named."""
    return [
        Job(each.name, each.module, problem_of(each.module, problem, size), size)
        for each in algorithms_of(op)
        if each.name == op or not each.by_request
    ]


@dataclass(frozen=True)
class Space:
    """The configs that an algorithm's `valid` accepts, its default first.

    `scores` are a model's expectations, the least for the best; empty where it knows nothing. A
    search measures the first `ordered` of that order before measurements correct the model.
    """

    configs: tuple[Any, ...]
    scores: tuple[float, ...] = ()
    ordered: int = 1

    @staticmethod
    def of(job: Job, num_sms: int, arch: str = "") -> Space:
        """Make the space for a target, by default this machine's."""
        with gpu_limits.aim(arch or gpu_limits.here().arch):
            tried = [job.module.default(job.problem, num_sms)]
            for config in job.module.space(job.problem):
                tried += _for_sms(config, num_sms)
            reasons = {c: job.module.valid(job.problem, c) for c in dict.fromkeys(tried)}
        usable = tuple(config for config, reason in reasons.items() if reason is None)
        if not usable:
            text = "; ".join(dict.fromkeys(filter(None, reasons.values())))
            raise ValueError(f"{job}: there is no config to try: {text or 'its space is empty'}")
        return Space(usable)

    def neighbours(self, config: Any) -> list[Any]:
        """Return the configs that differ in one field, by one step among the space's values."""
        mine = self._key(config)
        found = []
        for place, value in enumerate(mine):
            for other in _steps(self._values[place], value):
                near = self._by_key.get((*mine[:place], other, *mine[place + 1 :]))
                if near is not None:
                    found.append(near)
        return found

    def _key(self, config: Any) -> tuple:
        return tuple(getattr(config, name) for name in self._names)

    @functools.cached_property
    def _names(self) -> list[str]:
        return [field.name for field in dataclasses.fields(self.configs[0]) if field.compare]

    @functools.cached_property
    def _by_key(self) -> dict[tuple, Any]:
        return {self._key(config): config for config in self.configs}

    @functools.cached_property
    def _values(self) -> list[list[Any]]:
        """The values of each field, in order."""
        columns = zip(*self._by_key, strict=True)
        return [sorted(set(column), key=lambda v: (str(type(v)), v)) for column in columns]


def spaces(found: list[Job], num_sms: int, arch: str) -> dict[int, Space]:
    """Return spaces by job number, without algorithms that refuse this problem, unless all do."""
    usable = {}
    reasons = []
    for number, job in enumerate(found):
        try:
            usable[number] = Space.of(job, num_sms, arch)
        except ValueError as error:
            reasons.append(error)
    if not usable:
        raise reasons[0]
    return usable


def _steps(values: list[Any], value: Any) -> list[Any]:
    """Return the next smaller and the next larger value; all others where there is no order."""
    at = values.index(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return values[:at] + values[at + 1 :]
    return values[max(at - 1, 0) : at] + values[at + 1 : at + 2]


def _for_sms(config: Any, num_sms: int) -> list[Any]:
    """Return a config for a rank with a part of a GPU, or the config itself if it fits.

    A space is written for all SMs of a GPU; numbers of programs and fetchers shrink in proportion.
    More than one program per SM is never tried: alone they may fit, but not beside another op.
    """
    asked = {name: getattr(config, name, 0) for name in _PROGRAMS}
    share = num_sms / NUM_SMS
    scaled: dict[str, Any] = {n: max(round(v * share), 1) for n, v in asked.items() if v}
    shrunk = dataclasses.replace(config, **scaled)
    return [config, shrunk] if asked["programs"] <= num_sms else [shrunk]


def fields_text(value: Any) -> str:
    """Return fields as on the command line: numel=4096,dtype=bfloat16."""
    words = []
    for field in dataclasses.fields(value):
        each = getattr(value, field.name)
        text = str(each).removeprefix("torch.") if isinstance(each, torch.dtype) else str(each)
        words.append(f"{field.name}={text.lower() if isinstance(each, bool) else text}")
    return ",".join(words)


def points_of(configs: Sequence[Any], fields: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Make a point of each config of another tuner: its fields, and itself as `config_`."""
    names = dict.fromkeys(name for each in fields for name in each)
    typed = [(name, Any, dataclasses.field(default=None)) for name in names]
    hidden = dataclasses.field(default=None, compare=False, repr=False)
    made = dataclasses.make_dataclass("Point", [*typed, ("config_", Any, hidden)], frozen=True)
    pairs = zip(fields, configs, strict=True)
    return list(dict.fromkeys(made(**each, config_=config) for each, config in pairs))


# searches: which configs to try next


Evaluate = Callable[[list[Any], int], list[float | None]]
Search = Callable[[Space, Evaluate, int, random.Random], None]

_FIRST_SHARE = 5  # pattern: this part of the budget is spent on random configs first
_TOGETHER = 4  # and a generation tries the neighbours of this many of the best
_PROPOSED = 4  # by the model, at most, per generation; the first also has the default


def exhaustive(space: Space, evaluate: Evaluate, budget: int, rng: random.Random) -> None:
    """Try the default, then the others in random order, within the budget.

    In a space's own order neighbours differ only in the grid, so compilers side by side would all
    make the same kernel, and drift during the measurements would look like the effect of a field.
    """
    first, *others = space.configs[:budget]
    evaluate([first, *rng.sample(others, len(others))], 0)


def random_search(space: Space, evaluate: Evaluate, budget: int, rng: random.Random) -> None:
    """Try the default config, then random ones."""
    evaluate(_default_and_random(space, budget, rng), 0)


def pattern(space: Space, evaluate: Evaluate, budget: int, rng: random.Random) -> None:
    """Try random configs, then neighbours of the best, until the budget or the space is spent.

    A generation tries the neighbours of the best few that have some left, so that a search that is
    stuck at one continues around the next.
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
    """Try the default and the first of the model's order, then what may be faster than all of them.

    The model proposes, the GPU decides, and measurements update the model, once the first
    `space.ordered` are known. A small budget is then spent one config at a time. Where the model
    knows nothing, the pattern search runs.
    """
    if not space.scores:
        pattern(space, evaluate, budget, rng)
        return
    times: dict[Any, float | None] = {}
    together = min(max(budget // 10, 1), _PROPOSED)
    first = proposals(space, {}, max(space.ordered, together))
    wanted = list(dict.fromkeys([space.configs[0], *first]))
    generation = 0
    while wanted := wanted[: budget - len(times)]:
        times.update(zip(wanted, evaluate(wanted, generation), strict=True))
        wanted = proposals(space, times, together)
        generation += 1


SEARCHES: dict[str, Search] = {
    "pattern": pattern,
    "model": by_model,
    "random": random_search,
    "exhaustive": exhaustive,
}


def check_search(budget: int, search: str, log: str) -> None:
    """Raise ValueError for a search that cannot be made, or not be recorded."""
    if budget < 1:
        raise ValueError(f"budget {budget}: at least one config must be tried")
    if search not in SEARCHES:
        raise ValueError(f"search {search!r}: expected one of {', '.join(SEARCHES)}")
    if wrong := check_base(log):
        raise ValueError(f"log {log}: {wrong}")


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
    """Return untried configs, those with the largest expected improvement first.

    Before anything is measured, those with the least scores come first.
    """
    numbers = {config: number for number, config in enumerate(space.configs)}
    known = {numbers[c]: t for c, t in times.items() if t is not None and c in numbers}
    mean, gain = update([_values(config) for config in space.configs], space.scores, known)
    left = [config for config in space.configs if config not in times]
    return sorted(left, key=lambda c: (-gain[numbers[c]], mean[numbers[c]]))[:count]


def _values(config: Any) -> tuple[Any, ...]:
    fields = [field for field in dataclasses.fields(config) if field.compare]
    return tuple(getattr(config, field.name) for field in fields)


# how measurements update a model: its error is a Gaussian process over the configs, since configs
# with similar fields have similar errors. The figures were chosen on tasks that no test part has:
# see benchmarks/learn/README.md.

_ERROR = 0.08  # of a score, in logarithms of time: what the model gets wrong
_REACH = 1.5  # of an error, in doublings of a field; another word is two away
_NOISE = 0.02  # of a measurement
_LEVEL = 5.0  # of the unknown factor that all configs of a problem share


def update(
    configs: Sequence[Sequence[Any]], scores: Sequence[float], times: Mapping[int, float]
) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return the expected logarithm of each config's time, and its expected improvement.

    `configs`: the values of each one's fields. `times`: by the number of the config.
    """
    expected = numpy.asarray(scores, dtype=float)
    if not times:
        return expected, numpy.zeros(len(expected))
    seen = list(times)
    logs = numpy.log([times[number] for number in seen])
    shared = _covariance(configs, seen)
    among = shared[seen] + _NOISE**2 * numpy.eye(len(seen))
    weights = numpy.linalg.solve(among, shared.T)
    mean = expected + weights.T @ (logs - expected[seen])
    left = _ERROR**2 + _LEVEL**2 - (shared * weights.T).sum(axis=1)
    return mean, _improvement(logs.min() - mean, numpy.sqrt(numpy.maximum(left, 1e-12)))


def _covariance(configs: Sequence[Sequence[Any]], seen: list[int]) -> numpy.ndarray:
    """Return the covariance of each config's error with those of the measured ones."""
    far = numpy.zeros((len(configs), len(seen)))
    for values in zip(*configs, strict=True):
        far += _apart(values, seen)
    return _ERROR**2 * numpy.exp(-far / (2 * _REACH**2)) + _LEVEL**2


def _apart(values: tuple[Any, ...], seen: list[int]) -> numpy.ndarray:
    """Return squared distances in one field: between logarithms, or 0 or 4 between words."""
    if any(isinstance(value, bool) or not isinstance(value, int | float) for value in values):
        words = numpy.array([str(value) for value in values])
        return 4.0 * (words[:, None] != words[seen])
    places = numpy.log2(numpy.maximum(numpy.array(values, dtype=float), 0.5))
    return (places[:, None] - places[seen]) ** 2


def _improvement(ahead: numpy.ndarray, spread: numpy.ndarray) -> numpy.ndarray:
    """Return the mean of what is above zero of a normal distribution."""
    z = ahead / spread
    below = numpy.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in z])
    return spread * (z * below + numpy.exp(-z * z / 2) / math.sqrt(2 * math.pi))
