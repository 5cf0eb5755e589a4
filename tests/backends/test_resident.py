"""How many programs of ranks that share a GPU run at once: the kernel and the search."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import sundog
from sundog import Sim
from sundog.backends._measured import FILL, WARPS, count_resident, largest_that_fits, words
from sundog.compiled.kernels import _ptx_resources
from sundog.errors import SundogError, WaitTimeout

pytestmark = pytest.mark.sim_only  # tests/gpu/test_resident.py has the GPU


def count(world: sundog.World, counts: torch.Tensor, programs: int) -> None:
    total = programs * world.size
    count_resident[(programs,)](
        world.peer(counts, 0), torch.zeros(64), world.rank, total, world.ctx,
        SIZE=world.size, FILL=64,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("programs", "sms", "expected"),
    [(4, 4, [4, 4, 8, 0]), (3, 4, [3, 3, 6, 0]), (6, 4, [4, 4, 8, 1])],
)
@pytest.mark.parametrize("seed", range(3))
def test_programs_that_run_together_are_counted(seed, programs, sms, expected):
    def main(world: sundog.World) -> list[int]:
        counts = world.zeros((words(world.size),), torch.int64)
        world.barrier()
        count(world, counts, programs)
        with contextlib.suppress(WaitTimeout):
            world.barrier()
        world.barrier()
        return world.peer(counts, 0).tolist()

    options = Sim(schedule=f"random:{seed}", num_sms=sms, expire=True)
    assert sundog.run(main, 2, "sim", sim=options) == [expected] * 2


def test_a_rank_that_comes_too_late_is_not_counted():
    def main(world: sundog.World) -> list[int]:
        counts = world.zeros((words(2),), torch.int64)
        world.barrier()
        for rank in range(2):
            if rank == world.rank:
                count(world, counts, 2)
                with contextlib.suppress(WaitTimeout):
                    world.synchronize()
            world.barrier()
        return world.peer(counts, 0).tolist()

    assert sundog.run(main, 2, "sim", sim=Sim(expire=True)) == [[2, 0, 2, 1]] * 2


class Gpu:
    """SMs that hold one program each, and ranks that may use some of them."""

    def __init__(self, sets: list[set[int]], seed: int = 0) -> None:
        self.sets, self.chance, self.asked = sets, random.Random(seed), []

    def measure(self, programs: int) -> list[int]:
        self.asked.append(programs)
        free = set().union(*self.sets)
        counts = [0] * len(self.sets)
        turns = [rank for rank in range(len(self.sets)) for _ in range(programs)]
        self.chance.shuffle(turns)
        for rank in turns:
            mine = sorted(free & self.sets[rank])
            if mine:
                free.remove(self.chance.choice(mine))
                counts[rank] += 1
        return counts


def test_all_that_fits_at_once_is_taken():
    gpu = Gpu([set(range(132))] * 4)
    assert largest_that_fits(33, gpu.measure) == 33
    assert gpu.asked == [33] * 3, "and confirmed, since programs are placed anew each time"


@pytest.mark.parametrize("seed", range(20))
def test_sets_that_overlap_give_less(seed):
    """As under MPS with 25 %: 32 SMs for each of four ranks, and 4 of them are shared."""
    sets = [set(range(32 * rank, 32 * rank + 32)) for rank in range(3)]
    sets.append(set(range(100, 128)) | set(range(4)))
    gpu = Gpu([set(range(96, 128)) - set(range(124, 128)) | set(range(4)), *sets[:3]], seed)
    fits = largest_that_fits(32, gpu.measure)
    assert 28 <= fits < 32
    assert gpu.measure(28) == [28] * 4


def test_more_than_the_gpu_has_is_shared_fairly():
    gpu = Gpu([set(range(132))] * 4)
    assert largest_that_fits(66, gpu.measure) == 33


def test_a_late_rank_is_measured_again():
    answers = iter([[33, 0], [33, 33], [33, 33], [33, 33]])
    assert largest_that_fits(33, lambda programs: next(answers)) == 33


def test_what_never_fits_is_an_error_with_the_numbers():
    with pytest.raises(SundogError, match=r"(?s)in 16 attempts .*\(2, \[2, 0\]\)"):
        largest_that_fits(2, lambda programs: [2, 0])


@pytest.mark.parametrize("arch", [80, 90, 100])
def test_a_program_fills_an_sm(arch):
    """By registers: two of them would need more than the 64K that an SM has."""
    types = {"counts": "*i64", "scratch": "*fp32", "member": "i32", "total": "i32", "ctx": "*i64"}
    types |= {"SIZE": "constexpr", "FILL": "constexpr"}
    source = ASTSource(count_resident, types, {"SIZE": 4, "FILL": FILL})
    target = GPUTarget("cuda", arch, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": WARPS})
    registers, spills = _ptx_resources(compiled.asm["cubin"])
    assert 2 * registers * WARPS * 32 > 65536
    assert spills == 0
