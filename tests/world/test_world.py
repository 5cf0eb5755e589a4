"""What a rank's function gets: ranks, symmetric tensors, meeting points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sundog
from sundog.errors import NotSymmetric, RankMismatch, WorldClosed

Run = Callable[..., list]
WORLDS = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("size", WORLDS)
def test_results_come_back_by_rank(run: Run, size: int) -> None:
    assert run(lambda world: (world.rank, world.size), size) == [(r, size) for r in range(size)]


def test_closures_are_functions_too(run: Run) -> None:
    offset = 17
    assert run(lambda world: world.rank + offset, 2) == [17, 18]


@pytest.mark.parametrize("size", WORLDS)
def test_exchange_gives_everybody_every_value(run: Run, size: int) -> None:
    def main(world: sundog.World) -> list[Any]:
        return [world.exchange((world.rank, round)) for round in range(3)]

    expected = [[(r, round) for r in range(size)] for round in range(3)]
    assert run(main, size) == [expected] * size


@pytest.mark.parametrize("src", [0, 2])
def test_broadcast_object(run: Run, src: int) -> None:
    def main(world: sundog.World) -> Any:
        mine = {"rank": world.rank, "list": [world.rank] * 3}
        got = world.broadcast_object(mine, src)
        got["list"].append(world.rank)  # a copy of its own: the others must not see this
        world.barrier()
        return got

    assert run(main, 3) == [{"rank": src, "list": [src] * 3 + [r]} for r in range(3)]


def test_barrier_holds_the_early(run: Run) -> None:
    """Each rank writes into the next one's memory; after the barrier all see it."""

    def main(world: sundog.World) -> list[int]:
        x = world.zeros((4,), torch.int64)
        seen = []
        for round in range(1, 4):
            world.barrier()
            world.peer(x, (world.rank + 1) % world.size).fill_(100 * round + world.rank)
            world.barrier()
            seen.append(int(x[3]))
        return seen

    for rank, seen in enumerate(run(main, 3)):
        assert seen == [100 * round + (rank - 1) % 3 for round in (1, 2, 3)]


DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8,
    torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype(run: Run, dtype: torch.dtype) -> None:
    def main(world: sundog.World) -> Any:
        x = world.empty((3, 5), dtype)
        like, zeros = world.empty_like(x), world.zeros_like(x)
        assert x.shape == like.shape == zeros.shape == (3, 5)
        assert x.dtype == like.dtype == zeros.dtype == dtype
        assert x.device.type == world.device.type
        return zeros.to(torch.complex64).abs().sum().item()

    assert run(main, 2) == [0.0, 0.0]


@pytest.mark.parametrize("shape", [0, 1, 7, (), (0,), (3, 0, 2), (5, 1, 3), [2, 2]], ids=str)
def test_any_shape(run: Run, shape: Any) -> None:
    def main(world: sundog.World) -> Any:
        before = world.empty(1)
        x = world.full(shape, 3.0)
        y = world.full(shape, 4.0)
        world.barrier()
        assert world.is_symmetric(x)
        peer = world.peer(x, world.size - 1)
        answer = tuple(x.shape), x.sum().item(), y.sum().item(), tuple(peer.shape)
        for each in (y, x, before):
            world.free(each)
        return answer

    expected = torch.empty(shape)
    want = tuple(expected.shape), 3.0 * expected.numel(), 4.0 * expected.numel()
    assert run(main, 2) == [(*want, want[0])] * 2


def test_full_randn_and_names(run: Run) -> None:
    def main(world: sundog.World) -> Any:
        torch.manual_seed(42 + world.rank)
        return world.full((3,), 7, torch.int32, name="f"), world.randn((1000,), name="r")

    results = run(main, 2)
    for full, _ in results:
        assert torch.equal(full.cpu(), torch.full((3,), 7, dtype=torch.int32))
    assert not torch.equal(results[0][1].cpu(), results[1][1].cpu())


def test_fresh_memory_is_poison(run: Run, backend: str) -> None:
    if backend not in ("sim", "shm"):
        pytest.skip("only the simulator poisons")

    def main(world: sundog.World) -> Any:
        x = world.full((100,), 5.0)
        world.free(x)
        floats, halves = world.empty((100,)), world.empty((100,), torch.bfloat16)
        ints = world.empty((100,), torch.int32)
        same = bool((ints == ints[0]).all())
        return floats.isnan().all().item(), halves.isnan().all().item(), same, ints[0].item()

    for floats, halves, same, value in run(main, 2):
        assert floats
        assert halves
        assert same
        assert abs(value) > 1_000_000


def test_allocation_is_local_and_equal(run: Run) -> None:
    """No rank waits for another in `empty`, and the offsets are equal."""

    def alone(world: sundog.World) -> None:
        if world.rank == 0:
            world.free(world.empty((5,)))
        world.exchange("rank 1 has come only now")

    def same(world: sundog.World) -> list[int]:
        first, *tensors = [world.empty((n,)) for n in (7, 5, 1000, 3)]
        world.barrier()
        return [t.data_ptr() - first.data_ptr() for t in tensors]

    run(alone, 2)
    results = run(same, 3)
    assert results[0] == results[1] == results[2]


def test_alignment(run: Run) -> None:
    def main(world: sundog.World) -> bool:
        return all(world.empty((n,), torch.int8).data_ptr() % 256 == 0 for n in (1, 3, 300, 7))

    assert run(main, 2) == [True, True]


def test_free_and_scope_give_memory_back(run: Run) -> None:
    def main(world: sundog.World) -> Any:
        free = world._heap.free_bytes
        with world.scope():
            a = world.empty((1000,))
            with world.scope():
                b = world.empty((10,))
                inner = world.is_symmetric(b)
            outer = world.is_symmetric(a), world.is_symmetric(b)
            world.free(a)  # by hand, inside the scope: not freed twice
            c = world.empty((1000,))
        freed = world.is_symmetric(c)
        kept = world.empty((4,))
        states = inner, outer, freed, world.is_symmetric(kept)
        world.free(kept)
        return free - world._heap.free_bytes, states

    assert run(main, 2) == [(0, (True, (True, False), False, True))] * 2


def test_a_freed_tensor_is_not_taken_for_an_ordinary_one(run: Run) -> None:
    """Its memory may be another tensor's: an op would read or write that one."""

    def main(world: sundog.World) -> None:
        kept = world.full((4,), 1.0)
        with world.scope():
            freed, part = world.full((64,), 1.0), world.full((8,), 1.0)[2:]
        for x in (freed, part):
            with pytest.raises(NotSymmetric, match=r"all_gather: x of shape .* has been freed"):
                world.all_gather(x)
        with pytest.raises(NotSymmetric, match=r"all_gather: out of shape \(64,\) was on the heap"):
            world.all_gather(kept.new_ones(64 // world.size), freed)
        assert world.all_gather(kept).tolist() == [1.0] * 4 * world.size

    run(main, 2)


def test_scope_frees_after_an_exception(run: Run) -> None:
    def main(world: sundog.World) -> int:
        free = world._heap.free_bytes

        def fail() -> None:
            with world.scope():
                world.empty((1000,))
                raise KeyError

        with pytest.raises(KeyError):
            fail()
        return free - world._heap.free_bytes

    assert run(main, 2) == [0, 0]


def test_is_symmetric_and_as_symmetric(run: Run) -> None:
    def main(world: sundog.World) -> Any:
        x = world.randn((6, 4))
        ordinary = torch.randn(6, 4, device=world.device)
        copy = world.as_symmetric(ordinary.t())
        return (
            world.is_symmetric(x),
            world.is_symmetric(x[2:, 1]),
            world.is_symmetric(ordinary),
            world.as_symmetric(x) is x,
            world.is_symmetric(copy),
            torch.equal(copy, ordinary.t()),
        )

    assert run(main, 2) == [(True, True, False, True, True, True)] * 2


def test_peer_is_a_view(run: Run) -> None:
    """Sliced, strided and transposed views too, for every pair of ranks, bitwise."""

    def main(world: sundog.World) -> Any:
        torch.manual_seed(world.rank)
        x = world.randn((9, 7), torch.float16)
        world.barrier()
        views = [x, x[3:], x[2:8:2, 1:6], x.t(), x[:, 3], x[4, 4]]
        return x.clone(), [[world.peer(v, r).clone() for v in views] for r in range(world.size)]

    results = run(main, 3)
    for _, seen in results:
        for rank, views in enumerate(seen):
            x = results[rank][0]
            expected = [x, x[3:], x[2:8:2, 1:6], x.t(), x[:, 3], x[4, 4]]
            for view, want in zip(views, expected, strict=True):
                assert torch.equal(view, want)


def test_a_closed_world_says_so(run: Run) -> None:
    worlds = []

    def main(world: sundog.World) -> str:
        worlds.append(world)
        with world:
            world.empty(3)
            world.barrier()
        world.close()  # closing twice is fine
        with pytest.raises(WorldClosed, match=r"sundog\.run or sundog\.init") as error:
            world.empty(3)
        for call in (world.barrier, world.synchronize, lambda: world.exchange(1)):
            with pytest.raises(WorldClosed):
                call()
        return str(error.value)

    assert all("closed" in text for text in run(main, 2))
    for world in worlds:  # on shm they live in other processes
        with pytest.raises(WorldClosed):
            world.empty(3)


def test_ranks_that_meet_in_different_calls(run: Run) -> None:
    def main(world: sundog.World) -> str:
        try:
            if world.rank == 1:
                world.broadcast_object("hello", src=1)
            else:
                world.barrier()
        except RankMismatch as error:
            return str(error)
        return ""

    for text in run(main, 3):
        assert "rank 0: barrier" in text
        assert "rank 1: broadcast_object" in text


def test_exception_in_a_rank_keeps_its_type_and_names_the_rank(run: Run) -> None:
    def main(world: sundog.World) -> None:
        world.barrier()
        if world.rank == 2:
            raise LookupError("shelf 17 is empty")
        world.barrier()

    with pytest.raises(LookupError, match="shelf 17 is empty") as error:
        run(main, 3)
    told = [*getattr(error.value, "__notes__", []), str(error.value.__cause__)]
    assert any("rank 2 of 3" in text for text in told)


def test_world_describes_itself(run: Run, backend: str) -> None:
    texts = run(repr, 2)
    assert texts == [f"World(rank={r}, size=2, backend={backend!r})" for r in range(2)]
