"""What only a GPU can do, or Triton's language has not, is refused by name, file and line."""

from __future__ import annotations

import linecache
import re

import pytest
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as stock
from triton.language.extra import libdevice
from triton.language.extra.cuda.libdevice import tanh
from triton.language.extra.libdevice import rint

from sundog.errors import CannotInterpret

from .launching import Run, launch

pytestmark = pytest.mark.compat


@triton.jit
def assembly_kernel(x_ptr):
    x = tl.load(x_ptr)
    y = tl.inline_asm_elementwise("bfind.u32 $0, $1;", "=r,r", [x], tl.int32, True, 1)  # here
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
    assembly_kernel: "inline PTX, line 1: bfind.u32 $0, $1",
    extern_kernel: "__nv_abs",
    module_kernel: "libdevice.abs",
    helper_kernel: "tanh",
    imported_kernel: "rint",
}


@pytest.mark.sim_only
@pytest.mark.parametrize("kernel", GPU_ONLY, ids=lambda k: k.fn.__name__)
def test_what_only_a_gpu_can_do_is_named(run: Run, kernel: triton.JITFunction) -> None:
    lines = kernel.raw_src
    line = kernel.starting_line_number + next(i for i, text in enumerate(lines) if "# here" in text)
    with pytest.raises(CannotInterpret) as caught:
        launch(run, kernel, (1,), torch.ones(1, dtype=torch.int32))
    assert kernel.fn.__name__ in str(caught.value)
    # Of a helper first its own line, then the kernel's.
    assert re.search(rf"test_refusals.py:(\d+ \(called from :)?{line}\)?: ", str(caught.value))
    assert GPU_ONLY[kernel] in str(caught.value)


@pytest.mark.sim_only
def test_a_library_function_that_is_not_reached_does_no_harm(run: Run) -> None:
    launch(run, module_kernel, (1,), torch.ones(1, dtype=torch.int32), SAFE=True)


@triton.jit
def in_both_kernel(x_ptr):
    tl.store(x_ptr, libdevice.rsqrt(tl.load(x_ptr)))


@pytest.mark.sim_only
def test_a_library_function_that_tl_has_too_runs(run: Run) -> None:
    assert launch(run, in_both_kernel, (1,), torch.full((1,), 4.0))[0].item() == 0.5


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
        with pytest.raises(CannotInterpret, match=r"chain_kernel at .*test_refusals.py:\d+"):
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
