"""Views and tiles of matrices, this rank's and the peers'."""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog.device import tiles

from . import Run, assembly, compiled, on_every_arch

pytestmark = pytest.mark.compat


@triton.jit
def pull_kernel(x, out, peer, ctx, ROWS: tl.constexpr, COLS: tl.constexpr, HINT: tl.constexpr):
    row, col = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    tile = tiles.gather(x, row, col, peer, ctx, ROWS, COLS, HINT)
    tiles.store(out, row, col, tile)


@triton.jit
def push_kernel(x, out, peer, ctx, ROWS: tl.constexpr, COLS: tl.constexpr, HINT: tl.constexpr):
    row, col = tl.program_id(0) * ROWS, tl.program_id(1) * COLS
    tiles.scatter(out, row, col, tiles.load(x, row, col, ROWS, COLS), peer, ctx, HINT)


@triton.jit
def part_kernel(x, out, first, rows, ROWS: tl.constexpr, COLS: tl.constexpr):
    tiles.store(out, 0, 0, tiles.load(tiles.part(x, first, rows), 0, 0, ROWS, COLS))


@pytest.mark.parametrize("kernel", [pull_kernel, push_kernel])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_tiles_of_a_peer(run: Run, kernel: triton.JITFunction, transposed: bool, size: int) -> None:
    """Ragged in both directions, x and out in different orders, and nothing outside is touched."""
    rows, cols = 21, 37

    def main(world: sundog.World) -> torch.Tensor:
        torch.manual_seed(world.rank)
        whole = world.empty((cols, rows) if transposed else (rows, cols))
        x = (whole.T if transposed else whole).copy_(torch.randn(rows, cols))
        out = world.full((rows + 3, cols + 5), -1.0)
        world.barrier()
        peer = (world.rank + 1) % world.size
        grid = (triton.cdiv(rows, 8), triton.cdiv(cols, 16))
        target = tiles.view(out[:rows, :cols])
        kernel[grid](tiles.view(x), target, peer, world.ctx, ROWS=8, COLS=16, HINT=(1, 1))
        world.barrier()
        return torch.cat([x.cpu().flatten(), out.cpu().flatten()])

    got = run(main, size)
    for rank, each in enumerate(got):
        source = (rank + (1 if kernel is pull_kernel else -1)) % size
        wanted = torch.full((rows + 3, cols + 5), -1.0)
        wanted[:rows, :cols] = got[source][: rows * cols].view(rows, cols)
        assert torch.equal(each[rows * cols :].view_as(wanted), wanted)


def test_a_part_ends_where_it_says(run: Run) -> None:
    x = torch.arange(60.0).view(12, 5)

    def main(world: sundog.World) -> torch.Tensor:
        out = torch.empty(8, 8, device=world.device)
        given = tiles.view(x.to(world.device))
        part_kernel[(1,)](given, tiles.view(out), 5, 3, ROWS=8, COLS=8)
        return out.cpu()

    wanted = torch.zeros(8, 8)
    wanted[:3, :5] = x[5:8]
    assert torch.equal(run(main, 1)[0], wanted)


def test_a_view_has_two_dimensions() -> None:
    with pytest.raises(ValueError, match=r"two dimensions, and the tensor has shape .*\[2, 3, 4\]"):
        tiles.view(torch.empty(2, 3, 4))


@on_every_arch
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kernel", [pull_kernel, push_kernel])
def test_16_byte_accesses_with_the_hint(
    arch: str, transposed: bool, kernel: triton.JITFunction
) -> None:
    """A stride that the compiler knows nothing of: 1000, no multiple of 16."""
    whole = torch.empty(1000, 1000, dtype=torch.bfloat16)
    x = tiles.view(whole.T if transposed else whole)
    ctx = torch.empty(64, dtype=torch.int64)
    side = (8, 1) if transposed else (1, 8)
    verb = "load" if kernel is pull_kernel else "store"
    ptx = "ld" if kernel is pull_kernel else "st"
    pattern = rf"{ptx}\.global\.v4|(?:buffer|global)_{verb}_dwordx4"
    for hint in ((1, 1), side):
        options = dict(ROWS=64, COLS=64, HINT=hint)
        text = assembly(compiled(kernel, arch, (x, x, 1, ctx), options))
        assert bool(re.search(pattern, text)) is (hint == side)
