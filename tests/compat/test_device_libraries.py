"""Stand-ins for SHMEM, Triton-distributed and Iris: right kernels are clean, wrong ones found."""

from __future__ import annotations

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import sundog
from sundog.compat.rank import as_rank
from sundog.errors import SundogError
from sundog.tools.check.schedules import Report, check

from .device_libraries import barrier, by_torch, iris, message, put, put_and_signal, stand_in, told


def checked(program: object) -> Report:
    return check(as_rank(program), 2, schedules=4, seed=1, num_sms=4)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "program", [put(True), by_torch(True), told(True), barrier, message("release")]
)
def test_right_kernels_are_clean(program: object) -> None:
    report = checked(program)
    assert not report.findings, report


@pytest.mark.parametrize("backend", ["sim", "shm"])
def test_data_arrives(backend: str) -> None:
    wanted = [[0] * 32, [*range(32)]]
    assert sundog.run(put(True), 2, backend, torch=True) == wanted
    assert sundog.run(message("release"), 2, backend, torch=True) == wanted
    assert sundog.run(told(True), 3, backend, torch=True) == [-3, -1, -2]
    parts = [[0, 1, 2, 3, 10, 11, 12, 13], [4, 5, 6, 7, 14, 15, 16, 17]]
    assert sundog.run(by_torch(True), 2, backend, torch=True) == [
        [[0] * 8, [*parts[0], 10, 11, 12, 13]],
        [[0, 1, 2, 3, 0, 1, 2, 3], [*parts[1], 10, 11, 12, 13]],
    ]


@pytest.mark.parametrize("program", [put(False), by_torch(False), told(False)])
def test_a_put_without_fence_is_late_on_purpose(program: object) -> None:
    report = checked(program)
    assert any(finding.rule for finding in report.findings), report


def test_a_relaxed_signal_of_iris_is_found() -> None:
    assert {f.rule for f in checked(message("relaxed")).findings} == {"relaxed release"}


def test_stand_ins_say_what_they_are_when_compiled_for_a_gpu() -> None:
    kinds = {"data": "*i32", "flag": "*i64", "x": "*i32", "out": "*i32"}
    signature = {**kinds, "BLOCK": "constexpr", "FENCE": "constexpr"}
    source = ASTSource(put_and_signal, signature, {(4,): 32, (5,): True})
    with pytest.raises(triton.CompilationError, match="stand-in, to check kernels on a CPU"):
        triton.compile(source, target=GPUTarget("cuda", 90, 32))


def test_stand_ins_outside_of_ranks_say_so() -> None:
    with pytest.raises(SundogError, match="works in simulated ranks: use --torch"):
        iris.iris()
    with pytest.raises(SundogError, match="works in simulated ranks: use --torch"):
        stand_in.create_tensor(4, torch.int32)
