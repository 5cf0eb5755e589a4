"""The importers of other people's suites, on small files of our own in their formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.memory_model.executions import outcomes
from benchmarks.suites import alloy, dat3m, gsan
from benchmarks.suites.litmus_files import read_litmus
from benchmarks.suites.verdicts import Case, judge

MESSAGE = """PTX message
"a flag and a word"
{{ x=0; f=0; P1:r1=5; }}
 P0@cta 0,gpu 0   | P1@cta 1,gpu 0   ;
 st.weak x, 1     | LC00:            ;
 st.{release} f, 1 | ld.{acquire} r0, f ;
                  | beq r0, 0, LC00  ;
                  | ld.weak r1, x    ;
{asks} (P1:r0 == 1 /\\ P1:r1 {op} 0)
"""


@pytest.mark.parametrize(
    ("release", "acquire", "asks", "op", "passes"),
    [
        ("release.gpu", "acquire.gpu", "exists", "==", False),
        ("release.gpu", "acquire.gpu", "~exists", "==", True),
        ("release.gpu", "acquire.gpu", "forall", "!=", True),
        ("release.cta", "acquire.gpu", "exists", "==", True),
        ("relaxed.gpu", "relaxed.gpu", "forall", "!=", False),
    ],
)
def test_a_message_in_ptx(release: str, acquire: str, asks: str, op: str, passes: bool) -> None:
    text = MESSAGE.format(release=release, acquire=acquire, asks=asks, op=op)
    question = read_litmus(text)
    assert question.passes(outcomes(question.litmus)) == passes


@pytest.mark.parametrize(
    ("body", "ends"),
    [
        ("atom.relaxed.gpu.cas r0, m, 0, 1 | atom.relaxed.gpu.cas r0, m, 0, 1", {0, 1}),
        ("red.relaxed.gpu.add m, 2 | atom.relaxed.gpu.exch r0, m, 7", {0, 2}),
    ],
)
def test_updates_in_ptx(body: str, ends: set[int]) -> None:
    head = "PTX two {m=0;} P0@cta 0,gpu 0 | P1@cta 1,gpu 0 ;"
    question = read_litmus(f"{head} {body} ; exists (m == 1)")
    assert {end.registers[1]["r0"] for end in outcomes(question.litmus)} == ends


def test_proxies_and_aliases_in_ptx() -> None:
    text = """PTX proxies { x=0; y @ generic aliases x; s @ surface aliases x; }
     P0@cta 0,gpu 0 ; st.weak x, 1 ; {fence} suld.weak r0, s ; ld.weak r1, y ;
    forall (P0:r0 == 1)"""
    for fence, seen in (("", False), ("fence.proxy.surface ;", True)):
        question = read_litmus(text.replace("{fence}", fence))
        assert question.passes(outcomes(question.litmus)) == seen
        assert {end.registers[0]["r1"] for end in outcomes(question.litmus)} == {0, 1}


VULKAN = """Vulkan message {{ x=0; f=0; }}
 P0@sg 0, wg 0, qf 0 | P1@sg 0, wg 1, qf 0 ;
 {data}              | ld.atom.acq.dv.sc0.semsc0 r0, f ;
 st.atom.rel.{scope}.sc0.semsc0 f, 1 | ld.vis.dv.sc0 r1, x ;
filter (P1:r0 == 1)
"""


def _races(text: str) -> bool:
    question = read_litmus(text)
    return any(end.races for end in outcomes(question.litmus) if question.keep(end))


def test_races_in_vulkan() -> None:
    data = "st.av.dv.sc0 x, 1"
    assert not _races(VULKAN.format(data=data, scope="dv"))
    assert _races(VULKAN.format(data=data, scope="wg"))


ALONE = "Vulkan one { x=0; } P0@sg 0, wg 0, qf 0 ; st.sc0 x, 1 ; ld.nonpriv.sc0 r0, x ;"
UNORDERED = "Vulkan two {x=0;} P0@sg 0,wg 0,qf 0 | P1@sg 0,wg 1,qf 0 ; st.sc0 x, 1 | ld.sc0 r0, x ;"
TWO_NAMES = """Vulkan names { x=0; y aliases x; }
 P0@sg 0, wg 0, qf 0 | P1@sg 1, wg 0, qf 0 ;
 st.av.dv.sc0 x, 1   | ld.vis.dv.sc0 r0, y ;"""
BARRIER = """Vulkan barrier { x=0; }
 P0@sg 0, wg 0, qf 0  | P1@sg 1, wg 0, qf 0 ;
 st.av.dv.sc0 x, 1    | cbar.wg 0 ;
 membar.rel.wg.semsc0 | membar.acq.wg.semsc0 ;
 cbar.wg 0            | ld.vis.dv.sc0 r0, x ;"""
SUBGROUP = """Vulkan subgroup { x=0; }
 P0@sg 0, wg 0, qf 0      | P1@sg 0, wg 0, qf 0 | P2@sg 1, wg 0, qf 0 ;
 st.av.wg.sc0 x, 1        | cbar.acq_rel.sg.semsc0 1 | ;
 cbar.acq_rel.sg.semsc0 1 | ld.vis.wg.sc0 r0, x | ;"""
OTHER_CLASS = VULKAN.format(data="st.av.dv.sc0 x, 1", scope="dv").replace(
    "dv.sc0.semsc0 r0", "dv.sc1.semsc0 r0"
)
TICKET = """Vulkan ticket {{ x=0; t=0; f=0; }}
 P0@sg 0, wg 0, qf 0 | P1@sg 1, wg 0, qf 0 ;
 rmw.atom.acq.wg.sc0.semsc0.add r1, t, 1 | ld.atom.acq.wg.sc0.semsc0{vis} r0, f ;
 st.nonpriv.sc0 x, 1 | ld.nonpriv.sc0 r1, x ;
 st.atom.rel.wg.sc0.semsc0.semav f, 1 | ;
filter (P1:r0 == 1)"""


@pytest.mark.parametrize(
    ("text", "races"),
    [
        (ALONE, False),
        (UNORDERED, True),
        (TWO_NAMES, True),
        (BARRIER, False),
        (SUBGROUP, False),
        (OTHER_CLASS, False),
        (TICKET.format(vis=".semvis"), False),
    ],
)
def test_what_makes_no_difference_in_vulkan_is_read(text: str, races: bool) -> None:
    assert _races(text) == races


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BARRIER.replace("membar.acq.wg.semsc0", ""), "orders no memory"),
        (SUBGROUP.replace("sg 0, wg 0, qf 0 | P2", "sg 1, wg 0, qf 0 | P2"), "narrower than a CTA"),
        (TICKET.format(vis=""), "left out here"),
    ],
)
def test_and_what_does_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_litmus(text)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("st.sc0 x, 1", "private accesses"),
        ("st.av.wg.sc0 x, 1", "available or visible at cta scope only"),
        ("st.av.dv.sc1 x, 1", "some storage classes only"),
        ("avdevice", "to the device"),
        ("hello x, 1", "hello: not an instruction"),
    ],
)
def test_what_vulkan_says_and_we_cannot_is_refused(data: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_litmus(VULKAN.format(data=data, scope="dv"))


ALLOY = """// Litmus: message
// Expected: {mark}
  some
    t0 : ptx/Thread, t1 : ptx/Thread,
    r0 : ptx/Acquire, r1 : ptx/Read - ptx/Acquire,
    w0 : ptx/Write - ptx/Release, w1 : ptx/Release |
    t0.start = w0 and w0.po = w1 and t1.start = r0 and r0.po = r1 and
    r1.address = w0.address and r0.address = w1.address and
    w0.scope = System and {scope} and r0.scope = System and r1.scope = System and
    no r1.~rf and
    r0 in w1.rf  and
"""
NARROW = "t0 in w1.scope.*subscope and t1 not in w1.scope.*subscope"


@pytest.fixture
def checkouts(tmp_path: Path) -> tuple[Path, Path]:
    """Small checkouts of both suites: every case agrees but one, whose label is wrong."""
    first, second = tmp_path / "first", tmp_path / "second"
    lists = first / dat3m.LISTS
    lists.mkdir(parents=True)
    text = MESSAGE.format(release="release.gpu", acquire="acquire.gpu", asks="exists", op="==")
    (first / "good.litmus").write_text(text)
    (lists / "PTXv7_5-expected.csv").write_text("good.litmus,1\n")
    (lists / "PTXv7_5-Liveness-expected.csv").write_text("good.litmus,1\n")
    (first / "CADP").mkdir()
    spin = VULKAN.format(data="LC00: ; ld.atom.dv.sc0 r2, f ; beq r2, 0, LC00", scope="dv")
    (first / "CADP" / "spin.litmus").write_text(spin)
    for model, name in dat3m.PROGRESS.items():
        line = f"// a comment\n; CADP/spin.litmus,{int(model == 'never')}\n"
        (lists / f"VULKAN-Liveness-{name}-expected.csv").write_text(line)
    (lists / "VULKAN-DR-expected.csv").write_text("gone.litmus,1\n")
    folder = second / "generated_litmus" / "PTX"
    folder.mkdir(parents=True)
    (folder / "a.als").write_text(ALLOY.format(mark="\U00010102", scope="w1.scope = System"))
    (folder / "b.als").write_text(ALLOY.format(mark="\u2713", scope=NARROW))
    (folder / "c.als").write_text(ALLOY.format(mark="?", scope=NARROW))
    return first, second


def test_cases_of_alloy(checkouts: tuple[Path, Path]) -> None:
    found = [judge(case) for case in alloy.cases(checkouts[1])]
    assert [(v.name, v.found, v.kind) for v in found] == [
        ("a.als", "forbidden", "agrees"),
        ("b.als", "allowed", "agrees"),
    ]


def test_the_command_writes_every_verdict(checkouts: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    words = ["--dat3m", str(checkouts[0]), "--alloy", str(checkouts[1]), "--json", str(out)]
    done = CliRunner().invoke(app, ["suites", *words])
    assert done.exit_code == 1, "the label of an outcome is wrong on purpose"
    assert "holds expected, does not hold found: no reason is known" in done.output
    result = json.loads(out.read_text())
    assert result["kind"] == "table", "a page can show it"
    rows = {row[0]: row[1:5] for row in result["rows"]}
    assert rows["PTX in Alloy"] == ["2", "2", "0", "0"]
    cases = {(case["suite"], case["name"]): case for case in result["cases"]}
    assert cases["Dat3M PTX liveness", "good.litmus"]["verdict"] == "agrees"
    assert cases["Dat3M CADP progress, Fair", "CADP/spin.litmus"]["found"] == "can run for ever"
    gone = cases["Dat3M Vulkan races", "gone.litmus"]
    assert gone["verdict"] == "not expressible"
    assert "does not have" in gone["reason"]


def test_a_checkout_without_cases_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["suites", "--alloy", str(tmp_path)])
    assert done.exit_code == 2
    assert "alloy: no case in this checkout" in done.output


ENDS = """VULKAN ends {{ x=0; P0:r0=0; }}
 P0@sg 0, wg 0, qf 0 | P1@sg 0, wg 0, qf 0 ;
 LC00:               | st.atom.wg.sc0 x, {value} ;
 rmw.atom.wg.sc0 r0, x, 0 | ;
 bne r0, 0, LC01     | ;
 goto LC00           | ;
 LC01:               | ;
exists 0==0
"""


def test_progress_tests_as_kernels(tmp_path: Path) -> None:
    lists = tmp_path / dat3m.LISTS
    lists.mkdir(parents=True)
    (tmp_path / "CADP").mkdir()
    for name, value in (("ends", 1), ("spins", 0)):
        (tmp_path / "CADP" / f"{name}.litmus").write_text(ENDS.format(value=value))
    rows = "CADP/ends.litmus,1\nCADP/spins.litmus,0\n"
    (lists / "VULKAN-Liveness-Fair-expected.csv").write_text(rows)
    found = [judge(case) for case in dat3m.kernel_cases(tmp_path)]
    assert [(v.found, v.kind) for v in found] == [
        ("ends", "agrees"),
        ("can run for ever", "agrees"),
    ]


def test_a_known_difference_has_its_reason() -> None:
    verdict = judge(Case("suite", "case", "race", lambda: "no race", "we know why"))
    assert (verdict.kind, verdict.reason) == ("differs, with a reason", "we know why")


GSAN_HEAD = """import functools
import pytest
import torch
import triton
import triton.language as tl
from triton._internal_testing import is_cuda
from triton.experimental.gsan import create_mem_pool
from triton.experimental.gsan._testing_utils import atomic_poll, shadow_cell_from_address

pytestmark = pytest.mark.skipif(not is_cuda(), reason="a GPU")


@triton.jit
def kernel(data, flag, out, sem: tl.constexpr):
    if tl.program_id(0) == 0:
        tl.store(data, 7)
        tl.atomic_xchg(flag, 1, sem=sem)
    else:
        tl.atomic_poll(flag, 1, sem="acquire")
        seen = tl.load(data)
        tl.store(out, seen)


def run(sem):
    data, flag, out = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(3))
    kernel[(2,)](data, flag, out, sem=sem)
    torch.cuda.synchronize()
    return data, out

"""
GSAN_PASS = """
@pytest.mark.parametrize("sem", [pytest.param("release", id="a"), "acq_rel"])
def test_clean(with_gsan, capfd, sem):
    data, out = run(sem)
    assert out.item() == 7
    assert shadow_cell_from_address(data.data_ptr()).write_clock.epoch == 3


def test_of_gsan_alone(with_gsan):
    raise RuntimeError
"""
GSAN_FAIL = """
@functools.wraps(run)
def runner(*args):
    raise RuntimeError("needs a GPU")


def _run_failure_case(case, **named):
    raise RuntimeError("needs a GPU")


def test_racing():
    _run_failure_case("raw", runner=runner, runner_args=("relaxed",), source_function=kernel.fn,
                      marker="seen = tl.load(data)", error="Read after write race detected")
"""


def test_cases_of_gsan(tmp_path: Path) -> None:
    folder = tmp_path / gsan.FOLDER
    folder.mkdir(parents=True)
    (folder / "test_gsan.py").write_text(GSAN_HEAD + GSAN_PASS)
    (folder / "test_gsan_failures.py").write_text(GSAN_HEAD + GSAN_FAIL)
    (folder / "test_symmetric_memory.py").write_text("")
    (folder / "test_allocator.py").write_text("def test_frees(pool):\n    pass\n")
    found = [judge(case) for case in gsan.cases(tmp_path)]
    line = GSAN_HEAD[: GSAN_HEAD.index("seen = tl.load")].count("\n") + 1
    assert [(v.name, v.found, v.kind) for v in found] == [
        ("test_racing", f"Read after write at line {line}", "agrees"),
        ("test_clean[release]", "no race", "agrees"),
        ("test_clean[acq_rel]", "no race", "agrees"),
        ("test_of_gsan_alone", "", "not expressible"),
        ("test_frees", "", "not expressible"),
    ]
