"""All-reduce: every algorithm against an exact oracle and gloo; the same bits by contract."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

import sundog
from sundog import Sim, testing
from sundog.collectives import _reduce
from sundog.collectives.all_reduce import Problem
from sundog.errors import RankMismatch, WaitTimeout
from sundog.ops.load import algorithms, find

from .gloo import gloo
from .reducing import BOTH_KINDS, exact, oracle, random

Run = Callable[..., list]
ALGOS = tuple(algorithms("all_reduce"))
SAME_BITS = ("one_shot", "two_shot", "low_latency")
IN_PLACE = tuple(algo for algo in ALGOS if algo != "atomic")


def small(algo: str, block: int = 64, programs: int = 2) -> Any:
    """A config that makes several tiles and programs of a small problem."""
    kind = find(f"all_reduce.{algo}").Config
    return kind(block) if algo == "low_latency" else kind(block, programs)


def takes(algo: str, problem: Problem) -> bool:
    return find(f"all_reduce.{algo}").valid(problem, small(algo)) is None


def on_heap(world: sundog.World, part: torch.Tensor) -> torch.Tensor:
    return world.empty(part.shape, part.dtype, "x").copy_(part)


CASES = [
    (0, torch.float32, "sum"),
    (1, torch.bfloat16, "sum"),
    (37, torch.float16, "avg"),
    (131, torch.float32, "sum"),
    (131, torch.int8, "prod"),
    (512, torch.bfloat16, "max"),
    (193, torch.int64, "min"),
]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_every_algorithm_gives_the_exact_answer(run: Run, size: int) -> None:
    cases = CASES if size < 8 else CASES[3:4] + CASES[-2:]

    def main(world: sundog.World) -> list[dict[str, torch.Tensor]]:
        found = []
        for number, (numel, dtype, op) in enumerate(cases):
            x = on_heap(world, exact(100 * number + world.rank, numel, dtype))
            algos = [a for a in ALGOS if takes(a, Problem(numel, dtype, size, op))]
            outs = {a: world.all_reduce(x, op, algo=a, config=small(a)) for a in algos}
            found.append({a: out.cpu() for a, out in outs.items()})
        return found

    results = run(main, size)
    for number, (numel, dtype, op) in enumerate(cases):
        want = oracle(op, [exact(100 * number + rank, numel, dtype) for rank in range(size)])
        for rank, result in enumerate(results):
            assert set(result[number]) >= set(SAME_BITS[: 2 + (dtype.itemsize <= 4)])
            for algo, out in result[number].items():
                assert torch.equal(out, want), (algo, rank, numel, dtype, op)


@pytest.mark.parametrize("dtype", _reduce.DTYPES, ids=str)
def test_every_dtype_and_operator(run: Run, dtype: torch.dtype) -> None:
    """Random integers wrap as torch's do; floats are accumulated wide and rounded once."""
    ops = [op for op in BOTH_KINDS if (dtype, op) != (torch.bool, "avg")]
    make = random if not dtype.is_floating_point else exact

    def main(world: sundog.World) -> list[torch.Tensor]:
        x = make(world.rank, 71, dtype).to(world.device)
        algos = [a for a in SAME_BITS[::2] if takes(a, Problem(71, dtype, 3))]
        given = [(op, a) for a in algos for op in ops]
        return [world.all_reduce(x, op, algo=a, config=small(a)).cpu() for op, a in given]

    parts = [make(rank, 71, dtype) for rank in range(3)]
    for result in run(main, 3):
        for op, out in zip(ops * (len(result) // len(ops)), result, strict=True):
            # as bytes: a true of 2 would be equal to one of 1
            same = torch.equal(out.view(torch.uint8), oracle(op, parts).view(torch.uint8))
            assert same, op


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_the_same_bits_by_every_algorithm_grid_and_replay(run: Run, size: int) -> None:
    numel = 8 * 24  # divides by every size, for reduce_scatter
    blocks = ((32, 1), (64, 3)) if size < 8 else ((64, 2),)

    def main(world: sundog.World) -> list[torch.Tensor]:
        found = []
        for dtype in (torch.bfloat16, torch.float32):
            x = on_heap(world, random(world.rank, numel, dtype))
            for block, programs in blocks:
                configs = {a: small(a, block, programs) for a in SAME_BITS}
                found += [world.all_reduce(x, algo=a, config=c) for a, c in configs.items()]
                config = find("reduce_scatter").Config(block, programs)
                found.append(world.all_gather(world.reduce_scatter(x, config=config)))
            again = world.all_reduce(x, algo="two_shot", config=configs["two_shot"])
            found.append(again)
        return [each.cpu() for each in found]

    results = run(main, size)
    half = len(results[0]) // 2
    for place, dtype in ((0, torch.bfloat16), (half, torch.float32)):
        parts = [random(rank, numel, dtype) for rank in range(size)]
        want = _reduce.reference("sum", parts)
        near = oracle("sum", parts)
        torch.testing.assert_close(want, near)
        for result in results:
            for out in result[place : place + half]:
                assert torch.equal(out, want)


def test_gloo_gives_the_same(run: Run) -> None:
    size, numel = 3, 1031
    cases = [
        (torch.float32, "sum"), (torch.float64, "sum"), (torch.bfloat16, "max"),
        (torch.int32, "sum"), (torch.uint8, "prod"), (torch.int64, "min"), (torch.float16, "avg"),
    ]  # fmt: skip
    names = {"sum": "SUM", "avg": "AVG", "min": "MIN", "max": "MAX", "prod": "PRODUCT"}

    def theirs(group: Any) -> list[torch.Tensor]:
        parts = [random(group.rank, numel, dtype) for dtype, _ in cases]
        for part, (_, op) in zip(parts, cases, strict=True):
            dist.all_reduce(part, getattr(dist.ReduceOp, names[op]))
        return parts

    def ours(world: sundog.World) -> list[torch.Tensor]:
        parts = [random(world.rank, numel, dtype).to(world.device) for dtype, _ in cases]
        algos = [SAME_BITS[place % 2] for place in range(len(cases))]
        return [
            world.all_reduce(part, op, algo=algo).cpu()
            for part, algo, (_, op) in zip(parts, algos, cases, strict=True)
        ]

    for mine, torchs in zip(run(ours, size), gloo(theirs, size), strict=True):
        for out, want, (dtype, op) in zip(mine, torchs, cases, strict=True):
            if dtype.is_floating_point and op in ("sum", "avg"):
                # gloo adds in the dtype itself, in another order: it rounds at every step
                parts = torch.stack([random(rank, numel, dtype).double() for rank in range(size)])
                bound = size * torch.finfo(dtype).eps * parts.abs().sum(0)
                assert ((out.double() - want.double()).abs() <= bound).all(), (dtype, op)
            else:
                assert torch.equal(out, want), (dtype, op)


def test_a_nan_of_any_rank_stays_one(run: Run) -> None:
    def main(world: sundog.World) -> torch.Tensor:
        x = torch.ones(4, device=world.device)
        x[world.rank] = float("nan")
        return torch.stack([world.all_reduce(x, op) for op in BOTH_KINDS]).cpu()

    for out in run(main, 3):
        assert out.isnan().tolist() == [[True, True, True, False]] * 5


@pytest.mark.parametrize("symmetric", [True, False])
def test_in_place(run: Run, symmetric: bool) -> None:
    def main(world: sundog.World) -> list[torch.Tensor]:
        found = []
        for algo in IN_PLACE:
            part = exact(world.rank, 150, torch.float32).to(world.device)
            x = on_heap(world, part) if symmetric else part
            for _ in range(2):  # the second reads what the first wrote everywhere
                assert world.all_reduce(x, out=x, algo=algo, config=small(algo)) is x
            found.append(x.cpu())
        return found

    once = oracle("sum", [exact(rank, 150, torch.float32) for rank in range(3)])
    for result in run(main, 3):
        for out, algo in zip(result, IN_PLACE, strict=True):
            assert torch.equal(out, 3 * once), algo


@pytest.mark.sim_only
@pytest.mark.parametrize("algo", IN_PLACE)
def test_in_place_is_clean(algo: str) -> None:
    """No race between a slice's reader and its writer: the checker agrees with the comment."""

    def main(world: sundog.World) -> None:
        x = on_heap(world, exact(world.rank, 150, torch.float32))
        for _ in range(2):
            world.all_reduce(x, out=x, algo=algo, config=small(algo))
            x.mul_(2)

    testing.check(main, 3, schedules=4)


@pytest.mark.sim_only
@pytest.mark.parametrize("algo", ALGOS)
def test_the_checker_finds_nothing(algo: str) -> None:
    from sundog.tools._subject import exercise

    testing.check(exercise(find(f"all_reduce.{algo}"), 2), 2, schedules=3)


@pytest.mark.sim_only
@pytest.mark.parametrize("algo", ["one_shot", "low_latency"])
def test_two_halves_are_enough(algo: str) -> None:
    """Six calls in a row with nothing between: a half that is reused too early would be a race."""

    def main(world: sundog.World) -> list[float]:
        x = [torch.full((3,), float(number + world.rank)) for number in range(6)]
        outs = [world.all_reduce(each, algo=algo) for each in x]
        return [out[1].item() for out in outs]

    report = testing.check(main, 3, schedules=5)
    assert report.results == [[3 * n + 3.0 for n in range(6)]] * 3


@pytest.mark.sim_only
def test_words_that_are_polled_by_loads() -> None:
    """A volatile load is a relaxed access, and a word that has the epoch has the data: no race."""

    def main(world: sundog.World) -> list[float]:
        x = [torch.full((300,), float(n + world.rank), dtype=torch.bfloat16) for n in range(4)]
        config = find("all_reduce.low_latency").Config(64, 1, poll="load")
        outs = [world.all_reduce(each, algo="low_latency", config=config) for each in x]
        return [out[299].item() for out in outs]

    report = testing.check(main, 3, schedules=5)
    assert report.results == [[3 * n + 3.0 for n in range(4)]] * 3


@pytest.mark.parametrize("before", [(1 << 31) - 2, (1 << 32) - 2])
def test_low_latency_passes_the_end_of_32_bits(run: Run, before: int) -> None:
    """A word has 32 bits of the epoch: no old one may be taken for a new one where they wrap."""

    def main(world: sundog.World) -> list[float]:
        module, problem = find("all_reduce.low_latency"), Problem(3, torch.float32, 2)
        plan = module.plan(world, problem, module.Config())
        boxes, epochs = plan.workspaces
        epochs.fill_(before)
        last = torch.tensor([before, before - 1]).view(2, 1, 1) << 32  # even epochs are the first
        boxes.copy_(last.to(boxes.device))
        world.barrier()
        x = [torch.full((3,), float(n + world.rank), device=world.device) for n in range(5)]
        return [plan(each, torch.empty_like(each))[1].item() for each in x]

    assert run(main, 2) == [[2 * n + 1.0 for n in range(5)]] * 2


@pytest.mark.parametrize("poll", ["atomic", "load"])
def test_a_late_rank_is_named_by_low_latency(run: Run, backend: str, poll: str) -> None:
    def main(world: sundog.World) -> str:
        module, problem = find("all_reduce.low_latency"), Problem(300, torch.bfloat16, 3)
        plan = module.plan(world, problem, module.Config(poll=poll))
        x = torch.ones(300, dtype=torch.bfloat16, device=world.device)
        done = world.zeros(world.size)
        plan(x, torch.empty_like(x))  # compiles: nobody waits for that below
        world.synchronize()
        world.barrier()
        if world.rank != 1:
            plan(x, torch.empty_like(x))
        while world.rank == 1 and backend == "symm" and done.sum().item() < world.size - 1:
            time.sleep(
                0.1
            )  # its barrier is not that patient: looks at words take longer than polls
        told = ""
        try:
            world.synchronize()
        except WaitTimeout as error:
            told = str(error)
        if world.rank != 1 and backend == "symm":
            world.peer(done, 1)[world.rank] = 1.0
        with suppress(WaitTimeout):
            world.barrier()
        assert plan(x, torch.empty_like(x))[7].item() == 3  # goes on
        return told

    timeout = {"timeout": 4 if backend == "symm" else 2}
    told = run(main, 3, **({"sim": Sim(expire=True)} if backend == "sim" else timeout))
    assert not told[1]
    for rank in (0, 2):
        assert "all_reduce.boxes" in told[rank], told[rank]
        assert re.search(r"to reach 2, saw \d; rank 1 owes", told[rank]), told[rank]


def test_in_a_group(run: Run) -> None:
    def main(world: sundog.World) -> Any:
        group = world.group([3, 0, 2], heap_size=1 << 18)
        if group is None:
            return None
        x = exact(world.rank, 90, torch.int32).to(world.device)
        return [group.all_reduce(x, algo=a, config=small(a)).cpu() for a in ALGOS]

    results = run(main, 4)
    want = oracle("sum", [exact(rank, 90, torch.int32) for rank in (3, 0, 2)])
    assert results[1] is None
    for rank in (0, 2, 3):
        assert all(torch.equal(out, want) for out in results[rank])


def test_shape_out_and_handle(run: Run) -> None:
    def main(world: sundog.World) -> Any:
        x = exact(world.rank, 30, torch.float32).to(world.device).view(2, 3, 5)
        plain = world.all_reduce(x)
        out = world.empty((2, 3, 5))
        assert world.all_reduce(x, out=out) is out
        handle = world.all_reduce(x, async_op=True)
        later = handle.wait()
        scalar = world.all_reduce(x[0, 0, 0].clone())
        return [each.cpu() for each in (plain, out, later, scalar)]

    want = oracle("sum", [exact(rank, 30, torch.float32) for rank in range(2)]).view(2, 3, 5)
    for plain, out, later, scalar in run(main, 2):
        for each in (plain, out, later):
            assert torch.equal(each, want)
        assert torch.equal(scalar, want[0, 0, 0])


@pytest.mark.parametrize("algo", ALGOS)
def test_replays_of_a_graph(run: Run, algo: str) -> None:
    """An odd number of calls in it, and eager ones between: the halves of one_shot alternate on."""

    def main(world: sundog.World) -> list[torch.Tensor]:
        x = world.zeros((70,))
        world.all_reduce(x, algo=algo, config=small(algo))
        with world.capture() as graph:
            out = world.all_reduce(x, algo=algo, config=small(algo))
        found = []
        for seed in range(3):
            x.copy_(exact(10 * seed + world.rank, 70, torch.float32))
            graph.replay()
            found += [out.clone().cpu(), world.all_reduce(x, algo=algo, config=small(algo)).cpu()]
        graph.free()
        return found

    for result in run(main, 2):
        for seed in range(3):
            want = oracle("sum", [exact(10 * seed + rank, 70, torch.float32) for rank in range(2)])
            assert torch.equal(result[2 * seed], want)
            assert torch.equal(result[2 * seed + 1], want)


X = torch.zeros(4)
BAD = [
    ({"op": "xor"}, "op 'xor' is not known; there are: sum, avg"),
    ({"op": dist.ReduceOp.BAND}, "op 'band' is not .* for bits, combine .* world.all_gather"),
    ({"op": dist.ReduceOp.PREMUL_SUM}, "op 'premul_sum' is not .* multiply x and use sum"),
    ({"x": torch.zeros(4, dtype=torch.complex64), "op": "prod"}, "no reduction of torch.complex64"),
    ({"x": torch.zeros(4, dtype=torch.float8_e4m3fn)}, "no reduction of torch.float8_e4m3fn"),
    ({"x": torch.zeros(4, dtype=torch.bool), "op": "avg"}, "bool has no average"),
    ({"out": torch.zeros(2, 2).t()}, r"out of shape \(2, 2\).*not contiguous"),
    ({"out": torch.zeros(5)}, "out has 5 elements of torch.float32, expected 4"),
    ({"out": torch.zeros(4, dtype=torch.float64)}, "4 elements of torch.float64"),
    (
        {"algo": "best"},
        "algo 'best' is not known; there are: auto, one_shot, low_latency, two_shot",
    ),
    ({"algo": "one_shot", "config": find("all_reduce.one_shot").Config(block=48)}, "block 48"),
    (
        {"algo": "atomic", "x": X, "out": X},
        "algo='atomic' accumulates into out, so out must not be x",
    ),
    ({"algo": "atomic", "op": "max"}, "atomic can only sum, not max"),
    ({"algo": "atomic", "x": X.short()}, "no atomic that adds torch.int16"),
    ({"algo": "ring", "op": "avg", "x": X.int()}, "no average"),
    ({"algo": "two_shot", "config": find("all_reduce.two_shot").Config(programs=0)}, "programs 0"),
]


@pytest.mark.parametrize(("change", "text"), BAD, ids=[text for _, text in BAD])
def test_bad_input(run: Run, change: dict[str, Any], text: str) -> None:
    def main(world: sundog.World) -> None:
        given = {"x": torch.zeros(4), **change}
        moved = {id(v): v.to(world.device) for v in given.values() if torch.is_tensor(v)}
        given = {name: moved.get(id(v), v) for name, v in given.items()}
        with pytest.raises(ValueError, match=text):
            world.all_reduce(**given)

    run(main, 2)


def test_an_out_that_overlaps_x_but_is_not_x(run: Run) -> None:
    def main(world: sundog.World) -> None:
        whole = torch.zeros(9, device=world.device)
        with pytest.raises(ValueError, match="out shares memory with x, 4 bytes apart"):
            world.all_reduce(whole[:8], out=whole[1:])

    run(main, 2)


def test_ranks_that_ask_for_different_things_are_named(run: Run) -> None:
    def main(world: sundog.World) -> str:
        with pytest.raises(RankMismatch) as error:
            world.all_reduce(torch.zeros(4, device=world.device), "sum" if world.rank else "max")
        return str(error.value)

    for text in run(main, 2):
        assert "op='max'" in text
        assert "op='sum'" in text


def test_one_shot_refuses_what_would_fill_the_heap() -> None:
    module = find("all_reduce.one_shot")
    large = Problem((64 << 20) + 1, torch.int8, 2)
    assert "use two_shot" in module.valid(large, module.default(large, 16))
    assert "use two_shot" not in str(
        module.valid(Problem(64 << 20, torch.int8, 2), small("one_shot"))
    )
