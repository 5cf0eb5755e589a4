"""Softmax in one block, softmax in a loop, and the cross entropy of a vocabulary."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..subject import SMS, Args, Config, Shape, Subject, blocks


@triton.jit
def softmax_kernel(x, out, m, n, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    for tile in range(tl.program_id(0), tl.cdiv(m, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        at = rows[:, None] * n + columns[None, :]
        inside = (rows < m)[:, None] & (columns < n)[None, :]
        value = tl.load(x + at, inside, other=-float("inf")).to(tl.float32)
        value = tl.exp(value - tl.max(value, axis=1)[:, None])
        value = value / tl.sum(value, axis=1)[:, None]
        tl.store(out + at, value.to(out.dtype.element_ty), inside)


@triton.jit
def softmax_online_kernel(x, out, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        value = tl.load(x + row * n + start + lane, inside, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(largest, value)
        scale = tl.where(higher == -float("inf"), 0.0, tl.exp(largest - higher))
        total = total * scale + tl.where(inside, tl.exp(value - higher), 0.0)
        largest = higher
    top = tl.max(largest, axis=0)
    total = tl.sum(tl.where(largest == -float("inf"), 0.0, total * tl.exp(largest - top)), axis=0)
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        value = tl.load(x + row * n + start + lane, inside, other=0.0).to(tl.float32)
        shown = tl.exp(value - top) / total
        tl.store(out + row * n + start + lane, shown.to(out.dtype.element_ty), inside)


@triton.jit
def cross_entropy_kernel(logits, target, loss, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    largest = -float("inf")
    total = 0.0
    for start in range(0, n, BLOCK):
        inside = start + lane < n
        value = tl.load(logits + row.to(tl.int64) * n + start + lane, inside, other=-float("inf"))
        value = value.to(tl.float32)
        higher = tl.maximum(largest, tl.max(value, axis=0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(value - higher), axis=0)
        largest = higher
    wanted = tl.load(logits + row.to(tl.int64) * n + tl.load(target + row)).to(tl.float32)
    tl.store(loss + row, tl.log(total) + largest - wanted)


def _square(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    x = torch.randn(shape["m"], shape["n"], device=device, dtype=dtype)
    return {"x": x, "out": torch.empty_like(x), "m": shape["m"], "n": shape["n"]}


def _online(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    args = _square(shape, dtype, device)
    return {name: args[name] for name in ("x", "out", "n")}


def _softmax(args: Args) -> list[torch.Tensor]:
    return [torch.softmax(args["x"].float(), dim=-1)]


def _logits(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    m, n = shape["m"], shape["n"]
    logits = torch.randn(m, n, device=device, dtype=dtype)
    target = torch.randint(0, n, (m,), device=device, dtype=torch.int32)
    return {"logits": logits, "target": target, "loss": torch.empty(m, device=device), "n": n}


def _cross_entropy(args: Args) -> list[torch.Tensor]:
    given = args["logits"].float(), args["target"].long()
    return [torch.nn.functional.cross_entropy(*given, reduction="none")]


def _tiles(shape: Shape, config: Config) -> tuple[int, ...]:
    tiles = blocks(shape["m"], config["ROWS"])
    return (min(tiles, config["WAVES"] * SMS) if config["WAVES"] else tiles,)


def _few(config: Config) -> bool:
    """Keep the elements of a thread in its registers; BLOCK comes with a shape."""
    return config["ROWS"] * config.get("BLOCK", 1) <= 128 * 32 * config["num_warps"]


SUBJECTS = [
    Subject(
        "softmax", "softmax", softmax_kernel,
        {"ROWS": (1, 2, 4, 8), "num_warps": (1, 2, 4, 8, 16), "num_stages": (1, 2, 3),
         "WAVES": (0, 2, 4, 8)},
        [{"m": 4096, "n": 1024}, {"m": 16384, "n": 1024}, {"m": 1024, "n": 896},
         {"m": 8192, "n": 768}, {"m": 4096, "n": 4096}, {"m": 2048, "n": 3584},
         {"m": 1021, "n": 1021}, {"m": 4099, "n": 3989},
         {"m": 2048, "n": 1024}, {"m": 512, "n": 4096}],
        {"m": 5, "n": 30}, _square, _softmax, ["out"], _tiles,
        lambda s, size: (2 * s["m"] * s["n"] * size, 5 * s["m"] * s["n"]),
        lambda s, c: blocks(s["m"], c["ROWS"]) / _tiles(s, c)[0],
        dtypes=("bfloat16", "float32"),
        fits=_few, constants=lambda s: {"BLOCK": triton.next_power_of_2(s["n"])},
    ),
    Subject(
        "softmax_online", "softmax", softmax_online_kernel,
        {"BLOCK": (256, 512, 1024, 2048, 4096, 8192), "num_warps": (1, 2, 4, 8, 16),
         "num_stages": (1, 2, 3, 4)},
        [{"m": 2048, "n": 8192}, {"m": 512, "n": 32768}, {"m": 128, "n": 131072},
         {"m": 4096, "n": 5120}, {"m": 1024, "n": 14336}, {"m": 144, "n": 65536},
         {"m": 509, "n": 10007}, {"m": 1000, "n": 6001},
         {"m": 8192, "n": 6144}, {"m": 64, "n": 262144}],
        {"m": 3, "n": 600}, _online, _softmax, ["out"], lambda s, c: (s["m"],),
        lambda s, size: (3 * s["m"] * s["n"] * size, 8 * s["m"] * s["n"]),
        lambda s, c: 2 * blocks(s["n"], c["BLOCK"]), dtypes=("bfloat16", "float16"),
    ),
    Subject(
        "cross_entropy", "softmax", cross_entropy_kernel,
        {"BLOCK": (512, 1024, 2048, 4096, 8192, 16384), "num_warps": (1, 2, 4, 8, 16, 32),
         "num_stages": (1, 2, 3, 4)},
        [{"m": 1024, "n": 32000}, {"m": 512, "n": 128256}, {"m": 2048, "n": 32768},
         {"m": 256, "n": 152064}, {"m": 4096, "n": 16384}, {"m": 128, "n": 50304},
         {"m": 509, "n": 50257}, {"m": 1023, "n": 32003},
         {"m": 2048, "n": 64000}, {"m": 64, "n": 128256}],
        {"m": 3, "n": 700}, _logits, _cross_entropy, ["loss"], lambda s, c: (s["m"],),
        lambda s, size: (s["m"] * s["n"] * size, 4 * s["m"] * s["n"]),
        lambda s, c: blocks(s["n"], c["BLOCK"]), dtypes=("bfloat16", "float32"),
    ),
]  # fmt: skip
