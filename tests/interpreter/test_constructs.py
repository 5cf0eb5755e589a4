"""What of Triton's language kernels use beyond tiles: each construct runs, or says why not."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer, smid

from sundog.errors import CannotInterpret, KernelError

from .launching import Run, launch

pytestmark = [pytest.mark.compat, pytest.mark.sim_only]


@triton.jit
def _power(x, N: tl.constexpr):
    if N == 0:
        return x
    else:
        return _power(x, N - 1) * 2


@triton.jit
def recursion(x, y):
    tl.store(y + tl.arange(0, 8), _power(tl.load(x + tl.arange(0, 8)), 3))


class _Pair:
    @triton.constexpr_function
    def __init__(self, first, second):
        self.first = first
        self.second = second

    @triton.jit
    def mixed(self, factor):
        return self.first * factor + self.second


_Pair.__annotations__ = {"first": tl.tensor, "second": tl.tensor}  # types: the file has strings
Pair = aggregate(_Pair)


@triton.jit
def method_of_aggregate(x, y):
    at = tl.arange(0, 8)
    tl.store(y + at, Pair(tl.load(x + at), at.to(tl.float32)).mixed(2))


@triton.jit
def _branching(a, b):
    if a > b:
        return a - b
    else:
        return b * 10


@triton.jit
def map_elementwise(x, y):
    at = tl.arange(0, 8)
    tl.store(y + at, tl.map_elementwise(_branching, tl.load(x + at), tl.full([8], 3.0, tl.float32)))


@triton.jit
def early_launch(x, y):
    gdc_wait()
    tl.store(y + tl.arange(0, 8), tl.load(x + tl.arange(0, 8)))
    gdc_launch_dependents()


@triton.jit
def clocks(x, y):
    begin = globaltimer()
    later = globaltimer() >= begin
    tl.store(y + tl.arange(0, 8), tl.load(x + tl.arange(0, 8)) * later + (smid() < 0))


X = torch.arange(8, dtype=torch.float32)
RUNS = {
    recursion: X * 8,
    method_of_aggregate: X * 3,
    map_elementwise: torch.where(X > 3, X - 3, torch.tensor(30.0)),
    early_launch: X,
    clocks: X,
}


@pytest.mark.parametrize("kernel", RUNS, ids=lambda kernel: kernel.fn.__name__)
def test_constructs_run(run: Run, kernel: triton.JITFunction) -> None:
    assert torch.equal(launch(run, kernel, (1,), X, torch.zeros(8))[1], RUNS[kernel])


@triton.jit
def table_kernel(table, x, y):
    at = tl.arange(0, 8)
    row = tl.load(table + 1).to(tl.pointer_type(tl.float32))
    tl.store(y + at, tl.load(row + at))


def test_a_table_of_addresses_is_followed(run: Run) -> None:
    def main(world: object) -> torch.Tensor:
        x, y = torch.arange(16, dtype=torch.float32), torch.zeros(8)
        table = torch.tensor([x.data_ptr(), x.data_ptr() + 32])
        table_kernel[(1,)](table, x, y)
        return y

    assert torch.equal(run(main, 1)[0], torch.arange(8.0, 16.0))


@triton.jit
def scaled_product(x, y):
    a, s = tl.zeros([32, 64], tl.uint8), tl.zeros([32, 2], tl.uint8)
    c = tl.dot_scaled(a, s, "e4m3", tl.trans(a), s, "e4m3")
    tl.store(y, tl.sum(c))


@triton.jit
def library_function(x, y):
    tl.store(y, libdevice.asin(tl.load(x)))


@triton.jit
def packed_map(x, y):
    at = tl.arange(0, 8)
    tl.store(y + at, tl.map_elementwise(_branching, tl.load(x + at), tl.load(x + at), pack=2))


@triton.jit
def false_multiple(x, y):
    tl.store(y + tl.multiple_of(tl.arange(0, 8) * 3 % 8, 4), 1.0)


@triton.jit
def false_pointer(x, y):
    tl.store(tl.multiple_of(y + 1, 16), 1.0)


@triton.jit
def false_run(x, y):
    tl.store(y + tl.max_contiguous((tl.arange(0, 8) + 3) % 8, 8), 1.0)


@triton.jit
def false_constant(x, y):
    tl.store(y + tl.max_constancy(tl.arange(0, 8), 2), 1.0)


REFUSED = {
    scaled_product: (CannotInterpret, "tl.dot_scaled is not simulated: scale the tiles"),
    library_function: (CannotInterpret, "libdevice.asin runs only on a GPU"),
    packed_map: (CannotInterpret, "pack=2 is not simulated; leave it out"),
    false_multiple: (KernelError, r"tl.multiple_of\(4\) is false: element \[1\] is 3"),
    false_pointer: (KernelError, r"tl.multiple_of\(16\) is false: element \[0\] is \d+"),
    false_run: (KernelError, r"tl.max_contiguous\(8\) is false: element \[5\] is 0"),
    false_constant: (KernelError, r"tl.max_constancy\(2\) is false: element \[1\] is 1"),
}


@pytest.mark.parametrize("kernel", REFUSED, ids=lambda kernel: kernel.fn.__name__)
def test_what_is_not_simulated_or_not_true_is_said(run: Run, kernel: triton.JITFunction) -> None:
    kind, message = REFUSED[kernel]
    with pytest.raises(kind, match=message) as caught:
        launch(run, kernel, (1,), X, torch.zeros(8))
    assert f"of {kernel.fn.__name__} at " in str(caught.value)
    assert "test_constructs.py:" in str(caught.value)


@triton.jit
def tile_hints(x, n, y):
    rows = tl.multiple_of(tl.arange(0, 4)[:, None] * 8, [8, 1])
    at = tl.max_contiguous(rows + tl.arange(0, 8)[None, :], [1, 8])
    at = tl.multiple_of(at, (8, 8))  # of a row's elements the first: the others follow it
    start = tl.multiple_of(n, 4)
    tl.store(y + at, tl.load(tl.multiple_of(x, 4) + start + at))


def test_hints_that_hold_change_nothing(run: Run) -> None:
    x = torch.arange(40, dtype=torch.float32)
    got = launch(run, tile_hints, (1,), x, 8, torch.zeros(32))[1]
    assert torch.equal(got, x[8:])
