"""Hostile memory: bounds, freed memory, poison; addresses beyond 32 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog.errors import BadAccess
from sundog.machine.regions import Memory, Region
from sundog.world.tensors import poison_tensor

from .launching import Run, launch, same

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("error::RuntimeWarning")]


@triton.jit
def load_kernel(x_ptr, out_ptr, first, n, N: tl.constexpr):
    at = first + tl.arange(0, N)
    tl.store(out_ptr + tl.arange(0, N), tl.load(x_ptr + at, mask=at < n))  # load here


@triton.jit
def store_kernel(x_ptr, first, n, N: tl.constexpr):
    at = first + tl.arange(0, N)
    tl.store(x_ptr + at, at, mask=at < n)


@triton.jit
def atomic_kernel(x_ptr, first):
    tl.atomic_add(x_ptr + first, 1)


def simulate(main: Callable[[sundog.World], Any], size: int = 1) -> list:
    return sundog.run(main, size, backend="sim")


def bad_access(main: Callable[[sundog.World], Any], size: int = 1) -> str:
    with pytest.raises(BadAccess) as caught:
        simulate(main, size)
    return str(caught.value)


@pytest.mark.sim_only
def test_a_load_past_the_end_is_named() -> None:
    def main(world: sundog.World) -> None:
        x = world.zeros((13,), torch.int32, name="things")
        if world.rank == 1:
            load_kernel[(1,)](x, torch.zeros(16, dtype=torch.int32), 0, 15, N=16)

    text = bad_access(main, 2)
    source = load_kernel.raw_src
    line = load_kernel.starting_line_number + next(i for i, s in enumerate(source) if "here" in s)
    assert (
        f"rank 1 program (0, 0, 0) of load_kernel at tests/interpreter/test_memory.py:{line}"
        in text
    )
    assert "load of 4 bytes outside any live allocation" in text
    assert "4 bytes past the end of things of rank 1 (13 elements of 4 bytes)" in text


@pytest.mark.sim_only
def test_one_element_too_many_after_all_the_right_ones() -> None:
    def main(world: sundog.World) -> None:
        x = world.zeros((13,), torch.int32, name="x")
        for first in range(14):
            store_kernel[(1,)](x, first, 99, N=1)

    assert "4 bytes past the end of x of rank 0" in bad_access(main)


@triton.jit
def indirect_kernel(table, out, other):
    tl.store(out, tl.load(tl.load(table).to(tl.pointer_type(tl.float32))))


@pytest.mark.sim_only
def test_a_tensor_that_is_reached_by_its_address() -> None:
    x = torch.full((1 << 20,), 3.0)
    table, out = torch.tensor([x.data_ptr() + (1 << 21)]), torch.zeros(1)

    def main(world: sundog.World, other: torch.Tensor | None = None) -> float:
        indirect_kernel[(1,)](table, out, other)
        return float(out.item())

    assert "must be an argument of the launch too" in bad_access(main)
    assert simulate(lambda world: main(world, x)) == [3.0]


@pytest.mark.sim_only
def test_a_store_before_the_start_is_named() -> None:
    def main(world: sundog.World) -> None:
        x = torch.zeros(8, dtype=torch.int64)
        store_kernel[(1,)](x, -3, 8, N=4)

    text = bad_access(main)
    assert "store of 8 bytes" in text
    assert "24 bytes before x_ptr" in text


@pytest.mark.sim_only
def test_freed_memory_is_named() -> None:
    def main(world: sundog.World) -> None:
        world.zeros((4,), name="before")
        x = world.zeros((16,), torch.int32, name="gone")
        world.zeros((4,), name="behind")
        world.free(x)
        atomic_kernel[(1,)](x, 5)

    text = bad_access(main)
    assert "atomic of 4 bytes in freed memory: gone[5] of rank 0 was freed" in text


@pytest.mark.sim_only
def test_between_two_allocations_is_nothing() -> None:
    def main(world: sundog.World) -> None:
        x, y = world.zeros((64,), name="x"), world.zeros((64,), name="y")
        assert y.data_ptr() - x.data_ptr() > 256  # one has exactly 256 bytes
        load_kernel[(1,)](x, torch.zeros(2), 64, 66, N=2)

    assert "4 bytes past the end of x" in bad_access(main)


@triton.jit
def two_kernel(x_ptr, distance, out_ptr, N: tl.constexpr):
    """Half of the lanes in one allocation, half in another."""
    at = tl.arange(0, N)
    offset = tl.where(at < N // 2, at, at - N // 2 + distance)
    tl.store(out_ptr + at, tl.load(x_ptr + offset))


@pytest.mark.sim_only
@pytest.mark.parametrize("extra", [0, 1])
def test_one_access_in_two_allocations(extra: int) -> None:
    def main(world: sundog.World) -> list[float]:
        x, y = world.full((8,), 1.0, name="x"), world.full((8,), 2.0, name="y")
        out = torch.zeros(16)
        two_kernel[(1,)](x, (y.data_ptr() - x.data_ptr()) // 4 + extra, out, N=16)
        return out.tolist()

    if extra:
        assert "4 bytes past the end of y" in bad_access(main)
    else:
        assert simulate(main) == [[1.0] * 8 + [2.0] * 8]


@pytest.mark.sim_only
def test_lanes_that_are_masked_off_are_not_checked() -> None:
    def main(world: sundog.World) -> list[int]:
        x = world.zeros((5,), torch.int32)
        store_kernel[(1,)](x, 0, 5, N=1024)
        store_kernel[(1,)](x, 2**30, 5, N=8)
        return x.tolist()

    assert simulate(main) == [[0, 1, 2, 3, 4]]


@pytest.mark.sim_only
def test_a_view_may_reach_its_whole_storage_but_no_further() -> None:
    def main(world: sundog.World, first: int) -> list[int]:
        whole = torch.arange(20, dtype=torch.int32)
        out = torch.zeros(4, dtype=torch.int32)
        load_kernel[(1,)](whole[8:12], out, first, first + 4, N=4)
        return out.tolist()

    assert simulate(lambda world: main(world, -8)) == [[0, 1, 2, 3]]
    assert simulate(lambda world: main(world, 8)) == [[16, 17, 18, 19]]
    assert "past the end of x_ptr" in bad_access(lambda world: main(world, 9))


@pytest.mark.sim_only
def test_an_ordinary_tensor_is_known_only_while_its_kernels_run() -> None:
    def main(world: sundog.World) -> None:
        x = torch.zeros(4, dtype=torch.int64)
        atomic_kernel[(1,)](x, 0)
        world.synchronize()
        distance = (x.data_ptr() - world.ctx.data_ptr()) // 8
        atomic_kernel[(1,)](world.ctx, distance)

    assert "outside any live allocation" in bad_access(main)


def test_regions_are_found_by_address() -> None:
    memory = Memory()
    for start in (300, 100, 200):
        memory.add(Region(start, start + 50, f"at{start}", 0, 1, is_heap=True))
    assert memory.find(100, 150).name == "at100"
    assert memory.find(249, 250).name == "at200"
    assert memory.find(249, 251) is None
    assert memory.find(99, 100) is None
    memory.remove(200)
    assert memory.find(249, 250) is None
    assert memory.name(349) == "at300[49]"


POISONED = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
POISONED += [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
WHOLE = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]


@triton.jit
def masked_kernel(x_ptr, out_ptr, n, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n))


@pytest.mark.sim_only
@pytest.mark.parametrize("dtype", [*POISONED, *WHOLE, torch.bool])
def test_what_is_masked_off_is_poison(run: Run, dtype: torch.dtype) -> None:
    x = torch.ones(8).to(dtype)
    got = launch(run, masked_kernel, (1,), x, x.clone(), 5, N=8)[1]
    assert torch.equal(got[:5].float(), torch.ones(5))
    fresh = torch.empty(3, dtype=dtype)
    poison_tensor(fresh)
    assert same(got[5:].float(), fresh.float())
    assert dtype in (*WHOLE, torch.bool) or got[5:].float().isnan().all()


@pytest.mark.sim_only
@pytest.mark.parametrize("dtype", [*POISONED, *WHOLE])
def test_fresh_memory_is_poison(dtype: torch.dtype) -> None:
    (fresh,) = simulate(lambda world: world.empty((3, 5), dtype).clone())
    if dtype in POISONED:
        assert fresh.float().isnan().all()
    else:
        assert set(fresh.view(torch.uint8).ravel().tolist()) == {0xA5}


@triton.jit
def far_kernel(x_ptr, out_ptr, rows, stride):
    row = rows - 1
    far = x_ptr + row.to(tl.int64) * stride  # beyond 2**31 elements
    tl.store(out_ptr, far.to(tl.int64) - x_ptr.to(tl.int64))
    near = far - row.to(tl.int64) * stride
    tl.store(out_ptr + 1, tl.load(near).to(tl.int64))
    small = x_ptr + row * stride  # 32 bits: wraps, as on a GPU
    tl.store(out_ptr + 2, small.to(tl.int64) - x_ptr.to(tl.int64))


def test_offsets_have_64_bits(run: Run) -> None:
    x, out = torch.tensor([7.0]), torch.zeros(3, dtype=torch.int64)
    got = launch(run, far_kernel, (1,), x, out, 70001, 70000)[1].tolist()
    assert got == [70000 * 70000 * 4, 7, (70000 * 70000 - 2**32) * 4]
