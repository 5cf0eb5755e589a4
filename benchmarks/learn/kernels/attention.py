"""Attention: forward, its two gradients, and decoding one token against a cache."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ..subject import Args, Config, Shape, Subject, blocks

LOG2E = math.log2(math.e)
MOST_SPLITS = 64


@triton.jit
def attention_forward_kernel(
    q, k, v, out, seq, scale,
    DIM: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(1).to(tl.int64) * seq * DIM
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, DIM)
    at = base + rows[:, None] * DIM + lane[None, :]
    query = tl.load(q + at, (rows < seq)[:, None], other=0.0)
    largest = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, DIM], tl.float32)
    end = seq
    if CAUSAL:
        end = tl.minimum(seq, (tl.program_id(0) + 1) * BLOCK_M)
    for start in range(0, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        inside = columns < seq
        place = base + columns[:, None] * DIM + lane[None, :]
        key = tl.load(k + place, inside[:, None], other=0.0)
        score = tl.dot(query, tl.trans(key)) * scale
        keep = inside[None, :]
        if CAUSAL:
            keep &= rows[:, None] >= columns[None, :]
        score = tl.where(keep, score, -float("inf"))
        higher = tl.maximum(largest, tl.max(score, axis=1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(largest - higher)
        total = total * fade + tl.sum(weight, axis=1)
        value = tl.load(v + place, inside[:, None], other=0.0)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None])
        largest = higher
    mixed = mixed / total[:, None]
    tl.store(out + at, mixed.to(out.dtype.element_ty), (rows < seq)[:, None])


@triton.jit
def attention_backward_q_kernel(
    q, k, v, gradient, lse, delta, out, seq, scale,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(1).to(tl.int64) * seq
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, DIM)
    there = (rows < seq)[:, None]
    at = base * DIM + rows[:, None] * DIM + lane[None, :]
    query, g = tl.load(q + at, there, other=0.0), tl.load(gradient + at, there, other=0.0)
    norm = tl.load(lse + base + rows, rows < seq, other=0.0)
    d = tl.load(delta + base + rows, rows < seq, other=0.0)
    total = tl.zeros([BLOCK_M, DIM], tl.float32)
    for start in range(0, seq, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        place = base * DIM + columns[:, None] * DIM + lane[None, :]
        key = tl.load(k + place, (columns < seq)[:, None], other=0.0)
        value = tl.load(v + place, (columns < seq)[:, None], other=0.0)
        weight = tl.exp2(tl.dot(query, tl.trans(key)) * scale - norm[:, None])
        weight = tl.where((columns < seq)[None, :], weight, 0.0)
        change = weight * (tl.dot(g, tl.trans(value)) - d[:, None])
        total = tl.dot(change.to(key.dtype), key, total)
    total *= scale * 0.6931471805599453
    tl.store(out + at, total.to(out.dtype.element_ty), there)


@triton.jit
def attention_backward_kv_kernel(
    q, k, v, gradient, lse, delta, out_k, out_v, seq, scale,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(1).to(tl.int64) * seq
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, DIM)
    place = base * DIM + columns[:, None] * DIM + lane[None, :]
    key = tl.load(k + place, (columns < seq)[:, None], other=0.0)
    value = tl.load(v + place, (columns < seq)[:, None], other=0.0)
    for_k = tl.zeros([BLOCK_N, DIM], tl.float32)
    for_v = tl.zeros([BLOCK_N, DIM], tl.float32)
    for start in range(0, seq, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        at = base * DIM + rows[:, None] * DIM + lane[None, :]
        query = tl.load(q + at, (rows < seq)[:, None], other=0.0)
        g = tl.load(gradient + at, (rows < seq)[:, None], other=0.0)
        norm = tl.load(lse + base + rows, rows < seq, other=0.0)
        d = tl.load(delta + base + rows, rows < seq, other=0.0)
        weight = tl.exp2(tl.dot(key, tl.trans(query)) * scale - norm[None, :])
        weight = tl.where((rows < seq)[None, :], weight, 0.0)
        for_v = tl.dot(weight.to(g.dtype), g, for_v)
        change = weight * (tl.dot(value, tl.trans(g)) - d[None, :])
        for_k = tl.dot(change.to(query.dtype), query, for_k)
    for_k *= scale * 0.6931471805599453
    tl.store(out_k + place, for_k.to(out_k.dtype.element_ty), (columns < seq)[:, None])
    tl.store(out_v + place, for_v.to(out_v.dtype.element_ty), (columns < seq)[:, None])


@triton.jit(do_not_specialize=["splits"])
def attention_decode_kernel(
    q, k, v, out, lse, seq, scale, splits,
    DIM: tl.constexpr, HEADS: tl.constexpr, MOST: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pair, split = tl.program_id(0), tl.program_id(1)
    share = tl.cdiv(tl.cdiv(seq, splits), BLOCK_N) * BLOCK_N
    head, lane = tl.arange(0, HEADS), tl.arange(0, DIM)
    query = tl.load(q + (pair * HEADS + head)[:, None] * DIM + lane[None, :])
    largest = tl.full([HEADS], -1e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, DIM], tl.float32)
    end = tl.minimum(seq, (split + 1) * share)
    for start in range(split * share, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        place = pair.to(tl.int64) * seq * DIM + columns[:, None] * DIM + lane[None, :]
        key = tl.load(k + place, (columns < end)[:, None], other=0.0)
        score = tl.dot(query, tl.trans(key)) * scale
        score = tl.where((columns < end)[None, :], score, -1e30)
        higher = tl.maximum(largest, tl.max(score, axis=1))
        weight = tl.exp2(score - higher[:, None])
        fade = tl.exp2(largest - higher)
        total = total * fade + tl.sum(weight, axis=1)
        value = tl.load(v + place, (columns < end)[:, None], other=0.0)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None])
        largest = higher
    place = (pair * MOST + split) * HEADS + head
    tl.store(lse + place, tl.where(total > 0, largest + tl.log2(total), -1e30))
    mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + place[:, None] * DIM + lane[None, :], mixed)


def _scale(dim: int) -> float:
    return LOG2E / math.sqrt(dim)  # for exp2


def _heads(shape: Shape, dtype: torch.dtype, device: str, names: str = "qkv") -> Args:
    size = shape["heads"], shape["seq"], shape["dim"]
    made: Args = {name: torch.randn(size, device=device).to(dtype) for name in names}
    return {**made, "seq": shape["seq"], "scale": _scale(shape["dim"])}


def _forward(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    args = _heads(shape, dtype, device)
    return {**args, "out": torch.empty_like(args["q"])}


def _scores(args: Args) -> torch.Tensor:
    return args["q"].float() @ args["k"].float().transpose(1, 2) * (args["scale"] / LOG2E)


def _attention(args: Args) -> list[torch.Tensor]:
    q, k, v = (args[name].float()[None] for name in "qkv")
    full = torch.nn.functional.scaled_dot_product_attention
    return [full(q, k, v, is_causal=args["CAUSAL"])[0]]


def _backward(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    args = _heads(shape, dtype, device)
    scores = _scores(args)
    gradient = torch.randn_like(args["q"])
    mixed = torch.softmax(scores, dim=-1) @ args["v"].float()
    lse = torch.logsumexp(scores, dim=-1) * LOG2E
    delta = (mixed * gradient.float()).sum(-1)
    outs = {name: torch.empty_like(gradient) for name in ("out", "out_k", "out_v")}
    return {**args, **outs, "gradient": gradient, "lse": lse, "delta": delta}


def _backward_q(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    args = _backward(shape, dtype, device)
    return {name: args[name] for name in args if name not in ("out_k", "out_v")}


def _backward_kv(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    args = _backward(shape, dtype, device)
    return {name: args[name] for name in args if name != "out"}


def _gradients(args: Args, *names: str) -> list[torch.Tensor]:
    plain = {name: args[name].float().requires_grad_() for name in "qkv"}
    mixed = torch.softmax(_scores({**args, **plain}), dim=-1) @ plain["v"]
    wanted = [plain[name] for name in names]
    return list(torch.autograd.grad(mixed, wanted, args["gradient"].float()))


def _decode(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    pairs, heads, seq, dim = (shape[name] for name in ("pairs", "heads", "seq", "dim"))
    q = torch.randn(pairs, heads, dim, device=device).to(dtype)
    k, v = (torch.randn(pairs, seq, dim, device=device).to(dtype) for _ in "kv")
    out = torch.empty(pairs, MOST_SPLITS, heads, dim, device=device)
    args: Args = {"q": q, "k": k, "v": v, "out": out, "lse": torch.empty_like(out[..., 0])}
    return {**args, "seq": seq, "scale": _scale(dim)}


def _mixed(args: Args) -> list[torch.Tensor]:
    """Combine the parts that were written; the others still hold the poison, not a number."""
    weight = torch.softmax(args["lse"].nan_to_num(-1e30) / LOG2E, dim=1)[..., None]
    return [(weight * args["out"].nan_to_num(0.0)).sum(1)]


def _decoded(args: Args) -> list[torch.Tensor]:
    return [torch.softmax(_scores(args), dim=-1) @ args["v"].float()]


def _per_head(shape: Shape, config: Config, block: str) -> tuple[int, ...]:
    return blocks(shape["seq"], config[block]), shape["heads"]


def _decode_trips(shape: Shape, config: Config) -> float:
    return blocks(blocks(shape["seq"], config["splits"]), config["BLOCK_N"])


_TILES = {
    "BLOCK_M": (32, 64, 128, 256),
    "BLOCK_N": (16, 32, 64, 128),
    "num_warps": (2, 4, 8),
    "num_stages": (1, 2, 3, 4),
}
_SQUARE: list[Shape] = [
    {"heads": 32, "seq": 1024, "dim": 64},
    {"heads": 128, "seq": 512, "dim": 64},
    {"heads": 8, "seq": 2048, "dim": 64},
    {"heads": 64, "seq": 768, "dim": 64},
    {"heads": 16, "seq": 2048, "dim": 128},
    {"heads": 40, "seq": 1024, "dim": 128},
    {"heads": 12, "seq": 1021, "dim": 64},
    {"heads": 96, "seq": 1024, "dim": 64},
    {"heads": 48, "seq": 1536, "dim": 64},
]


def _enough(config: Config) -> bool:
    m, n, warps = config["BLOCK_M"], config["BLOCK_N"], config["num_warps"]
    return 8 <= m * n / (32 * warps) <= 128 and max(m, n) <= 32 * warps


def _square_work(products: int, tensors: int) -> Callable[[Shape, int], tuple[float, float]]:
    def work(shape: Shape, size: int) -> tuple[float, float]:
        heads, seq, dim = shape["heads"], shape["seq"], shape["dim"]
        pairs = seq * seq / (2 if shape.get("causal") else 1)
        return tensors * heads * seq * dim * size, 2.0 * products * heads * pairs * dim

    return work


SUBJECTS = [
    Subject(
        "attention_forward", "attention", attention_forward_kernel, _TILES,
        [{**shape, "causal": False} for shape in _SQUARE]
        + [{**shape, "causal": True} for shape in [*_SQUARE[:3], *_SQUARE[4:6]]]
        + [{"heads": 32, "seq": 4096, "dim": 128, "causal": True}],
        {"heads": 2, "seq": 40, "dim": 16, "causal": True}, _forward, _attention, ["out"],
        lambda s, c: _per_head(s, c, "BLOCK_M"), _square_work(2, 4),
        lambda s, c: blocks(s["seq"], c["BLOCK_N"]) / (2 if s["causal"] else 1), fits=_enough,
        constants=lambda s: {"DIM": s["dim"], "CAUSAL": s["causal"]},
    ),
    Subject(
        "attention_backward_q", "attention", attention_backward_q_kernel, _TILES, _SQUARE,
        {"heads": 2, "seq": 40, "dim": 16}, _backward_q, lambda a: _gradients(a, "q"), ["out"],
        lambda s, c: _per_head(s, c, "BLOCK_M"), _square_work(3, 5),
        lambda s, c: blocks(s["seq"], c["BLOCK_N"]), fits=_enough, dtypes=("bfloat16",),
        constants=lambda s: {"DIM": s["dim"]},
    ),
    Subject(
        "attention_backward_kv", "attention", attention_backward_kv_kernel, _TILES, _SQUARE,
        {"heads": 2, "seq": 40, "dim": 16}, _backward_kv, lambda a: _gradients(a, "k", "v"),
        ["out_k", "out_v"], lambda s, c: _per_head(s, c, "BLOCK_N"), _square_work(4, 6),
        lambda s, c: blocks(s["seq"], c["BLOCK_M"]), fits=_enough, dtypes=("bfloat16",),
        constants=lambda s: {"DIM": s["dim"]},
    ),
    Subject(
        "attention_decode", "attention", attention_decode_kernel,
        {"BLOCK_N": (16, 32, 64, 128, 256), "num_warps": (1, 2, 4, 8), "num_stages": (1, 2, 3, 4),
         "splits": (1, 4, 16, 64)},
        [{"pairs": 8, "heads": 16, "seq": 8192, "dim": 128},
         {"pairs": 64, "heads": 16, "seq": 2048, "dim": 128},
         {"pairs": 1, "heads": 16, "seq": 65536, "dim": 128},
         {"pairs": 256, "heads": 16, "seq": 1024, "dim": 128},
         {"pairs": 32, "heads": 16, "seq": 5120, "dim": 128},
         {"pairs": 16, "heads": 16, "seq": 4093, "dim": 128},
         {"pairs": 128, "heads": 16, "seq": 4096, "dim": 128},
         {"pairs": 4, "heads": 16, "seq": 32768, "dim": 128}],
        {"pairs": 2, "heads": 16, "seq": 70, "dim": 16}, _decode, _decoded, ["out", "lse"],
        lambda s, c: (s["pairs"], c["splits"]),
        lambda s, size: (s["pairs"] * s["dim"] * (2 * s["seq"] * size + 4 * s["heads"]),
                         4.0 * s["pairs"] * s["heads"] * s["seq"] * s["dim"]),
        _decode_trips, result=_mixed,
        constants=lambda s: {"DIM": s["dim"], "HEADS": s["heads"], "MOST": MOST_SPLITS},
    ),
]  # fmt: skip
