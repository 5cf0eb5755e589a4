"""Memory that torch hands out twice is two tensors, also if nobody saw the first one go."""

from __future__ import annotations

import gc

import pytest
import torch

from sundog import World
from sundog.tools.check.schedules import check

from .kernels import alone

BUFFER = bytearray(64)


def two_tensors(world: World, keep: bool) -> None:
    kept = []
    for turn in range(world.size):
        if turn == world.rank:
            x = torch.frombuffer(BUFFER, dtype=torch.float32)  # no operator: nobody sees it made
            if turn == 0:
                alone[(1,)](x, BLOCK=16)
            x.sum().item()  # after the kernel
            kept += [x] if keep else []
            del x
        world.exchange(None)  # meets in time, orders no memory


@pytest.mark.parametrize("keep", [False, True])
def test_a_new_tensor_in_old_memory_is_no_race(keep: bool) -> None:
    gc.collect()
    report = check(lambda world: two_tensors(world, keep), 2, schedules=3)
    assert [f.kind for f in report.findings] == (["race"] if keep else []), report
