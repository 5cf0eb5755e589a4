"""Norms of rows: RMS norm, layer norm and its gradient, and a residual added on the way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..subject import SMS, Args, Config, Shape, Subject, always, blocks

EPS = 1e-5


@triton.jit
def rms_norm_kernel(x, weight, out, m, n, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    scale = tl.load(weight + columns, columns < n, other=0.0).to(tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(m, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        at = rows[:, None] * n + columns[None, :]
        inside = (rows < m)[:, None] & (columns < n)[None, :]
        value = tl.load(x + at, inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(value * value, axis=1) / n + 1e-5)
        value = value * inverse[:, None] * scale[None, :]
        tl.store(out + at, value.to(out.dtype.element_ty), inside)


@triton.jit
def layer_norm_kernel(x, weight, bias, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        value = tl.load(x + at + start, start + lane < n, other=0.0).to(tl.float32)
        total += value
        squares += value * value
    mean = tl.sum(total, axis=0) / n
    inverse = tl.rsqrt(tl.sum(squares, axis=0) / n - mean * mean + 1e-5)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        value = tl.load(x + at + start, inside, other=0.0).to(tl.float32)
        w = tl.load(weight + start + lane, inside, other=0.0).to(tl.float32)
        b = tl.load(bias + start + lane, inside, other=0.0).to(tl.float32)
        value = (value - mean) * inverse * w + b
        tl.store(out + at + start, value.to(out.dtype.element_ty), inside)


@triton.jit
def layer_norm_backward_kernel(
    gradient, x, weight, mean, inverse, out, m, n, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    columns = tl.arange(0, BLOCK)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * n + columns[None, :]
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    w = tl.load(weight + columns, columns < n, other=0.0).to(tl.float32)
    g = tl.load(gradient + at, inside, other=0.0).to(tl.float32) * w[None, :]
    middle = tl.load(mean + rows, rows < m, other=0.0)[:, None]
    r = tl.load(inverse + rows, rows < m, other=0.0)[:, None]
    hat = (tl.load(x + at, inside, other=0.0).to(tl.float32) - middle) * r
    hat = tl.where(inside, hat, 0.0)
    along = tl.sum(g * hat, axis=1)[:, None] / n
    average = tl.sum(g, axis=1)[:, None] / n
    tl.store(out + at, ((g - average - hat * along) * r).to(out.dtype.element_ty), inside)


@triton.jit
def add_rms_norm_kernel(x, residual, weight, out, added, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * n + tl.arange(0, BLOCK)
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        value = tl.load(x + at + start, inside, other=0.0).to(tl.float32)
        value += tl.load(residual + at + start, inside, other=0.0).to(tl.float32)
        tl.store(added + at + start, value.to(added.dtype.element_ty), inside)
        squares += value * value
    inverse = tl.rsqrt(tl.sum(squares, axis=0) / n + 1e-5)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        # From the inputs: what this program stored above may not be visible to its other warps.
        value = tl.load(x + at + start, inside, other=0.0).to(tl.float32)
        value += tl.load(residual + at + start, inside, other=0.0).to(tl.float32)
        value *= inverse * tl.load(weight + start + lane, inside, other=0.0).to(tl.float32)
        tl.store(out + at + start, value.to(out.dtype.element_ty), inside)


def _rows(shape: Shape, dtype: torch.dtype, device: str, *names: str) -> Args:
    """Make x, out, n, and what else is named: vectors of n, `m`, or tensors like x."""
    m, n = shape["m"], shape["n"]
    x = torch.randn(m, n, device=device, dtype=dtype)
    args: Args = {"x": x, "out": torch.empty_like(x), "n": n}
    for name in names:
        if name == "m":
            args[name] = m
        elif name in ("weight", "bias"):
            args[name] = torch.randn(n, device=device, dtype=dtype)
        else:
            args[name] = torch.randn(m, n, device=device, dtype=dtype)
    return args


def _backward(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    args = _rows(shape, dtype, device, "m", "weight", "gradient")
    x = args["x"].float()
    inverse = torch.rsqrt(x.var(dim=1, unbiased=False) + EPS)
    return {**args, "mean": x.mean(dim=1), "inverse": inverse}


def _rms_norm(args: Args) -> list[torch.Tensor]:
    x = args["x"].float()
    return [x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * args["weight"].float()]


def _layer_norm(args: Args) -> list[torch.Tensor]:
    vectors = args["weight"].float(), args["bias"].float()
    return [torch.nn.functional.layer_norm(args["x"].float(), (args["n"],), *vectors, EPS)]


def _layer_norm_backward(args: Args) -> list[torch.Tensor]:
    x = args["x"].float().requires_grad_()
    y = torch.nn.functional.layer_norm(x, (args["n"],), args["weight"].float(), None, EPS)
    return [torch.autograd.grad(y, x, args["gradient"].float())[0]]


def _add_rms_norm(args: Args) -> list[torch.Tensor]:
    added = args["x"].float() + args["residual"].float()
    return [*_rms_norm({"x": added, "weight": args["weight"]}), added]


def _tiles(shape: Shape, config: Config) -> tuple[int, ...]:
    tiles = blocks(shape["m"], config["ROWS"])
    return (min(tiles, config["WAVES"] * SMS) if config["WAVES"] else tiles,)


def _few(config: Config) -> bool:
    """Keep the elements of a thread in its registers; BLOCK comes with a shape."""
    return config["ROWS"] * config.get("BLOCK", 1) <= 128 * 32 * config["num_warps"]


_LOOP = {
    "BLOCK": (256, 512, 1024, 2048, 4096, 8192),
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": (1, 2, 3, 4),
}
_WIDE: list[Shape] = [
    {"m": 4096, "n": 4096}, {"m": 2048, "n": 8192}, {"m": 512, "n": 16384}, {"m": 8192, "n": 5120},
    {"m": 128, "n": 7168}, {"m": 1024, "n": 14336}, {"m": 1021, "n": 4093}, {"m": 333, "n": 9001},
    {"m": 16384, "n": 2048}, {"m": 256, "n": 12288},
]  # fmt: skip
SUBJECTS = [
    Subject(
        "rms_norm", "norms", rms_norm_kernel,
        {"ROWS": (1, 2, 4, 8), "num_warps": (1, 2, 4, 8, 16), "num_stages": (1, 2, 3),
         "WAVES": (0, 2, 4)},
        [{"m": 4096, "n": 4096}, {"m": 16384, "n": 3584}, {"m": 64, "n": 4096},
         {"m": 4096, "n": 2560}, {"m": 2048, "n": 8192}, {"m": 8192, "n": 7168},
         {"m": 1021, "n": 4093}, {"m": 333, "n": 3001},
         {"m": 1024, "n": 3072}, {"m": 256, "n": 8192}],
        {"m": 5, "n": 30}, lambda s, t, d: _rows(s, t, d, "m", "weight"), _rms_norm, ["out"],
        _tiles, lambda s, size: ((2 * s["m"] + 1) * s["n"] * size, 4 * s["m"] * s["n"]),
        lambda s, c: blocks(s["m"], c["ROWS"]) / _tiles(s, c)[0],
        fits=_few, constants=lambda s: {"BLOCK": triton.next_power_of_2(s["n"])},
    ),
    Subject(
        "layer_norm", "norms", layer_norm_kernel, _LOOP, _WIDE, {"m": 3, "n": 600},
        lambda s, t, d: _rows(s, t, d, "weight", "bias"), _layer_norm, ["out"],
        lambda s, c: (s["m"],),
        lambda s, size: ((3 * s["m"] + 2) * s["n"] * size, 7 * s["m"] * s["n"]),
        lambda s, c: 2 * blocks(s["n"], c["BLOCK"]), dtypes=("bfloat16", "float32"),
    ),
    Subject(
        "layer_norm_backward", "norms", layer_norm_backward_kernel,
        {"ROWS": (1, 2, 4, 8), "num_warps": (1, 2, 4, 8, 16, 32), "num_stages": (1, 2, 3)},
        [{"m": 4096, "n": 4096}, {"m": 16384, "n": 3072}, {"m": 256, "n": 4096},
         {"m": 2048, "n": 2560}, {"m": 4096, "n": 8192}, {"m": 1024, "n": 5120},
         {"m": 1021, "n": 4093},
         {"m": 512, "n": 6144}, {"m": 8192, "n": 4096}],
        {"m": 5, "n": 30}, _backward, _layer_norm_backward, ["out"],
        lambda s, c: (blocks(s["m"], c["ROWS"]),),
        lambda s, size: ((3 * s["m"] + 1) * s["n"] * size, 10 * s["m"] * s["n"]), always,
        fits=_few, constants=lambda s: {"BLOCK": triton.next_power_of_2(s["n"])},
    ),
    Subject(
        "add_rms_norm", "norms", add_rms_norm_kernel, _LOOP, _WIDE, {"m": 3, "n": 600},
        lambda s, t, d: _rows(s, t, d, "residual", "weight", "added"), _add_rms_norm,
        ["out", "added"], lambda s, c: (s["m"],),
        lambda s, size: ((6 * s["m"] + 1) * s["n"] * size, 6 * s["m"] * s["n"]),
        lambda s, c: 2 * blocks(s["n"], c["BLOCK"]),
    ),
]  # fmt: skip
