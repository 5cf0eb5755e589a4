"""All-gather + GEMM by the copy engine: hbm_buffer's bits, and an order that the checker sees."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sundog
from sundog import gpu_limits
from sundog.backends.sim import Sim
from sundog.errors import RankMismatch, WaitTimeout
from sundog.fused import _workers
from sundog.fused import all_gather_matmul_copy_engine as copy_engine
from sundog.fused import all_gather_matmul_hbm_buffer as hbm_buffer
from sundog.fused.all_gather_matmul import Problem, all_gather_matmul
from sundog.hardware.description import read as read_hardware
from sundog.ops.select import choose
from sundog.predict.expected import time
from sundog.tools.check.schedules import check

from . import A_FEW, Run, answers, assembly, compare, compiled, spills

SMALL = copy_engine.Config(16, 16, 16, group_m=2, num_warps=4, run=2, programs=3)
TWIN = hbm_buffer.Config(16, 16, 16, group_m=2, num_warps=4, fetchers=2, programs=3)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def problem_of(shard: str, size: int, m: int = 40, n: int = 16, k: int = 24) -> Problem:
    """`m` and `k` are a rank's: three rows of tiles and two blocks."""
    whole = (m, n, k * size) if shard == "k" else (m * size, n, k)
    return Problem(*whole, F16, size, shard)


both_ways = pytest.mark.parametrize("shard", ["k", "m"])


@both_ways
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_the_bits_of_hbm_buffer(run: Run, shard: str, size: int) -> None:
    """On numbers whose sums round: blocks are added in the same order."""
    problem = replace(problem_of(shard, size, m=40 if size < 8 else 20), out_dtype=F32)
    engine, fetchers = (
        run(answers(op, problem, config, 2, exact=False), size)
        for op, config in ((copy_engine, SMALL), (hbm_buffer, TWIN))
    )
    for ours, theirs in zip(engine, fetchers, strict=True):
        for (got, want), (twin, _) in zip(ours, theirs, strict=True):
            assert torch.equal(got, twin)
            assert torch.allclose(got, want, rtol=1e-4, atol=1e-4)


@both_ways
@pytest.mark.parametrize("rows_at_once", [1, 3, 99])
@pytest.mark.parametrize("descriptors", [False, True])
def test_every_corner_of_the_config(
    run: Run, shard: str, rows_at_once: int, descriptors: bool
) -> None:
    config = replace(SMALL, run=rows_at_once, descriptors=descriptors)
    compare(run(answers(copy_engine, problem_of(shard, 3), config), 3))


@both_ways
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (17, 33, 1), (3, 5, 19), (16, 16, 16), (5, 3, 0)]
)
def test_ragged_sizes(run: Run, shard: str, m: int, n: int, k: int) -> None:
    """Rows whose length is not a multiple of 16 bytes are copied from aligned ones."""
    problem = replace(problem_of(shard, 2, m, n, k), dtype=BF16, has_bias=True, activation="silu")
    compare(run(answers(copy_engine, problem, SMALL), 2))


@both_ways
@pytest.mark.parametrize("on_heap", [False, True])
def test_three_dimensions_and_strides(run: Run, shard: str, on_heap: bool) -> None:
    """[batch, seq, k], and a transposed A on the heap, of which no run of rows is contiguous."""

    def main(world: sundog.World) -> list[torch.Tensor]:
        make = world.empty if on_heap else torch.empty
        a = make((2, 8, 24), dtype=F16).to(world.device).random_(-2, 3)
        flat = make((24, 16), dtype=F16).to(world.device).random_(-2, 3)
        b = torch.randint(-2, 3, (24 * (2 if shard == "k" else 1), 5), device=world.device).to(F16)
        world.barrier()
        found = [all_gather_matmul(world, a, b, shard=shard, algo="copy_engine")]
        found += [all_gather_matmul(world, flat.T, b, shard=shard, algo="copy_engine")]
        dim = 1 if shard == "k" else 0
        for x in (a.flatten(0, 1), flat.T):
            whole = torch.cat(world.exchange(x.cpu()), dim=dim).double()
            found.append((whole @ b.cpu().double()).to(F16))
        return [each.cpu() for each in found]

    for got, other, want, other_want in run(main, 2):
        assert got.shape == (2 if shard == "k" else 4, 8, 5)
        assert torch.equal(got.flatten(0, 1), want)
        assert torch.equal(other, other_want)


@both_ways
def test_replays_wait_for_their_own_copies(run: Run, shard: str) -> None:
    """New data before each replay: an epoch that was a part of the graph would be old."""
    size = 3
    problem = problem_of(shard, size)

    def main(world: sundog.World) -> list[bool]:
        plan = copy_engine.plan(world, problem, SMALL)
        a, b = copy_engine.inputs(world, problem, 0)
        out = world.empty((problem.m, problem.n), F16, "out")
        world.barrier()
        plan(a, b, out)
        with world.capture() as graph:
            plan(a, b, out)
        same = []
        for seed in range(1, 4):
            new, _ = copy_engine.inputs(world, problem, seed)
            whole = torch.cat(world.exchange(new.cpu()), dim=1 if shard == "k" else 0)
            a.copy_(new)
            graph.replay()
            want = (whole.double() @ b.cpu().double()).to(F16)
            same.append(torch.equal(out.cpu(), want))
            if seed == 2:
                plan(a, b, out)  # between two replays
        return same

    assert run(main, size) == [[True] * 3] * size


@pytest.mark.sim_only
@pytest.mark.parametrize("late", [1, 2])
def test_a_late_peer_is_named(late: int) -> None:
    problem = problem_of("m", 3)

    def main(world: sundog.World) -> None:
        plan = copy_engine.plan(world, problem, SMALL)
        a, b = copy_engine.inputs(world, problem, 0)
        out = world.empty((problem.m, problem.n), F16, "out")
        world.barrier()
        plan(a, b, out)
        if world.rank != late:
            plan(a, b, out)
            world.synchronize()

    words = rf"all_gather_matmul.ready\[{late}\].*rank {late}"
    with pytest.raises(WaitTimeout, match=rf"(?s){words}") as error:
        sundog.run(main, 3, "sim", sim=Sim(expire=True))
    assert error.value.record.peer == late


@pytest.mark.sim_only
def test_bad_configs_are_named() -> None:
    def main(world: sundog.World, programs: int, run: int) -> None:
        config = replace(SMALL, run=run + world.rank * (run > 2), programs=programs)
        copy_engine.plan(world, problem_of("m", 2), config)

    with pytest.raises(RankMismatch, match=r"(?s)run=3.*run=4"):
        sundog.run(lambda world: main(world, 3, 3), 2, "sim")
    with pytest.raises(ValueError, match="17 programs wait for each other and 16 SMs"):
        sundog.run(lambda world: main(world, 17, 2), 2, "sim", sim=Sim(num_sms=16))
    assert "run 0" in str(copy_engine.valid(problem_of("m", 2), replace(SMALL, run=0)))


def two_calls(problem: Problem, config: copy_engine.Config, graph: bool) -> Any:
    """Other data for the second call, and zeros after it, with nothing between but the stream."""

    def main(world: sundog.World) -> None:
        plan = copy_engine.plan(world, problem, config)
        a, b = copy_engine.inputs(world, problem, 0)
        new, _ = copy_engine.inputs(world, problem, 1)
        out = world.empty((problem.m, problem.n), F16, "out")
        world.barrier()
        plan(a, b, out)
        a.copy_(new)
        if graph:
            with world.capture() as captured:
                plan(a, b, out)
            captured.replay()
            a.zero_()
            captured.replay()
        else:
            plan(a, b, out)
        a.zero_()

    return main


@pytest.mark.sim_only
@both_ways
@pytest.mark.parametrize("graph", [False, True])
def test_the_checker_finds_nothing(shard: str, graph: bool) -> None:
    problem = problem_of(shard, 3, m=34, k=19)
    report = check(two_calls(problem, SMALL, graph), 3, schedules=3)
    assert report.findings == [], report


def _words_first(world: Any, problem: Any, config: Any, a: Any, buffer: Any, flags: Any) -> None:
    flags.staged.copy_(flags.epochs[:1].expand(flags.staged.shape).contiguous())
    for step in range(problem.size - 1):
        buffer[step].copy_(world.peer(a, (world.rank + 1 + step) % problem.size))


def _no_words_for_the_last(
    world: Any, problem: Any, config: Any, a: Any, buffer: Any, flags: Any
) -> None:
    for step in range(problem.size - 1):
        buffer[step].copy_(world.peer(a, (world.rank + 1 + step) % problem.size))
    flags.staged[:-1].copy_(flags.epochs[: flags.staged.numel() - 1])


@pytest.mark.sim_only
@pytest.mark.parametrize(
    ("fetch", "kind"), [(_words_first, "race"), (_no_words_for_the_last, "deadlock")]
)
def test_the_checker_finds_copies_in_the_wrong_order(
    monkeypatch: pytest.MonkeyPatch, fetch: Any, kind: str
) -> None:
    monkeypatch.setattr(copy_engine, "_fetch", fetch)
    config = replace(SMALL, run=4)
    report = check(two_calls(problem_of("m", 2), config, graph=False), 2, schedules=5)
    assert kind in {finding.kind for finding in report.findings}, report


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 64])
@pytest.mark.parametrize("most", [1, 2, 8, 100])
@pytest.mark.parametrize("least", [0, 1, 4])
def test_runs_cover_all_rows_grow_and_get_shorter(rows: int, most: int, least: int) -> None:
    found = list(copy_engine.runs(rows, most, least))
    assert [row for first, last in found for row in range(first, last)] == list(range(rows))
    lengths = [last - first for first, last in found]
    top = lengths.index(max(lengths)) if lengths else 0
    assert lengths[:top] == sorted(lengths[:top])
    assert lengths[top:] == sorted(lengths[top:], reverse=True)
    assert all(min(most, max(least, 1)) <= length <= most for length in lengths[:-1])
    assert not lengths or lengths[-1] <= max(least, 1)


@both_ways
@pytest.mark.parametrize("m", [16, 1024, 4096, 16384])
def test_the_default_leaves_an_sm_and_copies_several_times(m: int, shard: str) -> None:
    problem = Problem(m, 3584, 8192, BF16, 4, shard)
    config = copy_engine.default(problem, 132)
    assert copy_engine.valid(problem, config) is None
    assert config.programs <= 131
    rows, _ = _workers.staged_tiles(problem, config)
    assert len(list(copy_engine.runs(rows, config.run, 2))) >= min(rows, 4)
    assert len({*copy_engine.space(problem)}) >= 36


def test_auto_does_not_choose_what_was_not_measured() -> None:
    problem = Problem(16384, 7168, 7168, BF16, 2, "m")
    for backend in ("virtual", "symm"):
        chosen = choose("all_gather_matmul", problem, "nvidia-h200", 131, backend=backend)
        assert chosen.algo != "copy_engine"
        assert "copy_engine" not in chosen.why


def test_the_model_counts_each_copy() -> None:
    """Over PCIe, where the link bounds it: 54.7 GB/s, and 3.4 us for each of more copies."""
    problem, machine = Problem(16384, 2048, 7168, BF16, 2, "m"), read_hardware("h200-pcie")

    def seconds(rows_at_once: int) -> float:
        config = copy_engine.Config(run=rows_at_once, programs=130)
        return time("all_gather_matmul.copy_engine", problem, config, machine).seconds

    crossed = problem.m * problem.k * 2 / 2 / 54.7e9
    assert seconds(8) > crossed + 11 * 3.4e-6
    assert seconds(1) - seconds(8) == pytest.approx((64 - 11) * 3.4e-6, rel=0.1)


@pytest.mark.compat
@pytest.mark.parametrize(("arch", "shard"), [("sm_90", "k"), ("sm_90", "m"), ("gfx942", "m")])
def test_what_the_compilers_make_of_the_workers(arch: str, shard: str) -> None:
    """An acquire at system scope, a proxy fence after it, then TMA in three stages; no spills."""
    problem = Problem(8192, 4096, 4096, BF16, 8, shard)
    with gpu_limits.aim(arch):
        config = copy_engine.default(problem, 131)
    words = torch.empty(64, dtype=torch.int64)
    shapes = problem.shard_shape, (problem.k, problem.n), (problem.m, problem.n)
    a, b, out = (torch.empty(shape, dtype=BF16) for shape in shapes)
    buffer = torch.empty(problem.size - 1, *problem.shard_shape, dtype=BF16)
    given = copy_engine.arguments(
        problem, config, a, buffer, b, out, None, copy_engine._Flags(*[words] * 5),
        SimpleNamespace(ctx=words, kernel_mode=0),
    )  # fmt: skip
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    made = compiled(copy_engine._multiply_kernel, arch, given, options)
    text = assembly(made)
    assert spills(made) <= A_FEW
    if arch == "sm_90":
        acquires = {line for line in re.findall(r"atom\.\S+", text) if "acquire" in line}
        assert acquires
        assert all(".sys" in each for each in acquires)
        assert re.search(r"fence\.proxy\.async\.global", text)
        assert len(re.findall(r"cp\.async\.bulk\.tensor\S*mbarrier", text)) == 6
        assert len(re.findall(r"wgmma\.mma_async", text)) == 4
    else:
        assert re.search("mfma", text)
        assert re.search(r"(?:buffer|global)_load_dwordx4", text)
