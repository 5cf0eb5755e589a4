"""What a finding says: one per direction of a race, and whose call made the signal."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from sundog import World
from sundog.tools.check.schedules import check

pytestmark = pytest.mark.sim_only


@triton.jit
def turns(x, out):
    for turn in range(3):
        if tl.program_id(0) == 0:
            tl.store(x, turn)
        else:
            tl.store(out + turn, tl.load(x))


def read_and_overwritten(world: World) -> None:
    turns[(2,)](torch.zeros(1), torch.zeros(3))


def test_a_read_after_a_write_and_a_write_after_a_read_are_two_findings() -> None:
    found = check(read_and_overwritten, 1, schedules=12).findings
    assert {(f.first.verb, f.second.verb) for f in found} == {("store", "load"), ("load", "store")}
    assert len({(f.first.line, f.second.line) for f in found}) == 2
    assert len(found) == 2, [str(f) for f in found]
