"""Atomics of every kind and dtype, and the lanes that take no part."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from sundog.errors import KernelError

from .launching import Run, launch, same

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("error::RuntimeWarning")]

WORDS = [torch.int32, torch.int64, torch.uint32, torch.uint64]
FLOATS = [torch.float32, torch.float64]
N = 64


@triton.jit
def atomic_kernel(x_ptr, slots_ptr, memory_ptr, old_ptr, OP: tl.constexpr, N: tl.constexpr):
    """Each lane combines into a slot that it shares with others; every fifth takes no part."""
    at = tl.arange(0, N)
    part = at % 5 != 4
    x = tl.load(x_ptr + at)
    ptr = memory_ptr + tl.load(slots_ptr + at)
    if OP == "add":
        old = tl.atomic_add(ptr, x, mask=part)
    elif OP == "max":
        old = tl.atomic_max(ptr, x, mask=part)
    elif OP == "min":
        old = tl.atomic_min(ptr, x, mask=part)
    elif OP == "and":
        old = tl.atomic_and(ptr, x, mask=part)
    elif OP == "or":
        old = tl.atomic_or(ptr, x, mask=part)
    elif OP == "xor":
        old = tl.atomic_xor(ptr, x, mask=part)
    else:
        old = tl.atomic_xchg(ptr, x, mask=part)
    tl.store(old_ptr + at, old, mask=part)


OPS = {
    "add": lambda a, b: a + b, "max": max, "min": min, "and": lambda a, b: a & b,
    "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "xchg": lambda a, b: b,
}  # fmt: skip


def data(dtype: torch.dtype, count: int, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randint(-64, 64, (count,)).div(8).to(dtype)  # every sum is exact
    return torch.randint(-(2**62), 2**62, (count,)).to(torch.int64).to(dtype)


CASES = [(op, d) for op in OPS for d in WORDS]
CASES += [(op, d) for op in ("add", "max", "min", "xchg") for d in FLOATS]
CASES += [("add", torch.float16), ("add", torch.bfloat16)]


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_atomics(run: Run, op: str, dtype: torch.dtype) -> None:
    x, memory = data(dtype, N, 0), data(dtype, 8, 1)
    if op in ("max", "min") and dtype.is_floating_point:
        memory[0], x[2] = -0.0, float("inf")
    slots = torch.arange(N, dtype=torch.int32) % 7  # one slot is left alone
    part = np.arange(N) % 5 != 4
    got = launch(run, atomic_kernel, (1,), x, slots, memory, torch.zeros_like(x), OP=op, N=N)
    if op == "xchg":  # which of them is last is not said, but each value is passed on once
        assert sorted(got[3][part].tolist() + got[2].tolist()) == sorted(
            memory.tolist() + x[part].tolist()
        )
        return
    wanted = memory.clone()
    for lane in range(N):
        if part[lane]:
            slot = int(slots[lane])
            value = OPS[op](wanted[slot].item(), x[lane].item())
            bits = 8 * dtype.itemsize
            if not dtype.is_floating_point:
                value %= 1 << bits
                value -= (1 << bits) if dtype.is_signed and value >= 1 << (bits - 1) else 0
            wanted[slot] = torch.tensor(value, dtype=dtype)
    assert same(got[2], wanted, zero_sign=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int32])
def test_add_gives_the_old_value(run: Run, dtype: torch.dtype) -> None:
    x, memory = data(dtype, N, 2), data(dtype, N, 3)
    slots = torch.arange(N, dtype=torch.int32)
    got = launch(run, atomic_kernel, (1,), x, slots, memory, torch.zeros_like(x), OP="add", N=N)
    part = torch.arange(N) % 5 != 4
    assert same(got[3], torch.where(part, memory, torch.zeros_like(x)))


@triton.jit
def cas_kernel(memory_ptr, old_ptr, expected, value):
    at = tl.program_id(0)
    dtype = memory_ptr.dtype.element_ty
    old = tl.atomic_cas(memory_ptr, expected.to(dtype), (value + at).to(dtype))
    tl.store(old_ptr + at, old)


@triton.jit
def mixed_kernel(memory_ptr, expected):
    tl.atomic_cas(memory_ptr, expected, expected)


@pytest.mark.sim_only
def test_compare_and_swap_needs_the_type_of_the_memory(run: Run) -> None:
    with pytest.raises(KernelError, match="atomic_cas of int64 with int32 and int32"):
        launch(run, mixed_kernel, (1,), torch.zeros(1, dtype=torch.int64), 5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_compare_and_swap_lets_one_through(run: Run, dtype: torch.dtype) -> None:
    old = torch.zeros(8, dtype=dtype)
    got = launch(run, cas_kernel, (8,), torch.full((1,), 5, dtype=dtype), old, 5, 100)
    winner = int((got[1] == 5).nonzero().item())
    assert got[0].item() == 100 + winner
    assert (got[1] == 100 + winner).sum() == 7


@triton.jit
def poison_kernel(x_ptr, old_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(old_ptr + at, tl.atomic_add(x_ptr + at, 1.0, mask=at < 3))


@pytest.mark.sim_only
def test_a_lane_that_takes_no_part_has_no_old_value(run: Run) -> None:
    got = launch(run, poison_kernel, (1,), torch.arange(4.0), torch.zeros(8), N=8)
    assert got[0].tolist() == [1, 2, 3, 3]
    assert got[1][:3].tolist() == [0, 1, 2]
    assert got[1][3:].isnan().all()


if hasattr(tl, "atomic_load"):  # from Triton 3.9 on

    @triton.jit
    def own_kernel(x_ptr, out_ptr, N: tl.constexpr):
        at = tl.arange(0, N)
        x = tl.atomic_load(x_ptr + at, sem="acquire")
        tl.atomic_store(out_ptr + at, x + 1, sem="release")

    def test_atomic_load_and_store(run: Run) -> None:
        x = data(torch.int32, N, 4)
        assert torch.equal(launch(run, own_kernel, (1,), x, torch.zeros_like(x), N=N)[1], x + 1)
