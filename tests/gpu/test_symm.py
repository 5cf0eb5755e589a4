"""What is about `symm` alone, in worlds of all pytest processes; tests/support/spmd.py says how."""

from __future__ import annotations

import pytest
import rank_kernels as kernels
import torch

from sundog import World, target
from sundog.errors import NotResident, PeerLost

pytestmark = pytest.mark.gpu("symm")


def wait_in_many(world: World, programs: int) -> int:
    flags = world.signals((programs, world.size), "many.flags")
    epochs = world.signals((programs,), "many.epochs")
    x, out = world.zeros((512,)), world.zeros((512 * world.size,))
    world.barrier()
    lanes = 1 << (world.size - 1).bit_length()
    kernels.all_gather[(programs,)](
        x, out, flags, epochs, world.ctx, 512, SIZE=world.size, LANES=lanes, BLOCK=256
    )
    world.barrier()
    return world.num_sms


@pytest.mark.parametrize("size", [2, 4])
def test_more_programs_than_the_share_holds_are_refused(run, size):
    def main(world: World) -> int:
        return wait_in_many(world, 40 * world.num_sms)

    with pytest.raises(NotResident, match=r"programs of .* registers .*of NVIDIA .* hold"):
        run(main, size)


@pytest.mark.parametrize("size", [2, 4])
def test_two_programs_an_sm_are_fine_and_shares_add_up(run, size):
    shares = run(lambda world: wait_in_many(world, 2 * world.num_sms), size)
    assert len(set(shares)) == 1
    assert shares[0] <= target.of(torch.device("cuda")).num_sms


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_fails_ends_waits_of_the_others(run, size):
    def main(world: World) -> None:
        flags = world.signals(1, "fail.flags")
        world.barrier()
        if world.rank == 1:
            raise KeyError("rank 1 fails")
        kernels.wait_for[(1,)](flags, 1, 1, world.ctx)
        with pytest.raises(PeerLost, match=r"rank 1 of \d+ raised KeyError"):
            world.synchronize()

    with pytest.raises(KeyError, match="rank 1 fails"):
        run(main, size)
    assert run(lambda world: world.rank, size) == list(range(size))
