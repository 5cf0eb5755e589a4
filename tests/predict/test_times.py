"""Every algorithm has a time, and it moves as it should when the machine changes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from sundog.hardware.description import PairRates, read
from sundog.ops import load as ops
from sundog.ops.op import OPS
from sundog.predict.expected import MODELS, time


def problem_of(op: str, size: int = 8, scale: int = 1) -> Any:
    """A large problem of an op's module."""
    module = ops.find(op)
    if "moe" in op:
        return module.Problem(512 * scale, 4096, torch.bfloat16, size, 32, 4)
    if "matmul" in op:
        return module.Problem(4096 * scale, 3584, 8192, torch.bfloat16, size)
    if "rms_norm" in op:
        tokens = 4 if op.endswith("low_latency") else 128 * scale
        return module.Problem(tokens, 4096, torch.bfloat16, size)
    more = {"broadcast": (0,), "gather": (0,), "scatter": (0,)}.get(op.partition(".")[0], ())
    numel = 16384 if op == "all_reduce.low_latency" else (1 << 20) * scale
    return module.Problem(numel, torch.bfloat16, size, *more)


def expected(op: str, machine: Any, scale: int = 1, size: int = 8, **more: Any) -> Any:
    problem = problem_of(op, size, scale)
    num_sms = machine.gpu.num_sms // (size if machine.link.kind == "none" else 1)
    return time(op, problem, ops.find(op).default(problem, num_sms), machine, **more)


def test_every_algorithm_has_a_model() -> None:
    assert set(MODELS) == set(OPS)


@pytest.mark.parametrize("op", sorted(OPS))
def test_a_model_takes_the_cases_of_many_ranks(op: str) -> None:
    """Two nodes of eight: the first case of an op is what `sundog predict` begins with."""
    module, machine = ops.find(op), read("h200x8-2nodes")
    for size in (9, 16):
        first = module.cases(size)[0]
        assert time(op, first, module.default(first, 132), machine).seconds > 0


def test_an_op_without_a_model_is_named() -> None:
    with pytest.raises(ValueError, match=r"my_op has no time model; those that have: .*all_gather"):
        time("my_op", None, None, read("h200x8"))


@pytest.mark.parametrize("op", sorted(OPS))
@pytest.mark.parametrize("name", ["h200-shared", "h200x8", "mi300x8", "h200x8-2nodes"])
def test_a_time_is_made_of_parts(op: str, name: str) -> None:
    found = expected(op, read(name))
    assert 1e-6 < found.seconds < 1
    assert found.seconds == pytest.approx(sum(part.seconds for part in found.parts))
    assert found.bound in ("latency", "programs", "memory", "link", "compute")


# low_latency takes 64 KB
@pytest.mark.parametrize("op", sorted(op for op in OPS if not op.endswith("low_latency")))
def test_more_work_takes_longer(op: str) -> None:
    for name in ("h200-shared", "h200x8"):
        assert expected(op, read(name), 4).seconds > 1.5 * expected(op, read(name)).seconds


@pytest.mark.parametrize("op", ["all_gather_matmul.hbm_buffer", "all_gather_matmul.copy_engine"])
@pytest.mark.parametrize("name", ["h200-shared", "h200x8", "mi300x8"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_more_rows_with_one_config_take_no_less(op: str, name: str, size: int) -> None:
    """But for a few per cent, where a wave has more rows and as many flags."""
    module, machine = ops.find(op), read(name)
    num_sms = machine.gpu.num_sms // (size if machine.link.kind == "none" else 1)
    for n in (3584, 7168):
        problems = [
            module.Problem(size * r, n, 2048, torch.bfloat16, size) for r in range(8, 513, 24)
        ]
        for fixed in (problems[1], problems[5], problems[-1]):
            config = module.default(fixed, num_sms)
            times = [time(op, each, config, machine).seconds for each in problems]
            assert all(b > 0.94 * a for a, b in itertools.pairwise(times))


@pytest.mark.parametrize("op", sorted(op for op in OPS if op.startswith("quantized")))
def test_a_tile_is_no_larger_than_the_tensor(op: str) -> None:
    """Less than a program's groups: more elements took less time, since a tile was cut later."""
    module, machine = ops.find(op), read("h200x8")
    problems = [module.Problem(n, torch.bfloat16, 8) for n in (16, 37, 128, 192, 250, 512, 1000)]
    config = module.default(problems[-1], 132)
    times = [time(op, each, config, machine).seconds for each in problems]
    assert times == sorted(times)


def test_what_comes_with_one_flag_is_multiplied_after_it() -> None:
    """One round of 16 fetchers: their time and the product's add up."""
    op = "all_gather_matmul.hbm_buffer"
    module, machine = ops.find(op), read("h200x8")
    problem = module.Problem(1024, 3584, 2048, torch.bfloat16, 8)
    config = module.default(problem, 132)
    parts = {part.name: part.seconds for part in time(op, problem, config, machine).parts}
    assert set(parts) == {"launch", "barrier", "gather", "product"}
    finer = {p.name for p in time(op, problem, replace(config, k_per_flag=1), machine).parts}
    assert "fetch and multiply" in finer


@pytest.mark.parametrize("op", sorted(OPS))
def test_a_late_rank_adds_what_it_is_late_by(op: str) -> None:
    machine = read("h200x8")
    on_time, late = expected(op, machine), expected(op, machine, late_s=1e-4)
    assert late.seconds - on_time.seconds == pytest.approx(1e-4)


LINKED = ["all_gather.push", "all_reduce.two_shot", "all_to_all.push", "reduce_scatter.direct"]


@pytest.mark.parametrize("op", LINKED)
def test_a_link_of_half_the_rate_takes_twice_as_long(op: str) -> None:
    """Where the link bounds it: 512 MB."""
    machine = read("h200x8")
    half = machine.changed({"link.rate": machine.link.rate / 2, "link.pair_rate": 1e11})
    found = expected(op, machine, 256)
    assert found.bound == "link"
    assert expected(op, half, 256).seconds / found.seconds == pytest.approx(2.0, rel=0.1)


@pytest.mark.parametrize("op", LINKED)
def test_one_slow_pair_holds_all_ranks_up(op: str) -> None:
    """A seventh of the bytes goes over each pair: one of a 14th of the rate takes twice as long."""
    machine = read("h200x8")
    rate = machine.link.rate
    slow = PairRates(3, 5, rate / 14, rate / 14, rate / 14)
    found = expected(op, machine.changed({"link.pair_rates": (slow,)}), 256)
    assert found.seconds / expected(op, machine, 256).seconds == pytest.approx(2.0, rel=0.1)


def test_a_link_says_nothing_where_there_is_none() -> None:
    machine = read("h200-shared")
    other = machine.changed({"link.rate": 1.0})
    assert expected("all_gather.push", machine) == expected("all_gather.push", other)


def test_ranks_that_share_a_gpu_read_from_its_cache_what_fits() -> None:
    """Eight tensors of 2 MB fit beside what is written, eight of 16 MB do not."""
    machine = read("h200-shared")
    without = machine.changed({"gpu.cache_bytes": 1.0})
    ratios = [
        expected("all_gather.pull", without, scale).seconds
        / expected("all_gather.pull", machine, scale).seconds
        for scale in (1, 8)
    ]
    assert ratios[0] > 1.1
    assert ratios[1] == 1.0


def test_few_words_hide_in_the_start_of_the_other_ranks() -> None:
    """Ranks that share a GPU start one after another; those that have started send meanwhile."""
    machine, op = read("h200-shared"), "all_reduce.low_latency"
    slow = machine.changed({"gpu.poll_rate": machine.gpu.poll_rate / 2})
    config = ops.find(op).Config(128, 2)
    ratios = []
    for numel in (1024, 1 << 18):
        problem = ops.find(op).Problem(numel, torch.bfloat16, 8)
        ratios.append(
            time(op, problem, config, slow).seconds / time(op, problem, config, machine).seconds
        )
    assert ratios[0] < 1.02
    assert ratios[1] > 1.9


def test_one_sm_fewer_matters_where_it_costs_a_wave() -> None:
    """128 tiles: 128 programs do them in one wave, 127 in two."""
    op, machine = "matmul_reduce_scatter.push", read("h200x8")
    module = ops.find(op)
    problem = module.Problem(128 * 16, 256 * 8, 65536, torch.bfloat16, 8)

    def seconds(programs: int) -> float:
        return time(op, problem, module.Config(programs=programs), machine).seconds

    assert seconds(129) == pytest.approx(seconds(128), rel=0.02)
    assert seconds(127) / seconds(128) == pytest.approx(2.0, rel=0.1)


def test_one_program_fewer_slows_what_programs_bound() -> None:
    op, machine = "all_gather.push", read("h200-shared")
    module = ops.find(op)
    problem = module.Problem(1 << 24, torch.bfloat16, 2)

    def found(programs: int) -> Any:
        return time(op, problem, module.Config(16384, programs, 8), machine)

    assert found(4).bound == "programs"
    assert found(3).seconds / found(4).seconds == pytest.approx(4 / 3, rel=0.02)
    assert found(64).bound == "memory"


def test_where_small_and_large_all_reduces_part() -> None:
    """One shot is faster for small tensors, two shots for large ones, on every machine."""
    one, two = ops.find("all_reduce.one_shot"), ops.find("all_reduce.two_shot")
    for name in ("h200-shared", "h200x8", "h100x8", "mi300x8"):
        machine = read(name)
        num_sms = machine.gpu.num_sms // (8 if name == "h200-shared" else 1)
        faster = []
        for numel in (1024, 1 << 24):
            problem = one.Problem(numel, torch.bfloat16, 8)
            times = [
                time(f"all_reduce.{algo}", problem, module.default(problem, num_sms), machine)
                for algo, module in (("one_shot", one), ("two_shot", two))
            ]
            faster.append(times[0].seconds < times[1].seconds)
        assert faster == [True, False], name
