"""Helion kernels of the tests: five real ones, and one small one per construct of the device IR."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import helion
import helion.language as hl
import torch


@helion.kernel(static_shapes=True)
def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(out.size()):
        out[tile] = x[tile] + y[tile]
    return out


@helion.kernel(static_shapes=True)
def add_kept(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(out.size()):
        out[tile] = torch.add(x[tile], y[tile], alpha=2) + 1.5
    return out


@helion.kernel(static_shapes=True)
def softmax(x: torch.Tensor) -> torch.Tensor:
    n, _ = x.size()
    out = torch.empty_like(x)
    for tile in hl.tile(n):
        row = x[tile, :]
        e = torch.exp(row - torch.amax(row, dim=1, keepdim=True))
        out[tile, :] = e / torch.sum(e, dim=1, keepdim=True)
    return out


@helion.kernel(static_shapes=True)
def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    m, _ = x.size()
    out = torch.empty_like(x)
    for tile in hl.tile(m):
        row = x[tile, :].to(torch.float32)
        mean = torch.mean(row, dim=-1, keepdim=True)
        centred = row - mean
        var = torch.mean(centred * centred, dim=-1, keepdim=True)
        normal = centred * torch.rsqrt(var + eps)
        out[tile, :] = (normal * weight[:].to(torch.float32) + bias[:].to(torch.float32)).to(
            x.dtype
        )
    return out


@helion.kernel(static_shapes=True)
def matmul(
    x: torch.Tensor,
    y: torch.Tensor,
    epilogue: Callable[[torch.Tensor], torch.Tensor] = lambda acc: acc,
) -> torch.Tensor:
    m, k = x.size()
    _, n = y.size()
    out = torch.empty([m, n], dtype=x.dtype, device=x.device)
    for tile_m, tile_n in hl.tile([m, n]):
        acc = hl.zeros([tile_m, tile_n], dtype=torch.float32)
        for tile_k in hl.tile(k):
            acc = torch.addmm(acc, x[tile_m, tile_k], y[tile_k, tile_n])
        out[tile_m, tile_n] = epilogue(acc).to(x.dtype)
    return out


@helion.kernel(static_shapes=True)
def attention(q_in: torch.Tensor, k_in: torch.Tensor, v_in: torch.Tensor) -> torch.Tensor:
    m_dim = q_in.size(-2)
    n_dim = k_in.size(-2)
    head = hl.specialize(q_in.size(-1))
    q_view = q_in.reshape([-1, m_dim, head])
    v_view = v_in.reshape([-1, n_dim, head])
    k_view = k_in.reshape([-1, n_dim, head]).transpose(1, 2)
    out = torch.empty_like(q_view)
    scale = 1.0 / math.sqrt(head) * 1.44269504
    for tile_b, tile_m in hl.tile([q_view.size(0), m_dim]):
        m_i = hl.full([tile_b, tile_m], float("-inf"), dtype=torch.float32)
        l_i = torch.full_like(m_i, 1.0)
        acc = hl.zeros([tile_b, tile_m, head], dtype=torch.float32)
        q = q_view[tile_b, tile_m, :]
        for tile_n in hl.tile(v_view.size(1)):
            qk = torch.bmm(q, k_view[tile_b, :, tile_n])
            m_ij = torch.maximum(m_i, torch.amax(qk, -1) * scale)
            p = torch.exp2(qk * scale - m_ij[:, :, None])
            alpha = torch.exp2(m_i - m_ij)
            l_i = l_i * alpha + torch.sum(p, -1)
            acc = acc * alpha[:, :, None]
            acc = torch.baddbmm(acc, p.to(v_view.dtype), v_view[tile_b, tile_n, :])
            m_i = m_ij
        out[tile_b, tile_m, :] = (acc / l_i[:, :, None]).to(out.dtype)
    return out.view(q_in.size())


@helion.kernel(static_shapes=True)
def branch(x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.size(0)):
        value = x[tile]
        other = value * 3.0
        if flag[0] != 0:
            value = torch.sigmoid(value)
        else:
            other = other + 2.0
            value = value + other
        out[tile] = value + other
    return out


@helion.kernel(static_shapes=True)
def until(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.size(0)):
        value = x[tile]
        while torch.sum(value, dim=0) > 1.0:
            value = value * 0.5
        out[tile] = value
    return out


def _combine(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return left + right


@helion.kernel(static_shapes=True)
def scan(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    for tile in hl.tile(x.size(0)):
        out[tile, :] = hl.associative_scan(_combine, x[tile, :], dim=1)
    return out


def _argmax(
    left: torch.Tensor, left_at: torch.Tensor, right: torch.Tensor, right_at: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    take = right > left
    return torch.where(take, right, left), torch.where(take, right_at, left_at)


@helion.kernel(static_shapes=True)
def reduce_pair(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    best = torch.empty([x.size(0)], dtype=x.dtype, device=x.device)
    where = torch.empty([x.size(0)], dtype=at.dtype, device=x.device)
    for tile in hl.tile(x.size(0)):
        value, index = hl.reduce(
            _argmax, (x[tile, :], at[tile, :]), dim=1, other=(float("-inf"), 0)
        )
        best[tile] = value
        where[tile] = index
    return best, where


@helion.kernel(static_shapes=True)
def stepped(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty([x.size(0)], dtype=x.dtype, device=x.device)
    for tile in hl.tile(x.size(0)):
        total = hl.zeros([tile], dtype=torch.float32)
        for i in hl.grid(0, x.size(1), 2):
            total = total + x[tile, i]
        out[tile] = total.to(x.dtype)
    return out


@helion.kernel(static_shapes=True)
def jagged(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    rows = offsets.size(0) - 1
    out = torch.zeros([rows], dtype=values.dtype, device=values.device)
    for tile in hl.tile(rows):
        start = offsets[tile]
        length = offsets[tile.index + 1] - start
        total = hl.zeros([tile], dtype=torch.float32)
        for inner in hl.tile(0, length.amax()):
            index = start[:, None] + inner.index[None, :]
            keep = inner.index[None, :] < length[:, None]
            total = total + hl.load(values, [index], extra_mask=keep).sum(dim=1)
        out[tile] = total.to(values.dtype)
    return out


@helion.kernel(static_shapes=False)
def dynamic(x: torch.Tensor, size: int) -> torch.Tensor:
    out = torch.empty([x.size(0)], dtype=x.dtype, device=x.device)
    for tile in hl.tile(x.size(0)):
        total = hl.zeros([tile], dtype=torch.float32)
        for inner in hl.tile(1, x.size(1) - 1):
            total = total + (x[tile, inner] * (size + 1)).sum(-1)
        out[tile] = total.to(x.dtype)
    return out


@helion.kernel(static_shapes=True)
def histogram(x: torch.Tensor, bins: torch.Tensor) -> torch.Tensor:
    for tile in hl.tile(x.size(0)):
        hl.atomic_add(bins, [x[tile]], 1, sem="relaxed")
    return bins


def _f32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32)


def _f16(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def _long(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


# name -> (kernel, arguments). The first five are those the dataset is shown with.
CASES: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "add": lambda: (add, (_f32(256, 256), _f32(256, 256))),
    "softmax": lambda: (softmax, (_f32(128, 512),)),
    "layer_norm": lambda: (layer_norm, (_f16(128, 512), _f16(512), _f16(512), 1e-5)),
    "matmul": lambda: (matmul, (_f16(256, 512), _f16(512, 128))),
    "attention": lambda: (attention, (_f16(2, 4, 128, 64),) * 3),
    "add_kept": lambda: (add_kept, (_f32(256, 256), _f32(256, 256))),
    "branch": lambda: (branch, (_f32(256), torch.ones(1, dtype=torch.int32))),
    "until": lambda: (until, (_f32(256),)),
    "scan": lambda: (scan, (_f32(64, 128),)),
    "reduce_pair": lambda: (reduce_pair, (_f32(64, 128), _long(64, 128))),
    "stepped": lambda: (stepped, (_f32(64, 128),)),
    "jagged": lambda: (jagged, (_f32(512), torch.tensor([0, 7, 100, 512]))),
    "dynamic": lambda: (dynamic, (_f32(64, 128), 3)),
    "histogram": lambda: (histogram, (_long(64), _long(16))),
}
