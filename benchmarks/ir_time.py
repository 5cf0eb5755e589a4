"""How long the graph record of a Triton module takes: `python -m benchmarks.ir_time`.

The kernel is of attention's size: a loop with two dots, an online softmax and a causal mask. Each
line is one stage and architecture, the median and the worst of `REPEATS` extractions of a module
that is already compiled, and what is in the record.
"""

# A jit function's arguments are tiles and pointers, which have no Python type:
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import triton
import triton.language as tl

from sundog.dataset.ir_graph import IrGraphRecord, canonical_json
from sundog.dataset.triton.compile import lower
from sundog.dataset.triton.ttir import extract_ttir_graph, rebuild_module_text

__all__ = ["main", "measure"]

REPEATS = 21
LIMIT_MS = 150.0


@triton.jit
def attention(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, stride_head, num_keys,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD: tl.constexpr,
):  # fmt: skip
    """Causal attention of one block of rows of one head, which is contiguous."""
    start_m = tl.program_id(0)
    base = tl.program_id(1) * stride_head
    rows = start_m * BLOCK_M + tl.arange(0, BLOCK_M)
    keys = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, HEAD)
    own = base + rows[:, None] * HEAD + dims[None, :]
    q = tl.load(q_ptr + own, mask=rows[:, None] < num_keys, other=0.0)
    high = tl.full([BLOCK_M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    accumulator = tl.zeros([BLOCK_M, HEAD], dtype=tl.float32)
    for start in range(0, tl.minimum((start_m + 1) * BLOCK_M, num_keys), BLOCK_N):
        there = start + keys
        k_ptrs = k_ptr + base + there[None, :] * HEAD + dims[:, None]
        k = tl.load(k_ptrs, mask=there[None, :] < num_keys, other=0.0)
        scores = tl.where(rows[:, None] >= there[None, :], tl.dot(q, k) * scale, -1.0e6)
        new_high = tl.maximum(high, tl.max(scores, 1))
        p = tl.math.exp2(scores - new_high[:, None])
        shrink = tl.math.exp2(high - new_high)
        total = total * shrink + tl.sum(p, 1)
        v_ptrs = v_ptr + base + there[:, None] * HEAD + dims[None, :]
        v = tl.load(v_ptrs, mask=there[:, None] < num_keys, other=0.0)
        accumulator = tl.dot(p.to(tl.float16), v, accumulator * shrink[:, None])
        high = new_high
    out = (accumulator / total[:, None]).to(tl.float16)
    tl.store(out_ptr + own, out, mask=rows[:, None] < num_keys)


def measure(module: Any) -> tuple[list[float], IrGraphRecord]:
    """Milliseconds of each extraction, and the record."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        record = extract_ttir_graph(module)
        times.append((time.perf_counter() - start) * 1e3)
    return times, record


def main() -> None:
    half = torch.empty(1 << 20, dtype=torch.float16, device="meta")
    args = (half, half, half, half, 0.125, 65536, 1024)
    options = {"BLOCK_M": 128, "BLOCK_N": 64, "HEAD": 64, "num_warps": 4, "num_stages": 3}
    print(f"{'arch':8}{'stage':7}{'median ms':>10}{'worst ms':>10}{'ops':>6}{'edges':>7}{'kB':>7}")
    for arch in ("sm_90", "gfx942"):
        for stage in ("ttir", "ttgir"):
            module = lower(attention, args, options, arch=arch, stage=stage)
            times, record = measure(module)
            rebuild_module_text(record)
            ops = sum(node["node_kind"] == "op" for node in record["nodes"])
            size = len(canonical_json(record)) / 1e3
            row = f"{statistics.median(times):10.1f}{max(times):10.1f}{ops:6}"
            print(f"{arch:8}{stage:7}{row}{len(record['links']):7}{size:7.0f}")
    print(f"the limit is {LIMIT_MS:.0f} ms")


if __name__ == "__main__":
    main()
