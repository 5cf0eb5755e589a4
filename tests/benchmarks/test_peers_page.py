"""docs/peers.md is what the recorded results give, and they say what issue 20 asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compat.signal_pads import program

from benchmarks.peers.compiled import noted_launches, ordering
from benchmarks.peers.page import page
from benchmarks.result_files import read_result
from sundog.compat.rank import as_rank
from sundog.tools.check.schedules import check

REPOSITORY = Path(__file__).parents[2]
RESULTS: Any = read_result(REPOSITORY / "benchmarks" / "peers" / "results.json.xz")
WANTED = {  # kernels, and how many of them must run
    "meta-pytorch/kraken": 11, "yifuwang/symm-mem-recipes": 3, "pytorch/helion": 7,
    "flashinfer-ai/flashinfer": 3, "sgl-project/sglang": 1, "vllm-project/vllm": 8,
    "pytorch/torchtitan": 4, "meta-pytorch/torchcomms": 4,
    "ByteDance-Seed/Triton-distributed": 25, "ROCm/iris": 15,
}  # fmt: skip


def runs(repository: str) -> list[dict[str, Any]]:
    return [each for each in RESULTS if each["repository"] == repository and "kernel" in each]


def test_the_page_is_generated() -> None:
    assert (REPOSITORY / "docs" / "peers.md").read_text() == page(RESULTS)


def test_the_readme_has_the_figures_of_the_page() -> None:
    programs = [each for name in WANTED for each in runs(name)]
    kernels = sum(each["kernels"] for each in programs)
    wrong = sum(bool(each["findings"] + each["failures"]) for each in programs)
    text = (REPOSITORY / "README.md").read_text()
    assert f"[{kernels} kernels from ten repositories](docs/peers.md)" in text
    assert f"in {len(programs)} programs. {wrong} of these programs have" in text


def test_as_many_kernels_as_wanted_run_in_time() -> None:
    for repository, count in WANTED.items():
        assert sum(each["kernels"] for each in runs(repository)) >= count
        assert all(each["seconds"] <= 60 for each in runs(repository))


def test_every_finding_is_explained_and_gone_after_its_repair() -> None:
    for each in RESULTS:
        if "kernel" in each and (each["findings"] or each["failures"]):
            assert each["repairs"], each["kernel"]
            after = each["after repair"]
            assert not after["findings"] + after["failures"], each["kernel"]


def test_nine_in_ten_mutants_are_killed() -> None:
    tried = [each for each in RESULTS if "mutants" in each]
    assert {each["repository"] for each in tried} == set(list(WANTED)[:4])
    for each in tried:
        assert not each["failures"]
        assert each["killed"] >= 0.9 * each["mutants"]


def test_every_finding_is_looked_up_in_the_ptx() -> None:
    for each in RESULTS:
        if each.get("findings"):
            assert each["ptx"], each["kernel"]
    barrier = next(each for each in runs("flashinfer-ai/flashinfer") if each["findings"])
    assert any("acq_rel.gpu.cas" in line for line in barrier["ptx"]["barrier_triton_kernel"])


def test_what_orders_memory_is_read_from_the_ptx() -> None:
    with noted_launches() as launches:
        check(as_rank(program(RELEASE="relaxed")), 2, schedules=1)
    (found,) = ordering(launches).values()
    assert any(line.startswith("atom.global.relaxed.sys.cas.b32 at ") for line in found)
    assert any("acquire.sys.cas.b32 at " in line for line in found)
