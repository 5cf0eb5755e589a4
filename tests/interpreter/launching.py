"""Launch one kernel on whatever backend is being tested, and compare what it computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Run = Callable[..., list]


def launch(run: Run, kernel: Any, grid: Any, *args: Any, **constants: Any) -> list[torch.Tensor]:
    """The tensors among `args` after `kernel[grid](*args)`, on one rank."""

    def main(world: Any) -> list[torch.Tensor]:
        there = [a.to(world.device) if isinstance(a, torch.Tensor) else a for a in args]
        there = [a.clone() if isinstance(a, torch.Tensor) else a for a in there]
        kernel[grid](*there, **constants)
        world.synchronize()
        return [a.cpu() for a in there if isinstance(a, torch.Tensor)]

    return run(main, 1)[0]


def same(got: torch.Tensor, wanted: torch.Tensor, *, zero_sign: bool = True) -> bool:
    """Equal bit by bit, where one NaN is as good as another."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    if not got.is_floating_point():
        return torch.equal(got, wanted)
    a, b = got.double(), wanted.double()
    equal = (a == b) | (a.isnan() & b.isnan())
    if zero_sign:
        equal &= (torch.signbit(a) == torch.signbit(b)) | a.isnan()
    return bool(equal.all())
