"""Kernels of which a program has a row, in one or two loops: losses, gradients, statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from ..subject import Args, Config, Shape, Subject, blocks

_NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def _log_sum(x, n, BLOCK: tl.constexpr):
    """Return the logarithm of the sum of exponentials of a row that begins at x."""
    lane = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], _NOTHING, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        value = tl.load(x + start + lane, start + lane < n, other=_NOTHING).to(tl.float32)
        higher = tl.maximum(most, value)
        safe = tl.where(higher == _NOTHING, 0.0, higher)
        total = total * tl.exp(most - safe) + tl.exp(value - safe)
        most = higher
    peak = tl.max(most, axis=0)
    return peak + tl.log(tl.sum(total * tl.exp(most - peak), axis=0))


@triton.jit
def log_sum_exp_kernel(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    tl.store(out + row, _log_sum(x + row * n, n, BLOCK))


@triton.jit
def log_softmax_kernel(x, out, n, BLOCK: tl.constexpr):
    at, lane = tl.program_id(0) * n, tl.arange(0, BLOCK)
    level = _log_sum(x + at, n, BLOCK)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        value = tl.load(x + at + start + lane, inside, other=0.0).to(tl.float32) - level
        tl.store(out + at + start + lane, value.to(out.dtype.element_ty), inside)


@triton.jit
def cross_entropy_backward_kernel(x, label, out, n, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    at, wanted = row * n, tl.load(label + row)
    level = _log_sum(x + at, n, BLOCK)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        value = tl.load(x + at + start + lane, inside, other=0.0).to(tl.float32)
        value = tl.exp(value - level) - tl.where(start + lane == wanted, 1.0, 0.0)
        tl.store(out + at + start + lane, value.to(out.dtype.element_ty), inside)


@triton.jit
def softmax_backward_kernel(x, y, out, n, BLOCK: tl.constexpr):
    """x: the softmax, y: its gradient."""
    at, lane = tl.program_id(0) * n, tl.arange(0, BLOCK)
    along = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        value = tl.load(x + at + start + lane, inside, other=0.0).to(tl.float32)
        along += value * tl.load(y + at + start + lane, inside, other=0.0).to(tl.float32)
    total = tl.sum(along, axis=0)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        value = tl.load(x + at + start + lane, inside, other=0.0).to(tl.float32)
        gradient = tl.load(y + at + start + lane, inside, other=0.0).to(tl.float32)
        value = value * (gradient - total)
        tl.store(out + at + start + lane, value.to(out.dtype.element_ty), inside)


@triton.jit
def rms_norm_backward_kernel(x, y, weight, out, n, BLOCK: tl.constexpr):
    at, lane = tl.program_id(0) * n, tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    along = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        value = tl.load(x + at + start + lane, inside, other=0.0).to(tl.float32)
        gradient = tl.load(y + at + start + lane, inside, other=0.0).to(tl.float32)
        gradient *= tl.load(weight + start + lane, inside, other=0.0).to(tl.float32)
        squares += value * value
        along += value * gradient
    inverse = tl.rsqrt(tl.sum(squares, axis=0) / n + 1e-5)
    shift = tl.sum(along, axis=0) / n * inverse * inverse
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        value = tl.load(x + at + start + lane, inside, other=0.0).to(tl.float32)
        gradient = tl.load(y + at + start + lane, inside, other=0.0).to(tl.float32)
        gradient *= tl.load(weight + start + lane, inside, other=0.0).to(tl.float32)
        value = (gradient - value * shift) * inverse
        tl.store(out + at + start + lane, value.to(out.dtype.element_ty), inside)


@triton.jit
def normalise_kernel(x, out, n, BLOCK: tl.constexpr):
    """To a length of one."""
    at, lane = tl.program_id(0) * n, tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        value = tl.load(x + at + start + lane, start + lane < n, other=0.0).to(tl.float32)
        squares += value * value
    inverse = tl.rsqrt(tl.sum(squares, axis=0) + 1e-12)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        value = tl.load(x + at + start + lane, inside, other=0.0).to(tl.float32) * inverse
        tl.store(out + at + start + lane, value.to(out.dtype.element_ty), inside)


@triton.jit
def divergence_kernel(x, y, out, n, BLOCK: tl.constexpr):
    """Kullback and Leibler's, of two rows of logits."""
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    first, second = _log_sum(x + row * n, n, BLOCK), _log_sum(y + row * n, n, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        p = tl.load(x + row * n + start + lane, inside, other=0.0).to(tl.float32) - first
        q = tl.load(y + row * n + start + lane, inside, other=0.0).to(tl.float32) - second
        total += tl.where(inside, tl.exp(p) * (p - q), 0.0)
    tl.store(out + row, tl.sum(total, axis=0))


@triton.jit
def cosine_kernel(x, y, out, n, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    both = tl.zeros([BLOCK], tl.float32)
    xs = tl.zeros([BLOCK], tl.float32)
    ys = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        p = tl.load(x + row * n + start + lane, inside, other=0.0).to(tl.float32)
        q = tl.load(y + row * n + start + lane, inside, other=0.0).to(tl.float32)
        both += p * q
        xs += p * p
        ys += q * q
    length = tl.sqrt(tl.sum(xs, axis=0) * tl.sum(ys, axis=0) + 1e-12)
    tl.store(out + row, tl.sum(both, axis=0) / length)


@triton.jit
def row_variance_kernel(x, out, n, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        value = tl.load(x + row * n + start + lane, start + lane < n, other=0.0).to(tl.float32)
        total += value
        squares += value * value
    mean = tl.sum(total, axis=0) / n
    tl.store(out + row, tl.sum(squares, axis=0) / n - mean * mean)


@triton.jit
def mean_squared_error_kernel(x, y, out, n, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        p = tl.load(x + row * n + start + lane, inside, other=0.0).to(tl.float32)
        p -= tl.load(y + row * n + start + lane, inside, other=0.0).to(tl.float32)
        total += p * p
    tl.store(out + row, tl.sum(total, axis=0) / n)


# references, in float32

_F = torch.nn.functional


def _of(function: Callable[..., torch.Tensor], names: str = "x") -> Callable[[Args], list]:
    return lambda args: [function(*(args[name].float() for name in names))]


def _cross_entropy_backward(args: Args) -> list[torch.Tensor]:
    x = args["x"].float()
    return [x.softmax(-1) - _F.one_hot(args["label"], x.shape[1]).float()]


def _softmax_backward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * (y - (x * y).sum(-1, keepdim=True))


def _rms_norm_backward(args: Args) -> list[torch.Tensor]:
    x = args["x"].float().requires_grad_()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * args["weight"].float()
    return list(torch.autograd.grad(y, x, args["y"].float()))


def _divergence(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    p, q = x.log_softmax(-1), y.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def _length_one(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-12)


# subjects

_SPACE = {
    "BLOCK": (256, 512, 1024, 2048, 4096, 8192),
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": (1, 2, 3, 4),
}
_SHAPES: list[Shape] = [
    {"m": 4096, "n": 4096}, {"m": 1024, "n": 32000}, {"m": 512, "n": 50257}, {"m": 8192, "n": 2048},
    {"m": 2048, "n": 14336}, {"m": 333, "n": 9001}, {"m": 128, "n": 65536},
]  # fmt: skip


def _few(config: Config) -> bool:
    return 32 <= config["BLOCK"] // config["num_warps"] <= 128 * 32


def _subject(
    kernel: Any, inputs: str, reference: Callable[[Args], list], flops: int, passes: int,
    per_row: bool = False, extra: str = "",
) -> Subject:  # fmt: skip
    """`per_row`: it makes one number of each row; `extra`: a vector that it reads besides."""

    def make(shape: Shape, dtype: torch.dtype, device: str) -> Args:
        m, n = shape["m"], shape["n"]
        args: Args = {name: torch.randn(m, n, device=device, dtype=dtype) for name in inputs}
        if extra == "label":
            args[extra] = torch.randint(0, n, (m,), device=device)
        elif extra:
            args[extra] = torch.randn(n, device=device, dtype=dtype)
        out = torch.empty(m, device=device) if per_row else torch.empty_like(args["x"])
        return {**args, "out": out, "n": n}

    def work(shape: Shape, size: int) -> tuple[float, float]:
        numel = shape["m"] * shape["n"]
        return (len(inputs) + (not per_row)) * numel * size, flops * numel

    name = kernel.fn.__name__.removesuffix("_kernel")
    return Subject(
        name, "rows", kernel, _SPACE, _SHAPES, {"m": 3, "n": 600}, make, reference, ["out"],
        lambda s, c: (s["m"],), work, lambda s, c: passes * blocks(s["n"], c["BLOCK"]),
        ("bfloat16", "float32"), fits=_few,
    )  # fmt: skip


SUBJECTS = [
    _subject(log_sum_exp_kernel, "x", _of(lambda x: x.logsumexp(-1)), 4, 1, per_row=True),
    _subject(log_softmax_kernel, "x", _of(lambda x: x.log_softmax(-1)), 5, 2),
    _subject(cross_entropy_backward_kernel, "x", _cross_entropy_backward, 7, 2, extra="label"),
    _subject(softmax_backward_kernel, "xy", _of(_softmax_backward, "xy"), 4, 2),
    _subject(rms_norm_backward_kernel, "xy", _rms_norm_backward, 8, 2, extra="weight"),
    _subject(normalise_kernel, "x", _of(_length_one), 3, 2),
    _subject(divergence_kernel, "xy", _of(_divergence, "xy"), 14, 3, per_row=True),
    _subject(
        cosine_kernel, "xy", _of(lambda x, y: _F.cosine_similarity(x, y), "xy"), 6, 1, per_row=True
    ),
    _subject(
        row_variance_kernel, "x", _of(lambda x: x.var(-1, unbiased=False)), 3, 1, per_row=True
    ),
    _subject(
        mean_squared_error_kernel,
        "xy",
        _of(lambda x, y: (x - y).square().mean(-1), "xy"),
        3,
        1,
        per_row=True,
    ),
]
