"""What torch keeps for cuBLAS, per thread and stream, does not grow with the number of worlds."""

from __future__ import annotations

import os
import random

import pytest
import torch

import sundog
from sundog import World

pytestmark = pytest.mark.gpu("virtual")
SIZE = 8


def multiply(world: World) -> float:
    """Multiply matrices on every rank, and end the ranks in another order each time."""
    x = torch.ones(64, 64, device=world.device)
    value = (x @ x).sum().item()
    for _ in range(random.randrange(4)):
        torch.ones(1, device=world.device).item()  # lets other ranks run
    return value


def test_worlds_with_products_leave_nothing_more_behind() -> None:
    assert sundog.run(multiply, SIZE, "virtual", heap_size=1 << 20) == [64.0**3] * SIZE
    first = torch.cuda.memory_allocated()
    for size in [SIZE, 2, 5, SIZE, 3] * 4:
        sundog.run(multiply, size, "virtual", heap_size=1 << 20)
        assert torch.cuda.memory_allocated() == first


def test_a_world_without_gpu_work_makes_no_handle() -> None:
    torch.cuda.init()
    before = torch.cuda.memory_allocated()
    sundog.run(lambda world: world.barrier(), 16, "sim")
    assert torch.cuda.memory_allocated() == before


def test_children_do_not_inherit_the_queues_of_this_process() -> None:
    sundog.run(lambda world: None, 2, "virtual", heap_size=1 << 20)
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") != "32"
