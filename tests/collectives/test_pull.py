"""Algorithms that only load from peers: an ordinary output needs no copy; `auto` counts copies."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import sundog
from sundog import testing
from sundog.collectives import _reduce
from sundog.collectives.all_gather import Problem as Gather
from sundog.collectives.all_reduce import Problem as Sum
from sundog.collectives.all_to_all import Problem as Exchange
from sundog.ops.load import find
from sundog.ops.select import choose
from sundog.tools._subject import exercise, function_of
from sundog.tools.check.mutation import find_mutants, mutate

from .reducing import random

Run = Callable[..., list]
PULLED = ("all_reduce.two_shot_pull", "all_to_all.pull")
H200 = "nvidia-h200"


@pytest.mark.sim_only
@pytest.mark.parametrize("name", PULLED)
def test_the_checker_finds_nothing(name: str) -> None:
    testing.check(exercise(find(name), 2), 2, schedules=3)


def test_an_ordinary_output_is_written_without_a_copy(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    """Twice, in place too: the second call overwrites what the first one showed to its peers."""

    def main(world: sundog.World) -> None:
        parts = [random(rank, 1021) for rank in range(3)]
        wanted = _reduce.reference("sum", parts)
        x = world.empty((1021,)).copy_(parts[world.rank])
        out = torch.empty(1021, device=world.device)
        for _ in range(2):
            world.all_reduce(x, out=out, algo="two_shot_pull", explain=True)
            assert torch.equal(out.cpu(), wanted)
        for _ in range(2):
            x.copy_(parts[world.rank])
            world.all_reduce(x, out=x, algo="two_shot_pull")
            assert torch.equal(x.cpu(), wanted)
        parts = [random(7 + rank, 3 * 37) for rank in range(3)]
        x = world.empty((3 * 37,)).copy_(parts[world.rank])
        got = world.all_to_all(x, algo="pull", explain=True)
        assert torch.equal(got.cpu(), torch.cat([p.split(37)[world.rank] for p in parts]))

    run(main, 3)
    assert "not on the heap" not in capfd.readouterr().out


def test_auto_counts_what_a_copy_of_an_ordinary_output_costs() -> None:
    """As on the H200: 33M elements to 8 ranks took 1,399 us, 5,611 with the copy, 2,191 pulled."""
    numel = 33 << 20
    gather = Gather(numel, torch.bfloat16, 8)
    assert choose("all_gather", gather, H200, 16, backend="virtual").algo in ("push", "gluon")
    out = {"out": 8 * 2 * numel}
    choice = choose("all_gather", gather, H200, 16, backend="virtual", ordinary=out)
    assert choice.algo == "pull"
    assert "of it copies" in choice.why
    total, out = Sum(numel, torch.bfloat16, 8), {"out": 2 * numel}
    assert choose("all_reduce", total, H200, 16, backend="virtual").algo == "two_shot"
    choice = choose("all_reduce", total, H200, 16, backend="virtual", ordinary=out)
    assert choice.algo == "two_shot_pull"
    exchange, out = Exchange(numel // 8, torch.bfloat16, 8), {"out": 2 * numel}
    assert choose("all_to_all", exchange, H200, 16, ordinary=out).algo == "pull"
    small = Sum(64, torch.bfloat16, 8)
    assert choose("all_reduce", small, H200, 16, ordinary={"out": 128}).algo == "low_latency"


def test_auto_copies_nothing_where_both_tensors_are_ordinary(run: Run) -> None:
    """And the result is the same."""

    def main(world: sundog.World) -> None:
        x = random(world.rank, 4099).to(world.device)
        wanted = torch.cat([random(rank, 4099) for rank in range(2)])
        assert torch.equal(world.all_gather(x).cpu(), wanted)

    run(main, 2)


@pytest.mark.sim_only
def test_every_mutant_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the barriers: each of them orders something."""
    module = find(PULLED[0])
    monkeypatch.setattr(module, "cases", lambda size: [Sum(261, torch.float32, size)])
    function = function_of(PULLED[0], 2)
    found, report = find_mutants(function, 2)
    assert report.findings == [], report
    ours = [mutant for mutant in found if "barrier_ranks" in mutant.what]
    assert len(ours) >= 2
    survived = [o for o in mutate(function, 2, ours, schedules=40) if not o.killed_by]
    assert not survived, "\n".join(o.mutant.diff for o in survived)
