"""To fewer bits and back: int8 with a scale per row, float8 with a scale per 128 elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..subject import Args, Shape, Subject, always, blocks

GROUP = 128
LARGEST = 448.0  # of float8_e4m3fn


@triton.jit
def quantise_rows_kernel(x, out, scale, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        value = tl.load(x + row * n + start + lane, start + lane < n, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    step = tl.max(largest, axis=0) / 127.0
    tl.store(scale + row, step)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        value = tl.load(x + row * n + start + lane, inside, other=0.0).to(tl.float32)
        tl.store(out + row * n + start + lane, tl.floor(value / step + 0.5).to(tl.int8), inside)


@triton.jit
def quantise_groups_kernel(x, out, scale, num_groups, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    value = tl.load(x + at, (group < num_groups)[:, None], other=0.0).to(tl.float32)
    step = tl.maximum(tl.max(tl.abs(value), axis=1), 1e-10) / 448.0
    tl.store(scale + group, step, group < num_groups)
    value = value / step[:, None]
    tl.store(out + at, value.to(out.dtype.element_ty), (group < num_groups)[:, None])


@triton.jit
def dequantise_rows_kernel(q, scale, out, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = rows[:, None] * n + columns[None, :]
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    step = tl.load(scale + rows, rows < m, other=0.0)
    value = tl.load(q + at, inside, other=0).to(tl.float32) * step[:, None]
    tl.store(out + at, value.to(out.dtype.element_ty), inside)


def _rows(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    m, n = shape["m"], shape["n"]
    x = torch.randn(m, n, device=device, dtype=dtype)
    out = torch.empty(m, n, device=device, dtype=torch.int8)
    return {"x": x, "out": out, "scale": torch.empty(m, device=device), "n": n}


def _groups(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    x = torch.randn(shape["m"], shape["n"], device=device, dtype=dtype)
    count = x.numel() // GROUP
    out = torch.empty(x.shape, device=device, dtype=torch.float8_e4m3fn)
    return {"x": x, "out": out, "scale": torch.empty(count, device=device), "num_groups": count}


def _quantised(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    m, n = shape["m"], shape["n"]
    q = torch.randint(-127, 128, (m, n), device=device, dtype=torch.int8)
    out = torch.empty(m, n, device=device, dtype=dtype)
    return {"q": q, "scale": torch.rand(m, device=device), "out": out, "m": m, "n": n}


def _quantise_rows(args: Args) -> list[torch.Tensor]:
    x = args["x"].float()
    scale = x.abs().amax(dim=1) / 127
    return [x, scale]


def _row_values(args: Args) -> list[torch.Tensor]:
    return [args["out"].float() * args["scale"][:, None], args["scale"]]


def _quantise_groups(args: Args) -> list[torch.Tensor]:
    x = args["x"].float()
    return [x, x.view(-1, GROUP).abs().amax(dim=1) / LARGEST]


def _group_values(args: Args) -> list[torch.Tensor]:
    value = args["out"].float().view(-1, GROUP) * args["scale"][:, None]
    return [value.view(args["x"].shape), args["scale"]]


def _dequantise_rows(args: Args) -> list[torch.Tensor]:
    return [args["q"].float() * args["scale"][:, None]]


_WIDE: list[Shape] = [
    {"m": 4096, "n": 4096}, {"m": 2048, "n": 8192}, {"m": 8192, "n": 5120}, {"m": 64, "n": 14336},
    {"m": 512, "n": 28672}, {"m": 1024, "n": 7168}, {"m": 1021, "n": 4093}, {"m": 777, "n": 3001},
    {"m": 256, "n": 16384}, {"m": 16384, "n": 2048},
]  # fmt: skip
SUBJECTS = [
    Subject(
        "quantise_rows", "quantise", quantise_rows_kernel,
        {"BLOCK": (256, 512, 1024, 2048, 4096, 8192), "num_warps": (1, 2, 4, 8, 16),
         "num_stages": (1, 2, 3)},
        _WIDE, {"m": 3, "n": 600}, _rows, _quantise_rows, ["out", "scale"], lambda s, c: (s["m"],),
        lambda s, size: (s["m"] * (s["n"] * (2 * size + 1) + 4), 4 * s["m"] * s["n"]),
        lambda s, c: 2 * blocks(s["n"], c["BLOCK"]), result=_row_values, loses=0.02,
    ),
    Subject(
        "quantise_groups", "quantise", quantise_groups_kernel,
        {"GROUPS": (1, 2, 4, 8, 16, 32, 64, 128), "num_warps": (1, 2, 4, 8, 16),
         "num_stages": (1, 2)},
        [*_WIDE[:6], *_WIDE[8:], {"m": 1021, "n": 4096}], {"m": 3, "n": 256}, _groups,
        _quantise_groups, ["out", "scale"],
        lambda s, c: (blocks(s["m"] * s["n"] // GROUP, c["GROUPS"]),),
        lambda s, size: (s["m"] * s["n"] * (size + 1 + 4 / GROUP), 3 * s["m"] * s["n"]), always,
        dtypes=("bfloat16", "float32"), constants=lambda s: {"GROUP": GROUP}, result=_group_values,
        loses=0.06,
    ),
    Subject(
        "dequantise_rows", "quantise", dequantise_rows_kernel,
        {"BLOCK_M": (1, 2, 4, 8, 16), "BLOCK_N": (128, 256, 512, 1024, 2048, 4096),
         "num_warps": (1, 2, 4, 8, 16)},
        _WIDE, {"m": 5, "n": 200}, _quantised, _dequantise_rows, ["out"],
        lambda s, c: (blocks(s["n"], c["BLOCK_N"]), blocks(s["m"], c["BLOCK_M"])),
        lambda s, size: (s["m"] * s["n"] * (size + 1), s["m"] * s["n"]), always,
        fits=lambda c: 64 * c["num_warps"] <= c["BLOCK_M"] * c["BLOCK_N"] <= 16384,
    ),
]  # fmt: skip
