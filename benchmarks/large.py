"""`python -m benchmarks large`: all-gather + GEMM, once, on 8 ranks of one GPU.

These are two products that ran out of memory elsewhere.

The heap holds a rank's shard of A, and with hbm_buffer the staging buffer, which has all others'. B
and the output are ordinary tensors.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from sundog import target
from sundog.fused.all_gather_matmul import Problem
from sundog.launch import run
from sundog.ops.load import algorithms
from sundog.ops.select import config_for
from sundog.world.world import World

from .result_files import Figures

SHAPES = ((8192, 8192, 262144), (16384, 16384, 131072))
_OP = "all_gather_matmul"
_SIZE = 8
_FLAGS = 64 << 20  # bytes of the heap for what is small
_ROWS = 64  # of the output, that are compared


def main(json_file: str) -> None:
    problems = [Problem(*shape, torch.bfloat16, _SIZE) for shape in SHAPES]
    rows = [_row(problem, algo) for problem in problems for algo in ("hbm_buffer", "direct")]
    text = (
        f"bfloat16, {_SIZE} ranks that share one GPU, one call after one that compiles; "
        f"{_ROWS} rows of each rank's output compared bitwise with torch.mm."
    )
    head = ["M", "N", "K", "algorithm", "heap per rank", "seconds", "TFLOP/s of all ranks"]
    Figures("Large all-gather + GEMM", text, head, rows).show(json_file)


def _row(problem: Problem, algo: str) -> list[str]:
    heap = _heap_size(problem, algo)
    name = f"{algo}, {problem.m} x {problem.n} x {problem.k}"
    print(f"{name}: needs a heap of {heap:,} bytes on each of {problem.size} ranks", flush=True)
    module = algorithms(_OP)[algo]
    found = run(lambda world: _once(world, problem, algo, module), _SIZE, "virtual", heap_size=heap)
    wrong, seconds = sum(bad for bad, _ in found), max(s for _, s in found)
    assert wrong == 0, f"{name}: {wrong} elements differ from torch.mm"
    rate = problem.size * 2 * problem.m * problem.n * problem.k / seconds / 1e12
    print(f"{name}: {seconds:.3f} s, {rate:.0f} TFLOP/s, nothing differs", flush=True)
    sizes = [str(n) for n in (problem.m, problem.n, problem.k)]
    return [*sizes, algo, f"{heap:,} bytes", f"{seconds:.3f}", f"{rate:.0f}"]


def _heap_size(problem: Problem, algo: str) -> int:
    whole = problem.m * problem.k * problem.dtype.itemsize
    return (whole // problem.size if algo == "direct" else whole) + _FLAGS


def _once(world: World, problem: Problem, algo: str, module: ModuleType) -> tuple[int, float]:
    """Return the number of elements that differ, and the seconds of the second call."""
    kind = target.of(world.device).key
    config: Any = config_for(f"{_OP}.{algo}", module, problem, kind, world.num_sms)
    plan = module.plan(world, problem, config)
    a, b = module.inputs(world, problem, 0)
    out = torch.empty(problem.m, problem.n, dtype=problem.dtype, device=world.device)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    for _ in range(2):
        world.barrier()
        events[0].record()
        plan(a, b, out)
        events[1].record()
        world.synchronize()
    some = slice(0, problem.m, problem.m // _ROWS)
    parts = [world.peer(a, rank)[some] for rank in range(world.size)]
    wrong = int((torch.mm(torch.cat(parts, dim=1), b) != out[some]).sum().item())
    world.barrier()  # everybody has read its peers' A
    return wrong, events[0].elapsed_time(events[1]) * 1e-3
