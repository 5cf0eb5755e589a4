"""tune="online": what the model can't tell apart is tried in the first calls, and timed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import sundog
from sundog.ops import online, select
from sundog.ops.online import CALLS, Tryout

pytestmark = pytest.mark.sim_only


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """A machine whose model rates two algorithms of all_gather alike; its clock is made up."""
    found = ("push", "pull")

    def choose(op: str, *given: Any, **more: Any) -> select.Choice:
        choice = select.Choice("push", None, lambda: "by the model", found)
        return choice if op == "all_gather" else real(op, *given, **more)

    real = select.choose
    monkeypatch.setattr(online, "choose", choose)
    return found


def _gather(world: Any) -> None:
    x = torch.arange(16.0) + 16 * world.rank
    assert torch.equal(world.all_gather(x), torch.arange(16.0 * world.size))


def test_the_first_calls_run_them_in_turns_and_then_one_stays(near: tuple[str, ...]) -> None:
    def main(world: Any) -> tuple[str, ...]:
        ran = []
        for _ in range(CALLS * len(near) + 3):
            _gather(world)
            latest = max(world._plans, key=lambda call: call.used)
            ran.append(latest.key[2][0])
        return tuple(ran)

    first, second = sundog.run(main, 2, "sim", tune="online")
    assert first == second, "all ranks run the same algorithm in each call"
    assert first[: CALLS * 2] == near * CALLS
    assert len(set(first[CALLS * 2 :])) == 1


def test_the_slowest_rank_and_the_later_calls_decide() -> None:
    """Rank 1 is slow with push; the first call of pull compiles, which does not count."""
    pull = [100.0, 5.0, 5.0, 100.0]
    others = {"push": [9.0] * CALLS, "pull": pull}
    now = [0.0]
    tryout = Tryout(("push", "pull"), "by the model", clock=lambda: now[0])
    world: Any = SimpleNamespace(
        barrier=lambda: None,
        synchronize=lambda: None,
        exchange=lambda mine, what: [mine, others],
    )

    def call() -> None:
        now[0] += 1.0 if tryout.algo == "push" else 4.0

    while not tryout.is_over:
        tryout.run(world, call)
    assert tryout.seconds == {"push": [1.0] * CALLS, "pull": [4.0] * CALLS}
    assert tryout.medians == {"push": 9.0, "pull": 5.0}
    assert tryout.algo == "pull"


def test_it_is_never_the_default(near: tuple[str, ...]) -> None:
    def main(world: Any) -> None:
        assert world.tune == ""
        _gather(world)
        assert world._plans.tryouts == {}

    sundog.run(main, 2, "sim")


def test_a_group_tries_too_and_captures_and_async_calls_do_not(near: tuple[str, ...]) -> None:
    def main(world: Any) -> None:
        group = world.group([0, 1])
        assert group.tune == "online"
        x, out = torch.ones(8), torch.empty(16)
        group.all_gather(x, out, async_op=True).wait()
        (tryout,) = group._plans.tryouts.values()
        assert tryout.seconds == {}
        group.all_gather(x, out)
        assert list(tryout.seconds) == ["push"]
        with world.capture() as graph:
            group.all_gather(x, out)
        graph.replay()
        assert list(tryout.seconds) == ["push"], "a capture waits for nobody"
        assert torch.equal(out, torch.ones(16))

    sundog.run(main, 2, "sim", tune="online")


def test_the_model_names_those_within_a_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that nobody measured; with measurements there is nothing to try."""
    from sundog.collectives.all_reduce import Problem

    problem = Problem(numel=32768, dtype=torch.bfloat16, op="sum", size=8)
    measured = select.choose("all_reduce", problem, "nvidia-h200", 16)
    assert measured.near == ()
    monkeypatch.setattr(select, "entries", lambda target: ())
    monkeypatch.setattr(select, "_measured", lambda *given: [])
    choice = select.choose("all_reduce", problem, "nvidia-h200", 16)
    assert choice.near[0] == choice.algo
    monkeypatch.setattr(select, "_NEAR", 1000.0)
    wide = select.choose("all_reduce", problem, "nvidia-h200", 16)
    assert set(choice.near) < set(wide.near)


def test_it_says_what_it_tried() -> None:
    tryout = Tryout(("a", "b"), "by the model")
    assert tryout.explain() == "by the model; tried online: a, b, this call a"
    tryout.medians = {"a": 2e-5, "b": 1e-5}
    assert tryout.explain() == (
        "by the model; tried online, 3 calls each: a 20.0 us, b 10.0 us; b stays"
    )


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="tune must be 'online' or '', got 'always'"):
        sundog.run(lambda world: None, 2, "sim", tune="always")
    with pytest.raises(ValueError, match="with link='pcie' rank 0 alone is measured"):
        sundog.run(lambda world: None, 2, "sim", link="pcie", tune="online")
