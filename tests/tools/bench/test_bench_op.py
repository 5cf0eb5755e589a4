"""The parts of `sundog bench OP` that need no GPU: axes, limits, statistics, refusals."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from typer.testing import CliRunner

from sundog import World
from sundog.cli import app
from sundog.errors import PeerLost, SundogError, VariantFailed
from sundog.launch import run
from sundog.ops.load import find
from sundog.ops.op import OPS, Cost
from sundog.target import has_gpu
from sundog.tools import timing
from sundog.tools._subject import algorithms_of
from sundog.tools.bench.limits import Rates, seconds
from sundog.tools.bench.run import parse_axes
from sundog.tools.timing import Times, Variant

RATES = Rates(copy=4e12, fill=2e12, read=5e12, gemm=8e14)


# What an op must do at least on 4 ranks, counted by hand, of 1000 elements of 2 bytes and of a
# product 64 x 32 x 16: flops, bytes read, bytes written, bytes between ranks.
VECTOR, PRODUCT = (1000, torch.bfloat16, 4), (64, 32, 16, torch.bfloat16, 4)
E4M3 = torch.float8_e4m3fn
SCALED = (64, 32, 16, E4M3, 4, "k", False, None, torch.bfloat16, "row")
SCALED_SUM = (64, 32, 16, E4M3, 4, False, None, torch.bfloat16, "row")
COSTS = {
    "all_gather": (VECTOR, (0, 2000, 4 * 2000, 3 * 2000)),
    "all_to_all": (VECTOR, (0, 4 * 2000, 4 * 2000, 3 * 2000)),
    "broadcast": ((*VECTOR, 0), (0, 2000, 4 * 2000, 3 * 2000)),
    "gather": ((*VECTOR, 0), (0, 4 * 2000, 4 * 2000, 3 * 2000)),
    "scatter": ((*VECTOR, 0), (0, 4 * 2000, 4 * 2000, 3 * 2000)),
    "reduce": ((*VECTOR, 0), (3 * 1000, 4 * 2000, 2000, 3 * 2000)),
    "reduce_scatter": (VECTOR, (3 * 1000, 4 * 2000, 2000, 3 * 2000)),
    "all_reduce": (VECTOR, (3 * 1000, 2000, 2000, 2 * 1500)),
    # 8 groups of 128 bytes and a scale of 4; of the sum 2 for each rank.
    "quantized_all_gather": (VECTOR, (4000, 2000 + 4 * 1056, 4 * (2000 + 1056), 3 * 1056)),
    "quantized_all_reduce": (VECTOR, (3000, 2000 + 2 * 1056, 2000 + 2 * 1056, 2 * 3 * 264)),
    # 6 rows of 100, of which the first three ranks have two each and the last none.
    "all_reduce_rms_norm": (
        (6, 100, torch.bfloat16, 4),
        (600 * 9, 1200 + 400 + 200, 2 * 1200, 900 + 1800),
    ),
    # 10 tokens of 100 elements, each for two of eight experts.
    "moe_dispatch": ((10, 100, torch.bfloat16, 4, 8, 2), (0, 2000, 4000, 3000)),
    "moe_combine": ((10, 100, torch.bfloat16, 4, 8, 2), (4000, 4000, 2000, 3000)),
    "all_gather_matmul": (PRODUCT, (65536, 2048 + 1024, 4096, 1536)),
    "matmul_all_gather": (PRODUCT, (65536, 2048 + 1024, 4 * 4096, 3 * 4096)),
    "matmul_all_reduce": (PRODUCT, (65536, 2048 + 1024 + 4096, 2 * 4096, 2 * 3072)),
    # As the products of 16 bits; out_dtype is given, 2 bytes.
    "scaled_all_gather_matmul": (SCALED, (65536, 1024 + 512, 4096, 768)),
    "scaled_matmul_all_reduce": (SCALED_SUM, (65536, 1024 + 512 + 2048, 3 * 2048, 3 * 1536)),
    "scaled_matmul_reduce_scatter": (SCALED_SUM, (65536, 3584, 2048 + 1024, 1536)),
    "matmul_reduce_scatter": (PRODUCT, (65536, 2048 + 1024 + 4096, 4096 + 1024, 3072)),
}


@pytest.mark.parametrize("op", {key.partition(".")[0]: None for key in OPS})
def test_costs(op: str) -> None:
    given, counted = COSTS[op]
    module = find(op)
    assert module.cost(module.Problem(*given)) == Cost(*counted)


@pytest.mark.sim_only
@pytest.mark.parametrize("op", OPS)
def test_inputs_have_many_values_of_each_rank_and_seed(op: str) -> None:
    """Else a wrong tile, or a wrong rank's, would compare as right."""
    module = find(op)
    problem = module.cases(2)[0]

    def main(world: World) -> list[torch.Tensor]:
        made = [module.inputs(world, problem, seed) for seed in (0, 1)]
        return [x.clone().flatten() for given in made for x in given[:1]]

    vectors = [x for of_rank in run(main, 2, "sim") for x in of_rank]
    vectors = [x.float() if x.dtype.itemsize == 1 else x for x in vectors]  # FP8: torch has less
    assert all(x.unique().numel() >= 3 for x in vectors)
    assert not any(torch.equal(x, y) for x, y in itertools.combinations(vectors, 2))


def parse(name: str, *axes: str, size: int = 2) -> tuple[list, list]:
    return parse_axes(algorithms_of(name), axes, size)


def test_axes_of_problem_and_config_are_combined() -> None:
    axes = ["numel=10,20", "dtype=bfloat16", "algo=push", "programs=4,8"]
    problems, choices = parse("all_gather", *axes, size=3)
    assert [(p.numel, p.dtype, p.size) for p in problems] == [
        (10, torch.bfloat16, 3),
        (20, torch.bfloat16, 3),
    ]
    assert choices == [("push", {"programs": 4}), ("push", {"programs": 8})]


def test_without_axes_all_default_algorithms_are_timed() -> None:
    problems, choices = parse("all_reduce")
    assert problems == find("all_reduce").cases(2)[:1]
    assert choices == [
        (algo, {}) for algo in ("one_shot", "low_latency", "two_shot", "two_shot_pull")
    ]
    assert parse("all_reduce.ring")[1] == [("ring", {})]
    assert parse("all_reduce", "algo=ring,two_shot")[1] == [("ring", {}), ("two_shot", {})]


def test_an_axis_is_for_the_configs_that_have_it() -> None:
    """One variant, not three, of an algorithm that does not know the axis."""
    assert "threads_per_warp" not in {f.name for f in fields(find("all_gather.push").Config)}
    _, choices = parse("all_gather", "algo=push,gluon", "threads_per_warp=32,64", "programs=4")
    assert choices == [
        ("push", {"programs": 4}),
        ("gluon", {"threads_per_warp": 32, "programs": 4}),
        ("gluon", {"threads_per_warp": 64, "programs": 4}),
    ]


@pytest.mark.parametrize(
    "axis", ["nosuch=1", "numel=", "numel", "numel=many", "algo=nosuch", "programs=few"]
)
def test_bad_axes_are_refused(axis: str) -> None:
    with pytest.raises(ValueError, match=f"axis '{axis}'"):
        parse("all_gather", axis)


def test_the_limit() -> None:
    assert seconds(Cost(0, 4000, 4000, 0), 1, RATES) == pytest.approx(8000 / 4e12)
    assert seconds(Cost(0, 1000, 4000, 0), 1, RATES) == pytest.approx(2000 / 4e12 + 3000 / 2e12)
    assert seconds(Cost(0, 4000, 1000, 0), 1, RATES) == pytest.approx(2000 / 4e12 + 3000 / 5e12)
    assert seconds(Cost(8 * 10**14, 1, 1, 0), 1, RATES) == pytest.approx(1.0)
    assert seconds(Cost(0, 4000, 4000, 0), 8, RATES) == pytest.approx(8 * 8000 / 4e12)


def test_the_slowest_rank_is_the_headline() -> None:
    times = Times("x", [[1.0, 3.0], [2.0, 2.0], [9.0, 1.0], [4.0, 5.0], [6.0, 6.5]])
    assert times.slowest == [3.0, 2.0, 9.0, 5.0, 6.5]
    assert times.median == 5.0
    assert (times.percentile(20), times.percentile(80)) == (3.0, 6.5)
    assert times.skew == 1.0


@pytest.mark.parametrize("part", ["_replay", "times"])
def test_the_timer_says_which_variant_failed(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is captured or where it is timed; a rank that is lost is nobody's doing."""
    failure: list[SundogError] = [SundogError("a wait ran out"), PeerLost("rank 1 died")]

    def work(name: str) -> list[float]:
        if name == "b":
            raise failure[0]
        return [1.0]

    def replay(world: World, variant: Variant, at_least: int) -> tuple[Callable, int]:
        if part == "_replay":
            work(variant.name)
        return lambda: work(variant.name), 1

    gate = SimpleNamespace(times=lambda work, count: work())
    monkeypatch.setattr(timing, "Gate", lambda world: gate)
    monkeypatch.setattr(timing, "_replay", replay)
    world = cast(World, None)
    variants = [Variant(name, []) for name in "ab"]
    with pytest.raises(VariantFailed, match=r"^b: SundogError: a wait ran out$") as caught:
        timing.measure(world, variants, 1)
    again = pickle.loads(pickle.dumps(caught.value))  # as from a rank in a process of its own
    assert (again.variant, again.reason) == ("b", "SundogError: a wait ran out")
    del failure[0]
    with pytest.raises(PeerLost):
        timing.measure(world, variants, 1)


class _FakeGate:
    """By its clock the n-th piece of work takes n seconds on rank 0, and 2 n on rank 1."""

    def __init__(self, world: World) -> None:
        self._rank, self._number = world.rank, 0

    def times(self, work: Callable[[], object], count: int) -> list[float]:
        for _ in range(count):
            work()
        self._number += count
        numbers = range(self._number - count + 1, self._number + 1)
        return [n * (1.0 + self._rank) for n in numbers]

    def free(self) -> None:
        pass


@pytest.mark.sim_only
@pytest.mark.parametrize(("in_a_row", "a", "b"), [(False, 5, 6), (True, 3, 8)])
def test_the_timer(monkeypatch: pytest.MonkeyPatch, in_a_row: bool, a: int, b: int) -> None:
    """Per call, without warm-up, on all ranks; variants interleaved, or one after the other."""
    monkeypatch.setattr(timing, "Gate", _FakeGate)

    def main(world: World) -> tuple[list[Times], list[str], list[str]]:
        made: list[str] = []
        told: list[str] = []
        calls = {name: lambda name=name: made.append(name) for name in "xyz"}
        variants = [
            Variant("a", [calls["x"], calls["y"]], graph=False, ready=True),
            Variant("b", [calls["z"]], graph=False),
        ]
        found = timing.measure(world, variants, 3, 3, told.append, in_a_row)
        return found, made, told

    for times, made, told in run(main, 2, "sim"):
        step = 1 if in_a_row else 2  # between two samples of a variant
        for each, first, calls in zip(times, (a, b), (4, 3), strict=True):
            seconds = [first / calls, (first + step) / calls, (first + 2 * step) / calls]
            assert each.samples == [[t, 2 * t] for t in seconds]
        turns = ["xyxy" * 5, "zzz" * 5] if in_a_row else ["xyxyzzz"] * 5
        assert "".join(made) == "z" + "".join(turns), "b was not ready"
        assert told == ["a", "b"] * (1 if in_a_row else 3)


@pytest.mark.skipif(has_gpu(), reason="about machines without a GPU")
def test_without_a_gpu_bench_says_what_it_can_do() -> None:
    done = CliRunner().invoke(app, ["bench", "all_gather"])
    assert done.exit_code == 2
    assert "no GPU" in done.output
    assert "sundog check" in done.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["all_gather", "--world", "0"], "--world and --samples must be at least 1"),
        (["all_gather", "--backend", "sim"], "--backend sim: expected virtual or symm"),
        (["all_gather", "--json", "/proc/nowhere/f"], "/proc/nowhere/f cannot be written"),
        (["all_gather", "--csv", "/tmp"], "/tmp cannot be written: Is a directory"),
    ],
)
def test_bad_input_is_told_before_anything_is_measured(words: list[str], told: str) -> None:
    done = CliRunner().invoke(app, ["bench", *words])
    assert done.exit_code == 2
    assert told in " ".join(done.output.replace("\u2502", " ").split())
