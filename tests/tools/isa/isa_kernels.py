"""Kernels for test_isa.py: what `sundog isa` must mark, each beside the form that it must not.

Each `run_*` is a rank's function, as `sundog isa tests/tools/isa/isa_kernels.py:run_NAME` takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.tools.tensor_descriptor import TensorDescriptor

from sundog.device import memory, signal
from sundog.world.world import World

NUMEL = 1 << 16
ODD = NUMEL + 3


@triton.jit
def _push_by_bases(x, out, bases, rank, numel, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """As upstream had it: heap bases from a table, read again for every tile; no alignment left."""
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tile = tl.load(x + at, mask=at < numel)
        for peer in tl.static_range(SIZE):
            mine, theirs = tl.load(bases + rank), tl.load(bases + peer)
            there = (out + at).to(tl.int64) - mine + theirs
            tl.store(there.to(tl.pointer_type(x.dtype.element_ty)), tile, mask=at < numel)


@triton.jit
def _push_in_loop(x, out, ctx, numel, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Wide, but translates in the loop: the distances are read again for every tile."""
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tile = tl.load(x + at, mask=at < numel)
        for peer in range(SIZE):
            memory.store(out + at, tile, peer, ctx, mask=at < numel)


@triton.jit
def _push_by_branch(x, out, ctx, numel, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """The same, where a branch and a loop stand between the word and the address."""
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tile = tl.load(x + at, mask=at < numel)
        there = out
        if start > 0:
            for peer in range(SIZE):
                there = memory.translate(there, peer, ctx)
        tl.store(there + at, tile, mask=at < numel)


@triton.jit
def _push(x, out, ctx, flags, numel, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A peer's distance is read once; the flags and the scalars around it are no wide path."""
    for peer in range(SIZE):
        base = memory.translate(out, peer, ctx)
        for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(base + at, tl.load(x + at, mask=at < numel), mask=at < numel)
    epoch = tl.load(flags + SIZE) + 1
    signal.barrier_ranks(flags, epoch, ctx, SIZE)
    tl.store(flags + SIZE, epoch)


@triton.jit
def _copy_whole(x, out, numel, BLOCK: tl.constexpr):
    """One masked loop: narrow as soon as the size is not a multiple of 16."""
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < numel), mask=at < numel)


@triton.jit
def _copy_with_tail(x, out, numel, BLOCK: tl.constexpr):
    """Whole tiles without a mask, then what is left."""
    whole = numel // BLOCK * BLOCK
    for start in range(tl.program_id(0) * BLOCK, whole, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at))
    if tl.program_id(0) == 0:
        at = whole + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < numel), mask=at < numel)


@triton.jit
def _copy_by_branch(x, out, numel, BLOCK: tl.constexpr):
    """The last tile in the other branch."""
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        if start + BLOCK <= numel:
            tl.store(out + at, tl.load(x + at))
        else:
            tl.store(out + at, tl.load(x + at, mask=at < numel), mask=at < numel)


@triton.jit
def _copy_by_helper(x, out, numel, BLOCK: tl.constexpr):
    """One line in both branches: AMD's compiler makes one store of them, at no line of its own."""
    for start in range(tl.program_id(0) * BLOCK, numel, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        if start + BLOCK <= numel:
            _copy_tile(x, out, at, None)
        else:
            _copy_tile(x, out, at, at < numel)


@triton.jit
def _copy_tile(x, out, at, mask):
    tl.store(out + at, tl.load(x + at, mask=mask), mask=mask)


@triton.jit
def _copy_tail_narrow(x, out, numel, BLOCK: tl.constexpr):
    """A tail beside it excuses no narrow store in the loop."""
    whole = numel // BLOCK * BLOCK
    for start in range(tl.program_id(0) * BLOCK, whole, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at + numel, tl.load(x + at))
    at = whole + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < numel), mask=at < numel)


@triton.jit
def _copy_and_more(x, out, numel, BLOCK: tl.constexpr):
    """No mask, no tail: a whole tile after the loop that is narrow all the same."""
    for start in range(tl.program_id(0) * BLOCK, numel // BLOCK * BLOCK, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at))
    at = tl.arange(0, BLOCK)
    tl.store(out + at + numel, tl.load(x + at))


@triton.jit
def _too_small(x, out, numel):
    """A tile of an element a thread can't be wide, and there is no larger one."""
    for start in range(tl.program_id(0) * 128, numel, tl.num_programs(0) * 128):
        at = start + tl.arange(0, 128)
        tl.store(out + at, tl.load(x + at))


@triton.jit
def _look(flags):
    """Triton makes a load of this atomic; it is none of the kernel's loads."""
    tl.store(flags + 1, tl.atomic_add(flags, 0, sem="acquire", scope="sys"))


@triton.jit
def _by_ticket(pair, flags, ctx, numel, BLOCK: tl.constexpr):
    """Arguments in tuples, data and flags. A ticket is no reload, a tile of flags not narrow."""
    base = memory.translate(pair[1], 0, ctx)
    tile = tl.atomic_add(flags.ticket, 1)
    while tile * BLOCK < numel:
        at = tile * BLOCK + tl.arange(0, BLOCK)
        tl.store(base + at, tl.load(pair[0] + at, mask=at < numel), mask=at < numel)
        tile = tl.atomic_add(flags.ticket, 1)
    at = tl.arange(0, 64)
    tl.store(flags.epochs + at, tl.load(flags.epochs + at) + 1)


@gluon.jit
def _gluon_copy(x, out, numel, EACH: gl.constexpr, LANES: gl.constexpr):
    """As wide as its layout says: EACH elements of a thread beside each other."""
    layout: gl.constexpr = gl.BlockedLayout([EACH], [LANES], [gl.num_warps()], [0])
    for start in range(gl.program_id(0) * 4096, numel, gl.num_programs(0) * 4096):
        at = start + gl.arange(0, 4096, layout)
        gl.store(out + at, gl.load(x + at, mask=at < numel), mask=at < numel)


@triton.jit
def _matmul(a, b, bias, out, K, BLOCK: tl.constexpr):
    """Tensor cores on descriptors; the row of biases is small, its narrow loads are not marked."""
    row, column = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        total = tl.dot(a.load([row, k]), b.load([k, column]), total)
    total += tl.load(bias + column + tl.arange(0, BLOCK)).to(tl.float32)[None, :]
    out.store([row, column], total.to(out.dtype))


@triton.jit
def _many_values(x, out, numel, BLOCK: tl.constexpr):
    """More live values than registers."""
    at = tl.arange(0, BLOCK)
    tile = tl.load(x + at)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(BLOCK, numel, BLOCK):
        total += tile * tl.load(x + start + at)
        tile = tl.sqrt(tile * total)
    tl.store(out + at, total + tile)


def _runner(
    kernel: Any, numel: int = NUMEL, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> Callable[[World], None]:
    """A function that launches a kernel of (x, out, [ctx, flags,] numel)."""

    def run(world: World) -> None:
        given = {"x": world.empty(numel, dtype), "out": world.empty(2 * numel, dtype)}
        given |= {"bases": torch.zeros(world.size, dtype=torch.int64), "rank": world.rank}
        given |= {"ctx": world.ctx, "flags": world.signals(world.size + 1, "flags")}
        given |= {"numel": numel, "SIZE": world.size, "BLOCK": 2048}
        world.barrier()
        names = [name for name in kernel.arg_names if name in given]
        kernel[(4,)](**{name: given[name] for name in names}, **options)

    return run


run_by_bases = _runner(_push_by_bases)
run_in_loop = _runner(_push_in_loop)
run_by_branch = _runner(_push_by_branch)
run_push = _runner(_push)
run_odd = _runner(_copy_whole, ODD)
run_even = _runner(_copy_whole)
run_tail = _runner(_copy_with_tail, ODD)
run_branch = _runner(_copy_by_branch, ODD)
run_helper = _runner(_copy_by_helper)
run_tail_narrow = _runner(_copy_tail_narrow, ODD)
run_more = _runner(_copy_and_more, ODD)
run_too_small = _runner(_too_small)
run_gluon = _runner(_gluon_copy, EACH=8, LANES=32)
run_gluon_narrow = _runner(_gluon_copy, EACH=1, LANES=32)
run_spilling = _runner(_many_values, dtype=torch.float32, maxnreg=24)
run_spilling_amd = _runner(_many_values, dtype=torch.float32, num_warps=1, waves_per_eu=8)


class Flags(NamedTuple):
    ticket: Any
    epochs: Any


def run_ticket(world: World) -> None:
    pair = world.empty(NUMEL, torch.bfloat16), world.empty(NUMEL, torch.bfloat16)
    flags = Flags(world.signals(1, "ticket"), world.signals(64, "epochs"))
    _by_ticket[(4,)](pair, flags, world.ctx, NUMEL, BLOCK=2048)


def run_look(world: World) -> None:
    flags = world.signals(2, "flags")
    for _ in range(2):
        _look[(1,)](flags)


def run_nothing(world: World) -> None:
    world.barrier()


def run_matmul(world: World) -> None:
    a, b, out = (world.empty((256, 256), torch.bfloat16) for _ in range(3))
    bias = world.empty((256,), torch.bfloat16)
    described = [TensorDescriptor.from_tensor(t, [64, 64]) for t in (a, b, out)]
    _matmul[(4, 4)](*described[:2], bias, described[2], 256, BLOCK=64)
