"""What an op's algorithms should take on a machine, over one axis of its problem."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...hardware.description import Hardware
from ...ops.load import changed, value
from ...ops.op import BY_REQUEST, algorithms
from ...predict.parts import Ranks, Time
from ...predict.times import MODELS, time

__all__ = ["Asked", "Point", "crossings", "parse_axis", "points"]


@dataclass(frozen=True)
class Asked:
    """An op, and where it is asked about."""

    op: str
    size: int  # ranks
    problem: dict[str, Any]  # fields that differ from the op's first case
    axis: tuple[str, list[Any]]  # a field of the problem and its values
    late_s: float = 0.0


@dataclass(frozen=True)
class Point:
    """All algorithms of an op on one machine and problem, the fastest first."""

    hardware: Hardware
    problem: Any
    at: Any  # of the axis
    times: dict[str, Time]

    @property
    def best(self) -> str:
        return next(iter(self.times))


def parse_axis(text: str) -> tuple[str, list[Any]]:
    """'numel=1024,65536' as a name and values; '1024..1048576' is every power of two between."""
    name, equals, words = text.partition("=")
    if not (name and equals and words):
        raise ValueError(f"--axis {text!r}: expected NAME=v1,v2,... or NAME=first..last")
    first, dots, last = words.partition("..")
    if not dots:
        return name, [value(word) for word in words.split(",")]
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise ValueError(f"--axis {text!r}: expected two numbers, the smaller one first")
    values = []
    at = int(first)
    while at <= int(last):
        values.append(at)
        at *= 2
    return name, values


def points(asked: Asked, hardware: Hardware) -> list[Point]:
    """One per value of the axis."""
    modules = algorithms(asked.op)
    name = asked.op.partition(".")[0]
    known = {a: m for a, m in modules.items() if f"{name}.{a}" in MODELS}
    if not known:
        raise ValueError(f"{asked.op} has no time model; those that have: {', '.join(MODELS)}")
    if len(known) > 1:
        known = {a: m for a, m in known.items() if f"{name}.{a}" not in BY_REQUEST}
    ranks = Ranks.on(hardware, asked.size)
    found = []
    for at in asked.axis[1]:
        times = {}
        for algo, module in known.items():
            fields = {**asked.problem, asked.axis[0]: at}
            problem = changed(module.cases(asked.size)[0], fields)
            config = module.default(problem, ranks.num_sms)
            if module.valid(problem, config) is None:
                op = f"{name}.{algo}"
                times[algo] = time(op, problem, config, hardware, ranks.num_sms, asked.late_s)
        if not times:
            raise ValueError(f"{asked.op}: no algorithm takes {asked.axis[0]}={at}")
        ordered = dict(sorted(times.items(), key=lambda item: item[1].seconds))
        found.append(Point(hardware, problem, at, ordered))
    return found


def crossings(found: Sequence[Point]) -> list[str]:
    """Where another algorithm becomes the fastest, in sentences."""
    lines = []
    for before, after in itertools.pairwise(found):
        if before.best != after.best:
            lines.append(
                f"{after.hardware.name}: {before.best} is the fastest up to {before.at}, "
                f"{after.best} from {after.at} on"
            )
    return lines
