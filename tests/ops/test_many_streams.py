"""Ops in flight on several streams of one world: right or refused, whatever the launch order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sundog
from sundog import World
from sundog.backends.sim import Sim
from sundog.collectives._copy import Config
from sundog.testing import check

pytestmark = pytest.mark.sim_only

STREAMS = (1, 2, 3)  # the simulator's host waits for what it launches on stream 0


def mixed(world: World, calls: int, large: int = 600) -> None:
    """Calls on each stream, launched in another order on every rank, each compared at the end."""
    given_here = [[given(world.rank, n, large, turn) for turn in range(calls)] for n in STREAMS]
    xs = [[world.as_symmetric(x) for x in row] for row in given_here]
    outs = [
        [world.empty(wanted(world.size, n, large, 0).shape, torch.int32) for _ in row]
        for n, row in zip(STREAMS, xs, strict=True)
    ]
    world.barrier()
    for turn in (0, *range(calls)):
        # Plans and places: where ranks agree, so in one order; and again, as a new stream narrows
        # the others.
        for place in range(len(STREAMS)):
            start(world, place, xs[place][turn], outs[place][turn])
    world.barrier()
    for turn in range(calls):
        for step in range(len(STREAMS)):
            place = (step + world.rank) % len(STREAMS)
            start(world, place, xs[place][turn], outs[place][turn])
    world.synchronize()
    for n, row in zip(STREAMS, outs, strict=True):
        for turn, out in enumerate(row):
            assert torch.equal(out, wanted(world.size, n, large, turn)), (n, turn)


def start(world: World, place: int, x: torch.Tensor, out: torch.Tensor) -> None:
    with world.stream(STREAMS[place]):
        if STREAMS[place] == 1:
            world.all_gather(x, out, algo="push")
        else:
            world.all_reduce(x, out=out, algo=("one_shot", "two_shot")[place - 1])


def given(rank: int, number: int, large: int, turn: int) -> torch.Tensor:
    return torch.arange(large, dtype=torch.int32) * (rank + 1) + 7 * number + turn


def wanted(size: int, number: int, large: int, turn: int) -> torch.Tensor:
    parts = [given(rank, number, large, turn) for rank in range(size)]
    return torch.cat(parts) if number == 1 else torch.stack(parts).sum(0, dtype=torch.int32)


def test_ops_on_three_streams_in_any_launch_order_are_right() -> None:
    check(lambda world: mixed(world, 2), 2, schedules=4, num_sms=8)


def test_large_ops_leave_room_for_those_of_the_other_stream() -> None:
    """Each would take all four SMs of a rank: the ranks would wait for each other for ever."""
    sundog.run(lambda world: mixed(world, 1, 40_000), 2, "sim", sim=Sim(num_sms=4))


def test_a_second_stream_refuses_a_config_that_fills_the_sms() -> None:
    def main(world: World) -> None:
        x = torch.ones(40_000)
        world.all_gather(x)
        with world.stream(1):
            world.all_gather(x, config=Config(4096, 4, 4), algo="push")

    with pytest.raises(ValueError, match=r"programs 4, but 2 streams .* may fill 1 SMs; use fewer"):
        sundog.run(main, 2, "sim", sim=Sim(num_sms=4))


def test_a_graph_that_may_fill_the_sms_rules_out_a_second_stream() -> None:
    def main(world: World) -> None:
        x, out = torch.ones(100_000), torch.empty(200_000)
        world.all_gather(x, out)
        with world.capture() as graph:
            world.all_gather(x, out)
        graph.replay()
        with world.stream(1):
            world.all_gather(x, out)

    with pytest.raises(ValueError, match="Call an op once on each stream before you capture"):
        sundog.run(main, 2, "sim")


def test_more_streams_than_sms_are_refused() -> None:
    def main(world: World) -> Any:
        world.all_gather(torch.ones(4))
        with world.stream(1):
            world.all_gather(torch.ones(4))

    with pytest.raises(ValueError, match="2 streams need as many SMs at least, and a rank has 1"):
        sundog.run(main, 2, "sim", sim=Sim(num_sms=1))
