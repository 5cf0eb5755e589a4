"""`python -m benchmarks simulator`: what a simulation costs.

Two kernels that do not communicate run here and in Triton's own interpreter. Each side has its own
process, since Triton chooses its interpreter when a kernel is defined. The two sides take turns, so
that both meet the same machine, and the figure is the ratio of their medians. Then many ranks meet
at a barrier, which Triton's interpreter cannot run.
"""

# A jit function's arguments are tiles and pointers, which have no Python type:
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from sundog.device import signal

RATIO_GOAL = 0.7
BARRIER_GOAL = 2.0  # seconds
RANKS, PROGRAMS = 64, 8
REPEATS = 5


def run(repeats: int = REPEATS, ranks: int = RANKS, programs: int = PROGRAMS) -> dict[str, Any]:
    """Return all figures, in seconds: the medians of `repeats` runs."""
    seconds: dict[str, dict[str, list[float]]] = {
        name: {"ours": [], "triton": []} for name in CASES
    }
    for _ in range(repeats):
        for who in ("ours", "triton"):
            for name, value in _time_in_a_process(who).items():
                seconds[name][who].append(value)
    kernels = {name: _compared(times) for name, times in seconds.items()}
    barriers = [time_barrier(ranks, programs) for _ in range(repeats)]
    barrier = {"ranks": ranks, "programs": programs, "seconds": statistics.median(barriers)}
    return {"repeats": repeats, "kernels": kernels, "barrier": barrier}


def main(json_path: str = "") -> None:
    """Measure and print a table. With `json_path`, also write it for docs/measured.md."""
    from .result_files import Figures

    text = f"Medians of {REPEATS} runs that took turns; the ratio is what counts."
    head = ["what", "sundog", "Triton's interpreter", "ratio", "goal"]
    Figures("The simulator", text, head, _rows(run())).show(json_path, on_cpu=True)


def _compared(times: dict[str, list[float]]) -> dict[str, float]:
    ours, theirs = statistics.median(times["ours"]), statistics.median(times["triton"])
    return {"ours": ours, "triton": theirs, "ratio": ours / theirs}


def _rows(figures: dict[str, Any]) -> list[list[str]]:
    rows = []
    for name, figure in figures["kernels"].items():
        times = (f"{figure['ours']:.2f} s", f"{figure['triton']:.2f} s", f"{figure['ratio']:.2f}")
        rows.append([name, *times, f"{RATIO_GOAL}"])
    barrier = figures["barrier"]
    name = f"barrier of {barrier['ranks']} ranks x {barrier['programs']} programs"
    return [*rows, [name, f"{barrier['seconds']:.2f} s", "can't", "", f"{BARRIER_GOAL} s"]]


def _time_in_a_process(who: str) -> dict[str, float]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if who == "triton":
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", __spec__.name, who]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


# in the process of one of the two


def _time_kernels(who: str) -> dict[str, float]:
    if who == "triton":
        return {name: _best_of_two(case()) for name, case in CASES.items()}
    import sundog

    def host(world: sundog.World) -> dict[str, float]:
        return {name: _best_of_two(case(), world.synchronize) for name, case in CASES.items()}

    return sundog.run(host, 1, backend="sim")[0]


def _best_of_two(case: Callable[[], None], finish: Callable[[], None] = lambda: None) -> float:
    """Run it twice, since the first run also rewrites the kernel."""
    times = []
    for _ in range(2):
        start = time.perf_counter()
        case()
        finish()
        times.append(time.perf_counter() - start)
    return min(times)


def _matmul() -> Callable[[], None]:
    a, b, c = torch.randn(256, 256), torch.randn(256, 256), torch.empty(256, 256)
    strides = (256, 1)
    return lambda: matmul_kernel[(8, 8)](
        a, *strides, b, *strides, c, *strides, 256, 256, 256, BLOCK_M=32, BLOCK_N=32, BLOCK_K=32
    )


def _softmax() -> Callable[[], None]:
    x, out = torch.randn(1024, 1024), torch.empty(1024, 1024)
    return lambda: softmax_kernel[(1024,)](x, 1024, out, 1024, 1024, BLOCK=1024)


CASES = {
    "matmul 256 x 256 x 256 in tiles of 32 x 32 x 32": _matmul,
    "softmax 1024 x 1024": _softmax,
}


def time_barrier(ranks: int, programs: int) -> float:
    """Return the seconds to open a world, meet once inside a kernel, and close it."""
    import sundog

    def host(world: sundog.World) -> None:
        flags, counter = world.signals((world.size,), "flags"), world.signals((1,), "counter")
        world.barrier()
        lanes = triton.next_power_of_2(world.size)
        barrier_kernel[(programs,)](flags, counter, 1, world.ctx, LANES=lanes)
        world.barrier()

    start = time.perf_counter()
    sundog.run(host, ranks, backend="sim", heap_size=1 << 20)
    return time.perf_counter() - start


# kernels


@triton.jit
def matmul_kernel(
    a_ptr, stride_am, stride_ak,
    b_ptr, stride_bk, stride_bn,
    c_ptr, stride_cm, stride_cn,
    M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute a tile of C = A @ B, with masks at every edge, as a kernel for ragged sizes does."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    a_ptrs = a_ptr + rows[:, None] * stride_am + inner[None, :] * stride_ak
    b_ptrs = b_ptr + inner[:, None] * stride_bk + columns[None, :] * stride_bn
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=(rows[:, None] < M) & (inner[None, :] < K - k), other=0.0)
        b = tl.load(b_ptrs, mask=(inner[:, None] < K - k) & (columns[None, :] < N), other=0.0)
        total = tl.dot(a, b, total)
        a_ptrs += BLOCK_K * stride_ak
        b_ptrs += BLOCK_K * stride_bk
    c_ptrs = c_ptr + rows[:, None] * stride_cm + columns[None, :] * stride_cn
    tl.store(c_ptrs, total, mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def softmax_kernel(x_ptr, stride_x, out_ptr, stride_out, N, BLOCK: tl.constexpr):
    """Compute the softmax of one row."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    valid = columns < N
    x = tl.load(x_ptr + row * stride_x + columns, mask=valid, other=float("-inf"))
    numerator = tl.exp(x - tl.max(x, axis=0))
    out = numerator / tl.sum(numerator, axis=0)
    tl.store(out_ptr + row * stride_out + columns, out, mask=valid)


@triton.jit
def barrier_kernel(flags, counter, epoch, ctx, LANES: tl.constexpr):
    """Meet all programs of all ranks: those of a rank, one of them with the other ranks, again."""
    signal.barrier_programs(counter, ctx)
    if tl.program_id(0) == 0:
        signal.barrier_ranks(flags, epoch, ctx, LANES)
    signal.barrier_programs(counter, ctx)


if __name__ == "__main__":
    print(json.dumps(_time_kernels(sys.argv[1])))
