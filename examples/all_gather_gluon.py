"""One all-gather in two languages, Triton and Gluon; an argument selects one.

The two kernels differ in two things: the module of their functions (`memory` and `signal`, or
`gluon`), and the layout of a Gluon tile, which assigns elements to threads. On the simulator both
run on a CPU.

    python examples/all_gather_gluon.py triton
    python examples/all_gather_gluon.py gluon
    torchrun --nproc-per-node 4 examples/all_gather_gluon.py gluon
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from triton.experimental import gluon as experimental
from triton.experimental.gluon import language as gl

import sundog
from sundog.device import context, gluon, memory, signal

THREADS = 64 if torch.version.hip else 32


@triton.jit
def in_triton(x, out, flags, epoch, ctx, n, BLOCK: tl.constexpr, LANES: tl.constexpr):
    program, rank, size = tl.program_id(0), tl.load(ctx + context.RANK), tl.load(ctx + context.SIZE)
    at = program * BLOCK + tl.arange(0, BLOCK)
    tile = tl.load(x + at, mask=at < n)
    for step in range(size):
        peer = (rank + step) % size  # each rank starts with another peer
        memory.store(out + rank * n + at, tile, peer, ctx, mask=at < n)
    # My tiles before the flags, and all peers' tiles before what the host does after this kernel.
    signal.barrier_ranks(flags + program * size, epoch, ctx, LANES)


@experimental.jit
def in_gluon(
    x, out, flags, epoch, ctx, n, BLOCK: gl.constexpr, LANES: gl.constexpr, LAYOUT: gl.constexpr
):
    program, rank, size = gl.program_id(0), gl.load(ctx + context.RANK), gl.load(ctx + context.SIZE)
    at = program * BLOCK + gl.arange(0, BLOCK, LAYOUT)
    tile = gl.load(x + at, mask=at < n)
    for step in range(size):
        peer = (rank + step) % size  # each rank starts with another peer
        gluon.store(out + rank * n + at, tile, peer, ctx, mask=at < n)
    # My tiles before the flags, and all peers' tiles before what the host does after this kernel.
    gluon.barrier_ranks(flags + program * size, epoch, ctx, LANES)


# Four floats per thread: 16 bytes.
LAYOUT = gl.BlockedLayout([4], [THREADS], [4], [0])
LANGUAGES: dict[str, tuple[Any, dict[str, Any]]] = {
    "triton": (in_triton, {}),
    "gluon": (in_gluon, {"LAYOUT": LAYOUT}),
}


def main(world: sundog.World, language: str = "gluon", n: int = 999) -> torch.Tensor:
    kernel, constants = LANGUAGES[language]
    programs = 2
    torch.manual_seed(42 + world.rank)
    x = world.randn((n,), name="x")
    out = world.empty((world.size * n,), name="out")
    flags = world.signals((programs, world.size), "flags")
    world.barrier()  # all have allocated: peers may be touched
    kernel[(programs,)](
        x, out, flags, 1, world.ctx, n,
        BLOCK=triton.next_power_of_2(triton.cdiv(n, programs)),
        LANES=triton.next_power_of_2(world.size),
        **constants,
    )  # fmt: skip
    parts = world.exchange(x.cpu())
    assert torch.equal(out.cpu(), torch.cat(parts)), f"rank {world.rank} gathered something else"
    if world.rank == 0:
        print(f"{world.size} ranks gathered {n} floats of each in {language}: all equal")
    return out


if __name__ == "__main__":
    language = sys.argv[1] if len(sys.argv) > 1 else "gluon"
    if language not in LANGUAGES:
        sys.exit(f"language {language!r}: one of {', '.join(LANGUAGES)}")
    if "RANK" in os.environ:
        with sundog.init() as world:
            main(world, language)
    else:
        sundog.run(lambda world: main(world, language), world_size=8)
