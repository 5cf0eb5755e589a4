"""all_reduce_rms_norm.two_shot_sliced: slices of any width, and what its programs take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sundog
from sundog import gpu_limits
from sundog.compiled.recorded import compile_launch
from sundog.fused import all_reduce_rms_norm_two_shot_sliced as sliced
from sundog.fused.all_reduce_rms_norm import Problem
from sundog.fused.all_reduce_rms_norm_two_shot_sliced import Config
from sundog.tools import isa
from sundog.tools._launches import record
from sundog.tools._subject import expected_here, room

Run = Callable[..., list[Any]]
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# One rank owns everything; a tile has slices of several rows, of which the last is cut; a slice has
# several tiles; the last rank owns a part of a group.
SHAPES = [
    (1, 1, BF16),
    (3, 37, F32),
    (11, 130, F16),
    (5, 360, BF16),
    (2, 2880, F32),
    (1, 4100, F16),
]
QUANTS: list[dict[str, Any]] = [
    {"has_bias": True, "gemma": True},
    {"quant": "token", "both": True},
    {"quant": "group"},
    {"quant": "tensor", "is_static": True},
    {"quant": "token", "is_static": True},
    {"quant": "group", "is_static": True, "both": True},
]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_slices_of_any_width_have_the_bits(run: Run, size: int) -> None:
    """Those of the reference, twice, with inputs that round; a variant for each shape."""

    def main(world: sundog.World) -> list[str]:
        wrong = []
        for shape, more in zip(SHAPES, QUANTS, strict=True):
            problem = Problem(*shape, world.size, **more)
            plan = sliced.plan(world, problem, Config(2))
            for seed in range(2):
                given = sliced.inputs(world, problem, seed, exact=False)
                out = room(world, sliced, problem, given)
                plan(*given, out)
                if not torch.equal(out, expected_here(world, sliced, problem, given)):
                    wrong.append(f"call {seed} of {problem}")
        return wrong

    assert run(main, size) == [[]] * size


@pytest.mark.sim_only
def test_the_default_leaves_sms_to_a_late_rank() -> None:
    """Programs that wait take one SM each, so that no rank's first kernel finds all SMs taken."""
    assert sliced.default(Problem(32, 8192, BF16, 8), 16).programs == 16
    for arch in gpu_limits.LIMITS:
        with gpu_limits.aim(arch):
            assert gpu_limits.here().refuse_warps(sliced._warps(1 << 16)) is None


@pytest.mark.long
@pytest.mark.sim_only
@pytest.mark.parametrize("quant", ["", "token"])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("hidden", [360, 2880, 4096, 7168, 8192])
def test_nothing_is_spilled_nor_narrow(hidden: int, dtype: torch.dtype, quant: str) -> None:
    """On 8 ranks."""
    problem = {"hidden": hidden, "tokens": 32, "dtype": dtype, "quant": quant}
    for kernel in isa.inspect("all_reduce_rms_norm.two_shot_sliced", problem=problem):
        assert kernel.marks == []
        assert kernel.spills == 0


@pytest.mark.sim_only
def test_all_ranks_loads_are_in_flight_together() -> None:
    """The machine code adds nothing before it has issued them: 8 ranks and the residual."""

    def main(world: sundog.World) -> None:
        problem = Problem(32, 7168, BF16, 8)
        given = sliced.inputs(world, problem, 0)
        plan = sliced.plan(world, problem, sliced.default(problem, 16))
        plan(*given, room(world, sliced, problem, given))

    with gpu_limits.aim("sm_90"):
        (launch,) = record(main, 8, 64 << 20)
    code = compile_launch(launch, "sm_90").asm["sass"].splitlines()
    first = next(n for n, line in enumerate(code) if "FADD" in line)
    assert sum("LDG.E.128" in line for line in code[:first]) == 9
