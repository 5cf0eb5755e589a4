"""All-to-all: equal and unequal parts against torch and gloo, byte for byte."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sundog
from sundog import testing
from sundog.backends.sim import Sim
from sundog.collectives._copy import Config
from sundog.errors import RankMismatch, WaitTimeout
from sundog.machine.launcher import current_machine
from sundog.ops.load import find
from sundog.tools._subject import exercise

from .gloo import gloo
from .moving import DTYPES, joined, part, same

Run = Callable[..., list]
Matrix = list[list[int]]  # rows from rank to rank


def small(size: int, parts: int = 1) -> Config:
    return Config(256, parts * size, 1)


def received(parts: list[torch.Tensor], splits: Matrix, rank: int, row: int = 1) -> torch.Tensor:
    """What a rank gets, of all ranks' tensors."""
    dtype = parts[0].dtype
    found = []
    for each, sizes in zip(parts, splits, strict=True):
        nbytes = [row * n * dtype.itemsize for n in sizes]
        found.append(each.reshape(-1).view(torch.uint8).split(nbytes)[rank].view(dtype))
    return joined(found)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_equal_parts(run: Run, size: int) -> None:
    cases = [(0, torch.int8), (1, torch.bool), (37, torch.int16), (128, torch.float32)]
    cases = cases if size < 8 else cases[2:]

    def main(world: sundog.World) -> list[torch.Tensor]:
        found = []
        for numel, dtype in cases:
            x = part(world.rank, size * numel, dtype).to(world.device)
            for algo in ("push", "mail"):
                found.append(world.all_to_all(x, algo=algo, config=small(size, 2)).cpu())
        return found

    for rank, result in enumerate(run(main, size)):
        for place, out in enumerate(result):
            numel, dtype = cases[place // 2]
            parts = [part(each, size * numel, dtype) for each in range(size)]
            assert same(out, received(parts, [[numel] * size] * size, rank)), (place, numel)


def test_every_dtype_by_default(run: Run) -> None:
    def main(world: sundog.World) -> list[torch.Tensor]:
        parts = [part(world.rank, 3 * 333, dtype).view(9, 111) for dtype in DTYPES]
        out = [world.all_to_all(each.to(world.device)) for each in parts]
        assert all(each.shape == (9, 111) for each in out)
        return [each.cpu() for each in out]

    for rank, result in enumerate(run(main, 3)):
        for out, dtype in zip(result, DTYPES, strict=True):
            parts = [part(each, 999, dtype) for each in range(3)]
            assert same(out, received(parts, [[333] * 3] * 3, rank)), dtype


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_unequal_parts(run: Run, size: int) -> None:
    """Twice with other splits: empty ones, and such as take many chunks."""
    chance = random.Random(size)
    sizes = [0, 0, 1, 5, 37, 700] if size < 8 else [0, 1, 37]
    rounds = [[[chance.choice(sizes) for _ in range(size)] for _ in range(size)] for _ in range(2)]
    dtypes = (torch.float8_e4m3fn, torch.float32)

    def main(world: sundog.World) -> list[torch.Tensor]:
        found = []
        for splits, dtype in zip(rounds, dtypes, strict=True):
            sent, got = splits[world.rank], [row[world.rank] for row in splits]
            x = part(world.rank, 3 * sum(sent), dtype).view(-1, 3).to(world.device)
            out = world.all_to_all(x, None, sent, got, config=small(size, 1 + size % 2))
            assert out.shape == (sum(got), 3)
            found.append(out.cpu())
        return found

    for rank, result in enumerate(run(main, size)):
        for out, splits, dtype in zip(result, rounds, dtypes, strict=True):
            parts = [part(r, 3 * sum(row), dtype) for r, row in enumerate(splits)]
            assert same(out, received(parts, splits, rank, row=3)), (splits, dtype)


def test_gloo_gives_the_same(run: Run) -> None:
    splits = [[4, 0, 2], [1, 3, 5], [0, 0, 0]]  # rank 2 sends nothing, and gets something

    def theirs(group: Any) -> list[torch.Tensor]:
        sent, got = splits[group.rank], [row[group.rank] for row in splits]
        equal, unequal = torch.empty(6, 5), torch.empty(sum(got), 5)
        dist.all_to_all_single(equal, part(group.rank, 30, torch.float32).view(6, 5))
        x = part(group.rank, 5 * sum(sent), torch.float32).view(-1, 5)
        dist.all_to_all_single(unequal, x, got, sent)
        return [equal, unequal]

    def ours(world: sundog.World) -> list[torch.Tensor]:
        sent, got = splits[world.rank], [row[world.rank] for row in splits]
        x = part(world.rank, 30, torch.float32).view(6, 5).to(world.device)
        y = part(world.rank, 5 * sum(sent), torch.float32).view(-1, 5).to(world.device)
        out = torch.empty((sum(got), 5), device=world.device)
        assert world.all_to_all(y, out, in_splits=sent, out_splits=got) is out
        return [world.all_to_all(x).cpu(), out.cpu()]

    for mine, torchs in zip(run(ours, 3), gloo(theirs, 3), strict=True):
        for out, want in zip(mine, torchs, strict=True):
            assert out.shape == want.shape
            assert same(out, want)


def test_splits_that_change_where_a_rank_cannot_see_it(run: Run) -> None:
    """Rank 0 does the same twice, the others do not: nobody may take its plan for theirs."""
    rounds = [[[1, 1, 1], [1, 5, 2], [1, 3, 4]], [[1, 1, 1], [1, 2, 9], [1, 0, 6]]]

    def main(world: sundog.World) -> list[torch.Tensor]:
        found = []
        for splits in rounds:
            sent, got = splits[world.rank], [row[world.rank] for row in splits]
            x = part(world.rank, sum(sent), torch.int32).to(world.device)
            found.append(world.all_to_all(x, None, sent, got, config=small(3)).cpu())
        return found

    for rank, result in enumerate(run(main, 3)):
        for out, splits in zip(result, rounds, strict=True):
            parts = [part(r, sum(row), torch.int32) for r, row in enumerate(splits)]
            assert same(out, received(parts, splits, rank))


def test_splits_that_do_not_match_are_named_at_once(run: Run) -> None:
    def main(world: sundog.World) -> None:
        got = [2, 2] if world.rank == 0 else [2, 3]
        text = "rank 1 sends 8 bytes to rank 1, which expects 12: in_splits.1. here must"
        with pytest.raises(RankMismatch, match=text):
            world.all_to_all(torch.zeros(4), None, [2, 2], got)

    run(main, 2)


@pytest.mark.sim_only
@pytest.mark.parametrize(("sent", "expected"), [(3, 2), (2, 3), (0, 1), (1, 0)])
def test_splits_that_do_not_match_later_are_named_by_the_kernel(sent: int, expected: int) -> None:
    """No hang, no wrong result: the receiver has both numbers."""

    def main(world: sundog.World) -> str:
        config = small(2)
        world.all_to_all(torch.zeros(4), None, [2, 2], [2, 2], config=config)
        mine = [2, sent] if world.rank == 0 else [2, 2]
        theirs = [2, 2] if world.rank == 0 else [expected, 2]
        try:
            world.all_to_all(torch.zeros(sum(mine)), None, mine, theirs, config=config)
            world.synchronize()
        except WaitTimeout as error:
            return str(error)
        finally:
            world.exchange(None)
        return ""

    quiet, told = sundog.run(main, 2, "sim", sim=Sim(expire=True))
    assert quiet == ""
    assert f"all_to_all.bytes[2] to reach {4 * expected}, saw {4 * sent}; rank 0 owes" in told


@pytest.mark.sim_only
@pytest.mark.parametrize("algo", ["push", "mail"])
def test_the_checker_finds_nothing(algo: str) -> None:
    testing.check(exercise(find(f"all_to_all.{algo}"), 2), 2, schedules=2)


def test_in_a_group_and_async(run: Run) -> None:
    splits = [[2, 3], [0, 4]]

    def main(world: sundog.World) -> Any:
        group = world.group([2, 0], heap_size=1 << 20)
        if group is None:
            return None
        sent, got = splits[group.rank], [row[group.rank] for row in splits]
        x = part(group.rank, sum(sent), torch.int16).to(world.device)
        y = part(group.rank, 6, torch.int16).to(world.device)
        handles = [
            group.all_to_all(x, None, sent, got, config=small(2), async_op=True),
            group.all_to_all(y, async_op=True),
        ]
        return [handle.wait().cpu() for handle in handles]

    results = run(main, 3)
    assert results[1] is None
    for rank, place in enumerate((2, 0)):
        parts = [part(r, sum(row), torch.int16) for r, row in enumerate(splits)]
        assert same(results[place][0], received(parts, splits, rank))
        equal = [part(r, 6, torch.int16) for r in range(2)]
        assert same(results[place][1], received(equal, [[3, 3], [3, 3]], rank))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"x": torch.zeros(5)}, "first dimension of x, 5, does not divide by 2 ranks; give in_splits"),
    ({"in_splits": [2, 2]}, "give in_splits and out_splits, or neither"),
    ({"in_splits": [1, 2], "out_splits": [2, 2]}, r"in_splits \[1, 2\] add up to 3, but x has 4"),
    ({"in_splits": [4], "out_splits": [2, 2]}, r"in_splits \[4\] must be 2 numbers, 0 or more"),
    ({"in_splits": [5, -1], "out_splits": [2, 2]}, r"in_splits \[5, -1\] must be 2 numbers"),
    (
        {"in_splits": [2, 2], "out_splits": [2, 2], "out": torch.zeros(5)},
        r"out_splits \[2, 2\] add up to 4, but out has 5 rows",
    ),
    ({"in_splits": [2, 2], "out_splits": [2, 2], "algo": "push"}, "'push' takes equal parts only"),
    ({"in_splits": [2, 2], "out_splits": [2, 2], "config": Config(programs=3)}, "3 do not divide"),
    (
        {"in_splits": [2, 2], "out_splits": [2, 2], "config": {}},
        "config {} is not a .*_copy.Config",
    ),
    ({"out": torch.zeros(4).half()}, "out has 4 elements of torch.float16, expected 4 of"),
    ({"out": torch.zeros(2, 2).t()}, "out of shape.*not contiguous"),
]


def test_bad_input(run: Run) -> None:
    def main(world: sundog.World) -> None:
        for change, text in BAD:
            given = {"x": torch.zeros(4), **change}
            given = {k: v.to(world.device) if torch.is_tensor(v) else v for k, v in given.items()}
            with pytest.raises(ValueError, match=text):
                world.all_to_all(**given)

    run(main, 2)


@pytest.mark.sim_only
def test_sizes_share_a_kernel() -> None:
    """How many programs share a peer follows the size; each number had a binary of its own."""

    def main(world: sundog.World) -> int:
        for parts in range(1, 9):
            world.all_to_all(world.zeros((2 * parts * 1024,), torch.int32))
        machine = current_machine()
        assert machine is not None
        return len(machine.loaded)

    assert sundog.run(main, 2, "sim") == [1, 1]
