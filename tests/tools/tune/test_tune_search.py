"""Searches over a made-up space, with times from a formula: which configs they ask for."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from sundog.ops.op import OPS
from sundog.tools._subject import problem_of
from sundog.tools.tune.space import (
    SEARCHES,
    Job,
    Space,
    exhaustive,
    fields_text,
    jobs,
    pattern,
    random_search,
    spaces,
)

from . import toy_op


@dataclass(frozen=True)
class Config:
    block: int
    programs: int
    warps: int
    swizzle: str


CONFIGS = tuple(
    Config(1 << b, p, 1 << w, s)
    for b in range(5, 13)
    for p in (4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128)
    for w in range(4)
    for s in ("none", "rows", "columns")
)  # 1056


def seconds(config: Config, noise: random.Random) -> float | None:
    """A bowl with a ridge, a field of failures, and 1 % of noise."""
    if config.block > 1024 and config.warps == 1:
        return None
    x = math.log2(config.block) - 9 - 0.5 * (config.warps - 4) / 4
    y = math.log2(config.programs) - 5.8
    z = {"none": 0.2, "rows": 0.0, "columns": 0.35}[config.swizzle]
    return (1 + 0.1 * x * x + 0.2 * y * y + z + 0.05 * abs(x * y)) * noise.uniform(1, 1.01)


class Asked:
    """An evaluator that notes what it is asked."""

    def __init__(self, seed: int = 0) -> None:
        self.times: dict[Config, float | None] = {}
        self.generations: list[int] = []
        self._noise = random.Random(seed)

    def __call__(self, configs: list[Any], generation: int) -> list[float | None]:
        for config in configs:
            if config not in self.times:
                self.times[config] = seconds(config, self._noise)
                self.generations.append(generation)
        return [self.times[config] for config in configs]

    @property
    def best(self) -> float:
        return min(t for t in self.times.values() if t is not None)


BEST = min(t for c in CONFIGS if (t := seconds(c, random.Random(1))) is not None)


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("budget", [1, 2, 37, 5000])
def test_no_more_than_the_budget_and_nothing_twice(name: str, budget: int) -> None:
    asked = Asked()
    SEARCHES[name](Space(CONFIGS), asked, budget, random.Random(3))
    assert len(asked.times) == min(budget, len(CONFIGS))
    assert next(iter(asked.times)) == CONFIGS[0], "the default comes first"


def test_exhaustive_takes_the_first_of_a_space_in_any_order() -> None:
    asked = Asked()
    exhaustive(Space(CONFIGS), asked, 50, random.Random(0))
    assert list(asked.times) != list(CONFIGS[:50]), "neighbours have the same kernel"
    assert set(asked.times) == set(CONFIGS[:50])


@pytest.mark.parametrize("search", [random_search, pattern, exhaustive])
def test_a_seed_repeats_a_search(search: Any) -> None:
    runs = []
    for seed in (5, 5, 6):
        asked = Asked()
        search(Space(CONFIGS), asked, 60, random.Random(seed))
        runs.append(list(asked.times))
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("seed", range(8))
def test_pattern_comes_near_the_best_with_a_tenth_of_the_space(seed: int) -> None:
    asked = Asked(seed)
    pattern(Space(CONFIGS), asked, 100, random.Random(seed))
    assert asked.best <= 1.03 * BEST
    assert max(asked.generations) >= 3


def test_pattern_is_better_than_chance() -> None:
    def found(search: Any, seed: int) -> float:
        asked = Asked(seed)
        search(Space(CONFIGS), asked, 60, random.Random(seed))
        return asked.best

    wins = sum(found(pattern, seed) < found(random_search, seed) for seed in range(20))
    assert wins >= 15


def test_all_configs_may_fail() -> None:
    asked: list[Any] = []

    def fails(configs: list[Any], generation: int) -> list[float | None]:
        asked.extend(configs)
        return [None] * len(configs)

    pattern(Space(CONFIGS[:40]), fails, 30, random.Random(0))
    assert len(asked) == len(set(asked)) == 30


def test_neighbours_differ_by_one_step() -> None:
    space = Space(CONFIGS)
    centre = Config(128, 24, 2, "rows")
    near = space.neighbours(centre)
    values = {name: {getattr(c, name) for c in near} for name in dataclasses.asdict(centre)}
    assert values == {
        "block": {64, 128, 256},
        "programs": {16, 24, 32},
        "warps": {1, 2, 4},
        "swizzle": {"none", "rows", "columns"},
    }
    assert len(near) == 8
    corner = space.neighbours(Config(32, 4, 1, "none"))
    assert len(corner) == 5


def test_the_space_is_what_the_op_takes_with_its_default_first() -> None:
    job = jobs("tools.tune.toy_op", "numel=7", 2)[0]
    space = Space.of(job, 16)
    assert space.configs[0] == toy_op.Config()
    assert len(space.configs) == 20
    assert job.problem == toy_op.Problem(7, torch.float32, 2)
    empty = Job("toy", toy_op, dataclasses.replace(job.problem, numel=0), 2)
    with pytest.raises(ValueError, match="no config to try: numel 0: there is nothing to double"):
        Space.of(empty, 16)


@pytest.mark.parametrize("op", OPS)
def test_what_may_be_tried_is_valid_and_no_config_comes_twice(op: str) -> None:
    problem = "m=4096,n=3584,k=8192" if "matmul" in op else "numel=4096"
    problem = "tokens=16,hidden=4096" if "norm" in op else problem
    problem = "max_tokens=64,hidden=4096" if "moe" in op else problem
    dtype = "float8_e4m3fn" if op.startswith("scaled_") else "bfloat16"
    (job,) = jobs(op, f"{problem},dtype={dtype}", 8)
    configs = job.module.space(job.problem)
    least = 1 if op.endswith(".cublas") else 9  # a product that is cuBLAS's has little to try
    assert len(set(configs)) == len(configs) >= least
    for config in [*configs, job.module.default(job.problem, 132)]:
        assert job.module.valid(job.problem, config) is None, config


def test_a_fused_space_shrinks_to_the_sms_of_a_rank() -> None:
    problem = "m=4096,n=3584,k=8192,dtype=bfloat16"
    for algo in ("barrier", "hbm_buffer", "direct"):
        (job,) = jobs(f"all_gather_matmul.{algo}", problem, 8)
        whole, part = Space.of(job, 132).configs, Space.of(job, 16).configs
        assert {c.programs for c in whole[1:]} == {132}
        assert {c.programs for c in part[1:]} == {16}, "more of them are refused by the plan"
        assert len(set(part)) == len(part) >= 18
        if hasattr(part[0], "fetchers"):
            assert {c.fetchers for c in part} == {1, 2, 4, 16}
            assert len(Space.of(job, 4).configs) < len(part), "what became the same is tried once"


def test_there_is_no_more_than_one_program_per_sm() -> None:
    """Alone they may fit, but not beside another op."""
    for op, least in (("all_gather", 300), ("all_reduce", 150), ("all_gather_matmul", 150)):
        problem = "m=4096,n=3584,k=8192" if "matmul" in op else "numel=4194304"
        found = jobs(op, f"{problem},dtype=bfloat16", 8)
        configs = [c for space in spaces(found, 16, "sm_90").values() for c in space.configs]
        assert len(configs) >= least, op
        assert max(c.programs for c in configs) == 16
    (push,) = jobs("all_gather.push", "numel=4194304,dtype=bfloat16", 8)
    assert {c.programs for c in Space.of(push, 16).configs} == {1, 2, 3, 4, 6, 8, 10, 12, 14, 16}


def test_a_space_is_for_the_warps_of_the_target() -> None:
    (gluon,) = jobs("all_gather.gluon", "numel=65536,dtype=bfloat16", 8)
    assert {c.threads_per_warp for c in Space.of(gluon, 132, "gfx942").configs} == {64}
    assert len(Space.of(gluon, 132, "gfx942").configs) > 50
    (matmul,) = jobs("all_gather_matmul.barrier", "m=4096,n=3584,k=8192,dtype=bfloat16", 8)
    assert {c.descriptors for c in Space.of(matmul, 132, "gfx942").configs} == {False}, (
        "no TMA there"
    )
    assert {c.descriptors for c in Space.of(matmul, 132, "sm_90").configs} == {True}


def test_an_algorithm_that_refuses_the_problem_is_left_out() -> None:
    found = jobs("all_reduce", "numel=268435456,dtype=bfloat16,op=sum", 8)
    left = [found[number].op for number in spaces(found, 16, "sm_90")]
    assert "all_reduce.two_shot" in left
    assert "all_reduce.one_shot" not in left
    with pytest.raises(ValueError, match="takes up to"):
        spaces([job for job in found if job.op == "all_reduce.one_shot"], 16, "sm_90")


def test_an_op_is_tuned_by_algorithm() -> None:
    named = [job.op for job in jobs("all_reduce", "", 2)]
    assert "all_reduce.one_shot" in named
    assert "all_reduce.atomic" not in named, "never chosen by default"
    assert [job.op for job in jobs("all_reduce.atomic", "", 2)] == ["all_reduce.atomic"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rows=3", "Problem has no 'rows': numel, dtype, size, bad"),
        ("numel", "expected name=value"),
        ("numel=many", "numel=many: expected a whole number"),
    ],
)
def test_a_problem_is_told_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        problem_of(toy_op, text, 2)


def test_fields_are_written_as_they_are_read() -> None:
    problem = problem_of(toy_op, "numel=33,dtype=bfloat16,bad=true", 4)
    assert problem == toy_op.Problem(33, torch.bfloat16, 4, True)
    assert problem_of(toy_op, fields_text(problem), 4) == problem
