"""Launches that go straight to the compiled kernel: where nothing that it depends on changed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from sundog.backends._gpu import Direct


@triton.jit
def _kernel(x, n, flag=None, BLOCK: tl.constexpr = 4):
    pass


class Compiled:
    packed_metadata = ()

    def __init__(self) -> None:
        self.started: list[tuple] = []

    def __getitem__(self, grid: tuple) -> Any:
        return lambda *args, stream: self.started.append((grid, args, stream))


DATA = torch.zeros(64)
ARGS = ((2,), (DATA, 7), {"BLOCK": 8, "num_warps": 4})
DIFFERENT = {
    "grid": ((3,), *ARGS[1:]),
    "alignment": ((2,), (DATA[1:], 7), ARGS[2]),
    "dtype": ((2,), (DATA.int(), 7), ARGS[2]),
    "number": ((2,), (DATA, 8), ARGS[2]),
    "truth": ((2,), (DATA, True), ARGS[2]),
    "constant": ((2,), ARGS[1], {"BLOCK": 16, "num_warps": 4}),
    "option": ((2,), ARGS[1], {"BLOCK": 8, "num_warps": 8}),
    "tuple": ((2,), ((DATA, 7), 7), ARGS[2]),
    "callable": (lambda meta: (2,), *ARGS[1:]),
}


def test_the_second_launch_of_the_same_kind_is_direct() -> None:
    direct, compiled = Direct(), Compiled()
    assert direct.again(_kernel, *ARGS, stream=5) is None
    direct.note(_kernel, *ARGS, compiled)
    other = torch.ones(64)  # aligned alike
    assert direct.again(_kernel, (2,), (other, 7), ARGS[2], stream=5) is compiled
    [(grid, args, stream)] = compiled.started
    assert (grid, args[0] is other, args[1:], stream) == ((2, 1, 1), True, (7, None, 8), 5)


@pytest.mark.parametrize("what", DIFFERENT)
def test_any_difference_goes_through_triton(what: str) -> None:
    direct, compiled = Direct(), Compiled()
    direct.note(_kernel, *ARGS, compiled)
    direct.note(_kernel, *DIFFERENT["callable"], compiled)
    direct.note(_kernel, *DIFFERENT["tuple"], compiled)
    assert direct.again(_kernel, *DIFFERENT[what], stream=5) is None
    assert direct.again(triton.jit(_kernel.fn), *ARGS, stream=5) is None
    assert not compiled.started


def test_what_triton_has_not_finished_is_not_noted() -> None:
    direct = Direct()
    direct.note(_kernel, *ARGS, SimpleNamespace(result=None))
    assert direct.again(_kernel, *ARGS, stream=5) is None
