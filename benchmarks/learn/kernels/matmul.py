"""Matrix products: all layouts, batched, grouped, split over K, stream-K, and 8-bit weights."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ..subject import SMS, Args, Config, Shape, Subject, blocks


@triton.jit
def _tile_of(pid, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Walk GROUP_M rows of tiles at a time, so that neighbours share what L2 holds."""
    tiles_m, tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    first = pid // (GROUP_M * tiles_n) * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    inside = pid % (GROUP_M * tiles_n)
    return first + inside % height, inside // height


@triton.jit
def _product(
    a, b, k_begin, k_end, stride_ak, stride_bk,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiply a row block by a column block over a part of K; a and b point to their K = 0."""
    inner = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(k_begin, k_end, BLOCK_K):
        left = start + inner < k_end
        x = tl.load(a + (start + inner)[None, :] * stride_ak, left[None, :], other=0.0)
        y = tl.load(b + (start + inner)[:, None] * stride_bk, left[:, None], other=0.0)
        total = tl.dot(x, y, total)
    return total


@triton.jit
def matmul_kernel(
    a, b, c, m, n, k, stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = _tile_of(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    a += (rows % m)[:, None] * stride_am
    b += (columns % n)[None, :] * stride_bn
    total = _product(a, b, 0, k, stride_ak, stride_bk, BLOCK_M, BLOCK_N, BLOCK_K)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    at = rows[:, None] * n + columns[None, :]
    tl.store(c + at, total.to(c.dtype.element_ty), inside)


@triton.jit
def matmul_batched_kernel(
    a, b, c, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    batch = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    a += batch * m * k + (rows % m)[:, None] * k
    b += batch * k * n + (columns % n)[None, :]
    total = _product(a, b, 0, k, 1, n, BLOCK_M, BLOCK_N, BLOCK_K)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    at = batch * m * n + rows[:, None] * n + columns[None, :]
    tl.store(c + at, total.to(c.dtype.element_ty), inside)


@triton.jit
def matmul_grouped_kernel(
    a, b, c, offsets, groups, n, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile, group = tl.program_id(1), tl.full([], 0, tl.int32)
    first, last = tl.load(offsets), tl.load(offsets + 1)
    while (tile >= tl.cdiv(last - first, BLOCK_M)) & (group < groups):
        tile -= tl.cdiv(last - first, BLOCK_M)
        group += 1
        first, last = last, tl.load(offsets + group + 1)
    rows = first + tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    a += tl.minimum(rows, last - 1)[:, None] * k
    b += group.to(tl.int64) * k * n + (columns % n)[None, :]
    total = _product(a, b, 0, k, 1, n, BLOCK_M, BLOCK_N, BLOCK_K)
    inside = (rows < last)[:, None] & (columns < n)[None, :]
    at = rows[:, None] * n + columns[None, :]
    tl.store(c + at, total.to(c.dtype.element_ty), inside)


@triton.jit
def matmul_split_k_kernel(
    a, b, c, m, n, k, share, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(2) * share
    a += (rows % m)[:, None] * k
    b += (columns % n)[None, :]
    end = tl.minimum(begin + share, k)
    total = _product(a, b, begin, end, 1, n, BLOCK_M, BLOCK_N, BLOCK_K)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    # All parts of K add to one tile; the host reads it after the kernel.
    tl.atomic_add(c + rows[:, None] * n + columns[None, :], total, inside, sem="relaxed")


@triton.jit
def matmul_stream_k_kernel(
    a, b, c, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    steps = tl.cdiv(k, BLOCK_K)
    all_steps = steps * tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    share = tl.cdiv(all_steps, tl.num_programs(0))
    at = tl.program_id(0) * share
    end = tl.minimum(at + share, all_steps)
    while at < end:
        tile, first = at // steps, at % steps
        last = tl.minimum(steps, first + end - at)
        rows = tile % tl.cdiv(m, BLOCK_M) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = tile // tl.cdiv(m, BLOCK_M) * BLOCK_N + tl.arange(0, BLOCK_N)
        x, y = a + (rows % m)[:, None] * k, b + (columns % n)[None, :]
        stop = tl.minimum(last * BLOCK_K, k)
        total = _product(x, y, first * BLOCK_K, stop, 1, n, BLOCK_M, BLOCK_N, BLOCK_K)
        inside = (rows < m)[:, None] & (columns < n)[None, :]
        # Programs that share a tile add to it; the host reads it after the kernel.
        tl.atomic_add(c + rows[:, None] * n + columns[None, :], total, inside, sem="relaxed")
        at += last - first


@triton.jit
def matmul_w8_kernel(
    a, b, scale, c, m, n, k,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tile_m, tile_n = _tile_of(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        left = start + inner < k
        x = tl.load(
            a + (rows % m)[:, None] * k + (start + inner)[None, :], left[None, :], other=0.0
        )
        at = (start + inner)[:, None] * n + (columns % n)[None, :]
        y = tl.load(b + at, left[:, None], other=0).to(a.dtype.element_ty)
        total = tl.dot(x, y, total)
    inside = (rows < m)[:, None] & (columns < n)[None, :]
    total *= tl.load(scale + columns, columns < n, other=0.0)[None, :]
    at = rows[:, None] * n + columns[None, :]
    tl.store(c + at, total.to(c.dtype.element_ty), inside)


def _random(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, transposed: bool = False
) -> torch.Tensor:
    if transposed:
        return torch.randn(shape[::-1], device=device).t().to(dtype)
    return torch.randn(shape, device=device).to(dtype)


def _layouts(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    m, n, k = (shape[name] for name in "mnk")
    a = _random((m, k), dtype, device, transposed=shape["layout"][0] == "t")
    b = _random((k, n), dtype, device, transposed=shape["layout"][1] == "t")
    c = torch.empty(m, n, device=device, dtype=torch.bfloat16 if dtype.itemsize == 1 else dtype)
    args: Args = {"a": a, "b": b, "c": c, "m": m, "n": n, "k": k}
    (am, ak), (bk, bn) = a.stride(), b.stride()
    return {**args, "stride_am": am, "stride_ak": ak, "stride_bk": bk, "stride_bn": bn}


def _plain(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    m, n, k, batch = (shape.get(name, 1) for name in ("m", "n", "k", "batch"))
    lead = (batch,) if "batch" in shape else ()
    args: dict[str, Any] = {"a": _random((*lead, m, k), dtype, device)}
    args |= {"b": _random((*lead, k, n), dtype, device)}
    return {
        **args,
        "c": torch.empty(*lead, m, n, device=device, dtype=dtype),
        "m": m,
        "n": n,
        "k": k,
    }


def _summed(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    args = _plain(shape, dtype, device)
    return {**args, "c": torch.zeros(args["c"].shape, device=device)}


def _w8(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    args = _plain(shape, dtype, device)
    b = torch.randint(-127, 128, args["b"].shape, device=device, dtype=torch.int8)
    return {**args, "b": b, "scale": torch.rand(shape["n"], device=device) / 100}


def _sizes(shape: Shape) -> list[int]:
    """Return the rows of each group: uneven, and the same on every machine."""
    weights = [1 + 7 * number % 5 for number in range(shape["groups"])]
    sizes = [shape["m"] * weight // sum(weights) for weight in weights]
    return [*sizes[:-1], shape["m"] - sum(sizes[:-1])]


def _grouped(shape: Shape, dtype: torch.dtype, device: str) -> Args:
    m, n, k, groups = (shape[name] for name in ("m", "n", "k", "groups"))
    ends = [sum(_sizes(shape)[:number]) for number in range(groups + 1)]
    # One more, which the kernel reads where it walks past the last group.
    offsets = torch.tensor([*ends, m], dtype=torch.int32).to(device)
    a, b = _random((m, k), dtype, device), _random((groups, k, n), dtype, device)
    args: Args = {"a": a, "b": b, "c": torch.empty(m, n, device=device, dtype=dtype)}
    return {**args, "offsets": offsets, "groups": groups, "n": n, "k": k}


def _matmul(args: Args) -> list[torch.Tensor]:
    return [args["a"].float() @ args["b"].float()]


def _matmul_w8(args: Args) -> list[torch.Tensor]:
    return [args["a"].float() @ args["b"].float() * args["scale"]]


def _matmul_grouped(args: Args) -> list[torch.Tensor]:
    ends = args["offsets"][:-1].tolist()
    pairs = zip(ends, ends[1:], args["b"], strict=False)
    return [torch.cat([args["a"][i:j].float() @ b.float() for i, j, b in pairs])]


def _tiles(shape: Shape, config: Config) -> tuple[int, int]:
    return blocks(shape["n"], config["BLOCK_N"]), blocks(shape["m"], config["BLOCK_M"])


def _flat_tiles(shape: Shape, config: Config) -> tuple[int, ...]:
    x, y = _tiles(shape, config)
    return (x * y,)


def _work(shape: Shape, size: int) -> tuple[float, float]:
    m, n, k, batch = (shape.get(name, 1) for name in ("m", "n", "k", "batch"))
    return batch * (m * k + k * n + m * n) * size, 2.0 * batch * m * n * k


def _grouped_work(shape: Shape, size: int) -> tuple[float, float]:
    m, n, k = (shape[name] for name in "mnk")
    return (m * k + shape["groups"] * k * n + m * n) * size, 2.0 * m * n * k


def _trips(shape: Shape, config: Config) -> float:
    return blocks(min(shape["k"], config.get("share", shape["k"])), config["BLOCK_K"])


def _stream_trips(shape: Shape, config: Config) -> float:
    x, y = _tiles(shape, config)
    return x * y * blocks(shape["k"], config["BLOCK_K"]) / (config["WAVES"] * SMS)


def _fits(config: Config) -> bool:
    m, n, k = (config[f"BLOCK_{name}"] for name in "MNK")
    per_thread = m * n / (32 * config["num_warps"])
    shared = (m + n) * k * 2 * config["num_stages"]
    return 4 <= per_thread <= 128 and shared <= 232448


_SPACE = {"BLOCK_M": (32, 64, 128, 256), "BLOCK_N": (32, 64, 128, 256), "BLOCK_K": (32, 64, 128),
          "num_warps": (4, 8), "num_stages": (2, 3, 4)}  # fmt: skip
_SKINNY = {**_SPACE, "BLOCK_M": (16, 32, 64), "num_stages": (2, 3, 4, 5)}
_GEMMS: list[Shape] = [
    {"m": 1024, "n": 1024, "k": 1024}, {"m": 2048, "n": 4096, "k": 2048},
    {"m": 4096, "n": 4096, "k": 4096}, {"m": 512, "n": 3584, "k": 8192},
    {"m": 4096, "n": 14336, "k": 1024}, {"m": 640, "n": 5120, "k": 5120},
    {"m": 1021, "n": 1031, "k": 2039}, {"m": 777, "n": 3001, "k": 999},
    {"m": 128, "n": 8192, "k": 8192}, {"m": 8192, "n": 1024, "k": 4096},
]  # fmt: skip
_DEEP: list[Shape] = [
    {"m": 64, "n": 4096, "k": 16384},
    {"m": 256, "n": 1024, "k": 32768},
    {"m": 128, "n": 7168, "k": 8192},
    {"m": 16, "n": 5120, "k": 13824},
    {"m": 512, "n": 512, "k": 8192},
    {"m": 1024, "n": 1536, "k": 4096},
    {"m": 61, "n": 1021, "k": 8191},
    {"m": 32, "n": 8192, "k": 8192},
    {"m": 256, "n": 2048, "k": 16384},
]
SUBJECTS = [
    Subject(
        "matmul", "matmul", matmul_kernel, {**_SPACE, "GROUP_M": (1, 8)},
        [{**shape, "layout": "nn"} for shape in _GEMMS]
        + [{**shape, "layout": "nt"} for shape in _GEMMS[:5]]
        + [{**shape, "layout": "tn"} for shape in _GEMMS[1:5]],
        {"m": 40, "n": 50, "k": 70, "layout": "nt"}, _layouts, _matmul, ["c"], _flat_tiles, _work,
        _trips, dtypes=("bfloat16", "float16", "float8_e4m3fn"), fits=_fits,
    ),
    Subject(
        "matmul_tf32", "matmul", matmul_kernel, {**_SPACE, "GROUP_M": (8,)},
        [{**shape, "layout": "nn"} for shape in _GEMMS[:4]]
        + [{**shape, "layout": "nt"} for shape in _GEMMS[1:5]],
        {"m": 40, "n": 50, "k": 70, "layout": "nn"}, _layouts, _matmul, ["c"], _flat_tiles, _work,
        _trips, dtypes=("float32",),
        fits=lambda c: _fits({**c, "num_stages": 2 * c["num_stages"]}),
    ),
    Subject(
        "matmul_batched", "matmul", matmul_batched_kernel, _SPACE,
        [{"batch": 16, "m": 512, "n": 512, "k": 512}, {"batch": 64, "m": 256, "n": 128, "k": 256},
         {"batch": 8, "m": 1024, "n": 1024, "k": 640}, {"batch": 32, "m": 128, "n": 2048, "k": 128},
         {"batch": 128, "m": 64, "n": 512, "k": 512}, {"batch": 7, "m": 509, "n": 251, "k": 383},
         {"batch": 32, "m": 512, "n": 64, "k": 512}, {"batch": 12, "m": 2048, "n": 128, "k": 128}],
        {"batch": 2, "m": 40, "n": 50, "k": 70}, _plain, _matmul, ["c"],
        lambda s, c: (*_tiles(s, c), s["batch"]), _work, _trips, fits=_fits,
    ),
    Subject(
        "matmul_grouped", "matmul", matmul_grouped_kernel, _SPACE,
        [{"groups": 16, "m": 4096, "n": 4096, "k": 1024},
         {"groups": 32, "m": 4096, "n": 1024, "k": 2048},
         {"groups": 64, "m": 2048, "n": 1536, "k": 4096},
         {"groups": 16, "m": 8192, "n": 2048, "k": 1024},
         {"groups": 128, "m": 8192, "n": 768, "k": 2048},
         {"groups": 8, "m": 1021, "n": 1019, "k": 2039},
         {"groups": 16, "m": 512, "n": 2048, "k": 2048},
         {"groups": 32, "m": 8192, "n": 2048, "k": 512}],
        {"groups": 3, "m": 40, "n": 50, "k": 70}, _grouped, _matmul_grouped, ["c"],
        lambda s, c: (blocks(s["n"], c["BLOCK_N"]),
                      sum(blocks(size, c["BLOCK_M"]) for size in _sizes(s))),
        _grouped_work, _trips, fits=_fits, dtypes=("bfloat16",),
    ),
    Subject(
        "matmul_split_k", "matmul", matmul_split_k_kernel, {**_SKINNY, "share": (512, 2048)},
        _DEEP, {"m": 20, "n": 50, "k": 1000}, _summed, _matmul, ["c"],
        lambda s, c: (*_tiles(s, c), blocks(s["k"], c["share"])),
        lambda s, size: (_work(s, size)[0] + s["m"] * s["n"] * (8 - size), _work(s, size)[1]),
        _trips, fits=lambda c: _fits(c) and c["BLOCK_N"] <= 128, adds=True,
    ),
    Subject(
        "matmul_stream_k", "matmul", matmul_stream_k_kernel, {**_SPACE, "WAVES": (1, 2)},
        [*_DEEP[:6], *_GEMMS[1:3], _GEMMS[6]], {"m": 20, "n": 50, "k": 300}, _summed, _matmul,
        ["c"], lambda s, c: (c["WAVES"] * SMS,),
        lambda s, size: (_work(s, size)[0] + s["m"] * s["n"] * (8 - size), _work(s, size)[1]),
        _stream_trips, fits=_fits, adds=True, dtypes=("bfloat16",),
    ),
    Subject(
        "matmul_w8", "matmul", matmul_w8_kernel,
        {**_SKINNY, "BLOCK_M": (16, 32, 64, 128), "GROUP_M": (8,)},
        [{"m": 16, "n": 4096, "k": 4096}, {"m": 64, "n": 14336, "k": 4096},
         {"m": 256, "n": 4096, "k": 4096}, {"m": 128, "n": 5120, "k": 8192},
         {"m": 1024, "n": 3584, "k": 3584}, {"m": 61, "n": 4093, "k": 2039},
         {"m": 32, "n": 8192, "k": 8192}, {"m": 512, "n": 5120, "k": 2048}],
        {"m": 20, "n": 50, "k": 70}, _w8, _matmul_w8, ["c"], _flat_tiles,
        lambda s, size: ((s["m"] * (s["k"] + s["n"])) * size + s["k"] * s["n"],
                         2.0 * s["m"] * s["n"] * s["k"]),
        _trips, fits=lambda c: _fits(c) and c["BLOCK_N"] <= 128,
    ),
]  # fmt: skip
