"""What torch keeps per thread stays that of the rank that runs."""

from __future__ import annotations

import gc

import torch

import sundog


def _grad_before_and_after_collecting(world: sundog.World) -> tuple[bool, bool]:
    before = torch.is_grad_enabled()
    gc.collect()
    return before, torch.is_grad_enabled()


def test_a_finished_world_does_not_leak_its_state_when_it_is_collected() -> None:
    with torch.no_grad():
        sundog.run(lambda world: world.zeros(3), 2)
    assert sundog.run(_grad_before_and_after_collecting, 2) == [(True, True)] * 2
    assert torch.is_grad_enabled()
