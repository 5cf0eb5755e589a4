"""Count the files that a call crosses, and how often ranks talk for a new plan.

python scripts/call_path.py     # both figures, of an all_gather; tests/ops/test_dispatch.py
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import sundog
from sundog.ops.load import algorithms

ROOT = os.path.dirname(sundog.__file__) + os.sep
# What stands in for the GPU and the driver. A launch ends there, on every backend in another way.
BELOW = ("machine/", "interpreter/")


def crossed(call: Callable[[], Any]) -> list[str]:
    """List the files of sundog in which a function ran on this host, without the simulator's."""
    found = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(ROOT) and not _is_below(frame):
            found.add(path.removeprefix(ROOT))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(found)


def _is_below(frame: FrameType | None) -> bool:
    """Say whether the simulator runs this frame, or called it."""
    while frame is not None and frame.f_code is not crossed.__code__:
        if frame.f_code.co_filename.removeprefix(ROOT).startswith(BELOW):
            return True
        frame = frame.f_back
    return False


def exchanges(world: sundog.World, call: Callable[[], Any]) -> list[str]:
    """List what the ranks exchange on the host during a call."""
    inner, found = world._backend.exchange, []

    def note(value: Any, what: str, *rest: Any) -> list[Any]:
        found.append(what)
        return inner(value, what, *rest)

    world._backend.exchange = note  # type: ignore[method-assign]
    try:
        call()
    finally:
        del world._backend.exchange
    return found


def files_of_a_call() -> list[list[str]]:
    """List the files that the first, second and third all_gather of a world cross."""
    algorithms("all_gather")  # imports are no part of a call

    def main(world: sundog.World) -> list[list[str]]:
        x, out = world.zeros((1024,)), world.zeros((2048,))
        found = []
        for _ in range(3):
            world.barrier()
            found.append(crossed(lambda: world.all_gather(x, out)))
        return found

    return sundog.run(main, 2, "sim")[0]


def talk_of_a_plan() -> list[str]:
    """List what ranks exchange for the first all_gather of a world."""

    def main(world: sundog.World) -> list[str]:
        x, out = world.zeros((1024,)), world.zeros((2048,))
        world.reduce_scatter(x)  # the first op of all: ranks find each other's pages
        return exchanges(world, lambda: world.all_gather(x, out))

    return sundog.run(main, 2, "sim")[0]


if __name__ == "__main__":
    first, _, third = files_of_a_call()
    print(f"files crossed by a first all_gather: {len(first)}, by a repeated one: {len(third)}")
    print(f"host collectives of a new plan: {len(talk_of_a_plan())}")
