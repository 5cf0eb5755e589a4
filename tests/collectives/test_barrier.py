"""The device barrier: orders all ranks' streams, and everything in it is needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog import testing
from sundog.device import memory
from sundog.tools.check.mutation import find_mutants, mutate
from sundog.tools.check.schedules import check

Run = Callable[..., list]


@triton.jit
def put_to_next(x, out, rank, ctx, SIZE: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    memory.store(out + at, tl.load(x + at), (rank + 1) % SIZE, ctx)


def ring(world: sundog.World, rounds: int = 2, barriers: int = 2) -> list[list[float]]:
    """Everybody writes to the next rank, meets, reads, meets: without a flag of its own."""
    x, out = world.empty((16,)), world.empty((16,))
    world.barrier()
    found = []
    for number in range(rounds):
        x.fill_(10 * number + world.rank)
        put_to_next[(1,)](x, out, world.rank, world.ctx, SIZE=world.size, N=16)
        if barriers > 0:
            world.device_barrier()  # what was put is there
        found.append(out.tolist())
        if barriers > 1:
            world.device_barrier()  # and was read before the next round
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_what_was_before_it_is_seen_behind_it(run: Run, size: int) -> None:
    for rank, found in enumerate(run(ring, size)):
        before = (rank - 1) % size
        assert found == [[float(10 * number + before)] * 16 for number in range(2)]


@pytest.mark.sim_only
def test_the_checker_agrees_and_wants_both() -> None:
    testing.check(ring, 3, schedules=4)
    for barriers in (0, 1):
        found = check(lambda world, n=barriers: ring(world, 2, n), 2, schedules=4).findings
        assert "race" in {finding.kind for finding in found}


@pytest.mark.sim_only
def test_every_mutant_is_found() -> None:
    """But for the two CTA barriers, which order a program's own tiles: this kernel has none."""
    found, report = find_mutants(ring, 2)
    assert not report.findings, report
    assert len(found) >= 10
    assert len(report.results) == 2
    outcomes = mutate(ring, 2, found, schedules=6, expected=report.results)
    alive = [outcome.mutant.what for outcome in outcomes if not outcome.killed_by]
    assert alive == ["tl.debug_barrier(): dropped"] * 2


@pytest.mark.sim_only
def test_on_two_streams_at_once() -> None:
    """Each stream has flags of its own: rank 0's barriers come in another order than rank 1's."""

    def main(world: sundog.World) -> None:
        for number in (0, 1):
            with world.stream(number):
                world.device_barrier()  # plans are made in one order
        world.barrier()
        for number in (0, 1) if world.rank else (1, 0):
            with world.stream(number):
                world.device_barrier()
        world.barrier()

    testing.check(main, 2, schedules=4)


def test_in_a_group(run: Run) -> None:
    def main(world: sundog.World) -> object:
        group = world.group([2, 0], heap_size=1 << 20)
        return None if group is None else ring(group)[-1][0]

    assert run(main, 3) == [10.0, None, 11.0]


def test_in_a_captured_graph(run: Run) -> None:
    """Replays order anew: nothing of the epoch is baked in."""

    def main(world: sundog.World) -> list[float]:
        x, out = world.zeros((16,)), world.zeros((16,))
        world.barrier()
        # Compiled, and planned, before the capture.
        put_to_next[(1,)](x, out, world.rank, world.ctx, SIZE=2, N=16)
        world.device_barrier()
        world.barrier()
        seen = torch.zeros(16, device=world.device)
        with world.capture() as graph:
            put_to_next[(1,)](x, out, world.rank, world.ctx, SIZE=2, N=16)
            world.device_barrier()
            seen.copy_(out)
            world.device_barrier()
        found = []
        for number in range(3):
            x.fill_(10 * number + world.rank)
            graph.replay()
            found.append(seen[3].item())
        return found

    assert run(main, 2) == [[1.0, 11.0, 21.0], [0.0, 10.0, 20.0]]
