"""A descriptor reads through another proxy: data that is younger than its kernel needs a fence.

And what it writes has arrived when its kernel ends, not when the next statement begins.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import sundog
from sundog.checker.proxies import NO_FENCE
from sundog.checker.races import DESCRIPTOR_STORE
from sundog.device import memory, proxy, signal

from .pair import Kernel, Pair, neighbour, values

__all__ = ["PAIRS"]

BLOCK = 16
FAMILY = "descriptor load without the proxy fence"
SHARED_FENCE = tl.constexpr("fence.proxy.async.shared::cta; mov.u32 $0, 0;")
STORE = "descriptor store before the release"


@triton.jit
def own_tile_wrong(x, staged, desc, out, flag, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(staged + at, tl.load(x + at))
    tl.debug_barrier()
    # wrong: this program's own store, read through the other proxy
    tl.store(out + at, desc.load([0]))


@triton.jit
def own_tile_fixed(x, staged, desc, out, flag, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(staged + at, tl.load(x + at))
    tl.debug_barrier()
    proxy.fence()
    tl.store(out + at, desc.load([0]))


@triton.jit
def shared_fence_wrong(x, staged, desc, out, flag, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(staged + at, tl.load(x + at))
    tl.debug_barrier()
    # wrong: this fence is for shared memory, and the tile is in global memory
    tl.inline_asm_elementwise(SHARED_FENCE, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    tl.debug_barrier()
    tl.store(out + at, desc.load([0]))


@triton.jit
def staged_wrong(x, staged, desc, out, flag, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(staged + at, tl.load(x + at))
        tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem="release", scope="gpu")
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 0:
            pass
        # wrong: the acquire orders loads, but not those of the other proxy
        tl.store(out + at, desc.load([0]))


@triton.jit
def early_fence_wrong(x, staged, desc, out, flag, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(staged + at, tl.load(x + at))
        tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem="release", scope="gpu")
    else:
        # wrong: the fence stands before the wait, and fences what was known then
        proxy.fence()
        while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 0:
            pass
        tl.store(out + at, desc.load([0]))


@triton.jit
def writer_fences_wrong(x, staged, desc, out, flag, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(staged + at, tl.load(x + at))
        # wrong: the fence is the writer's, where it must be the reader's
        proxy.fence()
        tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem="release", scope="gpu")
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 0:
            pass
        tl.store(out + at, desc.load([0]))


@triton.jit
def staged_fixed(x, staged, desc, out, flag, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        tl.store(staged + at, tl.load(x + at))
        tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem="release", scope="gpu")
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 0:
            pass
        proxy.fence()
        tl.store(out + at, desc.load([0]))


def stage(kernel: Kernel, programs: int, world: sundog.World) -> None:
    x, staged, out = values(0, BLOCK), torch.empty(BLOCK), torch.empty(BLOCK)
    desc = TensorDescriptor(staged, [BLOCK], [1], [BLOCK])
    kernel[(programs,)](x, staged, desc, out, torch.zeros(1, dtype=torch.int64), BLOCK)
    assert torch.equal(out, x)


@triton.jit
def descriptor_store_wrong(x, staged, desc, out, flag, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        # wrong: it may be under way when the flag is set, and for longer
        desc.store([0], tl.load(x + at))
        tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem="release", scope="gpu")
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 0:
            pass
        tl.store(out + at, tl.load(staged + at))


@triton.jit
def descriptor_add_wrong(x, staged, desc, out, flag, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        # wrong: the same of an addition
        desc.atomic_add([0], tl.load(x + at))
        tl.debug_barrier()
        tl.atomic_xchg(flag, 1, sem="release", scope="gpu")
    else:
        while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 0:
            pass
        tl.store(out + at, tl.load(staged + at))


@triton.jit
def read_next_fixed(x, staged, desc, out, flag, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    if tl.load(flag) == 0:
        desc.store([0], tl.load(x + at))
    else:  # of the next kernel
        tl.store(out + at, tl.load(staged + at))


def hand_over(kernel: Kernel, launches: int, world: sundog.World) -> None:
    x, staged, out = values(0, BLOCK), torch.zeros(BLOCK), torch.empty(BLOCK)
    desc = TensorDescriptor(staged, [BLOCK], [1], [BLOCK])
    flag = torch.zeros(1, dtype=torch.int64)
    for _ in range(launches):
        kernel[(3 - launches,)](x, staged, desc, out, flag, BLOCK)
        flag.fill_(1)
    assert torch.equal(out, x)


@triton.jit
def from_peer_wrong(x, inbox, desc, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    memory.store(inbox + at, tl.load(x + at), peer, ctx)
    signal.signal(flag, peer, 1, ctx)
    signal.wait(flag, peer, 1, ctx)
    # wrong: the peer stored while this kernel ran, and a descriptor reads it
    tl.store(out + at, desc.load([0]))


@triton.jit
def from_peer_fixed(x, inbox, desc, out, flag, peer, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    memory.store(inbox + at, tl.load(x + at), peer, ctx)
    signal.signal(flag, peer, 1, ctx)
    signal.wait(flag, peer, 1, ctx)
    proxy.fence()
    tl.store(out + at, desc.load([0]))


def exchange(kernel: Kernel, world: sundog.World) -> None:
    x, out = values(world.rank, BLOCK), torch.empty(BLOCK)
    inbox, flag = world.empty((BLOCK,), name="inbox"), world.signals((1,), "flag")
    desc = TensorDescriptor(inbox, [BLOCK], [1], [BLOCK])
    world.barrier()
    kernel[(1,)](x, inbox, desc, out, flag, neighbour(world), world.ctx, BLOCK)
    assert torch.equal(out, values(neighbour(world), BLOCK))


def _pair(name: str, wrong: Kernel, fixed: Kernel, programs: int) -> Pair:
    hosts = partial(stage, wrong, programs), partial(stage, fixed, programs)
    return Pair(FAMILY, name, *hosts, 1, NO_FENCE)


def _store(name: str, wrong: Kernel) -> Pair:
    hosts = partial(hand_over, wrong, 1), partial(hand_over, read_next_fixed, 2)
    return Pair(STORE, name, *hosts, 1, DESCRIPTOR_STORE)


PAIRS = [
    _pair("own store", own_tile_wrong, own_tile_fixed, 1),
    _pair("fence for shared memory", shared_fence_wrong, own_tile_fixed, 1),
    _pair("staged by another program", staged_wrong, staged_fixed, 2),
    _pair("fence before the wait", early_fence_wrong, staged_fixed, 2),
    _pair("fence at the writer", writer_fences_wrong, staged_fixed, 2),
    _store("a tile", descriptor_store_wrong),
    _store("a sum", descriptor_add_wrong),
    Pair(
        FAMILY,
        "stored by a peer",
        partial(exchange, from_peer_wrong),
        partial(exchange, from_peer_fixed),
        2,
        NO_FENCE,
    ),
]
