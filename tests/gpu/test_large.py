"""More than 2^31 elements for real: what the simulator shows by address arithmetic only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import sundog
from sundog.ops.load import find

pytestmark = [pytest.mark.gpu("virtual"), pytest.mark.alone]
MORE = (1 << 31) + 4099  # elements of a byte: the last ones lie beyond 2^31 and are no whole tile
EVEN = (1 << 30) + 2048
CHUNK = 1 << 29


@pytest.fixture(autouse=True)
def give_back() -> Iterator[None]:
    """Leave the GPU's memory to the processes of tests that follow: torch would keep it."""
    yield
    torch.cuda.empty_cache()


def filled(world: sundog.World, numel: int) -> torch.Tensor:
    generator = torch.Generator(world.device).manual_seed(world.rank)
    x = world.empty((numel,), torch.int8, "x")
    return x.random_(-99, 99, generator=generator)


def in_chunks(numel: int) -> list[slice]:
    return [slice(at, min(at + CHUNK, numel)) for at in range(0, numel, CHUNK)]


@pytest.mark.parametrize("algo", ["push", "pull", "partitioned", "gluon"])
def test_all_gather(algo: str) -> None:
    def main(world: sundog.World) -> bool:
        x = filled(world, MORE)
        out = world.zeros((2 * MORE,), torch.int8)
        world.all_gather(x, out, algo=algo)
        parts = [world.peer(x, rank) for rank in range(2)]
        return all(torch.equal(o, p) for o, p in zip(out.chunk(2), parts, strict=True))

    assert sundog.run(main, 2, "virtual", heap_size=4 * MORE) == [True, True]


def test_all_reduce() -> None:
    def main(world: sundog.World) -> bool:
        x = filled(world, MORE)
        out = world.zeros((MORE,), torch.int8)
        world.all_reduce(x, out=out, algo="two_shot")
        a, b = (world.peer(x, rank) for rank in range(2))
        return all(torch.equal(out[at], a[at] + b[at]) for at in in_chunks(MORE))

    assert sundog.run(main, 2, "virtual", heap_size=3 * MORE) == [True, True]


@pytest.mark.parametrize("op", ["reduce_scatter", "all_to_all.push", "all_to_all.mail"])
def test_slices_behind_2_31(op: str) -> None:
    """Rank 2 of 3 has its slice, or part, from 2^31 on."""

    def main(world: sundog.World) -> bool:
        name, _, algo = op.partition(".")
        x = filled(world, 3 * EVEN)
        out = world.zeros((EVEN if name == "reduce_scatter" else 3 * EVEN,), torch.int8)
        getattr(world, name)(x, out=out, algo=algo or "auto")
        slices = [world.peer(x, rank).chunk(3)[world.rank] for rank in range(3)]
        if name == "reduce_scatter":
            a, b, c = slices
            return all(torch.equal(out[at], a[at] + b[at] + c[at]) for at in in_chunks(EVEN))
        return all(torch.equal(o, part) for o, part in zip(out.chunk(3), slices, strict=True))

    assert find(op).Problem  # named correctly
    assert sundog.run(main, 3, "virtual", heap_size=7 * EVEN) == [True] * 3
