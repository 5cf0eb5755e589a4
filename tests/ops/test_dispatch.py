"""The call path: how many files a call crosses, and how often ranks talk for a new plan."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sundog

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from call_path import exchanges, files_of_a_call

Run = Callable[..., list]


@pytest.mark.sim_only
def test_files_that_a_call_crosses() -> None:
    first, _, third = files_of_a_call()
    assert len(first) <= 18, first
    assert len(third) <= 7, third  # torch/calls.py among them


CALLS: dict[str, Callable[[sundog.World, torch.Tensor], Any]] = {
    "all_gather": lambda w, x: w.all_gather(x, w.zeros((32,))),
    "all_gather, staged": lambda w, x: w.all_gather(x.clone()),
    "all_reduce": lambda w, x: w.all_reduce(x, out=w.zeros((16,)), algo="two_shot"),
    "broadcast": lambda w, x: w.broadcast(x),
    "device_barrier": lambda w, x: w.device_barrier(),
    "all_to_all, by mail": lambda w, x: w.all_to_all(x, None, [8, 8], [8, 8]),
    "all_gather_matmul": lambda w, x: w.all_gather_matmul(x.view(4, 4), w.zeros((8, 4))),
}


@pytest.mark.parametrize("op", CALLS)
def test_ranks_talk_twice_for_a_new_plan_and_never_again(run: Run, op: str) -> None:
    """Once to agree, once when all flags are zero."""

    def main(world: sundog.World) -> tuple[list[str], list[str]]:
        x = world.zeros((16,))
        world.reduce_scatter(x)  # the first op of all: ranks find each other's pages
        with world.scope():
            first = exchanges(world, lambda: CALLS[op](world, x))
        with world.scope():
            second = exchanges(world, lambda: CALLS[op](world, x))
        return first, second

    for first, second in run(main, 2):
        counted = Counter(what.partition(" of ")[0] for what in first)
        assert counted == {"plan": 1, "barrier": 1}, first
        assert second == []


def test_a_new_place_is_compared_once(run: Run) -> None:
    def main(world: sundog.World) -> list[list[str]]:
        x, outs = world.zeros((4,)), world.zeros((2, 8))
        world.all_reduce(x)  # ranks that are processes show each other their pages, once
        found = []
        for out in (outs[0], outs[0], outs[1], outs[1], outs[0]):
            found.append(exchanges(world, lambda out=out: world.all_gather(x, out, algo="push")))
        return found

    for first, *others in run(main, 2):
        assert [what.partition(" of ")[0] for what in first] == ["plan", "barrier"]
        assert others == [[], ["place of out"], [], []]
