"""Captures in a loop, with failures between: old graphs die late, and torch stays as it was."""

from __future__ import annotations

import warnings

import pytest
import torch

from sundog import World
from sundog.errors import CaptureError

pytestmark = pytest.mark.gpu("virtual", "symm")
ROUNDS = 20


def capture_in_a_loop(world: World) -> list[float]:
    """Every third capture is refused by CUDA, every third ends with an exception of its own."""
    x = world.zeros((1024,), name="x")
    world.all_reduce(x)  # kernels are loaded, the plan is made
    world.barrier()
    seen = []
    for number in range(ROUNDS):
        x.fill_(number)
        try:
            with world.capture() as graph:  # the previous graph dies here
                out = world.all_reduce(x)
                if number % 3 == 1:
                    out.sum().item()
                if number % 3 == 2:
                    raise KeyError(number)
        except (CaptureError, KeyError):
            pass
        else:
            graph.replay()
            seen.append(out[0].item())
        torch.randn(4, device=world.device)  # raises if torch believes in a capture
        world.barrier()
    return seen


@pytest.mark.parametrize("size", [1, 2, 4])
def test_captures_in_a_loop_with_failures_between(run, size):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        results = run(capture_in_a_loop, size)
    assert results == [[float(n * size) for n in range(0, ROUNDS, 3)]] * size
    assert [str(each.message) for each in said if "captur" in str(each.message)] == []


@pytest.mark.parametrize("size", [1, 2])
def test_a_failed_capture_leaves_the_generator(run, size):
    def main(world: World) -> bool:
        x = torch.ones(8, device=world.device)
        torch.cuda.manual_seed(7)
        expected = torch.randn(16, device=world.device)
        torch.cuda.manual_seed(7)
        with pytest.raises(CaptureError), world.capture():
            x.normal_().sum().item()
        same = bool(torch.equal(torch.randn(16, device=world.device), expected))
        world.barrier()
        return same

    assert run(main, size) == [True] * size
