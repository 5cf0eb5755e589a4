"""Cached plans: bounded, evicted by all ranks alike, kept by graphs; staging that plans share."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

import sundog
from sundog import testing
from sundog.errors import CaptureError, OutOfHeap

Run = Callable[..., list]
KIB = 1 << 10


def gathered(world: sundog.World, numel: int, step: int = 0) -> None:
    """All-gather `numel` elements of an ordinary tensor, and look at the answer."""
    x = torch.full((numel,), 10 * step + world.rank, dtype=torch.int32, device=world.device)
    out = world.all_gather(x)
    want = [10 * step + rank for rank in range(world.size) for _ in range(numel)]
    assert out.tolist() == want


def sizes(world: sundog.World) -> list[int]:
    """Of the problems that have a plan, the least recently used first."""
    calls = sorted(world._plans, key=lambda call: call.used)
    return [call.plan.problem.numel for call in calls]


def staging(world: sundog.World) -> list[int]:
    """The bytes of every staging buffer."""
    live = world._heap.live.values()
    return sorted(block.nbytes for block in live if block.name.startswith("staging."))


def test_the_45th_size_fits(run: Run) -> None:
    """Sizes of 1.4 MB in 64 MB, or as here of 14 KB in 640: each plan had a copy of its output."""

    def main(world: sundog.World) -> None:
        for numel in range(3500, 3550):
            gathered(world, numel)

    run(main, 2, heap_size=640 * KIB)


def test_a_serving_loop_runs_in_a_small_heap(run: Run) -> None:
    def main(world: sundog.World) -> int:
        chosen = random.Random(7)
        free, most = world._heap.free_bytes, 0
        for step in range(120):
            gathered(world, chosen.randrange(1, 300), step)
            most = max(most, len(sizes(world)))
        world.free_plans()
        assert world._heap.free_bytes == free  # nothing leaks
        return most

    found = run(main, 2, heap_size=96 * KIB)
    assert len(set(found)) == 1
    assert 10 < found[0] < 100


def test_the_least_recently_used_plans_go(run: Run) -> None:
    def main(world: sundog.World) -> list[int]:
        world.max_plans = 3
        for numel in (1, 2, 3, 1, 4):
            gathered(world, numel)
        return sizes(world)

    assert run(main, 2) == [[3, 1, 4]] * 2


def test_the_bound_is_a_knob_too(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setenv("SUNDOG_MAX_PLANS", "2")

    def main(world: sundog.World) -> list[int]:
        group = world.group([0, 1])
        assert world.max_plans == group.max_plans == 2
        with pytest.raises(ValueError, match="max_plans must be at least 1, got 0"):
            world.max_plans = 0
        for numel in (1, 2, 3):
            gathered(group, numel)
        return sizes(group)

    assert run(main, 2) == [[2, 3]] * 2


def test_ranks_evict_alike_though_each_used_others_last(run: Run) -> None:
    """Rank 0's order counts. Here the ranks' own orders are made to differ."""

    def main(world: sundog.World) -> list[int]:
        world.max_plans = 3
        for numel in (1, 2, 3):
            gathered(world, numel)
        if world.rank == 1:
            for call in world._plans:
                call.used = -call.used
        gathered(world, 4)
        world.barrier()  # where heaps that differ are found
        return sorted(sizes(world))

    assert run(main, 2) == [[2, 3, 4]] * 2


def test_plans_share_their_staging(run: Run) -> None:
    def main(world: sundog.World) -> list[int]:
        for step, numel in enumerate((100, 90, 10)):
            gathered(world, numel, step)
        return staging(world)

    assert run(main, 2) == [[1024]] * 2  # 2 x 100 x 4 bytes, rounded up


def test_staging_grows_and_the_smaller_plans_follow(run: Run) -> None:
    def main(world: sundog.World) -> list[int]:
        for step, numel in enumerate((10, 1000, 10, 5000, 10)):
            gathered(world, numel, step)
        return staging(world)

    (nbytes,) = run(main, 2)[0]
    assert 40_000 <= nbytes <= 50_000


def test_streams_have_their_own_staging(run: Run) -> None:
    def main(world: sundog.World) -> int:
        x = torch.arange(4, dtype=torch.int32, device=world.device)
        handle = world.all_gather(x, async_op=True)
        assert world.all_gather(x + 4).tolist() == [4, 5, 6, 7] * 2
        assert handle.wait().tolist() == [0, 1, 2, 3] * 2
        return len(staging(world))

    assert run(main, 2) == [2, 2]


def test_a_graph_keeps_its_plan_and_its_staging(run: Run) -> None:
    def main(world: sundog.World) -> None:
        world.max_plans = 2
        x = torch.zeros(5, dtype=torch.int32, device=world.device)
        out = torch.zeros(10, dtype=torch.int32, device=world.device)
        world.all_gather(x, out)
        with world.capture() as graph:
            world.all_gather(x, out)
        for step, numel in enumerate((7, 8, 9, 400, 6)):
            gathered(world, numel, step)
            x.fill_(100 * step + world.rank)
            out.zero_()
            graph.replay()
            assert out.tolist() == [100 * step] * 5 + [100 * step + 1] * 5
        assert 5 in sizes(world)
        assert len(staging(world)) == 2  # the graph has the addresses of the first one
        graph.free()
        gathered(world, 11)
        gathered(world, 12)
        assert 5 not in sizes(world)
        assert len(staging(world)) == 1

    run(main, 2)


def test_a_plan_stays_as_long_as_one_rank_has_a_graph_of_it(run: Run) -> None:
    """When a graph is collected is each rank's affair."""

    def main(world: sundog.World) -> list[bool]:
        world.max_plans = 1
        x, out = world.zeros((5,)), world.zeros((10,))
        world.all_gather(x, out)
        with world.capture() as graph:
            world.all_gather(x, out)
        if world.rank == 0:
            graph.free()
        gathered(world, 6)
        kept = [5 in sizes(world)]
        world.free_plans()
        kept.append(5 in sizes(world))
        graph.free()
        world.free_plans()
        return [*kept, 5 in sizes(world)]

    assert run(main, 2) == [[True, True, False]] * 2


def test_a_full_heap_evicts_before_it_refuses(run: Run) -> None:
    def main(world: sundog.World) -> None:
        gathered(world, 100)
        x = torch.ones(11_000, dtype=torch.int32, device=world.device)
        held = world.empty((1,))
        with pytest.raises(OutOfHeap, match=r"world\.free_plans"):
            world.empty((36_800,))  # of the user's own: not a place where ranks agree
        assert world.all_gather(x).sum().item() == 22_000
        with pytest.raises(OutOfHeap):
            world.all_gather(torch.cat([x, x, x]))
        world.barrier()
        assert sizes(world) == []
        assert staging(world) == []
        gathered(world, 100)
        world.free(held)

    run(main, 2, heap_size=144 * KIB)


def test_what_must_not_be_in_a_capture(run: Run) -> None:
    def main(world: sundog.World) -> None:
        with pytest.raises(CaptureError, match=r"world\.free_plans"), world.capture():
            world.free_plans()

    run(main, 2)


@pytest.mark.sim_only
def test_evicted_memory_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker sees no race between the kernels of plans that had the same memory in turn."""
    monkeypatch.setenv("SUNDOG_MAX_PLANS", "1")

    def main(world: sundog.World) -> None:
        for step in range(3):
            for numel in (3, 40):
                gathered(world, numel, step)
            world.all_reduce(torch.ones(5), algo="two_shot", async_op=True).wait()

    testing.check(main, 2, schedules=3)
