"""What is tuned: one algorithm of an op, a problem, and the configs that may be tried."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from ... import gpu_limits
from .._launches import NUM_SMS
from .._subject import algorithms_of, problem_of

__all__ = ["Job", "Space", "fields_text", "jobs", "spaces"]

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
    """The configs of an algorithm that its `valid` takes, its default first.

    `scores`: what a model expects of each, the least is the best; empty where it knows nothing.
    """

    configs: tuple[Any, ...]
    scores: tuple[float, ...] = ()

    @staticmethod
    def of(job: Job, num_sms: int, arch: str = "") -> Space:
        """`arch`: the target; without it this machine's."""
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
        """Those that differ in one field, by one step among the values that the space has."""
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
        return [field.name for field in dataclasses.fields(self.configs[0])]

    @functools.cached_property
    def _by_key(self) -> dict[tuple, Any]:
        return {self._key(config): config for config in self.configs}

    @functools.cached_property
    def _values(self) -> list[list[Any]]:
        """Of each field, in order."""
        columns = zip(*self._by_key, strict=True)
        return [sorted(set(column), key=lambda v: (str(type(v)), v)) for column in columns]


def spaces(found: list[Job], num_sms: int, arch: str) -> dict[int, Space]:
    """By the number of the job; without algorithms that refuse this problem, unless all do."""
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
    """As it is on a rank that has a part of a GPU, and itself if that is enough for it.

    A space is written for all SMs of a GPU: programs, and those that fetch, shrink alike. More than
    one program per SM is never tried: alone they may fit, beside another op they may not.
    """
    asked = {name: getattr(config, name, 0) for name in _PROGRAMS}
    share = num_sms / NUM_SMS
    scaled: dict[str, Any] = {n: max(round(v * share), 1) for n, v in asked.items() if v}
    shrunk = dataclasses.replace(config, **scaled)
    return [config, shrunk] if asked["programs"] <= num_sms else [shrunk]


def fields_text(value: Any) -> str:
    """numel=4096,dtype=bfloat16: as one writes it on the command line."""
    words = []
    for field in dataclasses.fields(value):
        each = getattr(value, field.name)
        text = str(each).removeprefix("torch.") if isinstance(each, torch.dtype) else str(each)
        words.append(f"{field.name}={text.lower() if isinstance(each, bool) else text}")
    return ",".join(words)
