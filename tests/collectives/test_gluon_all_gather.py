"""all_gather.gluon: push is the oracle, bitwise; odd sizes, offsets and layouts; bad configs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import sundog
from sundog.collectives import all_gather_gluon as in_gluon
from sundog.collectives import all_gather_push as in_triton
from sundog.collectives.all_gather import Problem
from sundog.collectives.all_gather_gluon import Config
from sundog.tools._subject import function_of
from sundog.tools.check.mutation import find_mutants, mutate

Run = Callable[..., list]
NAME = "sundog.collectives.all_gather_gluon"
EXAMPLE = Path(__file__).parents[2] / "examples" / "all_gather_gluon.py"
# One tile and many, one row and many, one program and many, both sizes of a warp, a tile that has
# just 16 bytes for each thread. On a GPU only those with its own size of a warp.
CONFIGS = [
    Config(1, 512, 1, 1, 32),
    Config(4, 1024, 3, 2, 64),
    Config(8, 2048, 2, 4, 32),
    Config(32, 16, 5, 1, 32),
    Config(1, 8192, 2, 8, 64),
]
SIZES = [(0, torch.float32), (1, torch.int64), (37, torch.bfloat16), (4099, torch.uint8),
         (1536, torch.float32), (2049, torch.int16), (5000, torch.float8_e4m3fn)]  # fmt: skip


def both(world: sundog.World, problem: Problem, config: Config, shift: int) -> list[torch.Tensor]:
    """The bits that either algorithm gathers from one x, `shift` elements into its allocation."""
    results = []
    longer = dataclasses.replace(problem, numel=problem.numel + shift)
    x = in_gluon.inputs(world, longer, 3)[0][shift:]
    flat = in_triton.Config(4096, 2, 4)
    for module, its_config in ((in_triton, flat), (in_gluon, config)):
        out = world.empty((problem.size * problem.numel + shift,), problem.dtype, "out")
        plan = module.plan(world, problem, its_config)
        world.barrier()  # peers may be touched
        results.append(plan(x, out[shift:]).view(torch.uint8).cpu())
        plan.free()
    return results


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shift", [0, 1])
def test_gathers_the_bits_that_push_gathers(run: Run, size: int, shift: int) -> None:
    def main(world: sundog.World) -> None:
        for place, (numel, dtype) in enumerate(SIZES[shift :: 2 if size > 2 else 1]):
            config = CONFIGS[(place + size) % len(CONFIGS)]
            if world.device.type != "cpu":
                config = dataclasses.replace(config, threads_per_warp=32)
            with world.scope():
                wanted, got = both(world, Problem(numel, dtype, size), config, shift)
                assert torch.equal(got, wanted), (numel, dtype, config)

    run(main, size)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_config_gathers_the_same(run: Run, config: Config) -> None:
    if config.threads_per_warp == 64 and torch.cuda.is_available() and not torch.version.hip:
        pytest.skip("a layout of warps of 64 does not compile for this GPU")

    def main(world: sundog.World) -> None:
        wanted, got = both(world, Problem(5003, torch.int32, 3), config, 0)
        assert torch.equal(got, wanted)

    run(main, 3)


def test_the_public_call_takes_it(run: Run) -> None:
    def main(world: sundog.World) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((3, 5), world.rank + 0.5, device=world.device)
        return x.cpu(), world.all_gather(x, algo="gluon").cpu()

    results = run(main, 3)
    for _, gathered in results:
        assert torch.equal(gathered, torch.cat([x for x, _ in results]))


@pytest.mark.parametrize("size", [1, 3, 4])
def test_the_example_gives_the_same_in_both_languages(run: Run, size: int) -> None:
    main = function_of(str(EXAMPLE), size)
    triton, gluon = (
        run(functools.partial(main, language=name), size) for name in ("triton", "gluon")
    )
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(triton, gluon, strict=True))


REFUSED = {
    "threads_per_warp 16": Config(threads_per_warp=16),
    "block_m 3 is not a power of two": Config(block_m=3),
    "block_m 0": Config(block_m=0),
    "block_n 8 is not a power of two from 16": Config(block_n=8),
    "block_n 48": Config(block_n=48),
    "block_m x block_n 1048576": Config(block_m=1024, block_n=1024),
    "programs 0": Config(programs=0),
    "num_warps 3": Config(num_warps=3),
    "32 warps of 64 are over 1024": Config(num_warps=32, threads_per_warp=64, block_m=64),
    "a tile of 2048 bytes does not give 256 threads 16 bytes each": Config(block_m=1),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_can_not_do_is_refused_with_the_reason(run: Run, reason: str) -> None:
    problem, config = Problem(64, torch.float32, 2), REFUSED[reason]
    assert reason in (in_gluon.valid(problem, config) or "")
    with pytest.raises(ValueError, match=rf"all_gather.gluon: .*{reason}"):
        run(lambda world: in_gluon.plan(world, problem, config), 2)


def test_defaults_and_the_space_are_valid() -> None:
    for numel in (0, 1, 1000, 1 << 20, 1 << 34):
        problem = Problem(numel, torch.bfloat16, 8)
        for num_sms in (1, 16, 132):
            assert in_gluon.valid(problem, in_gluon.default(problem, num_sms)) is None
        space = in_gluon.space(problem)
        assert len(space) > 50
        assert all(in_gluon.valid(problem, config) is None for config in space)


@pytest.mark.long
@pytest.mark.compat
@pytest.mark.sim_only
def test_every_mutant_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    numels = (1025, 1024)  # the second is a multiple of 16 bytes, which has a loop of its own
    cases = [Problem(numel, torch.int32, 2) for numel in numels]
    monkeypatch.setattr(in_gluon, "cases", lambda size: cases)
    function = function_of(NAME, 2)
    found, report = find_mutants(function, 2)
    assert report.findings == [], report
    assert any("device.barrier_ranks(ready" in mutant.what for mutant in found)
    survived = [o for o in mutate(function, 2, found, schedules=60) if not o.killed_by]
    assert not survived, "\n".join(o.mutant.diff for o in survived)
