"""Groups: worlds of some of the ranks, with heaps of their own inside the world's heap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog.device import memory, signal
from sundog.errors import HeapDivergence, NotSymmetric, RankMismatch, WorldClosed
from sundog.ops.op import Plan
from sundog.tools.check.schedules import check

Run = Callable[..., list]


@triton.jit
def gather(x, out, flags, epoch, ctx, SIZE: tl.constexpr, LANES: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, N)
    rank = tl.load(ctx)
    for peer in range(SIZE):
        memory.put(out + rank * N + at, x + at, peer, ctx)
    signal.barrier_ranks(flags, epoch, ctx, LANES)


def all_gather(world: sundog.World, base: int) -> torch.Tensor:
    """Each rank's random row, gathered by one kernel."""
    torch.manual_seed(base)
    x = world.empty((16,))
    x.copy_(torch.randn(16))
    out = world.zeros((world.size, 16))
    flags = world.signals(world.size, "flags")
    world.barrier()
    lanes = triton.next_power_of_2(world.size)
    gather[(1,)](x, out, flags, 1, world.ctx, SIZE=world.size, LANES=lanes, N=16)
    world.barrier()
    return out.clone()


def row(base: int) -> torch.Tensor:
    torch.manual_seed(base)
    return torch.randn(16)


@pytest.mark.parametrize("members", [[0], [1, 3], [3, 0, 2], [0, 1, 2, 3]], ids=str)
def test_kernels_talk_inside_a_group(run: Run, members: list[int]) -> None:
    def main(world: sundog.World) -> Any:
        group = world.group(members, heap_size=1 << 16)
        if group is None:
            return None
        return group.rank, group.size, all_gather(group, world.rank), group.exchange(world.rank)

    results = run(main, 4)
    expected = torch.stack([row(rank) for rank in members])
    for rank, result in enumerate(results):
        if rank not in members:
            assert result is None
            continue
        place, size, out, named = result
        assert (place, size, named) == (members.index(rank), len(members), members)
        assert torch.equal(out.cpu(), expected)


def test_disjoint_groups_work_at_the_same_time(run: Run) -> None:
    def main(world: sundog.World) -> Any:
        low, high = world.group([0, 1], 1 << 16), world.group([2, 3], 1 << 16)
        group = low or high
        assert group is not None
        inside = all_gather(group, world.rank)
        return inside, all_gather(world, world.rank)

    results = run(main, 4)
    for rank, (inside, everyone) in enumerate(results):
        pair = [0, 1] if rank < 2 else [2, 3]
        assert torch.equal(inside.cpu(), torch.stack([row(r) for r in pair]))
        assert torch.equal(everyone.cpu(), torch.stack([row(r) for r in range(4)]))


def test_overlapping_groups(run: Run) -> None:
    def main(world: sundog.World) -> Any:
        groups = [world.group(ranks, 1 << 16) for ranks in ([0, 1], [1, 2], [2, 0])]
        return [all_gather(g, world.rank) if g is not None else None for g in groups]

    for rank, results in enumerate(run(main, 3)):
        for ranks, out in zip(([0, 1], [1, 2], [2, 0]), results, strict=True):
            assert (out is not None) == (rank in ranks)
            if out is not None:
                assert torch.equal(out.cpu(), torch.stack([row(r) for r in ranks]))


def test_a_group_of_a_group(run: Run) -> None:
    def main(world: sundog.World) -> Any:
        outer = world.group([3, 2, 1], 1 << 18)
        inner = outer.group([2, 0], 1 << 16) if outer is not None else None
        return None if inner is None else all_gather(inner, world.rank)

    results = run(main, 4)
    for rank in (1, 3):  # ranks 2 and 0 of the outer group
        assert torch.equal(results[rank].cpu(), torch.stack([row(1), row(3)]))
    assert results[0] is None
    assert results[2] is None


def test_members_allocate_without_the_others(run: Run) -> None:
    def main(world: sundog.World) -> Any:
        first = world.empty((7,))
        group = world.group([0, 2], 1 << 16)
        if group is not None:
            group.empty((100,))
            group.barrier()
        x = world.empty((10,))
        world.barrier()  # no divergence
        return x.data_ptr() - first.data_ptr()

    offsets = run(main, 3)
    assert len(set(offsets)) == 1


def test_divergence_inside_a_group(run: Run) -> None:
    def main(world: sundog.World) -> str:
        group = world.group([1, 2], 1 << 16)
        if group is not None:
            group.empty((3 + group.rank,), name="odd")
            try:
                group.barrier()
            except HeapDivergence as error:
                return str(error)
        return ""

    texts = run(main, 3)
    assert texts[0] == ""
    for text in texts[1:]:
        assert "rank 1: alloc of 12 bytes (odd)" in text
        assert "rank 2: alloc of 16 bytes (odd)" in text


def test_a_groups_tensor_is_not_the_worlds(run: Run) -> None:
    def main(world: sundog.World) -> Any:
        group = world.group([0, 1], 1 << 16)
        assert group is not None
        ours, theirs = world.empty((4,)), group.empty((4,))
        for other, tensor in ((world, theirs), (group, ours)):
            for call in (other.free, lambda t, other=other: other.peer(t, 0)):
                with pytest.raises(NotSymmetric, match="another world"):
                    call(tensor)
        group.free(theirs)
        world.free(ours)
        return world.is_symmetric(theirs), group.is_symmetric(ours)

    assert run(main, 2) == [(False, False)] * 2


def test_a_group_ends_with_its_scope(run: Run) -> None:
    """Its memory is the world's again, and using it says so. Eight eighths fit only like that."""

    def main(world: sundog.World) -> Any:
        free = world._heap.free_bytes
        for base in range(12):
            with world.scope():
                group = world.group([0, 2])
                x = row(base).to(world.device)
                if group is not None:
                    all_gather(group, base)
                    group.all_reduce(x)  # makes a plan, which the next such call finds
                    group.barrier()
            if group is not None:
                with pytest.raises(WorldClosed, match="scope"):
                    group.barrier()
                with pytest.raises(WorldClosed, match="scope"):
                    group.all_reduce(x)
        return free - world._heap.free_bytes

    assert run(main, 3) == [0, 0, 0]


def test_a_scope_ends_when_its_groups_kernels_have(run: Run) -> None:
    """Their plans' memory is the world's next tensor, and a peer may still read it."""

    def main(world: sundog.World) -> list[float]:
        x = torch.full((1000,), world.rank + 1.0, device=world.device, requires_grad=True)
        sums = []
        for _ in range(3):
            with world.scope():
                group = world.group([2, 0])
                result = None if group is None else group.all_reduce(x)
            next_one = world.full((200_000,), -1.0)  # over all that the group had
            sums.append(-1.0 if result is None else result.detach().unique().item())
            world.free(next_one)
        return sums

    assert run(main, 3) == [[4.0] * 3, [-1.0] * 3, [4.0] * 3]


def test_closing_a_group_leaves_the_world_open(run: Run) -> None:
    def main(world: sundog.World) -> torch.Tensor:
        group = world.group([0, 1], 1 << 16)
        assert group is not None
        plan = Plan(group, None, None, (), lambda: None)
        group.close()
        group.close()
        with pytest.raises(WorldClosed):
            group.empty(3)
        with pytest.raises(WorldClosed):
            plan()
        with pytest.raises(WorldClosed):
            group.send(row(0), 1 - group.rank)
        return all_gather(world, world.rank)

    for out in run(main, 2):
        assert torch.equal(out.cpu(), torch.stack([row(0), row(1)]))


@pytest.mark.parametrize("members", [[], [0, 0], [0, 3], [-1]], ids=str)
def test_bad_members(run: Run, members: list[int]) -> None:
    def main(world: sundog.World) -> str:
        with pytest.raises(ValueError, match=r"rank|member") as error:
            world.group(members)
        return str(error.value)

    for text in run(main, 3):
        assert str(members[-1] if members else []) in text


@pytest.mark.parametrize("nbytes", [-1, 1e6], ids=str)
def test_bad_heap_sizes(run: Run, nbytes: Any) -> None:
    def main(world: sundog.World) -> int:
        free = world._heap.free_bytes
        with pytest.raises(ValueError, match=f"heap_size must be >= 0 bytes .* got {nbytes}"):
            world.group([0, 1], nbytes)
        return free - world._heap.free_bytes

    assert run(main, 2) == [0, 0]


def test_ranks_name_different_members(run: Run) -> None:
    def main(world: sundog.World) -> str:
        with pytest.raises(RankMismatch) as error:
            world.group([0, 1] if world.rank == 0 else [1, 0])
        return str(error.value)

    for text in run(main, 2):
        assert "rank 0: (0, 1)" in text
        assert "rank 1: (1, 0)" in text


@pytest.mark.sim_only
def test_a_member_may_be_sent_to_at_once() -> None:
    """A group is there when all of its members have their flags: the checker sees if it is not."""

    def main(world: sundog.World) -> None:
        group = world.group([0, 1])
        assert group is not None
        x = torch.full((3,), float(world.rank))
        group.send(x, 1) if world.rank == 0 else group.recv(x, 0)
        assert x.eq(0).all()

    report = check(main, 2, schedules=2, heap_size=8 << 20)
    assert not report.findings, report
