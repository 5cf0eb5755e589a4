"""Kernels that move rows by an index, along a sequence, or out of packed words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from ..subject import Args, Config, Shape, Subject, blocks

_PAGE = 16  # rows of a page
_BAG = 4  # rows that are summed into one
_TAPS = 4  # of a convolution


@triton.jit
def paged_gather_kernel(x, index, out, n, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Row r of the output is row r % PAGE of the page that the table names."""
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    source = tl.load(index + row // PAGE) * PAGE + row % PAGE
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        value = tl.load(x + source * n + start + lane, inside)
        tl.store(out + row * n + start + lane, value, inside)


@triton.jit
def scatter_rows_kernel(x, index, out, n, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    target = tl.load(index + row)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        value = tl.load(x + row * n + start + lane, inside)
        tl.store(out + target * n + start + lane, value, inside)


@triton.jit
def embedding_bag_kernel(x, index, out, n, BAG: tl.constexpr, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        total = tl.zeros([BLOCK], tl.float32)
        for place in tl.static_range(BAG):
            source = tl.load(index + row * BAG + place)
            total += tl.load(x + source * n + start + lane, inside, other=0.0).to(tl.float32)
        tl.store(out + row * n + start + lane, total.to(out.dtype.element_ty), inside)


@triton.jit
def gather_columns_kernel(x, index, out, n, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        source = tl.load(index + start + lane, inside, other=0)
        tl.store(out + row * n + start + lane, tl.load(x + row * n + source, inside), inside)


@triton.jit
def causal_convolution_kernel(x, weight, out, n, TAPS: tl.constexpr, BLOCK: tl.constexpr):
    """Every column by itself: row r from the rows r - TAPS + 1 to r."""
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        total = tl.zeros([BLOCK], tl.float32)
        for tap in tl.static_range(TAPS):
            there = inside & (row >= tap)
            value = tl.load(x + (row - tap) * n + start + lane, there, other=0.0).to(tl.float32)
            w = tl.load(weight + tap * n + start + lane, inside, other=0.0).to(tl.float32)
            total += value * w
        tl.store(out + row * n + start + lane, total.to(out.dtype.element_ty), inside)


@triton.jit
def shift_mix_kernel(x, weight, out, n, BLOCK: tl.constexpr):
    """Mix every row with the one before it, column by column."""
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        here = tl.load(x + row * n + start + lane, inside, other=0.0).to(tl.float32)
        there = inside & (row > 0)
        before = tl.load(x + (row - 1) * n + start + lane, there, other=0.0).to(tl.float32)
        w = tl.load(weight + start + lane, inside, other=0.0).to(tl.float32)
        value = here + w * (before - here)
        tl.store(out + row * n + start + lane, value.to(out.dtype.element_ty), inside)


@triton.jit
def unpack_four_bits_kernel(packed, scale, out, n, BLOCK: tl.constexpr):
    """Two numbers of four bits in a byte, the lower first, and a scale per row."""
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    factor = tl.load(scale + row).to(tl.float32)
    for start in range(0, n, BLOCK):
        at = start + lane
        word = tl.load(packed + row * (n // 2) + at // 2, at < n, other=0).to(tl.int32)
        value = ((word >> (at % 2 * 4)) & 15) - 8
        value = value.to(tl.float32) * factor
        tl.store(out + row * n + at, value.to(out.dtype.element_ty), at < n)


@triton.jit
def reverse_rows_kernel(x, out, n, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        value = tl.load(x + row * n + (n - 1 - start - lane), inside)
        tl.store(out + row * n + start + lane, value, inside)


# arguments and references


def _paged(args: Args) -> list[torch.Tensor]:
    pages = args["x"].float().view(-1, _PAGE, args["n"])
    return [pages[args["index"]].view(-1, args["n"])]


def _scattered(args: Args) -> list[torch.Tensor]:
    out = torch.empty_like(args["x"], dtype=torch.float32)
    out[args["index"]] = args["x"].float()
    return [out]


def _bag(args: Args) -> list[torch.Tensor]:
    return [args["x"].float()[args["index"].view(-1, _BAG)].sum(1)]


def _convolved(args: Args) -> list[torch.Tensor]:
    x, total = args["x"].float(), torch.zeros_like(args["x"], dtype=torch.float32)
    for tap in range(_TAPS):
        total[tap:] += x[: len(x) - tap] * args["weight"].float()[tap]
    return [total]


def _mixed(args: Args) -> list[torch.Tensor]:
    x = args["x"].float()
    before = torch.cat([torch.zeros_like(x[:1]), x[:-1]])
    return [x + args["weight"].float()[0] * (before - x)]


def _unpacked(args: Args) -> list[torch.Tensor]:
    words = args["packed"].to(torch.int32)
    pairs = torch.stack([words & 15, words >> 4], -1).view(len(words), -1) - 8
    return [pairs.float() * args["scale"].float()[:, None]]


def _index(count: int, rows: int, device: str) -> torch.Tensor:
    """Every row once, in an order of chance, as often as is asked."""
    if device == "meta":
        return torch.empty(count, dtype=torch.int64, device=device)
    return torch.cat([torch.randperm(rows, device=device) for _ in range(-(-count // rows))])[
        :count
    ]


_SPACE = {
    "BLOCK": (128, 256, 512, 1024, 2048, 4096, 8192),
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": (1, 2, 4),
}
_SHAPES: list[Shape] = [
    {"m": 4096, "n": 4096}, {"m": 16384, "n": 1024}, {"m": 2048, "n": 14336}, {"m": 8192, "n": 128},
    {"m": 1024, "n": 7168}, {"m": 2000, "n": 3002}, {"m": 512, "n": 16384},
]  # fmt: skip


def _few(config: Config) -> bool:
    return 32 <= config["BLOCK"] // config["num_warps"] <= 128 * 32


def _subject(
    kernel: Any, reference: Callable[[Args], list], index: Callable[[int, int], int] | None = None,
    taps: int = 0, reads: float = 1.0, constants: Config | None = None, packed: bool = False,
) -> Subject:  # fmt: skip
    """`index`: how many entries its table has, by m and n; `taps`: rows of its weights."""

    def make(shape: Shape, dtype: torch.dtype, device: str) -> Args:
        m, n = shape["m"], shape["n"]
        args: Args = {"out": torch.empty(m, n, device=device, dtype=dtype), "n": n}
        if packed:
            args["packed"] = torch.randint(0, 256, (m, n // 2), device=device, dtype=torch.uint8)
            return {**args, "scale": torch.rand(m, device=device, dtype=dtype)}
        args["x"] = torch.randn(m, n, device=device, dtype=dtype)
        if index is not None:
            count = index(m, n)
            rows = n if kernel is gather_columns_kernel else m // _PAGE if count < m else m
            args["index"] = _index(count, rows, device)
        if taps:
            args["weight"] = torch.randn(taps, n, device=device, dtype=dtype)
        return args

    name = kernel.fn.__name__.removesuffix("_kernel")
    return Subject(
        name, "moves", kernel, _SPACE, _SHAPES, {"m": 32, "n": 200}, make, reference, ["out"],
        lambda s, c: (s["m"],), lambda s, size: ((1 + reads) * s["m"] * s["n"] * size, 0.0),
        lambda s, c: blocks(s["n"], c["BLOCK"]), ("bfloat16", "float32"), fits=_few,
        constants=lambda shape: constants or {},
    )  # fmt: skip


SUBJECTS = [
    _subject(paged_gather_kernel, _paged, lambda m, n: m // _PAGE, constants={"PAGE": _PAGE}),
    _subject(scatter_rows_kernel, _scattered, lambda m, n: m),
    _subject(
        embedding_bag_kernel, _bag, lambda m, n: m * _BAG, reads=_BAG, constants={"BAG": _BAG}
    ),
    _subject(
        gather_columns_kernel, lambda args: [args["x"].float()[:, args["index"]]], lambda m, n: n
    ),
    _subject(causal_convolution_kernel, _convolved, taps=_TAPS, constants={"TAPS": _TAPS}),
    _subject(shift_mix_kernel, _mixed, taps=1),
    _subject(unpack_four_bits_kernel, _unpacked, reads=0.25, packed=True),
    _subject(reverse_rows_kernel, lambda args: [args["x"].float().flip(1)]),
]
