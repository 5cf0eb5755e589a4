"""Every fused op fits every target: its default, and what a tuner may try there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sundog import gpu_limits
from sundog.compiled.kernels import CompiledKernel, judge
from sundog.fused import _gemm
from sundog.ops import load, op
from sundog.tools import isa
from sundog.tools.tune.space import Space, jobs

pytestmark = [pytest.mark.compat, pytest.mark.sim_only]

TILED = [name for name in op.OPS if issubclass(load.find(name).Config, _gemm.Tiles)]  # not cuBLAS
SCALED = [name for name in TILED if name.startswith("scaled_")]  # FP8 alone
FUSED = [name for name in TILED if name not in SCALED]
SHAPE = "m=4096,n=3584,k=8192,dtype=bfloat16"


@pytest.mark.parametrize("arch", gpu_limits.LIMITS)
@pytest.mark.parametrize("name", FUSED)
def test_the_default_fits(arch: str, name: str) -> None:
    module = load.find(name)
    with gpu_limits.aim(arch):
        for dtype in (torch.bfloat16, torch.float32):
            problem = load.changed(isa.typical(module, 8), {"dtype": dtype})
            for num_sms in (16, 132):
                config = module.default(problem, num_sms)
                assert module.valid(problem, config) is None
                assert not config.descriptors or gpu_limits.LIMITS[arch].has_tma


@pytest.mark.parametrize("arch", gpu_limits.LIMITS)
@pytest.mark.parametrize("name", SCALED)
def test_the_default_of_fp8_fits(arch: str, name: str) -> None:
    module = load.find(name)
    with gpu_limits.aim(arch):
        for scaling in ("tensor", "row", "block"):
            problem = load.changed(isa.typical(module, 8), {"scaling": scaling})
            for num_sms in (16, 132):
                config = module.default(problem, num_sms)
                assert module.valid(problem, config) is None
                assert config.programs <= num_sms


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", FUSED)
def test_a_tuner_has_forty_configs(arch: str, name: str) -> None:
    (job,) = jobs(name, SHAPE, 8)
    assert len(Space.of(job, 132, arch).configs) >= 40


@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_the_largest_config_fits_when_it_is_compiled(arch: str) -> None:
    """The rule that `valid` has for shared memory is the compiler's."""
    name = "all_gather_matmul.barrier"
    (job,) = jobs(name, SHAPE, 8)

    def needs(config: Any) -> int:
        with gpu_limits.aim(arch):
            return _gemm.shared_bytes(config, 2)

    largest = max(Space.of(job, 132, arch).configs, key=needs)
    tiles = ("tile_m", "tile_n", "tile_k", "num_warps", "num_stages")
    changes = {field: getattr(largest, field) for field in tiles}
    kernels = isa.inspect(name, (arch,), config=changes, world=2)
    assert not [mark for kernel in kernels for mark in kernel.marks if mark.rule == "shared"]
    most = max(kernel.shared for kernel in kernels)
    assert gpu_limits.LIMITS[arch].shared // 2 < most <= gpu_limits.LIMITS[arch].shared


def test_what_does_not_fit_is_refused_and_marked() -> None:
    name = "all_gather_matmul.barrier"
    module = load.find(name)
    problem, config = isa.typical(module, 2), module.Config(num_stages=3)
    assert module.valid(problem, config) is None, "on sm_90"
    with gpu_limits.aim("sm_89"):
        refused = module.valid(problem, config)
    assert refused is not None
    assert "a program of sm_89 has at most 101,376" in refused
    with pytest.raises(ValueError, match="a program of gfx942 has at most 65,536"):
        isa.inspect(name, ("gfx942",), config={"num_stages": 4}, world=2)
    for arch, rules in (("gfx942", ["shared"]), ("gfx950", [])):
        compiled = CompiledKernel(None, [], {}, 256, arch, 70_000)  # type: ignore[arg-type]
        assert [mark.rule for mark in judge(compiled, [], 0)] == rules


def test_a_program_has_at_most_1024_threads() -> None:
    """Of both kinds of op, and of one warp size and the other."""
    for name in ("all_reduce.one_shot", "all_gather.push"):
        module = load.find(name)
        problem = isa.typical(module, 2)
        config = module.Config(block=32768, num_warps=32)
        assert module.valid(problem, config) is None
        with gpu_limits.aim("gfx942"):
            refused = module.valid(problem, config)
        assert "32 warps of 64 are 2048 threads" in (refused or "")
