"""`link="pcie"` on one GPU: peers' data in pinned host memory, flags and contexts on the device."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import pytest
import rank_kernels as kernels
import torch
from support import link_kernels

import sundog
from sundog import World, target
from sundog.errors import WaitTimeout
from sundog.ops.load import find
from sundog.tools._subject import _exercise

pytestmark = pytest.mark.gpu("virtual")


def run(fn: Any, size: int, **options: Any) -> list[Any]:
    return sundog.run(fn, size, "virtual", link="pcie", heap_size=128 << 20, **options)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether its memory is the host's: then the CPU can read what the GPU wrote, in place."""
    assert tensor.device.type == "cuda"
    words = [
        line.split(maxsplit=2)[:2] for line in Path("/proc/self/maps").read_text().splitlines()
    ]
    ranges = [[int(end, 16) for end in each.split("-")] for each, mode in words if "r" in mode]
    address = tensor.data_ptr()
    if not any(start <= address < end for start, end in ranges):
        return False
    return ctypes.string_at(address, tensor.nbytes) == tensor.cpu().numpy().tobytes()


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_where_data_and_flags_lie(size):
    def main(world: World) -> tuple:
        x = world.randn((1000,))
        flags = world.signals(4, "flags")
        world.barrier()
        return world.passive, is_pinned(x), is_pinned(flags), is_pinned(world.ctx), world.num_sms

    results = run(main, size)
    sms = target.of(torch.device("cuda")).num_sms - (size - 1)
    assert results[0] == (False, False, False, False, sms)
    assert results[1:] == [(True, True, False, False, sms)] * (size - 1)


def test_torch_works_on_a_passive_ranks_data():
    """In stream order, like on any GPU tensor, and a peer's copy is reached from every rank."""

    def main(world: World) -> tuple:
        x = world.empty((5003,)).fill_(world.rank).mul_(3).add_(torch.ones(5003, device="cuda"))
        world.barrier()
        peers = [float(world.peer(x, rank).sum()) for rank in range(world.size)]
        world.barrier()
        return peers, world.is_symmetric(x[17:])

    assert run(main, 3) == [([5003.0, 4 * 5003.0, 7 * 5003.0], True)] * 3


@pytest.mark.parametrize("size", [2, 4])
def test_rank_0_fetches_while_stand_ins_play_the_others(size):
    n = 300_001
    got = run(lambda world: link_kernels.pull_all(world, n, 8192, world.passive), size)[0]
    link_kernels.check_pulled(got, size, n)


@pytest.mark.parametrize("size", [2, 4])
def test_all_gather_without_a_stand_in(size):
    """It pushes: every rank moves its own data, and has all of it."""

    def main(world: World) -> tuple[torch.Tensor, torch.Tensor]:
        x = world.randn((1003,))
        return x.cpu(), world.all_gather(x, algo="push").cpu()

    results = run(main, size)
    assert all(torch.equal(out, torch.cat([x for x, _ in results])) for _, out in results)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", link_kernels.PULLING)
def test_rank_0_alone_works(name, size):
    """Two plans, several calls back to back, fresh data, and the right results on rank 0."""
    module = find(name)
    for problem in module.cases(size):
        run(lambda world, problem=problem: _exercise(world, module, problem), size)


def test_a_wait_runs_out_and_the_world_goes_on():
    def main(world: World) -> Any:
        flags = world.signals(3, "owed.flags")
        world.barrier()
        error = None
        if world.rank == 1:  # a passive rank: its flags are not where its data is
            kernels.wait_for[(1,)](flags[2:], 0, 5, world.ctx)
            try:
                world.synchronize()
            except WaitTimeout as caught:
                error = caught
        world.barrier()
        x = world.full((10,), world.rank)
        out = world.all_gather(x)
        world.barrier()
        return error, out.tolist()

    begin = time.monotonic()
    results = run(main, 2, timeout=0.5)
    assert time.monotonic() - begin < 20
    record = results[1][0].record
    assert (record.flag, record.expected, record.seen, record.peer) == ("owed.flags[2]", 5, 0, 0)
    assert all(out == [0.0] * 10 + [1.0] * 10 for _, out in results)


@pytest.mark.alone
def test_reading_across_the_link_has_the_speed_of_the_link():
    """48 MB of a peer's data in a kernel of all SMs: tens of GB/s, not thousands."""
    n = 12 << 20

    def main(world: World) -> float:
        src, dst = world.empty((n,)).fill_(1), world.empty((n,))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        world.barrier()
        if world.passive:
            return 0.0
        for _ in range(3):
            begin.record()
            link_kernels.fetch[(world.num_sms,)](src, dst, world.ctx, n, BLOCK=4096)
            end.record()
            world.synchronize()
        assert torch.equal(dst, src)
        return n * 4 / (begin.elapsed_time(end) * 1e-3)

    rate = run(main, 2)[0]
    assert 20e9 < rate < 150e9, f"{rate / 1e9:.1f} GB/s"


@pytest.mark.alone
def test_worlds_with_a_link_leak_nothing():
    def main(world: World) -> tuple[int, int]:
        world.all_gather(world.randn((100,)))
        world.barrier()
        return torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()

    used = [run(main, 2)[0] for _ in range(10)]
    assert used[-1] == used[4]
