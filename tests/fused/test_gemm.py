"""The shared GEMM: every layout, ragged sizes, descriptors and pointers, the epilogue."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import sundog
from sundog.fused import _gemm
from sundog.fused._fitting import fitting
from sundog.gpu_limits import LIMITS

from . import A_FEW, Run, assembly, compiled, on_every_arch, spills

SMALL = dict(tile_m=16, tile_n=32, tile_k=16, group_m=2, num_warps=4)
LAYOUTS = ["NN", "NT", "TN", "TT"]


def matrix(rows: int, cols: int, order: str, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random whole numbers; "T" is a view of the transpose, as a linear layer's weight is."""
    made = torch.Generator().manual_seed(seed)
    shape = (rows, cols) if order == "N" else (cols, rows)
    whole = torch.randint(-4, 5, shape, generator=made).to(dtype)
    return whole if order == "N" else whole.T


@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", _gemm.DTYPES)
def test_exact_in_every_layout(
    run: Run, layout: str, dtype: torch.dtype, descriptors: bool
) -> None:
    """Whole numbers, so any order of adding gives the same bits. 40 = 2 groups and a ragged one."""
    m, n, k = (40, 72, 56) if descriptors else (39, 71, 53)
    a = matrix(m, k, layout[0], dtype, 1)
    b = matrix(k, n, layout[1], dtype, 2)

    def main(world: sundog.World) -> torch.Tensor:
        config = _gemm.Tiles(**SMALL, descriptors=descriptors)
        out = torch.empty(m, n, dtype=torch.float32, device=world.device)
        x, y = (t.to(world.device) for t in (a, b))
        kinds = {_gemm.operand(t, (16, 16), descriptors)[1] for t in (x, y)}
        assert (_gemm.VIEW in kinds) is not descriptors
        return _gemm.matmul(x, y, out, None, None, config, 3).cpu()

    assert torch.equal(run(main, 1)[0], (a.double() @ b.double()).float())


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (17, 33, 1), (16, 32, 16), (65, 40, 130)])
def test_any_size(run: Run, m: int, n: int, k: int) -> None:
    a, b = matrix(m, k, "N", torch.float16, 3), matrix(k, n, "N", torch.float16, 4)

    def main(world: sundog.World) -> torch.Tensor:
        out = torch.empty(m, n, dtype=torch.float16, device=world.device)
        x, y = (t.to(world.device) for t in (a, b))
        return _gemm.matmul(x, y, out, None, None, _gemm.Tiles(**SMALL), 2).cpu()

    assert torch.equal(run(main, 1)[0].double(), a.double() @ b.double())


@pytest.mark.parametrize("dtype", _gemm.DTYPES)
@pytest.mark.parametrize("activation", _gemm.ACTIVATIONS)
def test_epilogue(run: Run, dtype: torch.dtype, activation: str | None) -> None:
    """Against float64, within what rounding the output once costs (float32: adding in float32)."""
    torch.manual_seed(5)
    a, b, bias = (torch.randn(s).to(dtype) for s in ((35, 50), (50, 41), (41,)))

    def main(world: sundog.World) -> torch.Tensor:
        out = torch.empty(35, 41, dtype=dtype, device=world.device)
        x, y, z = (t.to(world.device) for t in (a, b, bias))
        return _gemm.matmul(x, y, out, z, activation, _gemm.Tiles(**SMALL), 2).cpu()

    exact = a.double() @ b.double() + bias.double()
    wanted = exact if activation is None else torch.nn.functional.silu(exact)
    rounding = torch.finfo(dtype).eps
    assert torch.allclose(run(main, 1)[0].double(), wanted, rtol=rounding, atol=5e-6)


@pytest.mark.sim_only
@pytest.mark.parametrize("descriptors", [False, True])
def test_offsets_have_64_bits(run: Run, descriptors: bool) -> None:
    """Row 16 begins at element 2^31: only the pages that are touched take memory."""
    a, b = matrix(17, 24, "N", torch.float16, 6), matrix(24, 40, "N", torch.float16, 7)

    def main(world: sundog.World) -> torch.Tensor:
        stride = 1 << 27
        far = torch.empty(17 * stride, dtype=torch.float16).as_strided((17, 24), (stride, 1))
        far.copy_(a)
        out = torch.empty(17, 40)
        config = _gemm.Tiles(**SMALL, descriptors=descriptors)
        return _gemm.matmul(far, b, out, None, None, config, 2)

    assert torch.equal(run(main, 1)[0].double(), a.double() @ b.double())


@pytest.mark.compat
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tma_and_tensor_cores_on_sm_90(layout: str) -> None:
    """The default config: loads and stores by TMA, three stages of both operands, no spills."""
    made = _compiled("sm_90", layout, _gemm.Tiles())
    text = assembly(made)
    assert len(re.findall(r"wgmma\.mma_async", text)) == 4  # 64 of K by 16
    loads = re.findall(r"cp\.async\.bulk\.tensor\S*mbarrier", text)
    assert len(loads) == 6  # of each operand 2 before the loop, 1 in it
    assert re.search(r"cp\.async\.bulk\.tensor\S*bulk_group", text)
    assert not re.search(r"st\.global", text)
    assert spills(made) <= A_FEW


@pytest.mark.compat
@pytest.mark.parametrize(("out", "num_stages"), [(torch.float32, 3), (torch.bfloat16, 4)])
def test_an_output_that_does_not_fit_beside_the_inputs(out: torch.dtype, num_stages: int) -> None:
    """By pointers; of 32 bits when the loop over K has ended, in the memory that it had."""
    made = _compiled("sm_90", "NT", _gemm.Tiles(num_stages=num_stages), out)
    assert re.search(r"st\.global\.v4\.b32", assembly(made))
    assert made.metadata.shared <= LIMITS["sm_90"].shared
    assert spills(made) <= A_FEW


@pytest.mark.compat
@on_every_arch
@pytest.mark.parametrize("layout", LAYOUTS)
def test_wide_accesses_and_tensor_cores_by_pointers(arch: str, layout: str) -> None:
    config = _gemm.Tiles(128, 128, 64, descriptors=False, num_stages=3 if arch == "sm_90" else 2)
    made = _compiled(arch, layout, config)
    text = assembly(made)
    assert spills(made) <= A_FEW
    if arch == "sm_90":
        assert re.search(r"wgmma\.mma_async", text)
        assert re.search(r"cp\.async\.cg\.shared\.global .*0x10", text)
        assert not re.search(r"ld\.global", text)
    else:
        assert re.search(r"mfma", text)
        assert set(re.findall(r"(?:global|buffer)_load_(\w+)", text)) == {"dwordx4"}


@pytest.mark.compat
def test_float32_is_not_rounded_to_tf32() -> None:
    a = torch.empty(512, 512)
    config = _gemm.Tiles(**fitting(512, 512, 512, 512, torch.float32, 64))
    args = _gemm.arguments(a, a, a, None, None, config)
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    made = compiled(_gemm._gemm_kernel, "sm_90", args, options)
    text = assembly(made)
    assert re.search(r"fma\.rn\.f32", text)
    assert not re.search(r"tf32|mma", text)
    assert spills(made) <= A_FEW


def _compiled(
    arch: str, layout: str, config: _gemm.Tiles, dtype: torch.dtype = torch.bfloat16
) -> Any:
    a, b = (matrix(512, 512, order, torch.bfloat16, 0) for order in layout)
    out = torch.empty(512, 512, dtype=dtype)
    args = _gemm.arguments(a, b, out, None, None, config)
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    return compiled(_gemm._gemm_kernel, arch, args, options)


def test_bad_tiles() -> None:
    reason = _gemm.valid(_gemm.Tiles(tile_m=100), torch.bfloat16)
    assert reason == "tile_m 100 is not a power of two of at least 16"
    reason = _gemm.valid(_gemm.Tiles(num_stages=6), torch.bfloat16)
    assert reason is not None
    assert (
        "take 294,912 bytes of shared memory, and a program of sm_90 has at most 232,448" in reason
    )
    assert "num_warps 3" in (_gemm.valid(_gemm.Tiles(num_warps=3), torch.bfloat16) or "")
    assert "group_m 0" in (_gemm.valid(_gemm.Tiles(group_m=0), torch.bfloat16) or "")
    assert _gemm.valid(_gemm.Tiles(), torch.bfloat16) is None
