"""Lanes that a masked load or atomic leaves: a remark if they alone are to blame for a failure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler import ASTSource
from typer.testing import CliRunner

import sundog
from sundog import World
from sundog.checker.failures import UNDEFINED_LANES, WRONG_RESULT
from sundog.checker.findings import Finding
from sundog.cli import app
from sundog.dataset.triton.compile import gpu_target
from sundog.device import memory
from sundog.tools.check.exhaustive import check_all
from sundog.tools.check.schedules import check, check_once

pytestmark = pytest.mark.sim_only

N, LANES = 5, 8
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
FLOATS += [torch.float8_e5m2, torch.float8_e4m3fnuz]
WHOLE = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]


@triton.jit
def total(x, out, n, LANES: tl.constexpr, FILL: tl.constexpr, VOLATILE: tl.constexpr):
    at = tl.arange(0, LANES)
    copied = tl.load(x + at, mask=at < n)
    tl.store(out + 1 + at, copied, mask=at < n)
    if FILL:
        tile = tl.load(x + at, mask=at < n, other=0)
    else:
        tile = tl.load(x + at, mask=at < n, volatile=VOLATILE)  # summed
    wide = tile.to(tl.float32)
    tl.store(out, tl.sum(wide).to(x.dtype.element_ty))


def summed(
    dtype: torch.dtype = torch.float32, fill: bool = False, want: int = N, volatile: bool = False
) -> Callable[[World], float]:
    def main(world: World) -> float:
        x, out = torch.ones(N).to(dtype), torch.zeros(LANES + 1).to(dtype)
        total[(1,)](x, out, N, LANES=LANES, FILL=fill, VOLATILE=volatile)
        got = out[0].float().item()
        print(f"got {got}")
        assert got == want
        return got

    return main


def is_summed(finding: Finding) -> bool:
    assert finding.second is not None
    return finding.rule == UNDEFINED_LANES.name and "# summed" in finding.second.text


@pytest.mark.parametrize("volatile", [False, True])
@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE])
def test_a_sum_that_counts_on_zeros_is_a_remark(dtype: torch.dtype, volatile: bool) -> None:
    report = check(summed(dtype, volatile=volatile), 1, schedules=3)
    assert report.findings == []
    (remark,) = report.remarks
    assert is_summed(remark)
    assert report.results == [N]
    assert report.schedules == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_lanes_that_go_nowhere_are_no_remark(dtype: torch.dtype) -> None:
    """The other load of `total` has such lanes too, and they are stored nowhere."""
    report = check(summed(dtype, fill=True), 1, schedules=2)
    assert (report.findings, report.remarks) == ([], [])


@pytest.mark.parametrize("fill", [False, True])
def test_what_is_wrong_anyhow_stays_wrong(fill: bool) -> None:
    report = check(summed(fill=fill, want=N + 1), 1, schedules=2)
    assert [finding.kind for finding in report.findings] == [WRONG_RESULT.kind]
    assert report.remarks == []


def test_it_is_an_error_for_who_is_strict() -> None:
    report = check(summed(), 1, schedules=2, strict=True)
    (finding,) = report.findings
    assert is_summed(finding)
    assert report.first_schedule == 1
    again = check_once(summed(), 1, finding.token, strict=True)
    assert [each.key() for each in again.findings] == [finding.key()]


def test_the_first_run_alone_is_heard(capsys: pytest.CaptureFixture[str]) -> None:
    check_once(summed(), 1)
    assert capsys.readouterr().out == "got nan\n"


@triton.jit
def both(x, out, n, LANES: tl.constexpr):
    at = tl.arange(0, LANES)
    one = tl.load(x + at, mask=at < n)  # one
    other = tl.load(x + at, mask=at < n)  # other
    tl.store(out, tl.sum(((one > 1) & (other > 1)).to(tl.int32)))
    tl.store(out + 1, tl.sum((one < 0).to(tl.int32)))


@pytest.mark.parametrize(("place", "blamed"), [(0, ["one", "other"]), (1, ["one"])])
def test_all_are_named_where_only_both_together_matter(place: int, blamed: list[str]) -> None:
    def main(world: World) -> None:
        x, out = torch.ones(N, dtype=torch.uint8), torch.zeros(2, dtype=torch.int32)
        both[(1,)](x if place == 0 else x.view(torch.int8), out, N, LANES=LANES)
        assert out[place] == 0

    report = check_once(main, 1)
    assert report.findings == []
    lines = [remark.second.text for remark in report.remarks if remark.second is not None]
    assert [line.rpartition("# ")[2] for line in lines] == blamed


@triton.jit
def wait_for(flag, expected, out, index, KIND: tl.constexpr):
    late = tl.load(expected, mask=index > 0)
    if KIND == "deadlock":
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != late:
            pass
    else:
        tl.store(out + late, 1)


@pytest.mark.parametrize("kind", ["deadlock", "bad access"])
def test_a_deadlock_and_a_bad_access(kind: str) -> None:
    def main(world: World) -> None:
        flag, out = world.signals(1, "flag"), torch.zeros(1, dtype=torch.int64)
        world.barrier()
        wait_for[(1,)](flag, torch.ones(1, dtype=torch.int64), out, 0, KIND=kind)

    report = check_once(main, 2)
    assert report.findings == []
    (remark,) = report.remarks
    assert remark.rule == UNDEFINED_LANES.name


@triton.jit
def send(x, inbox, flag, out, ctx, n, LANES: tl.constexpr):
    at = tl.arange(0, LANES)
    tile = tl.load(x + at, mask=at < n)
    memory.store(inbox + at, tile, 1, ctx, mask=at < n)
    memory.atomic_xchg(flag, 1, 1, ctx, sem="release")  # no CTA barrier before it
    tl.store(out, tl.sum(tile))


@triton.jit
def receive(inbox, flag, out, n, LANES: tl.constexpr):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != 1:
        pass
    tl.debug_barrier()
    at = tl.arange(0, LANES)
    tl.store(out, tl.sum(tl.load(inbox + at, mask=at < n, other=0.0)))


def racing(world: World) -> None:
    x, out = torch.ones(N), torch.zeros(1)
    inbox, flag = world.empty((N,), name="inbox"), world.signals(1, "flag")
    world.barrier()
    if world.rank == 0:
        send[(1,)](x, inbox, flag, out, world.ctx, N, LANES=LANES)
    else:
        receive[(1,)](inbox, flag, out, N, LANES=LANES)
    assert out.item() == N


@pytest.mark.parametrize("explore", [False, True])
def test_a_race_beside_it_is_found(explore: bool) -> None:
    report = check_all(racing, 2).report if explore else check(racing, 2, schedules=4)
    assert {finding.rule for finding in report.findings} == {"no CTA barrier before the release"}
    assert [remark.rule for remark in report.remarks] == [UNDEFINED_LANES.name]
    for finding in (*report.findings, *report.remarks):
        again = check_once(racing, 2, finding.token)
        assert finding.key() in {each.key() for each in (*again.findings, *again.remarks)}


@pytest.mark.parametrize("strict", [False, True])
def test_all_interleavings_know_it_too(strict: bool) -> None:
    coverage = check_all(summed(), 1, strict=strict)
    assert coverage.is_complete
    (remark,) = coverage.report.findings if strict else coverage.report.remarks
    assert is_summed(remark)
    assert not (coverage.report.remarks if strict else coverage.report.findings)


def right_by_zeros(world: World) -> None:
    summed()(world)


def test_the_exit_status_and_the_json(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    command = ["check", f"{__name__}:right_by_zeros", "--world", "2", "--json", str(path)]
    for options, status, where in ([], 0, "remarks"), (["--strict"], 1, "findings"):
        done = CliRunner().invoke(app, [*command, "--schedules", "2", *options])
        assert done.exit_code == status, done.output
        assert "portability: undefined lanes" in done.output
        (found,) = json.loads(path.read_text())[where]
        assert found["rule"] == UNDEFINED_LANES.name
        assert found["second"]["text"].endswith("# summed")


def test_mutants_of_such_a_kernel_are_killed_by_their_own_fault() -> None:
    done = CliRunner().invoke(
        app, ["check", f"{__name__}:right_by_zeros", "--schedules", "2", "--world", "1", "--mutate"]
    )
    assert "portability" in done.output
    assert done.exit_code == 1
    assert "SURVIVED" in done.output, "the store that nobody looks at"


def test_a_program_may_run_as_compilers_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssertionError):
        sundog.run(summed(), 2, "sim")
    monkeypatch.setenv("SUNDOG_UNDEFINED_LANES", "zeros")
    assert sundog.run(summed(), 2, "sim") == [N, N]
    report = check(summed(), 1, schedules=2)
    assert (report.findings, report.remarks) == ([], [])


@triton.jit
def counted(x, out, n, LANES: tl.constexpr):
    at = tl.arange(0, LANES)
    tl.store(out, tl.sum(tl.atomic_add(x + at, 1, mask=at < n, sem="relaxed")))


def test_a_sum_of_what_an_atomic_returns_is_a_remark() -> None:
    def main(world: World) -> None:
        out = torch.zeros(1, dtype=torch.int32)
        counted[(1,)](torch.zeros(N, dtype=torch.int32), out, N, LANES=LANES)
        assert out.item() == 0

    report = check_once(main, 1)
    assert report.findings == []
    (remark,) = report.remarks
    assert remark.second is not None
    assert (remark.rule, remark.second.verb) == (UNDEFINED_LANES.name, "masked atomic")
    assert "atomic_add" in remark.second.text


@triton.jit
def poll(flags, n, least, LANES: tl.constexpr, KIND: tl.constexpr):
    at = tl.arange(0, LANES)
    if KIND == "add":
        while tl.sum(tl.atomic_add(flags + at, 0, mask=at < n, sem="acquire", scope="sys")) < least:
            pass
    else:
        while tl.sum(tl.load(flags + at, mask=at < n, volatile=True)) < least:
            pass


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("kind", ["add", "volatile"])
def test_a_poll_that_sums_such_lanes(kind: str, late: int) -> None:
    """With one signal too few it never ends, whatever these lanes hold."""

    def main(world: World) -> None:
        poll[(1,)](torch.ones(N, dtype=torch.int32), N, N + late, LANES=LANES, KIND=kind)

    report = check_once(main, 1)
    assert [finding.kind for finding in report.findings] == ["deadlock"] * late
    assert [remark.rule for remark in report.remarks] == [UNDEFINED_LANES.name] * (1 - late)


@triton.jit
def copy(x, out, n, LANES: tl.constexpr):
    at = tl.arange(0, LANES)
    tl.store(out + at, tl.load(x + at, mask=at < n))


def compiled(target: str, pointer: str, kernel: Any = copy) -> Any:
    signature = {"x": pointer, "out": pointer, "n": "i32", "LANES": "constexpr"}
    source = ASTSource(kernel, signature=signature, constexprs={"LANES": 128})
    return triton.compile(source, target=gpu_target(target))


@pytest.mark.compat
@pytest.mark.parametrize("pointer", ["*fp32", "*fp16", "*i8", "*i64", "*fp8e4nv"])
def test_nvidia_has_zeros_in_such_lanes(pointer: str) -> None:
    text = " ".join(compiled("sm_90", pointer).asm["ptx"].split())
    (first,) = re.findall(r"mov\.[bu]\d+ (%\w+), 0x0; @%p\d+ ld\.global\.b\d+ \{ \1 \}", text)
    assert first


@triton.jit
def add(x, out, n, LANES: tl.constexpr):
    at = tl.arange(0, LANES)
    tl.store(out + at, tl.atomic_add(x + at, 1, mask=at < n))


@pytest.mark.compat
@pytest.mark.parametrize("pointer", ["*fp32", "*fp16", "*i32", "*i64"])
def test_nvidia_has_zeros_in_such_lanes_of_an_atomic(pointer: str) -> None:
    text = " ".join(compiled("sm_90", pointer, add).asm["ptx"].split())
    (first,) = re.findall(r"mov\.[bu]\d+ (%\w+), 0x0; @%p\d+ atom\.\S+ \1,", text)
    assert first


@pytest.mark.compat
@pytest.mark.parametrize("pointer", ["*fp32", "*fp16", "*i8", "*i64"])
def test_amd_loads_such_lanes_out_of_bounds(pointer: str) -> None:
    """A buffer load outside of its descriptor gives zero; 0x7ffffffe bytes are described."""
    text = compiled("gfx942", pointer).asm["amdgcn"]
    assert re.search(r"s_mov_b32 s\d+, 0x7ffffffe", text)
    assert re.search(r"v_cndmask_b32_e\d+ (v\d+), .*vcc\n(.*\n)*?\s*buffer_load_\w+ \S+ \1,", text)
