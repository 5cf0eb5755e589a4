"""Element by element: SwiGLU, bias with GELU, rotary embedding."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..subject import SMS, Args, Config, Shape, Subject, always, blocks


@triton.jit
def swiglu_kernel(gate, up, out, numel, BLOCK: tl.constexpr):
    for tile in range(tl.program_id(0), tl.cdiv(numel, BLOCK), tl.num_programs(0)):
        at = tile * BLOCK + tl.arange(0, BLOCK)
        inside = at < numel
        g = tl.load(gate + at, inside).to(tl.float32)
        u = tl.load(up + at, inside).to(tl.float32)
        tl.store(out + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), inside)


@triton.jit
def bias_gelu_kernel(x, bias, out, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at = rows[:, None] * n + columns[None, :]
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    added = tl.load(bias + columns, columns < n).to(tl.float32)
    value = tl.load(x + at, inside).to(tl.float32) + added[None, :]
    value = 0.5 * value * (1.0 + tl.erf(value * 0.7071067811865476))
    tl.store(out + at, value.to(out.dtype.element_ty), inside)


@triton.jit
def rotary_kernel(
    x, cos, sin, out, tokens, heads,
    HALF: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    lane = tl.arange(0, HALF)
    angle = token[:, None, None] * HALF + lane[None, None, :]
    c = tl.load(cos + angle, (token < tokens)[:, None, None]).to(tl.float32)
    s = tl.load(sin + angle, (token < tokens)[:, None, None]).to(tl.float32)
    row = token[:, None, None] * heads + head[None, :, None]
    at = row * (2 * HALF) + lane[None, None, :]
    inside = (token < tokens)[:, None, None] & (head < heads)[None, :, None]
    first = tl.load(x + at, inside).to(tl.float32)
    second = tl.load(x + at + HALF, inside).to(tl.float32)
    tl.store(out + at, (first * c - second * s).to(out.dtype.element_ty), inside)
    tl.store(out + at + HALF, (second * c + first * s).to(out.dtype.element_ty), inside)


def _flat(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    gate, up = (torch.randn(shape["m"], shape["n"], device=device, dtype=dtype) for _ in "gu")
    return {"gate": gate, "up": up, "out": torch.empty_like(gate), "numel": gate.numel()}


def _swiglu(args: Args) -> list[torch.Tensor]:
    return [torch.nn.functional.silu(args["gate"].float()) * args["up"].float()]


def _swiglu_grid(shape: Shape, config: Config) -> tuple[int, ...]:
    tiles = blocks(shape["m"] * shape["n"], config["BLOCK"])
    return (min(tiles, config["WAVES"] * SMS) if config["WAVES"] else tiles,)


def _swiglu_trips(shape: Shape, config: Config) -> float:
    tiles = blocks(shape["m"] * shape["n"], config["BLOCK"])
    return tiles / _swiglu_grid(shape, config)[0]


def _biased(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    m, n = shape["m"], shape["n"]
    x = torch.randn(m, n, device=device, dtype=dtype)
    bias = torch.randn(n, device=device, dtype=dtype)
    return {"x": x, "bias": bias, "out": torch.empty_like(x), "m": m, "n": n}


def _bias_gelu(args: Args) -> list[torch.Tensor]:
    return [torch.nn.functional.gelu(args["x"].float() + args["bias"].float())]


def _heads(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    tokens, heads, dim = shape["tokens"], shape["heads"], shape["dim"]
    x = torch.randn(tokens, heads, dim, device=device, dtype=dtype)
    angle = torch.randn(tokens, dim // 2, device=device)
    args: dict[str, Any] = {"x": x, "cos": angle.cos().to(dtype), "sin": angle.sin().to(dtype)}
    return {**args, "out": torch.empty_like(x), "tokens": tokens, "heads": heads}


def _rotary(args: Args) -> list[torch.Tensor]:
    first, second = args["x"].float().chunk(2, dim=-1)
    cos, sin = args["cos"].float()[:, None], args["sin"].float()[:, None]
    return [torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)]


_ROWS: list[Shape] = [
    {"m": 2048, "n": 4096}, {"m": 4096, "n": 14336}, {"m": 512, "n": 11008}, {"m": 64, "n": 8192},
    {"m": 8192, "n": 1024}, {"m": 1536, "n": 5120}, {"m": 1021, "n": 4093}, {"m": 777, "n": 3001},
    {"m": 16384, "n": 2048}, {"m": 256, "n": 28672},
]  # fmt: skip
SUBJECTS = [
    Subject(
        "swiglu", "elementwise", swiglu_kernel,
        {"BLOCK": (256, 512, 1024, 2048, 4096, 8192), "num_warps": (1, 2, 4, 8, 16),
         "num_stages": (1, 3), "WAVES": (0, 2, 4, 8)},
        _ROWS, {"m": 3, "n": 100}, _flat, _swiglu, ["out"], _swiglu_grid,
        lambda s, size: (3 * s["m"] * s["n"] * size, 6 * s["m"] * s["n"]), _swiglu_trips,
        dtypes=("bfloat16", "float32"),
    ),
    Subject(
        "bias_gelu", "elementwise", bias_gelu_kernel,
        {"BLOCK_M": (1, 2, 4, 8, 16, 32), "BLOCK_N": (64, 128, 256, 512, 1024, 2048),
         "num_warps": (1, 2, 4, 8, 16)},
        _ROWS, {"m": 5, "n": 70}, _biased, _bias_gelu, ["out"],
        lambda s, c: (blocks(s["n"], c["BLOCK_N"]), blocks(s["m"], c["BLOCK_M"])),
        lambda s, size: ((2 * s["m"] + 1) * s["n"] * size, 20 * s["m"] * s["n"]), always,
        dtypes=("float16", "float32"),
        fits=lambda c: 32 * c["num_warps"] <= c["BLOCK_M"] * c["BLOCK_N"] <= 16384,
    ),
    Subject(
        "rotary", "elementwise", rotary_kernel,
        {"BLOCK_T": (1, 2, 4, 8), "BLOCK_H": (1, 2, 4, 8, 16, 32), "num_warps": (1, 2, 4, 8, 16)},
        [{"tokens": 4096, "heads": 32, "dim": 128}, {"tokens": 8192, "heads": 16, "dim": 128},
         {"tokens": 512, "heads": 64, "dim": 128}, {"tokens": 16384, "heads": 32, "dim": 64},
         {"tokens": 2048, "heads": 48, "dim": 128}, {"tokens": 1021, "heads": 28, "dim": 128},
         {"tokens": 3001, "heads": 40, "dim": 128},
         {"tokens": 1024, "heads": 64, "dim": 128}, {"tokens": 6144, "heads": 32, "dim": 128}],
        {"tokens": 3, "heads": 3, "dim": 16}, _heads, _rotary, ["out"],
        lambda s, c: (blocks(s["tokens"], c["BLOCK_T"]), blocks(s["heads"], c["BLOCK_H"])),
        lambda s, size: (s["tokens"] * s["dim"] * (2 * s["heads"] + 1) * size,
                         3 * s["tokens"] * s["heads"] * s["dim"]),
        always, constants=lambda s: {"HALF": s["dim"] // 2},
        fits=lambda c: c["BLOCK_T"] * c["BLOCK_H"] * 2 >= c["num_warps"]
        and c["BLOCK_T"] * c["BLOCK_H"] <= 128,
    ),
]  # fmt: skip
