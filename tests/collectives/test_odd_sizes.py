"""Sizes and addresses that are not multiples of 16 bytes: the same bits, and wide accesses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sundog
from sundog.collectives import _reduce
from sundog.ops import load as loading
from sundog.ops import op as ops
from sundog.tools import isa

from .moving import SMALL, part, same
from .reducing import random

Run = Callable[..., list]
SIZE = 3
ODD = (1, 7, 17, 509)  # less than a chunk, some chunks, several tiles
DTYPES = (torch.bfloat16, torch.float32, torch.int8, torch.float64)
SHIFTS = ((0, 0), (1, 0), (5, 5), (2, 7))  # elements before x and before out
FEW = _reduce.Config(256, 3, 1)


def turned(dtype: torch.dtype) -> list[tuple[int, int]]:
    """The shifts, with other sizes for every dtype."""
    first = DTYPES.index(dtype)
    return [*SHIFTS[first:], *SHIFTS[:first]]


def placed(world: sundog.World, numel: int, shift: int, dtype: torch.dtype) -> torch.Tensor:
    """A symmetric tensor, `shift` elements into its allocation."""
    return world.empty((shift + numel,), dtype)[shift:]


def poisoned(world: sundog.World, numel: int, shift: int, dtype: torch.dtype) -> torch.Tensor:
    """One that holds 77 up to eight elements after its end, for a result."""
    return placed(world, numel + 8, shift, dtype).fill_(77)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(run: Run, dtype: torch.dtype) -> None:
    """All of them, in place too, from and to any address; nothing is written beside the result."""

    def main(world: sundog.World) -> None:
        for numel, (before_x, before_out) in zip(ODD, turned(dtype), strict=True):
            parts = [random(rank, SIZE * numel, dtype) for rank in range(SIZE)]
            wanted = _reduce.reference("sum", parts)
            x = placed(world, SIZE * numel, before_x, dtype).copy_(parts[world.rank])
            out = poisoned(world, SIZE * numel, before_out, dtype)
            for algo in ("one_shot", "two_shot_pull", "two_shot"):
                module = loading.find(f"all_reduce.{algo}")
                world.all_reduce(x, out=out[:-8], algo=algo, config=module.Config(256, 3, 1))
                assert same(out[:-8], wanted), (algo, numel, before_x, before_out)
                assert (out[-8:] == 77).all()
            world.reduce(x, 1, out=out[:-8] if world.rank == 1 else None, config=FEW)
            assert same(out[:-8], wanted)
            few = poisoned(world, numel, before_out, dtype)
            world.reduce_scatter(x, out=few[:-8], config=FEW)
            mine = wanted[world.rank * numel :][:numel]
            assert same(few[:-8], mine), (numel, before_x, before_out)
            assert (few[-8:] == 77).all()
            world.all_reduce(x, out=x, algo="two_shot", config=module.Config(256, 3, 1))
            assert same(x, wanted)
            world.barrier()

    run(main, SIZE)


@pytest.mark.parametrize("dtype", DTYPES)
def test_moves(run: Run, dtype: torch.dtype) -> None:
    """Push and pull, from and to any address; nothing is written beside the result."""

    def main(world: sundog.World) -> None:
        for numel, (before_x, before_out) in zip(ODD, turned(dtype), strict=True):
            parts = [part(rank, SIZE * numel, dtype) for rank in range(SIZE)]
            x = placed(world, SIZE * numel, before_x, dtype).copy_(parts[world.rank])
            out = poisoned(world, SIZE * numel, before_out, dtype)
            for algo in ("push", "pull", "partitioned", "gluon"):
                config: Any = SMALL
                if algo == "gluon":
                    config = loading.find("all_gather.gluon").Config(1, 512, 2, 1, 32)
                world.all_gather(x[:numel], out[:-8], algo=algo, config=config)
                assert same(out[:-8], torch.cat([p[:numel] for p in parts])), (algo, numel)
                assert (out[-8:] == 77).all()
            splits = torch.cat([p.split(numel)[world.rank] for p in parts])
            for algo in ("push", "pull"):
                world.all_to_all(x, out[:-8].fill_(77), algo=algo, config=SMALL)
                assert same(out[:-8], splits), (algo, numel, before_x, before_out)
            world.barrier()

    run(main, SIZE)


LARGE = [  # not the quantised ones: they store elements where they lie
    op
    for op in ops.OPS
    if hasattr(loading.find(op).cases(2)[0], "numel")
    and not hasattr(loading.find(op).cases(2)[0], "wire")
    and getattr(loading.find(op), "LARGEST", 1 << 40) > 64 << 10
]


@pytest.mark.compat
@pytest.mark.sim_only
@pytest.mark.parametrize("op", LARGE)
def test_the_main_loop_is_wide_at_any_size(op: str) -> None:
    """A prime number of elements costs a narrow access or two per tensor, outside the loops."""
    for target, numel in (("sm_90", 786_433), ("gfx942", 1_000_003)):
        changes = {"dtype": torch.bfloat16, "numel": numel}
        for kernel in isa.inspect(op, (target,), problem=changes, world=2):
            assert not kernel.marks
            wide = [site for site in kernel.sites if site.role == "wide"]
            assert {site.kind for site in wide} == {"load", "store"}
            assert all(min(site.widths) == 16 for site in wide)
            narrow = [n for moves in (kernel.loads, kernel.stores) for n in (moves.get(2, 0),)]
            assert max(narrow) <= 8


@pytest.mark.sim_only
@pytest.mark.parametrize("op", [op for op in LARGE if op != "all_reduce.atomic"])  # adds no bytes
def test_bytes_on_eight_ranks_are_wide_and_not_spilled(op: str) -> None:
    """One byte an element, the most addresses, the largest tiles: the hardest to keep wide."""
    changes = {"dtype": torch.uint8, "numel": 1 << 24}
    for kernel in isa.inspect(op, ("sm_90",), problem=changes, world=8):
        assert not kernel.marks
        assert all(min(site.widths) == 16 for site in kernel.sites if site.role == "wide")
