"""Sums, maxima and running sums: along rows, along columns, the largest few of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..subject import Args, Config, Shape, Subject, always, blocks

TOP = 8


@triton.jit
def cumsum_kernel(x, out, total, m, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    carried = tl.zeros([ROWS], tl.float32)
    for start in range(0, n, BLOCK):
        at = rows[:, None] * n + start + lane[None, :]
        inside = (rows < m)[:, None] & (start + lane < n)[None, :]
        value = tl.load(x + at, inside, other=0.0).to(tl.float32)
        tl.store(out + at, tl.cumsum(value, axis=1) + carried[:, None], inside)
        carried += tl.sum(value, axis=1)
    tl.store(total + rows, carried, rows < m)


@triton.jit
def row_sum_kernel(x, out, m, n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        inside = (rows < m)[:, None] & (start + lane < n)[None, :]
        at = rows[:, None] * n + start + lane[None, :]
        total += tl.load(x + at, inside, other=0.0).to(tl.float32)
    tl.store(out + rows, tl.sum(total, axis=1), rows < m)


@triton.jit
def column_sum_kernel(x, out, m, n, share, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.program_id(1) * share
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(first, tl.minimum(first + share, m), BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        inside = (rows < tl.minimum(first + share, m))[:, None] & (columns < n)[None, :]
        at = rows[:, None] * n + columns[None, :]
        total += tl.load(x + at, inside, other=0.0).to(tl.float32)
    # Several programs add to one column; the host reads the sums after the kernel.
    tl.atomic_add(out + columns, tl.sum(total, axis=0), columns < n, sem="relaxed")


@triton.jit
def row_argmax_kernel(x, value, index, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        new = tl.load(x + row * n + start + lane, inside, other=-float("inf")).to(tl.float32)
        where = tl.where(new > best, start + lane, where)
        best = tl.maximum(best, new)
    top, at = tl.max(best, axis=0, return_indices=True)
    tl.store(value + row, top)
    tl.store(index + row, tl.sum(tl.where(lane == at, where, 0), axis=0))


@triton.jit
def top_k_kernel(
    x, values, indices, m, n, TOP: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    inside = (rows < m)[:, None] & (lane < n)[None, :]
    left = tl.load(x + rows[:, None] * n + lane[None, :], inside, other=-float("inf"))
    left = left.to(tl.float32)
    for k in range(TOP):
        top, at = tl.max(left, axis=1, return_indices=True)
        tl.store(values + rows * TOP + k, top, rows < m)
        tl.store(indices + rows * TOP + k, at, rows < m)
        left = tl.where(lane[None, :] == at[:, None], -float("inf"), left)


def _made(shape: Shape, dtype: torch.dtype, device: str, **more: object) -> Args:
    m, n = shape["m"], shape["n"]
    x = torch.randn(m, n, device=device, dtype=dtype)
    return {"x": x, "m": m, "n": n, **more}


def _row_result(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    return _made(shape, dtype, device, out=torch.empty(shape["m"], device=device))


def _cumsum_inputs(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    out = torch.empty(shape["m"], shape["n"], device=device)
    return _made(shape, dtype, device, out=out, total=torch.empty(shape["m"], device=device))


def _cumsum(args: Args) -> list[torch.Tensor]:
    x = args["x"].float()
    return [x.cumsum(1), x.sum(1)]


def _column_result(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    return _made(shape, dtype, device, out=torch.zeros(shape["n"], device=device))


def _argmax_inputs(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    value = torch.empty(shape["m"], device=device)
    args = _made(
        shape, dtype, device, value=value, index=torch.empty_like(value, dtype=torch.int32)
    )
    return {name: args[name] for name in ("x", "value", "index", "n")}


def _top_inputs(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    values = torch.empty(shape["m"], TOP, device=device)
    indices = torch.empty_like(values, dtype=torch.int32)
    return _made(shape, dtype, device, values=values, indices=indices)


def _picked(args: Args) -> list[torch.Tensor]:
    """Return the values, and what the indices point to: equal ones may come in any order."""
    value = args["value"] if "value" in args else args["values"]
    index = args["index"][:, None] if "index" in args else args["indices"]
    found = args["x"].float().gather(1, index.long().clamp(0, args["n"] - 1))
    return [value, found.reshape(value.shape)]


def _largest(args: Args) -> list[torch.Tensor]:
    best = args["x"].float().max(dim=1).values
    return [best, best]


def _top(args: Args) -> list[torch.Tensor]:
    best = args["x"].float().topk(TOP, dim=1).values
    return [best, best]


def _few(config: Config) -> bool:
    """Keep the elements of a thread in its registers; BLOCK comes with a shape."""
    return config["ROWS"] * config.get("BLOCK", 1) <= 128 * 32 * config["num_warps"]


_WIDE: list[Shape] = [
    {"m": 2048, "n": 8192}, {"m": 512, "n": 32768}, {"m": 8192, "n": 4096}, {"m": 144, "n": 65536},
    {"m": 4096, "n": 5120}, {"m": 1024, "n": 14336}, {"m": 1021, "n": 10007}, {"m": 777, "n": 3001},
    {"m": 256, "n": 16384}, {"m": 16384, "n": 2048},
]  # fmt: skip
SUBJECTS = [
    Subject(
        "cumsum", "reductions", cumsum_kernel,
        {"ROWS": (1, 2, 4, 8), "BLOCK": (64, 128, 256, 512, 1024, 2048, 4096),
         "num_warps": (1, 2, 4, 8), "num_stages": (1, 3)},
        _WIDE, {"m": 3, "n": 100}, _cumsum_inputs, _cumsum, ["out", "total"],
        lambda s, c: (blocks(s["m"], c["ROWS"]),),
        lambda s, size: (s["m"] * s["n"] * (size + 4), 2 * s["m"] * s["n"]),
        lambda s, c: blocks(s["n"], c["BLOCK"]), dtypes=("bfloat16", "float32"),
        fits=lambda c: 32 * c["num_warps"] <= c["ROWS"] * c["BLOCK"] <= 8192,
    ),
    Subject(
        "row_sum", "reductions", row_sum_kernel,
        {"ROWS": (1, 2, 4, 8, 16), "BLOCK": (128, 256, 512, 1024, 2048, 4096, 8192),
         "num_warps": (1, 2, 4, 8, 16), "num_stages": (1, 2, 4)},
        _WIDE, {"m": 3, "n": 200}, _row_result, lambda a: [a["x"].float().sum(1)], ["out"],
        lambda s, c: (blocks(s["m"], c["ROWS"]),),
        lambda s, size: (s["m"] * s["n"] * size, s["m"] * s["n"]),
        lambda s, c: blocks(s["n"], c["BLOCK"]), dtypes=("float16", "float32"),
        fits=lambda c: 128 * c["num_warps"] <= c["ROWS"] * c["BLOCK"] <= 16384,
    ),
    Subject(
        "column_sum", "reductions", column_sum_kernel,
        {"BLOCK_M": (4, 8, 16, 32, 64), "BLOCK_N": (32, 64, 128, 256, 512), "num_warps": (2, 4, 8),
         "num_stages": (1, 3), "share": (128, 512, 2048)},
        _WIDE, {"m": 9, "n": 70}, _column_result, lambda a: [a["x"].float().sum(0)], ["out"],
        lambda s, c: (blocks(s["n"], c["BLOCK_N"]), blocks(s["m"], c["share"])),
        lambda s, size: (s["m"] * s["n"] * size, s["m"] * s["n"]),
        lambda s, c: blocks(min(s["m"], c["share"]), c["BLOCK_M"]), dtypes=("bfloat16", "float32"),
        fits=lambda c: 64 * c["num_warps"] <= c["BLOCK_M"] * c["BLOCK_N"] <= 8192, adds=True,
    ),
    Subject(
        "row_argmax", "reductions", row_argmax_kernel,
        {"BLOCK": (256, 512, 1024, 2048, 4096, 8192), "num_warps": (1, 2, 4, 8, 16),
         "num_stages": (1, 2, 4)},
        _WIDE, {"m": 3, "n": 600}, _argmax_inputs, _largest, ["value", "index"],
        lambda s, c: (s["m"],), lambda s, size: (s["m"] * s["n"] * size, 2 * s["m"] * s["n"]),
        lambda s, c: blocks(s["n"], c["BLOCK"]), dtypes=("bfloat16", "float32"), result=_picked,
    ),
    Subject(
        "top_k", "reductions", top_k_kernel,
        {"ROWS": (1, 2, 4, 8, 16), "num_warps": (1, 2, 4, 8, 16), "num_stages": (1, 2, 3)},
        [{"m": 4096, "n": 256}, {"m": 32768, "n": 256}, {"m": 1024, "n": 160},
         {"m": 8192, "n": 2048}, {"m": 512, "n": 2048}, {"m": 4096, "n": 1536},
         {"m": 4099, "n": 251},
         {"m": 16384, "n": 192}, {"m": 2048, "n": 2048}],
        {"m": 3, "n": 50}, _top_inputs, _top, ["values", "indices"],
        lambda s, c: (blocks(s["m"], c["ROWS"]),),
        lambda s, size: (s["m"] * (s["n"] * size + 8 * TOP), 2 * TOP * s["m"] * s["n"]), always,
        dtypes=("bfloat16", "float32"), result=_picked, fits=_few,
        constants=lambda s: {"BLOCK": triton.next_power_of_2(s["n"]), "TOP": TOP},
    ),
]  # fmt: skip
