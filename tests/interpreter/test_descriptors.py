"""Tensor descriptors, made by the host and by the kernel: edges, padding, gather, scatter."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

import sundog

from .launching import Run, same

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("error::RuntimeWarning")]


@triton.jit
def host_kernel(source, target, M: tl.constexpr, N: tl.constexpr):
    row, column = tl.program_id(0) * M, tl.program_id(1) * N
    target.store([row, column], source.load([row, column]) * 2)


@triton.jit
def device_kernel(x_ptr, out_ptr, rows, columns, M: tl.constexpr, N: tl.constexpr):
    source = tl.make_tensor_descriptor(x_ptr, [rows, columns], [columns, 1], [M, N])
    target = tl.make_tensor_descriptor(out_ptr, [rows, columns], [columns, 1], [M, N])
    row, column = tl.program_id(0) * M, tl.program_id(1) * N
    target.store([row, column], source.load([row, column]) * 2)


@triton.jit
def padding_kernel(source, out_ptr, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(out_ptr + at, source.load([8, 16]))


DESCRIBED = [torch.float32, torch.bfloat16, torch.float16, torch.int32]


@pytest.mark.parametrize("dtype", DESCRIBED)
@pytest.mark.parametrize("made_by", ["host", "device"])
def test_descriptors_stop_at_the_edges(run: Run, dtype: torch.dtype, made_by: str) -> None:
    x = torch.randint(-99, 99, (13, 24)).to(dtype)

    def main(world: sundog.World) -> torch.Tensor:
        source, target = x.to(world.device), torch.full_like(x, 5, device=world.device)
        grid = (triton.cdiv(13, 8), triton.cdiv(24, 16))
        if made_by == "host":
            tiles = [TensorDescriptor.from_tensor(t, [8, 16]) for t in (source, target)]
            host_kernel[grid](*tiles, M=8, N=16)
        else:
            triton.set_allocator(lambda size, align, stream: torch.empty(size, device=world.device))
            device_kernel[grid](source, target, 13, 24, M=8, N=16)
        return target.cpu()

    assert same(run(main, 1)[0], x * 2)


@pytest.mark.parametrize("padding", ["zero", "nan"])
@pytest.mark.parametrize("dtype", DESCRIBED[:3])
def test_descriptors_pad(run: Run, dtype: torch.dtype, padding: str) -> None:
    x = torch.randn(13, 24).to(dtype)

    def main(world: sundog.World) -> torch.Tensor:
        out = torch.zeros(8, 16, dtype=dtype, device=world.device)
        tile = TensorDescriptor.from_tensor(x.to(world.device), [8, 16], padding)
        padding_kernel[(1,)](tile, out, M=8, N=16)
        return out.cpu()

    wanted = torch.full((8, 16), float("nan") if padding == "nan" else 0.0, dtype=dtype)
    wanted[:5, :8] = x[8:, 16:]
    assert same(run(main, 1)[0], wanted)


@triton.jit
def gather_kernel(source, target, rows_ptr, M: tl.constexpr):
    rows = tl.load(rows_ptr + tl.arange(0, M))
    target.scatter(source.gather(rows, 16), rows, 0)


@pytest.mark.sim_only
def test_descriptors_gather_and_scatter(run: Run) -> None:
    x = torch.randn(20, 32)
    rows = torch.tensor([3, 19, 0, 7, 4, 11, 12, 13], dtype=torch.int32)

    def main(world: sundog.World) -> torch.Tensor:
        out = torch.zeros(20, 16)
        tiles = TensorDescriptor.from_tensor(x, [1, 16]), TensorDescriptor.from_tensor(out, [1, 16])
        gather_kernel[(1,)](*tiles, rows, M=8)
        return out

    wanted = torch.zeros(20, 16)
    wanted[rows.long()] = x[rows.long(), 16:]
    assert same(run(main, 1)[0], wanted)
