"""`python -m benchmarks link-rates`: what crosses PCIe per second, by copies and by kernels.

This is why all_gather_matmul fetches by kernels and not by the copy engine. The engine is faster,
but every copy costs it some microseconds, and a fused kernel wants small ones. A kernel of one warp
sets a flag after each copy, on the same stream; two streams take turns, so that the engine need not
wait for them. A kernel asks for 128 bytes at a time, by TMA too. All run in graphs that take turns,
after some rounds that do not count: the link's first half second is slower.
"""

# A jit function's arguments are tiles and pointers, which have no Python type:
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from sundog.backends._link import pinned_heap

from .result_files import Figures

_BYTES = 32 << 20
_SAMPLES = 9
_WARM = 20  # rounds before
_CALLS = 4  # in a graph


def main(path: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    there, here = pinned_heap(_BYTES, device), torch.empty(_BYTES, dtype=torch.uint8, device=device)
    with torch.cuda.stream(torch.cuda.Stream()):
        found = _times(_ways(there, here))
    rows = [[name, *_cells(samples)] for name, samples in found.items()]
    text = f"{_BYTES >> 20} MiB of pinned memory into the GPU's; {_CALLS} times in a graph."
    nanos = {name: [round(1e9 * t, 1) for t in times] for name, times in found.items()}
    figures = Figures("The PCIe link", text, ["how", "median", "GB/s"], rows)
    figures.show(path, samples_ns=nanos)


def _ways(there: torch.Tensor, here: torch.Tensor) -> dict[str, Callable[[], object]]:
    flags = torch.zeros(1024, dtype=torch.int64, device=here.device)
    side = torch.cuda.Stream()
    ways: dict[str, Callable[[], object]] = {"one copy": lambda: here.copy_(there)}
    for size in (1 << 19, 1 << 20, 1 << 21, 1 << 22):
        name = f"copies of {size / (1 << 20):g} MiB, a flag after each"
        ways[name] = partial(_copies, there, here, flags, side, size)
    for programs in (1, 2, 3, 4, 8, 16, 32):
        name = f"kernel of {programs} programs"
        ways[name] = partial(_by_kernel, there, here, programs)
    for programs in (2, 4, 8):
        name = f"kernel of {programs} programs, by TMA"
        ways[name] = partial(_by_tma, there, here, programs)
    return ways


def _cells(samples: list[float]) -> list[str]:
    median = statistics.median(samples)
    return [f"{1e6 * median:.1f} us", f"{_BYTES / median / 1e9:.1f}"]


def _times(ways: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Return the seconds of one call, per sample."""
    graphs = {name: _captured(work) for name, work in ways.items()}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_WARM + _SAMPLES):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found[name].append(begin.elapsed_time(end) * 1e-3 / _CALLS)
    return {name: times[_WARM:] for name, times in found.items()}


def _captured(work: Callable[[], object]) -> torch.cuda.CUDAGraph:
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    for _ in range(_CALLS):
        work()
    graph.capture_end()
    return graph


def _copies(
    there: torch.Tensor, here: torch.Tensor, flags: torch.Tensor, side: torch.cuda.Stream, size: int
) -> None:
    main_stream = torch.cuda.current_stream()
    side.wait_stream(main_stream)
    for number, start in enumerate(range(0, _BYTES, size)):
        with torch.cuda.stream((main_stream, side)[number % 2]):
            here[start : start + size].copy_(there[start : start + size])
            _flag[(1,)](flags, number, num_warps=1)
    main_stream.wait_stream(side)


def _by_kernel(there: torch.Tensor, here: torch.Tensor, programs: int) -> None:
    words = there.view(torch.int32), here.view(torch.int32)
    _copy[(programs,)](*words, _BYTES // 4, BLOCK=4096, STAGES=8, num_warps=8)


def _by_tma(there: torch.Tensor, here: torch.Tensor, programs: int) -> None:
    rows, cols = 32, 256  # of a box; a row of the matrix has four
    shape, strides = [_BYTES // 2048, 1024], [1024, 1]
    src, dst = (
        TensorDescriptor(t.view(torch.int16).view(shape), shape, strides, [rows, cols])
        for t in (there, here)
    )
    boxes = _BYTES // (2 * rows * cols)
    _copy_boxes[(programs,)](src, dst, boxes, ROWS=rows, COLS=cols, STAGES=8, num_warps=8)


@triton.jit(do_not_specialize=["number"])
def _flag(flags, number):
    tl.atomic_add(flags + number, 1, sem="release", scope="gpu")


@triton.jit
def _copy(src, dst, n, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    step = tl.num_programs(0) * BLOCK
    for start in tl.range(tl.program_id(0) * BLOCK, n, step, num_stages=STAGES):
        at = start + tl.arange(0, BLOCK)
        tl.store(dst + at, tl.load(src + at))


@triton.jit
def _copy_boxes(src, dst, n, ROWS: tl.constexpr, COLS: tl.constexpr, STAGES: tl.constexpr):
    for box in tl.range(tl.program_id(0), n, tl.num_programs(0), num_stages=STAGES):
        row, col = box // 4 * ROWS, box % 4 * COLS
        dst.store([row, col], src.load([row, col]))
