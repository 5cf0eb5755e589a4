"""Rows by index, read and added to, and a transpose."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..subject import Args, Shape, Subject, always, blocks


@triton.jit
def gather_rows_kernel(table, index, out, m, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    wanted = tl.load(index + rows, rows < m, other=0).to(tl.int64)
    value = tl.load(table + wanted[:, None] * n + columns[None, :], inside)
    tl.store(out + rows[:, None] * n + columns[None, :], value, inside)


@triton.jit
def scatter_add_rows_kernel(x, index, out, m, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    wanted = tl.load(index + rows, rows < m, other=0).to(tl.int64)
    value = tl.load(x + rows[:, None] * n + columns[None, :], inside).to(tl.float32)
    # Rows may share an index, so programs may add to one place; the host reads it afterwards.
    tl.atomic_add(out + wanted[:, None] * n + columns[None, :], value, inside, sem="relaxed")


@triton.jit
def transpose_kernel(x, out, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    value = tl.load(x + rows[:, None] * n + columns[None, :], inside)
    tl.store(out + columns[:, None] * m + rows[None, :], tl.trans(value), tl.trans(inside))


def _table(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    m, n, size = shape["m"], shape["n"], shape["size"]
    table = torch.randn(size, n, device=device, dtype=dtype)
    index = torch.randint(0, size, (m,), device=device, dtype=torch.int32)
    out = torch.empty(m, n, device=device, dtype=dtype)
    return {"table": table, "index": index, "out": out, "m": m, "n": n}


def _added(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    m, n, size = shape["m"], shape["n"], shape["size"]
    x = torch.randn(m, n, device=device, dtype=dtype)
    index = torch.randint(0, size, (m,), device=device, dtype=torch.int32)
    return {"x": x, "index": index, "out": torch.zeros(size, n, device=device), "m": m, "n": n}


def _scatter_add(args: Args) -> list[torch.Tensor]:
    empty = torch.zeros_like(args["out"])
    return [empty.index_add_(0, args["index"].long(), args["x"].float())]


def _square(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    m, n = shape["m"], shape["n"]
    x = torch.randn(m, n, device=device, dtype=dtype)
    return {"x": x, "out": torch.empty(n, m, device=device, dtype=dtype), "m": m, "n": n}


_INDEXED: list[Shape] = [
    {"m": 4096, "n": 4096, "size": 32000}, {"m": 16384, "n": 1024, "size": 16384},
    {"m": 512, "n": 8192, "size": 2048}, {"m": 8192, "n": 2048, "size": 4096},
    {"m": 2048, "n": 5120, "size": 8192}, {"m": 1024, "n": 7168, "size": 65536},
    {"m": 1021, "n": 4093, "size": 5003}, {"m": 3001, "n": 1001, "size": 999},
    {"m": 256, "n": 14336, "size": 1024}, {"m": 32768, "n": 512, "size": 8192},
]  # fmt: skip
_BLOCKS = {
    "ROWS": (1, 2, 4, 8, 16),
    "BLOCK": (128, 256, 512, 1024, 2048, 4096),
    "num_warps": (1, 2, 4, 8),
}
SUBJECTS = [
    Subject(
        "gather_rows", "gather", gather_rows_kernel, _BLOCKS, _INDEXED,
        {"m": 5, "n": 200, "size": 7}, _table, lambda a: [a["table"][a["index"].long()]], ["out"],
        lambda s, c: (blocks(s["m"], c["ROWS"]), blocks(s["n"], c["BLOCK"])),
        lambda s, size: (s["m"] * (2 * s["n"] * size + 4), 0), always,
        fits=lambda c: 32 * c["num_warps"] <= c["ROWS"] * c["BLOCK"] <= 16384,
        dtypes=("bfloat16", "float32"),
    ),
    Subject(
        "scatter_add_rows", "gather", scatter_add_rows_kernel, _BLOCKS, _INDEXED,
        {"m": 5, "n": 200, "size": 7}, _added, _scatter_add, ["out"],
        lambda s, c: (blocks(s["m"], c["ROWS"]), blocks(s["n"], c["BLOCK"])),
        lambda s, size: (s["m"] * (s["n"] * (size + 8) + 4), s["m"] * s["n"]), always, adds=True,
        fits=lambda c: 32 * c["num_warps"] <= c["ROWS"] * c["BLOCK"] <= 8192,
        dtypes=("bfloat16", "float32"),
    ),
    Subject(
        "transpose", "gather", transpose_kernel,
        {"BLOCK_M": (8, 16, 32, 64, 128, 256), "BLOCK_N": (8, 16, 32, 64, 128, 256),
         "num_warps": (1, 2, 4, 8, 16)},
        [{"m": 4096, "n": 4096}, {"m": 8192, "n": 2048}, {"m": 1024, "n": 14336},
         {"m": 16384, "n": 512}, {"m": 5120, "n": 7168}, {"m": 2048, "n": 640},
         {"m": 4093, "n": 2039}, {"m": 1001, "n": 3003},
         {"m": 14336, "n": 4096}, {"m": 256, "n": 16384}],
        {"m": 9, "n": 21}, _square, lambda a: [a["x"].t()], ["out"],
        lambda s, c: (blocks(s["n"], c["BLOCK_N"]), blocks(s["m"], c["BLOCK_M"])),
        lambda s, size: (2 * s["m"] * s["n"] * size, 0), always,
        fits=lambda c: 32 * c["num_warps"] <= c["BLOCK_M"] * c["BLOCK_N"] <= 16384,
        dtypes=("bfloat16", "float32"),
    ),
]  # fmt: skip
