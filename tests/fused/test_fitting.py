"""The tiles that a product gets where nothing was tuned."""

from __future__ import annotations

import pytest
import torch

from sundog import gpu_limits
from sundog.fused import _gemm
from sundog.fused._fitting import fitting

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


# Each was the fastest on an H200 or within 3 % of it, of 96 and of 84 tiles (2026-11-19).
@pytest.mark.parametrize(
    ("dtype", "m", "n", "k", "tile"),
    [
        (BF16, 16, 3584, 8192, (16, 32, 256)),
        (BF16, 16, 5120, 3456, (16, 64, 256)),
        (BF16, 128, 3584, 8192, (64, 64, 128)),
        (BF16, 256, 3584, 8192, (64, 128, 64)),
        (BF16, 512, 4096, 4096, (128, 128, 64)),
        (BF16, 1024, 3584, 8192, (128, 256, 64)),
        (FP8, 16, 1024, 8192, (64, 32, 256)),
        (FP8, 16, 3584, 8192, (16, 32, 512)),
        (FP8, 128, 4096, 4096, (64, 128, 256)),
        (FP8, 512, 4096, 4096, (128, 128, 128)),
        (FP8, 1024, 3584, 8192, (128, 256, 128)),
    ],
)
def test_a_whole_gpu_takes_what_was_measured_to_be_fastest(
    dtype: torch.dtype, m: int, n: int, k: int, tile: tuple[int, int, int]
) -> None:
    with gpu_limits.aim("sm_90"):
        made = fitting(m, m, n, k, dtype, 132)
    assert (made["tile_m"], made["tile_n"], made["tile_k"]) == tile


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120", "gfx942", "gfx950"])
@pytest.mark.parametrize("dtype", [BF16, torch.float32, FP8])
@pytest.mark.parametrize("num_sms", [1, 16, 66, 132])
def test_tiles_fit_every_target_and_no_k_is_too_short(
    arch: str, dtype: torch.dtype, num_sms: int
) -> None:
    with gpu_limits.aim(arch):
        for m, n, k in ((1, 1, 1), (17, 37, 41), (257, 3585, 8191), (16384, 129, 64)):
            made = _gemm.Tiles(**fitting(m, m, n, k, dtype, num_sms))
            assert _gemm.valid(made, dtype) is None
            assert made.tile_k >= (32 if dtype == FP8 else 16)


def test_tiles_of_sixteen_rows_are_for_few_rows() -> None:
    with gpu_limits.aim("sm_90"):
        for rows in (65, 127, 129, 1000):
            assert fitting(rows, rows, 1024, 8192, BF16, 132)["tile_m"] >= 64
