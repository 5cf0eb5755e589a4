"""New shapes of the kernels, drawn to the plan of those that they have.

A drawn shape is one of the kernel's own whose sizes have moved. A power of two stays one, a prime
stays a prime, and every other size keeps its divisor. So Triton specialises the new shape as the
old one, and no new binary is needed.
"""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

from .subject import Shape, Subject, Task, is_prime

_UNIT = 128  # a size that this divides stays a multiple of it
_TRIES = 400  # for one shape


def drawn(subject: Subject, count: int, seed: int = 0) -> Subject:
    """Return the kernel with `count` new shapes in the place of its own, and with one dtype.

    One dtype makes a binary serve as many shapes as it can.
    """
    rng = random.Random(f"{subject.name} {seed}")
    dtype = rng.choice(list(subject.dtypes))
    templates = rng.sample(list(subject.shapes), len(subject.shapes))
    shapes: list[Shape] = []
    while True:
        before = len(shapes)
        for template in templates:
            tries = (_moved(template, subject, rng) for _ in range(_TRIES))
            known = (*subject.shapes, *shapes)
            fits = (s for s in tries if s not in known and _alike(s, template, subject, dtype))
            shapes += itertools.islice(fits, 1)
            if len(shapes) == count:
                return replace(subject, shapes=shapes, dtypes=[dtype])
        if len(shapes) == before:
            raise ValueError(f"{subject.name}: {before} new shapes of {count}: ask for fewer")


def _moved(template: Shape, subject: Subject, rng: random.Random) -> Shape:
    """Draw each size anew, between the least and the largest of the kernel's shapes."""
    moved = dict(template)
    for name, size in template.items():
        if isinstance(size, int) and not isinstance(size, bool):
            known = [shape[name] for shape in subject.shapes]
            wanted = math.exp(rng.uniform(math.log(min(known)), math.log(max(known))))
            moved[name] = _of_its_sort(wanted, size)
    return moved


def _of_its_sort(wanted: float, size: int) -> int:
    if size & (size - 1) == 0:
        return 1 << round(math.log2(wanted))
    if is_prime(size):
        return next(n for n in range(round(wanted), 2 * round(wanted) + 2) if is_prime(n))
    unit = math.gcd(size, _UNIT)
    times = max(round(wanted / unit), 1)
    return unit * (times if unit == _UNIT else times | 1)  # an odd multiple has no larger divisor


def _alike(shape: Shape, template: Shape, subject: Subject, dtype: str) -> bool:
    """Say whether the binaries are the template's, and the work within what the kernel has."""
    own, its = (Task(subject, each, dtype) for each in (shape, template))
    known = [Task(subject, each, dtype).work for each in subject.shapes]
    within = all(
        min(each) <= value <= max(each)
        for value, each in zip(own.work, zip(*known, strict=True), strict=True)
    )
    return within and own.binary_key({}) == its.binary_key({})
