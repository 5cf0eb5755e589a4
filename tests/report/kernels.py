"""The demo's kernel, right and wrong, and one that never ends: what a report is made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from sundog.demo import racy, rank_function, right
from sundog.device import memory
from sundog.world.world import World

clean = right
without_barrier = racy
silent = rank_function(silent=0)


@triton.jit
def relaxed_kernel(inbox, flag, out, peer, ctx):
    at = tl.arange(0, 8)
    memory.store(inbox + at, at, peer, ctx)
    tl.debug_barrier()
    tl.atomic_xchg(memory.translate(flag, peer, ctx), 1, sem="relaxed", scope="sys")
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") == 0:
        pass
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def endless_kernel(flag, peer, ctx):
    mine, word = 0, memory.translate(flag, 0, ctx)
    while mine != 3:  # each sets what the other one takes away: nobody ever finds 3
        mine = tl.atomic_xchg(word, peer, sem="acq_rel", scope="sys") + 0 * mine


def _run(kernel: Any, tensors: bool) -> Callable[[World], None]:
    def run(world: World) -> None:
        inbox, flag = world.empty((8,), dtype=torch.int32, name="inbox"), world.signals(1, "flag")
        out = torch.empty(8, dtype=torch.int32)
        world.barrier()
        given = (inbox, flag, out) if tensors else (flag,)
        kernel[(1,)](*given, 1 - world.rank, world.ctx)

    return run


relaxed = _run(relaxed_kernel, tensors=True)
endless = _run(endless_kernel, tensors=False)
