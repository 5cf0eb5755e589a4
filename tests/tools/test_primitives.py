"""The tools know what a world offers beside its ops: barriers, send and receive."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from sundog import World
from sundog.cli import app
from sundog.launch import run
from sundog.tools._primitives import PRIMITIVES

pytestmark = pytest.mark.sim_only
FEW = ["--world", "2", "--schedules", "4"]


@pytest.mark.parametrize("name", PRIMITIVES)
def test_check_knows_it(name: str) -> None:
    done = CliRunner().invoke(app, ["check", name, *FEW])
    assert done.exit_code == 0, done.output
    assert "no findings in 4 schedules" in done.output


def test_mutants_of_the_device_barrier_are_killed_or_accepted() -> None:
    done = CliRunner().invoke(app, ["check", "device_barrier", *FEW, "--mutate"])
    assert done.exit_code == 0, done.output
    assert "2 accepted" in done.output


@pytest.mark.long
def test_probe_has_a_row_for_each() -> None:
    done = CliRunner().invoke(app, ["probe", *PRIMITIVES, "--backend", "sim", "--replays", "2"])
    assert done.exit_code == 0, done.output
    for name in PRIMITIVES:
        assert name in done.output


def test_isa_knows_the_device_barrier() -> None:
    words = ["isa", "device_barrier", "--target", "sm_90", "--world", "2"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "1 kernels, 0 marked" in done.output


@pytest.mark.parametrize("name", PRIMITIVES)
def test_a_wrong_answer_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a primitive that does nothing would pass."""
    primitive = PRIMITIVES[name]

    def broken(world: World) -> None:
        type(primitive).exercise(Idle(primitive.prepare, primitive.module, primitive.step), world)

    class Idle(type(primitive)):  # type: ignore[misc]
        def inputs(self, world: World, seed: int) -> tuple[torch.Tensor]:
            return (torch.full((37,), float(world.rank)),)

        def reference(self, rank: int, xs: list[torch.Tensor]) -> torch.Tensor:
            return xs[rank]

    with pytest.raises(AssertionError, match=r"rank \d: call 0 gave"):
        run(broken, 2, "sim")
