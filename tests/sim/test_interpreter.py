"""Triton's language: control flow, functions, arguments, and what only a GPU can do."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as stock
from triton.language.extra import libdevice
from triton.language.extra.cuda.libdevice import tanh
from triton.language.extra.libdevice import rint

from sundog.errors import CannotInterpret, KernelError

from .launching import Run, launch

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("error::RuntimeWarning")]

TWELVE = tl.constexpr(12)


@triton.jit
def _twice(x, by=2):
    return x * by


@triton.jit
def _both_ways(x, y, SWAP: tl.constexpr = False):
    if SWAP:
        return y, x
    return x, y


@triton.jit
def control_kernel(out, n, first, last):
    total = tl.full((), 0, tl.int64)
    for i in range(first, last, 2):  # a loop variable is a tensor
        total += i.to(tl.int64) * n
    tl.store(out, total)
    product = 1
    for i in tl.static_range(1, 5):
        product = product * i
    tl.store(out + 1, product)
    steps = 0
    x = n
    while x != 1:
        x = tl.where(x % 2 == 0, x // 2, 3 * x + 1)
        steps += 1
    tl.store(out + 2, steps)
    a, b = _both_ways(first, last, SWAP=True)
    tl.store(out + 3, a * 100 + b)
    tl.store(out + 4, _twice(n) + _twice(_twice(n, 3), by=TWELVE))
    tl.store(out + 5, n if n > 5 and last > 5 else -n)
    down = 0
    for i in tl.range(3, 0, -1):
        down = down * 10 + i
    tl.store(out + 6, down)
    tl.store(out + 7, 0 if not n % 7 == 0 else 1)  # noqa: SIM201


def test_control_flow(run: Run) -> None:
    got = launch(run, control_kernel, (1,), torch.zeros(8, dtype=torch.int64), 7, 1, 10)[0]
    assert got.tolist() == [7 * 25, 24, 16, 1001, 14 + 7 * 36, 7, 321, 1]


@triton.jit
def tiles_kernel(x_ptr, out, maybe_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    x = tl.load(x_ptr + at)
    tl.store(out + at, (x > 2 and x < 9) or x == 0)
    tl.store(out + N + at, not x > 2)
    if maybe_ptr is not None and tl.load(maybe_ptr) > 0:
        tl.store(out + at, x > 99)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_and_or_not_of_tiles_are_element_by_element(run: Run) -> None:
    x = torch.arange(16, dtype=torch.int32)
    got = launch(run, tiles_kernel, (1,), x, torch.zeros(32, dtype=torch.bool), None, N=16)[1]
    assert torch.equal(got, torch.cat([((x > 2) & (x < 9)) | (x == 0), ~(x > 2)]))


@triton.jit
def condition_kernel(x_ptr):
    if tl.load(x_ptr + tl.arange(0, 4)) > 0:
        tl.store(x_ptr, 1)


@pytest.mark.sim_only
def test_a_tile_is_no_condition(run: Run) -> None:
    with pytest.raises(KernelError, match="condition of 4 elements"):
        launch(run, condition_kernel, (1,), torch.ones(4))


def make_kernel(offset: int, table: tl.constexpr) -> Callable:
    @triton.jit
    def closure_kernel(out):
        tl.store(out, OFFSET + TABLE)

    OFFSET, TABLE = tl.constexpr(offset), table
    return closure_kernel


def test_closures(run: Run) -> None:
    for offset in (3, 4):
        kernel = make_kernel(offset, tl.constexpr(100))
        assert (
            launch(run, kernel, (1,), torch.zeros(1, dtype=torch.int32))[0].item() == 100 + offset
        )


@triton.jit
def arguments_kernel(out, flag, small, large, huge, real, nothing, pair, number=5):
    tl.store(out, small.to(tl.int64) * 2)
    tl.store(out + 1, large * 2)
    tl.store(out + 2, (huge // 2).to(tl.int64))
    tl.store(out + 3, (real.to(tl.float64) * 1e9).to(tl.int64))
    tl.store(out + 4, pair[0] + pair[1] + number)
    if flag:
        tl.store(out + 5, 1)
    if nothing is None:
        tl.store(out + 6, 1)
    tl.static_assert(real.dtype == tl.float32)
    tl.static_assert(large.dtype == tl.int64)


def test_arguments_have_the_types_that_a_gpu_gives_them(run: Run) -> None:
    args = (True, 2**31 - 1, 2**31, 2**64 - 2, 0.1, None, (7, 8))
    got = launch(run, arguments_kernel, (1,), torch.zeros(7, dtype=torch.int64), *args)[0]
    tenth = int(torch.tensor(0.1).double() * 1e9)
    assert got.tolist() == [2**32 - 2, 2**32, 2**63 - 1, tenth, 20, 1, 1]


@triton.jit
def wrap_kernel(out, n):
    tl.store(out, n * n)  # in 32 bits, as both are
    tl.store(out + 1, n.to(tl.int64) * n)
    tl.store(out + 2, ~n.to(tl.uint32))


def test_arithmetic_wraps_silently(run: Run) -> None:
    got = launch(run, wrap_kernel, (1,), torch.zeros(3, dtype=torch.int64), 70000)[0]
    assert got.tolist() == [70000**2 - 2**32, 70000**2, 2**32 - 1 - 70000]


@triton.jit
def print_kernel(x_ptr, GOOD: tl.constexpr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.device_print("x", x)
    tl.device_assert(x < 3, "too large")
    tl.static_assert(GOOD, "not good")


@pytest.mark.sim_only
def test_print_and_assert(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.tensor([0.5, 1.5], dtype=torch.bfloat16)
    launch(run, print_kernel, (1,), x, GOOD=True, N=2)
    assert "rank 0 program (0, 0, 0) of print_kernel" in (text := capfd.readouterr().out)
    assert "[0.5 1.5]" in text
    with pytest.raises(KernelError, match="not good"):
        launch(run, print_kernel, (1,), x, GOOD=False, N=2)
    with pytest.raises(KernelError, match=r"test_interpreter.py:\d+: .*too large"):
        launch(run, print_kernel, (1,), x * 4, GOOD=True, N=2)


@triton.jit
def assembly_kernel(x_ptr):
    x = tl.load(x_ptr)
    y = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], tl.int32, True, 1)  # here
    tl.store(x_ptr, y)


@triton.jit
def extern_kernel(x_ptr):
    x = tl.load(x_ptr)
    y = tl.core.extern_elementwise("", "", [x], {(tl.int32,): ("__nv_abs", tl.int32)}, True)  # here
    tl.store(x_ptr, y)


@triton.jit
def module_kernel(x_ptr, SAFE: tl.constexpr = False):
    if not SAFE:
        tl.store(x_ptr, libdevice.abs(tl.load(x_ptr)))  # here


@triton.jit
def _helper(x):
    return tanh(x)


@triton.jit
def helper_kernel(x_ptr):
    tl.store(x_ptr, _helper(tl.load(x_ptr)))  # here


@triton.jit
def imported_kernel(x_ptr):
    x = tl.load(x_ptr).to(tl.float32)
    tl.store(x_ptr, rint(x).to(tl.int32))  # here


GPU_ONLY = {
    assembly_kernel: "inline assembly", extern_kernel: "__nv_abs", module_kernel: "libdevice.abs",
    helper_kernel: "tanh", imported_kernel: "rint",
}  # fmt: skip


@pytest.mark.sim_only
@pytest.mark.parametrize("kernel", GPU_ONLY, ids=lambda k: k.fn.__name__)
def test_what_only_a_gpu_can_do_is_named(run: Run, kernel: triton.JITFunction) -> None:
    lines = kernel.raw_src
    line = kernel.starting_line_number + next(i for i, text in enumerate(lines) if "# here" in text)
    with pytest.raises(CannotInterpret) as caught:
        launch(run, kernel, (1,), torch.ones(1, dtype=torch.int32))
    assert kernel.fn.__name__ in str(caught.value)
    assert f"test_interpreter.py:{line}: " in str(caught.value)
    assert GPU_ONLY[kernel] in str(caught.value)


@pytest.mark.sim_only
def test_a_library_function_that_is_not_reached_does_no_harm(run: Run) -> None:
    launch(run, module_kernel, (1,), torch.ones(1, dtype=torch.int32), SAFE=True)


@triton.jit
def chain_kernel(x_ptr, out, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(out + tl.arange(0, N), 2 < x < 9)


@pytest.mark.sim_only
def test_chains_of_comparisons_are_right_or_refused(run: Run) -> None:
    x = torch.arange(16, dtype=torch.int32)
    if hasattr(stock, "_InterpreterComparison"):
        got = launch(run, chain_kernel, (1,), x, torch.zeros(16, dtype=torch.bool), N=16)[1]
        assert torch.equal(got, (x > 2) & (x < 9))
    else:
        with pytest.raises(CannotInterpret, match=r"chain_kernel at .*test_interpreter.py:\d+"):
            launch(run, chain_kernel, (1,), x, torch.zeros(16, dtype=torch.bool), N=16)


@pytest.mark.sim_only
def test_source_that_is_gone_is_not_needed(run: Run) -> None:
    """Triton keeps a kernel's source from when it was decorated: the file may change."""
    source = "def late_kernel(out):\n    tl.store(out, 41 + 1)\n"
    linecache.cache["<made>"] = (len(source), None, source.splitlines(True), "<made>")
    names = {"tl": tl, "__name__": "made"}
    exec(compile(source, "<made>", "exec"), names)
    kernel = triton.jit(names["late_kernel"])
    del linecache.cache["<made>"]
    assert launch(run, kernel, (1,), torch.zeros(1))[0].item() == 42


def test_without_source_triton_itself_refuses() -> None:
    names = {"tl": tl, "__name__": "made"}
    exec("def sourceless(out):\n    tl.store(out, 1)\n", names)
    with pytest.raises((ValueError, OSError), match=re.compile("file|source")):
        triton.jit(names["sourceless"])


def test_kernel_globals_stay_as_they_are(run: Run) -> None:
    before = dict(globals())
    launch(run, control_kernel, (1,), torch.zeros(8, dtype=torch.int64), 7, 1, 10)
    assert globals().keys() == before.keys()
    assert all(globals()[name] is value for name, value in before.items())
    assert isinstance(control_kernel, triton.JITFunction)
