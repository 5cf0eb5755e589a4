"""Aligned copies of unaligned matrices: what is copied, how wide accesses are, and the results."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import sundog
from sundog import gpu_limits
from sundog.device import tiles
from sundog.fused import _aligned, _gemm
from sundog.fused import all_gather_matmul_barrier as barrier
from sundog.fused import all_gather_matmul_direct as direct
from sundog.fused import all_gather_matmul_hbm_buffer as hbm_buffer

from . import A_FEW, Run, answers, assembly, compare, compiled, on_every_arch, spills

SMALL: Any = dict(tile_m=16, tile_n=32, tile_k=16, num_warps=4)
BF16 = torch.bfloat16


def padded_matrix(rows: int, cols: int, order: str, descriptors: bool = True) -> torch.Tensor:
    """Zeros, as wide as an aligned copy is."""
    rows, cols = (rows, cols) if order == "N" else (cols, rows)
    made = torch.zeros(rows, _aligned.padded(cols, 2, descriptors), dtype=BF16)
    return made if order == "N" else made.T


@pytest.mark.parametrize("layout", ["NN", "NT", "TN", "TT"])
def test_a_copy_where_rows_are_not_aligned_and_none_elsewhere(run: Run, layout: str) -> None:
    """39 x 53 and 53 x 71: whatever dimension is contiguous, rows are not multiples of 16 bytes."""

    def main(world: sundog.World) -> None:
        shapes = [(39, 53), (53, 71)]
        given = [torch.empty(s, dtype=BF16, device=world.device).random_(-4, 5) for s in shapes]
        given = [
            t if order == "N" else t.T.contiguous().T
            for t, order in zip(given, layout, strict=True)
        ]
        rooms = _aligned.Rooms(world, _gemm.Tiles(**SMALL), 2)
        wide = rooms.wide(*given)
        for before, after in zip(given, wide, strict=True):
            assert _gemm.kind_of(before, True) == _gemm.VIEW
            assert _gemm.kind_of(after, True) != _gemm.VIEW
            rows, cols = before.shape
            assert torch.equal(after[:rows, :cols], before)
            assert after.count_nonzero() == before.count_nonzero()  # the padding is zero
        again = rooms.wide(*given)
        assert [t.data_ptr() for t in again] == [t.data_ptr() for t in wide]  # the same memory
        assert [t.data_ptr() for t in rooms.wide(*again)] == [t.data_ptr() for t in again]

    run(main, 1)


def test_an_unaligned_address_is_copied_too(run: Run) -> None:
    def main(world: sundog.World) -> None:
        whole = torch.ones(16 * 16 + 8, dtype=BF16, device=world.device)
        for first, is_copied in ((8, False), (1, True)):
            part = whole[first : first + 256].view(16, 16)
            [wide] = _aligned.Rooms(world, _gemm.Tiles(**SMALL), 2).wide(part)
            assert (wide.data_ptr() != part.data_ptr()) is is_copied

    run(main, 1)


def test_strides_in_both_dimensions_are_read_in_place(run: Run) -> None:
    def main(world: sundog.World) -> None:
        part = torch.ones(32, 32, dtype=BF16, device=world.device)[::2, ::2]
        [same] = _aligned.Rooms(world, _gemm.Tiles(**SMALL), 2).wide(part)
        assert same is part

    run(main, 1)


@pytest.mark.parametrize("algo", [barrier, direct, hbm_buffer])
@pytest.mark.parametrize("shard", ["k", "m"])
def test_unaligned_operands_of_all_gather_matmul(run: Run, algo: Any, shard: str) -> None:
    """Twice, with other data: the padding of the second call is still zero."""
    k = 37 * 3 if shard == "k" else 53
    problem = algo.Problem(17 * 3, 21, k, BF16, 3, shard, has_bias=True)
    config = algo.Config(**SMALL, programs=3, **({"fetchers": 2} if algo is hbm_buffer else {}))
    compare(run(answers(algo, problem, config), 3))


def test_infinity_past_a_padded_shard_does_not_become_nan(run: Run) -> None:
    """Rank 0's columns of A end in padding: the rows of B that meet it belong to rank 1."""

    def main(world: sundog.World) -> torch.Tensor:
        problem = direct.Problem(16, 16, 2 * 5, BF16, 2, "k")
        plan = direct.plan(world, problem, direct.Config(**SMALL, programs=1))
        a = world.empty((16, 5), BF16, "a").fill_(1)
        b = torch.ones(10, 16, dtype=BF16, device=world.device)
        b[5:] = float("inf")
        world.barrier()
        return plan(a, b, torch.empty(16, 16, dtype=BF16, device=world.device)).cpu()

    assert all(each.isposinf().all() for each in run(main, 2))


@pytest.mark.compat
@pytest.mark.parametrize("layout", ["NN", "NT"])
def test_tma_and_tensor_cores_of_an_unaligned_product(layout: str) -> None:
    """1024 x 1543 x 2057, of which nothing is aligned: on sm_90 both operands come by TMA."""
    a, b = padded_matrix(1024, 2057, layout[0]), padded_matrix(2057, 1543, layout[1])
    made = _product(a, b, torch.empty(1024, 1543, dtype=BF16), "sm_90", _gemm.Tiles())
    text = assembly(made)
    assert len(re.findall(r"cp\.async\.bulk\.tensor\S*mbarrier", text)) == 6
    assert "wgmma.mma_async" in text
    assert not re.search(r"ld\.global\.(b16|u16)", text)
    assert spills(made) <= A_FEW


@pytest.mark.compat
@on_every_arch
def test_wide_loads_of_an_unaligned_product_by_pointers(arch: str) -> None:
    config = _gemm.Tiles(128, 128, 64, descriptors=False, num_stages=2)
    a, b = padded_matrix(1024, 2057, "N", False), padded_matrix(2057, 1543, "N", False)
    text = assembly(_product(a, b, torch.empty(1024, 1543, dtype=BF16), arch, config))
    if arch == "sm_90":
        assert re.search(r"cp\.async\.cg\.shared\.global .*0x10", text)
        assert not re.search(r"ld\.global", text)
    else:
        assert set(re.findall(r"(?:global|buffer)_load_(\w+)", text)) == {"dwordx4"}


@pytest.mark.compat
@on_every_arch
def test_the_copy_stores_wide(arch: str) -> None:
    x, room = torch.empty(2057, 1543, dtype=BF16), padded_matrix(2057, 1543, "N", False)
    args = (tiles.view(x), tiles.view(room), _aligned._ROWS, _aligned._COLS)
    text = assembly(compiled(_aligned._align_kernel, arch, args, {"num_warps": 4}))
    stores = set(re.findall(r"st\.global\.\S+|(?:global|buffer)_store_\w+", text))
    assert stores in ({"st.global.v4.b32"}, {"global_store_dwordx4"}, {"buffer_store_dwordx4"})


def _product(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, arch: str, config: _gemm.Tiles
) -> Any:
    with gpu_limits.aim(arch):
        args = _gemm.arguments(a, b, out, None, None, config)
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    return compiled(_gemm._gemm_kernel, arch, args, options)
