"""Run by test_symm_ranks.py, in a process that has not used CUDA: sundog.run forks it per rank."""

from __future__ import annotations

import json
import os
import sys
import time

import rank_kernels as kernels
import torch
import triton

import sundog
from sundog import World
from sundog.errors import PeerLost, SundogError


def gather(world: World) -> list[float]:
    n, size = 1000, world.size
    x, out = world.full((n,), world.rank + 1.0), world.empty((size * n,))
    flags, epochs = world.signals((1, size), "flags"), world.signals(1, "epochs")
    world.barrier()
    lanes = triton.next_power_of_2(size)
    kernels.all_gather[(1,)](x, out, flags, epochs, world.ctx, n, SIZE=size, LANES=lanes, BLOCK=256)
    world.barrier()
    return out.view(size, n)[:, -1].tolist()


def dies(world: World) -> None:
    flags = world.signals(2, "flags")
    world.barrier()
    if world.rank == 1:
        os._exit(7)
    kernels.wait_for[(1,)](flags, 1, 1, world.ctx)
    begin = time.monotonic()
    try:
        world.synchronize()
    except PeerLost:
        print(f"rank {world.rank} learnt of it after {time.monotonic() - begin:.1f} s", flush=True)
        world.close()
        raise


def raises(world: World) -> None:
    world.barrier()
    if world.rank == 1:
        raise KeyError("rank 1 fails")
    world.barrier()


def sizes(world: World) -> None:
    raise AssertionError("not reached")


def attempt(name: str) -> dict:
    begin = time.monotonic()
    try:
        if name == "gather":
            return {"result": sundog.run(gather, 3, "symm", heap_size=1 << 24)}
        if name == "too much":
            sundog.run(sizes, 2, "symm", heap_size=1 << 40)
        sundog.run({"dies": dies, "raises": raises}[name], 3, "symm", heap_size=1 << 24)
    except (SundogError, KeyError) as error:
        text = f"{type(error).__name__}: {error}"
        return {"error": text, "seconds": time.monotonic() - begin}
    return {}


if __name__ == "__main__":
    assert not torch.cuda.is_initialized()
    print(json.dumps(attempt(sys.argv[1])), flush=True)
