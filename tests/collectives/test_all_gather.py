"""All-gather: every algorithm against torch and gloo, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sundog
from sundog import testing
from sundog.collectives._copy import Config
from sundog.errors import RankMismatch
from sundog.ops.load import find
from sundog.tools._subject import exercise
from sundog.tools.check.schedules import check

from .gloo import gloo
from .moving import DTYPES, SMALL, joined, part, same

Run = Callable[..., list]
ALGOS = ("push", "pull", "partitioned")
# 0, 1, primes, ends that are not a multiple of 16 bytes, exactly a tile, exactly all tiles and more
CASES = [
    (0, torch.float32), (1, torch.uint8), (37, torch.bfloat16), (211, torch.int8),
    (64, torch.float32), (1024, torch.int16), (1031, torch.float32),
]  # fmt: skip


def small(algo: str, size: int) -> Config:
    return Config(256, 2 * size, 1) if algo == "partitioned" else SMALL


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_algorithm_gives_torchs_answer(run: Run, size: int) -> None:
    cases = CASES if size < 8 else [CASES[2], CASES[-1]]

    def main(world: sundog.World) -> list[list[torch.Tensor]]:
        found = []
        for number, (numel, dtype) in enumerate(cases):
            x = part(100 * number + world.rank, numel, dtype).to(world.device)
            outs = [world.all_gather(x, algo=a, config=small(a, size)) for a in ALGOS]
            found.append([out.cpu() for out in outs])
        return found

    for result in run(main, size):
        for number, (numel, dtype) in enumerate(cases):
            want = joined([part(100 * number + rank, numel, dtype) for rank in range(size)])
            for algo, out in zip(ALGOS, result[number], strict=True):
                assert same(out, want), (algo, numel, dtype)


def test_every_dtype_by_default(run: Run) -> None:
    def main(world: sundog.World) -> list[torch.Tensor]:
        parts = [part(world.rank, 1001, dtype).to(world.device) for dtype in DTYPES]
        return [world.all_gather(each, algo=algo).cpu() for each in parts for algo in ALGOS]

    want = [joined([part(rank, 1001, dtype) for rank in range(3)]) for dtype in DTYPES]
    for result in run(main, 3):
        for place, out in enumerate(result):
            assert same(out, want[place // len(ALGOS)]), place


def test_gloo_gives_the_same(run: Run) -> None:
    dtypes = (torch.float32, torch.int64, torch.float16, torch.uint8)

    def theirs(group: Any) -> list[torch.Tensor]:
        outs = [torch.empty((12, 5), dtype=dtype) for dtype in dtypes]
        for out, dtype in zip(outs, dtypes, strict=True):
            dist.all_gather_into_tensor(out, part(group.rank, 20, dtype).view(4, 5))
        return outs

    def ours(world: sundog.World) -> list[torch.Tensor]:
        parts = [part(world.rank, 20, dtype).view(4, 5).to(world.device) for dtype in dtypes]
        return [world.all_gather(each).cpu() for each in parts]

    for mine, torchs in zip(run(ours, 3), gloo(theirs, 3), strict=True):
        for out, want in zip(mine, torchs, strict=True):
            assert out.shape == want.shape
            assert same(out, want)


@pytest.mark.parametrize("algo", ALGOS)
def test_tensors_that_start_anywhere(run: Run, algo: str) -> None:
    """Views at odd offsets, another one on every rank for what is not symmetric."""
    numel = 300

    def main(world: sundog.World) -> list[torch.Tensor]:
        found = []
        for shift in (1, 2, 7):
            ordinary = torch.zeros(numel + 40, dtype=torch.uint8, device=world.device)
            heap = world.zeros(3 * numel + 40, torch.uint8)
            far, near = shift + 3 * world.rank, shift  # only the near one is the same everywhere
            world.barrier()
            if algo == "pull":
                x = world.zeros(numel + 40, torch.uint8)[near : near + numel]
                out = torch.zeros(3 * numel + 40, dtype=torch.uint8, device=world.device)
                out = out[far : far + 3 * numel]
                world.barrier()
            else:
                x, out = ordinary[far : far + numel], heap[near : near + 3 * numel]
            x.copy_(part(world.rank, numel, torch.uint8))
            assert world.all_gather(x, out, algo=algo, config=small(algo, 3)) is out
            found.append(out.cpu())
        return found

    want = joined([part(rank, numel, torch.uint8) for rank in range(3)])
    for result in run(main, 3):
        assert all(same(out, want) for out in result)


def test_any_config_gives_the_same(run: Run) -> None:
    """Fewer programs than peers, more programs than tiles, tiles larger than the tensor."""
    configs = [Config(16, 1, 1), Config(64, 2, 1), Config(4096, 3, 2), Config(512, 6, 4)]

    def main(world: sundog.World) -> list[torch.Tensor]:
        x = part(world.rank, 99, torch.int16).to(world.device)
        return [world.all_gather(x, algo=a, config=c).cpu() for a in ALGOS for c in configs]

    want = joined([part(rank, 99, torch.int16) for rank in range(3)])
    for result in run(main, 3):
        assert all(same(out, want) for out in result)


def test_in_a_group(run: Run) -> None:
    def main(world: sundog.World) -> Any:
        group = world.group([3, 0, 2], heap_size=1 << 20)
        if group is None:
            return None
        x = part(world.rank, 90, torch.int32).to(world.device)
        return [group.all_gather(x, algo=a, config=small(a, 3)).cpu() for a in ALGOS]

    results = run(main, 4)
    want = joined([part(rank, 90, torch.int32) for rank in (3, 0, 2)])
    assert results[1] is None
    for rank in (0, 2, 3):
        assert all(same(out, want) for out in results[rank])


@pytest.mark.sim_only
@pytest.mark.parametrize("algo", ALGOS)
def test_the_checker_finds_nothing(algo: str) -> None:
    testing.check(exercise(find(f"all_gather.{algo}"), 2), 2, schedules=2)


@pytest.mark.sim_only
def test_an_async_gather_that_nobody_waited_for_is_a_race() -> None:
    def main(world: sundog.World, waits: bool) -> None:
        x = part(world.rank, 40, torch.int32)
        out = world.empty((80,), torch.int32)
        world.barrier()
        handle = world.all_gather(x, out, async_op=True)
        if waits:
            assert handle.wait() is out
        out.zero_()
        handle.wait()

    testing.check(lambda world: main(world, True), 2, schedules=4)
    found = check(lambda world: main(world, False), 2, schedules=4).findings
    assert {finding.kind for finding in found} == {"race"}


@pytest.mark.sim_only
def test_two_streams_have_plans_of_their_own() -> None:
    """The same call on two streams at once: neither sees the other's flags."""

    def main(world: sundog.World) -> list[torch.Tensor]:
        x = [part(10 * n + world.rank, 70, torch.int16) for n in range(2)]
        handle = world.all_gather(x[0], async_op=True)
        now = world.all_gather(x[1])
        return [handle.wait().clone(), now]

    report = testing.check(main, 2, schedules=6)
    for result in report.results:
        for n, out in enumerate(result):
            assert same(out, joined([part(10 * n + rank, 70, torch.int16) for rank in range(2)]))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"x": [1.0]}, "x is a list, expected a tensor"),
    ({"out": torch.zeros(7)}, "out has 7 elements of torch.float32, expected 8"),
    ({"out": torch.zeros(8, dtype=torch.float64)}, "8 elements of torch.float64"),
    ({"out": torch.zeros(2, 4).t()}, "out of shape.*not contiguous"),
    ({"algo": "best"}, "algo 'best' is not known; there are: auto, push, pull, partitioned"),
    ({"algo": "push", "config": Config(block=48)}, "block 48 is not a power of two"),
    ({"algo": "pull", "config": Config(programs=0)}, "programs 0: at least one"),
    ({"config": Config(num_warps=3)}, "num_warps 3"),
    ({"algo": "partitioned", "config": Config(programs=3)}, "3 do not divide among 2 peers"),
    ({"algo": "push", "config": {"block": 64}}, "is not a Config of one of its algorithms"),
    ({"algo": "push", "config": 64}, "64 is not a sundog.collectives._copy.Config, which"),
    ({"config": 64}, "no algorithm takes.* with 64: push: its config is a sundog.collectives"),
]


def test_bad_input(run: Run) -> None:
    def main(world: sundog.World) -> None:
        x, own = torch.zeros(4, device=world.device), world.device
        world.device = torch.device("meta")
        with pytest.raises(ValueError, match=f"x is on {own}, but this rank is on meta; move it"):
            world.all_gather(x)
        world.device = own
        with pytest.raises(ValueError, match="out is on the meta device, without data"):
            world.all_gather(x, torch.zeros(8, device="meta"))
        for change, text in BAD:
            given = {"x": torch.zeros(4), **change}
            given = {k: v.to(world.device) if torch.is_tensor(v) else v for k, v in given.items()}
            with pytest.raises(ValueError, match=text):
                world.all_gather(**given)

    run(main, 2)


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"x": torch.zeros(5)}, ["numel=4", "numel=5"]),
        ({"x": torch.zeros(4).half()}, ["torch.float32", "torch.float16"]),
        ({"algo": "pull"}, ["push", "pull"]),
        ({"config": Config(512)}, ["block=256", "block=512"]),
        ({"algo": "best"}, ["refused: .*'best' is not known"]),
    ],
)
def test_ranks_that_ask_for_different_things_are_named(
    run: Run, change: dict[str, Any], texts: list[str]
) -> None:
    def main(world: sundog.World) -> None:
        given: dict[str, Any] = {"x": torch.zeros(4), "algo": "push", "config": Config(256)}
        given |= change if world.rank else {}
        x = given.pop("x").to(world.device)
        with pytest.raises(RankMismatch) as error:
            world.all_gather(x, **given)
        for text in texts:
            assert error.match(text)

    run(main, 2)
