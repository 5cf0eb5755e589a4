"""Check many things at once, each in a process that was forked from this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TypeVar

from .._pool import Failure, Worker, run_all, serve

_LONGEST = 1800.0  # seconds for one answer: a schedule that takes longer hangs
Answer = TypeVar("Answer")


def each_forked(
    answer: Callable[[int], Answer], count: int
) -> Iterator[tuple[int, Answer | Failure]]:
    """Call `answer` for every number below `count`, on all CPUs; yield answers as they come.

    An answer travels through a pipe, so it must be picklable. A process that dies or raises leaves
    a Failure for its number, and the other numbers go on.
    """
    num_workers = min(len(os.sched_getaffinity(0)), count)
    workers = [Worker(serve(answer), _LONGEST) for _ in range(num_workers)]
    yield from run_all(workers, range(count))


def in_order(answer: Callable[[int], Answer], count: int) -> Iterator[Answer | Failure]:
    """Do as `each_forked`, and yield the answers in the order of their numbers."""
    early: dict[int, Answer | Failure] = {}
    following = 0
    for number, reply in each_forked(answer, count):
        early[number] = reply
        while following in early:
            yield early.pop(following)
            following += 1
