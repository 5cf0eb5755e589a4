"""What one program, or the kernel after it, may not take for granted."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

import sundog
from sundog.checker.overlaps import EQUAL_ADDRESSES
from sundog.checker.proxies import READ_BACK
from sundog.checker.races import EARLY_LAUNCH, WIDTH
from sundog.device import memory

from .pair import Kernel, Pair, values

__all__ = ["PAIRS"]

BLOCK = 16


@triton.jit
def by_pointers_wrong(x, staged, pointer, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    staged.store([0], tl.load(x + at))
    tl.debug_barrier()
    # wrong: the descriptor's store may still be on its way
    tl.store(out + at, tl.load(pointer + at))


@triton.jit
def kept_fixed(x, staged, pointer, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    kept = tl.load(x + at)
    staged.store([0], kept)
    tl.store(out + at, kept)


def read_back(kernel: Kernel, world: sundog.World) -> None:
    x, staged, out = values(0, BLOCK), torch.zeros(BLOCK), torch.empty(BLOCK)
    kernel[(1,)](x, TensorDescriptor.from_tensor(staged, [BLOCK]), staged, out, BLOCK)
    assert torch.equal(out, x)


@triton.jit
def clamped_wrong(x, out, n, BLOCK: tl.constexpr):
    # wrong: the elements past the end are all stored to the last one
    at = tl.minimum(tl.arange(0, BLOCK), n - 1)
    tl.store(out + at, tl.load(x + at))


@triton.jit
def masked_fixed(x, out, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n), mask=at < n)


def ragged(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(0, BLOCK - 3), torch.empty(BLOCK - 3)
    kernel[(1,)](x, out, BLOCK - 3, BLOCK)
    assert torch.equal(out, x)


@triton.jit
def produce(x, middle, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(middle + at, tl.load(x + at))


@triton.jit
def early_wrong(middle, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    # wrong: launched with launch_pdl, it may run before the kernel before it has ended
    tl.store(out + at, tl.load(middle + at))


@triton.jit
def early_fixed(middle, out, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    gdc_wait()  # orders all that the kernel before has done before the load below
    tl.store(out + at, tl.load(middle + at))


def dependent(kernel: Kernel, world: sundog.World) -> None:
    x, middle, out = values(0, BLOCK), torch.zeros(BLOCK), torch.empty(BLOCK)
    produce[(1,)](x, middle, BLOCK)
    kernel[(1,)](middle, out, BLOCK, launch_pdl=True)
    assert torch.equal(out, x)


@triton.jit
def widths(flag, narrow, out, rank, ctx, WIDE: tl.constexpr):
    if rank == 0:
        memory.atomic_xchg(flag if WIDE else narrow, 1, 1, ctx, sem="release")
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
            pass
        tl.store(out, 1)


def flag_widths(wide: bool, world: sundog.World) -> None:
    # wrong unless wide: the flag has 8 bytes for who polls it, and 4 for who writes it
    flag, out = world.signals((1,), "flag"), torch.zeros(1, dtype=torch.int64)
    world.barrier()
    widths[(1,)](flag, flag.view(torch.int32), out, world.rank, world.ctx, wide)
    assert out.item() == world.rank


PAIRS = [
    Pair(
        "descriptor store read back",
        "by pointers",
        partial(read_back, by_pointers_wrong),
        partial(read_back, kept_fixed),
        1,
        READ_BACK,
    ),
    Pair(
        "two threads, one address",
        "clamped tail",
        partial(ragged, clamped_wrong),
        partial(ragged, masked_fixed),
        1,
        EQUAL_ADDRESSES,
    ),
    Pair(
        "early launch",
        "no wait for the kernel before",
        partial(dependent, early_wrong),
        partial(dependent, early_fixed),
        1,
        EARLY_LAUNCH,
    ),
    Pair(
        "widths of a flag",
        "written as half of it",
        partial(flag_widths, False),
        partial(flag_widths, True),
        2,
        WIDTH,
    ),
]
