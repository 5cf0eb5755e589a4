"""Measuring, without a GPU: a stand-in for the kernel writes results, one for the timer counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.learn.compile_ahead import Binary, Cell
from benchmarks.learn.kernels import SUBJECTS
from benchmarks.learn.measure import Gpu
from benchmarks.learn.subject import Subject, Task

BINARY = Binary({}, "hash", 0.0, 0, {})


class CountingTimer:
    """Every launch takes `ns`."""

    stream = 0

    def __init__(self, ns: int) -> None:
        self.ns = ns
        self.asked: list[int] = []

    def samples(self, launch: Any, count: int) -> list[int]:
        self.asked.append(count)
        for _ in range(count):
            launch()
        return [self.ns] * count


class ReferenceKernel:
    """Launches by copying the reference into the outputs, scaled: 1.0 is right."""

    n_regs, n_spills = 40, 0

    def __init__(self, subject: Subject, factor: float) -> None:
        self.subject, self.factor = subject, factor

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        assert len(grid) == 3
        return self._launch

    def _launch(self, *values: Any, stream: int) -> None:
        args = dict(zip(self.subject.parameters, values, strict=True))
        wanted = self.subject.reference(args)
        for name, want in zip(self.subject.outputs, wanted, strict=True):
            args[name].copy_(self.factor * want)


def measured(name: str, timer: CountingTimer, factor: float = 1.0, gpu: Gpu | None = None) -> Any:
    subject = SUBJECTS[name]
    gpu = gpu or Gpu("cpu", timer)  # type: ignore[arg-type]
    gpu.load = lambda binary, cell: ReferenceKernel(subject, factor)  # type: ignore[method-assign]
    return gpu.measure(BINARY, Cell(name, "float32", subject.tiny, subject.configs[0]))


DIRECT = [name for name, subject in SUBJECTS.items() if subject.result is None]


@pytest.mark.parametrize("name", DIRECT)
def test_a_right_result_is_timed(name: str) -> None:
    timer = CountingTimer(20_000)
    found = measured(name, timer)
    assert found.status == "ok", found
    assert found.samples_ns == [20_000] * 16
    assert timer.asked == [1, 16]
    assert found.registers == 40


@pytest.mark.parametrize("factor", [1.02, float("nan")])
def test_a_wrong_result_has_no_time(factor: float) -> None:
    found = measured("swiglu", CountingTimer(20_000), factor)
    assert found.status == "wrong"
    assert found.samples_ns == []
    assert "relative error" in found.error


def test_a_hopeless_config_gets_one_sample_and_a_long_one_five() -> None:
    timer = CountingTimer(20_000)
    gpu = Gpu("cpu", timer)  # type: ignore[arg-type]
    assert measured("swiglu", timer, gpu=gpu).status == "ok"
    timer.ns = 6 * 20_000 + 1
    found = measured("swiglu", timer, gpu=gpu)
    assert (found.status, found.samples_ns) == ("slow", [timer.ns])
    assert len(measured("swiglu", CountingTimer(9_000_000)).samples_ns) == 5


def test_inputs_are_made_once_per_task() -> None:
    task = Task(SUBJECTS["swiglu"], {"m": 2, "n": 3}, "float32")
    inputs = Gpu("cpu", CountingTimer(1))._inputs  # type: ignore[arg-type]
    args, wanted = inputs.of(task)
    again, _ = inputs.of(Task(SUBJECTS["swiglu"], {"m": 2, "n": 3}, "float32"))
    assert args is again
    torch.testing.assert_close(wanted[0], SUBJECTS["swiglu"].reference(args)[0])
