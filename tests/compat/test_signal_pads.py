"""Programs for torch symmetric memory, run and checked unmodified: signal pads in inline PTX."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import sundog
from sundog.cli import app
from sundog.compat.rank import as_rank
from sundog.tools.check.schedules import Report, check

from .signal_pads import gather, multimem, program, right, take_relaxed_and_write_again


def checked(**how: object) -> Report:
    return check(as_rank(program(**how)), 2, schedules=6, seed=1)


def rules(report: Report) -> set[str]:
    return {finding.rule for finding in report.findings}


@pytest.mark.parametrize(("size", "backend"), [(1, "sim"), (2, "sim"), (4, "sim"), (2, "shm")])
def test_program_for_torchrun_gives_torchs_result(size: int, backend: str) -> None:
    first, *others = sundog.run(right, size, backend, torch=True)
    assert first.abs().sum() > 0
    assert all(torch.equal(first, each) for each in others)


@pytest.mark.parametrize("how", [{}, {"ACQUIRE": "by all", "AFTER": False}], ids=str)
def test_right_kernel_is_clean_and_has_no_remark(how: dict) -> None:
    report = checked(**how)
    assert not report.findings + report.remarks, report


@pytest.mark.parametrize(
    ("how", "rule"),
    [
        ({"BEFORE": False}, "no CTA barrier before the release"),
        ({"AFTER": False}, "no CTA barrier after the acquire"),
        ({"RELEASE": "relaxed"}, "relaxed release"),
        ({"ACQUIRE": "relaxed"}, "relaxed acquire"),
        ({"SCOPE": "gpu"}, "scope does not reach"),
        (
            {"ACQUIRE": "by all", "BETWEEN": False, "AFTER": False},
            "no CTA barrier after the acquire",
        ),
    ],
    ids=str,
)
def test_wrong_kernel_is_found(how: dict, rule: str) -> None:
    assert rule in rules(checked(**how))


def test_report_names_the_instruction_and_its_line() -> None:
    report = checked(RELEASE="relaxed")
    why = next(f.why for f in report.findings if f.rule == "relaxed release")
    lines = (Path(__file__).parent / "signal_pads.py").read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if "{SEM}.{SCOPE}.cas" in text)
    assert f"tests/compat/signal_pads.py:{line}" in why, why


def test_command_line_checks_a_program(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    target = "tests/compat/signal_pads.py:right"
    how = ["--torch", "--world", "2", "--schedules", "2", "--json", str(found)]
    result = CliRunner().invoke(app, ["check", target, *how])
    assert result.exit_code == 0, result.output
    assert json.loads(found.read_text())["findings"] == []


def test_multicast_stores_reach_every_rank_and_are_clean() -> None:
    wanted = [*range(20), *range(100, 120)]
    assert sundog.run(gather, 2, "sim", torch=True) == [wanted, wanted]
    report = check(as_rank(gather), 2, schedules=3)
    assert not report.findings + report.remarks, report


def test_a_relaxed_wait_at_the_end_relies_on_the_boundary() -> None:
    report = check(as_rank(take_relaxed_and_write_again), 2, schedules=4)
    assert not report.findings, report
    assert {finding.rule for finding in report.remarks} == {"relies on the kernel boundary"}


REDUCED = "multimem.ld_reduce.relaxed.sys.global.add"
MULTIMEM = {  # with 1, 2 and 3 on the ranks
    f"{{.reg .f32 %x; {REDUCED}.f32 %x, [$1]; st.global.f32 [$2], %x; mov.b32 $0, 0;}}": (
        torch.float32, [1.0] * 8, [6.0] + [0.0] * 7,
    ),
    f"{{.reg .b32 %x<4>; {REDUCED}.v4.bf16x2 {{%x0, %x1, %x2, %x3}}, [$1];"
    " st.global.v4.b32 [$2], {%x0, %x1, %x2, %x3}; mov.b32 $0, 0;}": (
        torch.bfloat16, [1.0] * 8, [6.0] * 8,
    ),
    "multimem.red.relaxed.sys.global.add.u32 [$1], 10; mov.b32 $0, 0;": (
        torch.int32, [31, 1, 1, 1, 1, 1, 1, 1], [0] * 8,
    ),
    "multimem.ld_reduce.relaxed.sys.global.max.s32 $0, [$1]; st.global.b32 [$2], $0;": (
        torch.int32, [1] * 8, [3, 0, 0, 0, 0, 0, 0, 0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", MULTIMEM)
def test_multimem_reaches_every_rank(text: str) -> None:
    dtype, buffer, out = MULTIMEM[text]
    assert sundog.run(multimem(text, dtype), 3, "sim", torch=True)[0] == (buffer, out)
