"""Elementwise kernels over whole tensors: gradients of activations, gates, optimisers, masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..subject import SMS, Args, Config, Shape, Subject, blocks


@triton.jit
def _places(n, BLOCK: tl.constexpr, start):
    at = start + tl.arange(0, BLOCK)
    return at, at < n


@triton.jit
def gelu_kernel(x, out, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at, inside = _places(n, BLOCK, start)
        value = tl.load(x + at, inside).to(tl.float32)
        value = 0.5 * value * (1 + tl.erf(value * 0.7071067811865476))
        tl.store(out + at, value.to(out.dtype.element_ty), inside)


@triton.jit
def gelu_backward_kernel(x, y, out, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at, inside = _places(n, BLOCK, start)
        value = tl.load(x + at, inside).to(tl.float32)
        gradient = tl.load(y + at, inside).to(tl.float32)
        density = 0.3989422804014327 * tl.exp(-0.5 * value * value)
        slope = 0.5 * (1 + tl.erf(value * 0.7071067811865476)) + value * density
        tl.store(out + at, (gradient * slope).to(out.dtype.element_ty), inside)


@triton.jit
def silu_backward_kernel(x, y, out, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at, inside = _places(n, BLOCK, start)
        value = tl.load(x + at, inside).to(tl.float32)
        gradient = tl.load(y + at, inside).to(tl.float32)
        gate = tl.sigmoid(value)
        slope = gate * (1 + value * (1 - gate))
        tl.store(out + at, (gradient * slope).to(out.dtype.element_ty), inside)


@triton.jit
def swiglu_backward_kernel(x, y, z, out, second, n, BLOCK: tl.constexpr):
    """x: the gate before its activation, y: what it gates, z: the gradient."""
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at, inside = _places(n, BLOCK, start)
        gate = tl.load(x + at, inside).to(tl.float32)
        value = tl.load(y + at, inside).to(tl.float32)
        gradient = tl.load(z + at, inside).to(tl.float32)
        part = tl.sigmoid(gate)
        slope = part * (1 + gate * (1 - part))
        tl.store(out + at, (gradient * value * slope).to(out.dtype.element_ty), inside)
        tl.store(second + at, (gradient * gate * part).to(out.dtype.element_ty), inside)


@triton.jit
def geglu_kernel(x, y, out, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at, inside = _places(n, BLOCK, start)
        gate = tl.load(x + at, inside).to(tl.float32)
        value = tl.load(y + at, inside).to(tl.float32)
        gate = 0.5 * gate * (1 + tl.erf(gate * 0.7071067811865476))
        tl.store(out + at, (gate * value).to(out.dtype.element_ty), inside)


@triton.jit
def add_three_kernel(x, y, z, out, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at, inside = _places(n, BLOCK, start)
        total = tl.load(x + at, inside).to(tl.float32) + tl.load(y + at, inside).to(tl.float32)
        total += tl.load(z + at, inside).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), inside)


@triton.jit
def relu_squared_kernel(x, out, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at, inside = _places(n, BLOCK, start)
        value = tl.maximum(tl.load(x + at, inside).to(tl.float32), 0.0)
        tl.store(out + at, (value * value).to(out.dtype.element_ty), inside)


@triton.jit
def moving_average_kernel(x, y, out, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at, inside = _places(n, BLOCK, start)
        old = tl.load(x + at, inside).to(tl.float32)
        new = tl.load(y + at, inside).to(tl.float32)
        tl.store(out + at, (old + 0.01 * (new - old)).to(out.dtype.element_ty), inside)


@triton.jit
def adam_kernel(x, y, z, w, out, second, third, n, BLOCK: tl.constexpr):
    """x: weights, y: gradient, z and w: its first and second moment."""
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at, inside = _places(n, BLOCK, start)
        gradient = tl.load(y + at, inside).to(tl.float32)
        first = 0.9 * tl.load(z + at, inside).to(tl.float32) + 0.1 * gradient
        moment = 0.99 * tl.load(w + at, inside).to(tl.float32) + 0.01 * gradient * gradient
        weight = tl.load(x + at, inside).to(tl.float32)
        weight -= 1e-3 * (first / (tl.sqrt(tl.abs(moment)) + 1e-4) + 0.1 * weight)
        tl.store(out + at, weight.to(out.dtype.element_ty), inside)
        tl.store(second + at, first.to(out.dtype.element_ty), inside)
        tl.store(third + at, moment.to(out.dtype.element_ty), inside)


@triton.jit
def clamp_scale_kernel(x, y, out, n, BLOCK: tl.constexpr):
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at, inside = _places(n, BLOCK, start)
        value = tl.load(x + at, inside).to(tl.float32) * 0.125
        limit = tl.abs(tl.load(y + at, inside).to(tl.float32))
        value = tl.minimum(tl.maximum(value, -limit), limit)
        tl.store(out + at, value.to(out.dtype.element_ty), inside)


# references, in float32

_F = torch.nn.functional


def _grads(function: Callable[..., torch.Tensor], count: int) -> Callable[[Args], list]:
    """Gradients with respect to the first inputs; the one after them is the gradient's own."""

    def run(args: Args) -> list[torch.Tensor]:
        given = [args[name].float().requires_grad_() for name in "xyz"[:count]]
        return list(torch.autograd.grad(function(*given), given, args["xyz"[count]].float()))

    return run


def _adam(args: Args) -> list[torch.Tensor]:
    x, y, z, w = (args[name].float() for name in "xyzw")
    first, moment = 0.9 * z + 0.1 * y, 0.99 * w + 0.01 * y * y
    return [x - 1e-3 * (first / (moment.abs().sqrt() + 1e-4) + 0.1 * x), first, moment]


def _of(function: Callable[..., torch.Tensor], names: str) -> Callable[[Args], list]:
    return lambda args: [function(*(args[name].float() for name in names))]


def _clamped(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.minimum(torch.maximum(0.125 * x, -y.abs()), y.abs())


# subjects

_SPACE = {
    "BLOCK": (256, 512, 1024, 2048, 4096, 8192),
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": (1, 3),
    "WAVES": (0, 2, 4, 8),
}
_SHAPES: list[Shape] = [
    {"m": 4096, "n": 4096}, {"m": 2048, "n": 14336}, {"m": 512, "n": 11008}, {"m": 1024, "n": 1024},
    {"m": 16384, "n": 2048}, {"m": 333, "n": 3001}, {"m": 64, "n": 8192},
]  # fmt: skip


def _few(config: Config) -> bool:
    return 32 <= config["BLOCK"] // config["num_warps"] <= 128 * 32


def _grid(shape: Shape, config: Config) -> tuple[int, ...]:
    tiles = blocks(shape["m"] * shape["n"], config["BLOCK"])
    return (min(tiles, config["WAVES"] * SMS) if config["WAVES"] else tiles,)


def _trips(shape: Shape, config: Config) -> float:
    return blocks(shape["m"] * shape["n"], config["BLOCK"]) / _grid(shape, config)[0]


def _subject(
    kernel: Any,
    inputs: str,
    reference: Callable[[Args], list],
    flops: int,
    outputs: Sequence[str] = ("out",),
    dtypes: Sequence[str] = ("bfloat16", "float32"),
) -> Subject:
    def make(shape: Shape, dtype: torch.dtype, device: str) -> Args:
        size = shape["m"], shape["n"]
        args: Args = {name: torch.randn(size, device=device, dtype=dtype) for name in inputs}
        args |= {name: torch.empty(size, device=device, dtype=dtype) for name in outputs}
        return {**args, "n": shape["m"] * shape["n"]}

    def work(shape: Shape, size: int) -> tuple[float, float]:
        numel = shape["m"] * shape["n"]
        return (len(inputs) + len(outputs)) * numel * size, flops * numel

    name = kernel.fn.__name__.removesuffix("_kernel")
    return Subject(
        name, "elementwise", kernel, _SPACE, _SHAPES, {"m": 7, "n": 90}, make, reference,
        list(outputs), _grid, work, _trips, dtypes, fits=_few,
    )  # fmt: skip


SUBJECTS = [
    _subject(gelu_kernel, "x", _of(_F.gelu, "x"), 8),
    _subject(gelu_backward_kernel, "xy", _grads(_F.gelu, 1), 14),
    _subject(silu_backward_kernel, "xy", _grads(_F.silu, 1), 10),
    _subject(
        swiglu_backward_kernel,
        "xyz",
        _grads(lambda x, y: _F.silu(x) * y, 2),
        14,
        ("out", "second"),
    ),
    _subject(geglu_kernel, "xy", _of(lambda x, y: _F.gelu(x) * y, "xy"), 9),
    _subject(add_three_kernel, "xyz", _of(lambda x, y, z: x + y + z, "xyz"), 2),
    _subject(relu_squared_kernel, "x", _of(lambda x: _F.relu(x).square(), "x"), 2),
    _subject(moving_average_kernel, "xy", _of(lambda x, y: x + 0.01 * (y - x), "xy"), 3),
    _subject(adam_kernel, "xyzw", _adam, 14, ("out", "second", "third"), ("float32",)),
    _subject(clamp_scale_kernel, "xy", _of(_clamped, "xy"), 3),
]
