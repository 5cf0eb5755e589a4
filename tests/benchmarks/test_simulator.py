"""The benchmark of the simulator measures what it says, on kernels that compute the right thing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from support.scripts import python

import sundog
from benchmarks import simulator

pytestmark = pytest.mark.sim_only


def test_its_kernels_are_right() -> None:
    a, b, x = torch.randn(70, 50), torch.randn(50, 40), torch.randn(9, 100)

    def main(world: sundog.World) -> tuple[torch.Tensor, torch.Tensor]:
        c, out = torch.empty(70, 40), torch.empty(9, 100)
        matmul = simulator.matmul_kernel[(3, 2)]
        matmul(a, 50, 1, b, 40, 1, c, 40, 1, 70, 40, 50, BLOCK_M=32, BLOCK_N=32, BLOCK_K=16)
        simulator.softmax_kernel[(9,)](x, 100, out, 100, 100, BLOCK=128)
        return c, out

    ((product, rows),) = sundog.run(main, 1, backend="sim")
    torch.testing.assert_close(product, a @ b, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rows, x.softmax(1))


def test_nobody_leaves_the_barrier_before_everybody_came() -> None:
    def main(world: sundog.World) -> None:
        flags, counter = world.signals((world.size,), "flags"), world.signals((1,), "counter")
        world.barrier()
        if world.rank != 2:  # who is missing keeps the others
            simulator.barrier_kernel[(3,)](flags, counter, 1, world.ctx, LANES=4)

    with pytest.raises(sundog.errors.Deadlock):
        sundog.run(main, 4, backend="sim")
    assert simulator.time_barrier(ranks=3, programs=2) > 0


def test_the_two_take_turns_and_the_medians_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []

    def fake(who: str) -> dict[str, float]:
        order.append(who)
        factor = 1.0 if who == "ours" else 2.0
        return dict.fromkeys(
            simulator.CASES, factor * [0.3, 9.0, 0.2, 0.3, 0.1][(len(order) - 1) // 2]
        )

    monkeypatch.setattr(simulator, "_time_in_a_process", fake)
    monkeypatch.setattr(simulator, "time_barrier", lambda ranks, programs: ranks * programs / 1000)
    simulator.main(str(tmp_path / "sim.json"))
    assert order == ["ours", "triton"] * 5
    *kernels, barrier = json.loads((tmp_path / "sim.json").read_text())["rows"]
    assert [row[1:] for row in kernels] == [["0.30 s", "0.60 s", "0.50", "0.7"]] * len(
        simulator.CASES
    )
    assert barrier == ["barrier of 64 ranks x 8 programs", "0.51 s", "can't", "", "2.0 s"]
    text = capsys.readouterr().out
    assert "matmul" in text
    assert "0.51 s" in text


def test_the_two_run_in_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of the kernels, once: `python -m benchmarks simulator` runs them all."""
    code = (
        "import sys; from benchmarks import simulator as sim; sim.CASES.popitem(); "
        "sim._best_of_two = lambda case, finish=int: [case(), finish(), 1.5][2]; "
        "print(sim.json.dumps(sim._time_kernels(sys.argv[1])))"
    )

    def run_less(command: list[str], **options: Any) -> Any:
        assert command[1:3] == ["-m", "benchmarks.simulator"]
        return python(["-c", code, *command[3:]], options["env"])

    monkeypatch.setattr(subprocess, "run", run_less)
    for who in ("ours", "triton"):
        assert simulator._time_in_a_process(who) == {next(iter(simulator.CASES)): 1.5}
