"""`sundog isa`: what it counts, what it marks, and that our own ops have nothing to mark."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from sundog import launch
from sundog.cli import app
from sundog.compiled import assembly, ttgir
from sundog.compiled.kernels import Kernel
from sundog.errors import SundogError
from sundog.ops import load as loading
from sundog.ops import op as ops
from sundog.tools import isa

pytestmark = [pytest.mark.compat, pytest.mark.sim_only]

KERNELS = str(Path(__file__).parent / "isa_kernels.py")
LOOPS = str(Path(__file__).parents[2] / "checker" / "pipelined_loops.py")
BOTH = ("sm_90", "gfx942")


def kernels(name: str, targets: tuple[str, ...] = BOTH, **options: Any) -> list[Kernel]:
    return isa.inspect(f"{KERNELS}:run_{name}", targets, world=2, **options)


def rules(kernel: Kernel) -> set[tuple[str, str]]:
    """What was marked, and the kernel's line in words of its source."""
    lines = Path(KERNELS).read_text().splitlines()
    found = set()
    for mark in kernel.marks:
        line = mark.where.partition(" ")[0].rpartition(":")[2]
        found.add((mark.rule, lines[int(line) - 1].strip() if line else ""))
    return found


STORE = "tl.store(there.to(tl.pointer_type(x.dtype.element_ty)), tile, mask=at < numel)"
REMOTE = "memory.store(out + at, tile, peer, ctx, mask=at < numel)"
CHOSEN = "tl.store(there + at, tile, mask=at < numel)"
COPY = "tl.store(out + at, tl.load(x + at, mask=at < numel), mask=at < numel)"
UNMASKED = "tl.store(out + at, tl.load(x + at))"
SHIFTED = "tl.store(out + at + numel, tl.load(x + at))"
GLUON = "gl.store(out + at, gl.load(x + at, mask=at < numel), mask=at < numel)"
CASES = {
    "by_bases": {("narrow", STORE), ("reload", STORE)},
    "in_loop": {("reload", REMOTE)},
    "by_branch": {("reload", CHOSEN)},
    "push": set(),
    "ticket": set(),
    "odd": {("narrow", COPY)},
    "even": set(),
    "tail": set(),
    "branch": set(),
    "helper": set(),
    "tail_narrow": {("narrow", SHIFTED), ("narrow", COPY)},
    "more": {("narrow", SHIFTED)},
    "too_small": {("narrow", UNMASKED)},
}


@pytest.mark.parametrize("name", CASES)
def test_marks(name: str) -> None:
    """What happened upstream (by_bases), its milder forms, and what must not be marked."""
    for kernel in kernels(name):
        assert rules(kernel) == CASES[name], kernel.target


def test_an_access_of_two_branches_is_found_at_the_scalar() -> None:
    """As LLVM leaves it; unless there are more tiles without a line than such accesses."""

    def access(line: int, tile: tuple[int, ...], **widths: int) -> Any:
        counted = Counter({int(name[1:]): count for name, count in widths.items()})
        return SimpleNamespace(place=(("a.py", line, 1),), tile=tile, itemsize=8, widths=counted)

    for tiles in (2, 3):
        lost = [access(line, (64,)) for line in range(tiles)]
        found, scalar = access(7, (64,), _16=3), access(8, (), _8=1, _16=2)
        ttgir._find_lost([*lost, found, scalar])
        assert [each.widths for each in lost] == [{16: 2} if tiles == 2 else {}] * tiles
        assert (found.widths, scalar.widths) == ({16: 3}, {8: 1} if tiles == 2 else {8: 1, 16: 2})


def test_a_merged_place_stands_for_several() -> None:
    one = assembly.Instruction("store", 16, False, (("a.py", 7, 3), ("b.py", 0, 0)))
    assert one.is_at((("a.py", 7, 3), ("b.py", 12, 5)))
    assert not one.is_at((("a.py", 8, 3), ("b.py", 12, 5)))
    assert not one.is_at((("a.py", 7, 3),))


def test_gluon_is_as_wide_as_its_layout() -> None:
    (good,) = kernels("gluon", ("sm_90",))
    (bad,) = kernels("gluon_narrow", ("sm_90",))
    assert (good.loads, good.stores, good.marks) == ({16: 4}, {16: 4}, [])
    assert (bad.loads, bad.stores, rules(bad)) == ({2: 32}, {2: 32}, {("narrow", GLUON)})


@pytest.mark.parametrize(("name", "target"), [("spilling", "sm_90"), ("spilling_amd", "gfx950")])
def test_a_spill_is_marked(name: str, target: str) -> None:
    (kernel,) = kernels(name, (target,))
    assert kernel.spills > 0
    assert rules(kernel) == {("spill", "")}


def test_counts() -> None:
    (copy,) = kernels("even", ("sm_90",))
    assert (copy.loads, copy.stores) == ({16: 2}, {16: 2})  # 128 threads, a tile of 4 KB
    assert (copy.atomics, copy.barriers, copy.tma, copy.tensor_cores) == ({}, 0, 0, {})
    assert copy.spills <= 16  # ptxas keeps 8 or 12 bytes on the stack now and then
    assert copy.shared == 0
    assert 8 <= copy.registers <= 64
    (push,) = kernels("push", ("sm_90",))
    assert push.stores.keys() == {8, 16}  # the epoch, the tile
    assert push.atomics["add acquire sys"] == 2
    assert push.atomics["exch release sys"] == 3  # the signal, and two of a wait that ran out
    assert push.barriers > 2
    roles = {(s.kind, s.arguments): s.role for s in push.sites if s.tile}
    assert roles == {
        ("load", ("x",)): "wide",
        ("store", ("out",)): "wide",
        ("load", ("ctx",)): "flags",
    }
    assert {s.role for s in push.sites if not s.tile} == {"scalar"}


def test_a_flag_that_is_read_is_an_atomic() -> None:
    """On AMD by a plain load. Launched twice, shown once."""
    for kernel in kernels("look"):  # one a target
        assert (kernel.loads, kernel.stores) == ({}, {8: 1})
        assert kernel.atomics == {"add acquire sys": 1}
    assert [k.target for k in kernels("look")] == list(BOTH)


def test_tensor_cores_and_descriptors() -> None:
    nvidia, amd = kernels("matmul")
    assert list(nvidia.tensor_cores) == ["wgmma.mma_async"]
    assert nvidia.tma > 0
    assert nvidia.shared > 3 * 64 * 64 * 2
    assert not nvidia.marks  # the narrow load of the bias is small
    assert all(name.startswith("v_mfma") for name in amd.tensor_cores)
    assert amd.tensor_cores
    assert ("narrow", "load of a") in {(m.rule, m.text.partition(",")[0]) for m in amd.marks}


@pytest.mark.parametrize("name", ["push", "ticket"])
def test_a_distance_cut_to_32_bits_is_marked(name: str) -> None:
    """AMD takes offsets inside memory below 2 GiB as 32-bit numbers: no peer is that near."""
    (kernel,) = kernels(name, ("gfx942",), heap_size=1 << 30)
    assert {mark.rule for mark in kernel.marks} == {"cut"}
    (large,) = kernels(name, ("gfx942",), heap_size=4 << 30)
    (nvidia,) = kernels("push", ("sm_90",), heap_size=1 << 30)
    assert not large.marks
    assert not nvidia.marks


def test_no_heap_on_amd_is_that_small(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch._heap_size(1 << 20, True, 2) == 1 << 20
    monkeypatch.setattr(torch.version, "hip", "7.0")
    least = launch._heap_size(1 << 20, True, 2)
    assert launch._heap_size(8 << 30, True, 2) == 8 << 30
    (kernel,) = kernels("push", ("gfx942",), heap_size=least)
    assert not kernel.marks


def test_what_cannot_be_inspected() -> None:
    with pytest.raises(SundogError, match="launched no kernel"):
        kernels("nothing")
    with pytest.raises(SundogError, match=r"_many_values does not compile for gfx942: .*maxnreg"):
        kernels("spilling", ("gfx942",))
    with pytest.raises(
        ValueError, match=r"target sm_99: Triton .* cannot compile for it .*SIGABRT"
    ):
        isa.inspect("all_gather.push", ("sm_99",), world=2)
    with pytest.raises(ValueError, match="Problem has no 'rows': numel, dtype"):
        isa.inspect("all_gather.push", problem={"rows": 3}, world=2)
    with pytest.raises(ValueError, match="Config has no 'tile'"):
        isa.inspect("all_gather.push", config={"tile": 3}, world=2)


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "isa.json"
    words = ["--target", "sm_90", "--world", "2"]
    bad = CliRunner().invoke(app, ["isa", f"{KERNELS}:run_odd", *words, "--json", str(out)])
    assert bad.exit_code == 1
    assert "1 kernels, 1 marked" in bad.output
    assert "2 bytes at a time" in bad.output
    (kernel,) = json.loads(out.read_text())
    assert (kernel["name"], kernel["marks"][0]["rule"]) == ("_copy_whole", "narrow")
    assert CliRunner().invoke(app, ["isa", f"{KERNELS}:run_even", *words]).exit_code == 0
    early = CliRunner().invoke(app, ["isa", f"{LOOPS}:run_dot", *words, "--json", str(out)])
    assert early.exit_code == 1
    assert "hoisted at pipelined_loops.py:" in early.output
    (kernel,) = json.loads(out.read_text())
    assert "hoisted" in {mark["rule"] for mark in kernel["marks"]}
    for wrong in (
        ["nosuch"],
        ["all_gather", "--target", "sm90x"],
        ["all_gather", "--target", ","],
        ["all_gather", "--target", "sm_99"],  # a name, but no GPU: LLVM ends the process that asks
        ["all_gather", "--target", "gfx999"],
        ["all_gather", "--problem", "x"],
        ["all_gather", "--problem", "numel=many"],
        ["all_gather", "--problem", "numel=-1"],
        ["all_gather", "--problem", "dtype=float33"],
        ["all_gather", "--problem", "size=3"],
        ["all_gather", "--config", "programs=few"],
        ["all_gather", "--json", str(tmp_path)],
        ["test_isa:test_marks"],  # no function of a world: it raises
    ):
        refused = CliRunner().invoke(app, ["isa", *wrong, "--world", "2"])
        assert refused.exit_code == 2, refused.output
        assert refused.stderr.startswith("sundog isa: ")
        assert not refused.stdout


COLLECTIVES = [op for op in ops.OPS if hasattr(loading.find(op).cases(2)[0], "numel")]


@pytest.mark.parametrize("op", COLLECTIVES)
def test_every_collective_is_wide(op: str) -> None:
    """16-bit types on NVIDIA, 32-bit types on AMD; `sundog isa` goes over all of it."""
    module = loading.find(op)
    for target, dtype in (("sm_90", torch.bfloat16), ("gfx942", torch.float32)):
        for kernel in isa.inspect(op, (target,), problem={"dtype": dtype}, world=4):
            assert not kernel.marks
            if getattr(module, "LARGEST", 1 << 40) <= 64 << 10:
                continue  # its tensors are small: latency counts
            wide = [site for site in kernel.sites if site.role == "wide"]
            assert {s.kind for s in wide} == {"load", "store"}
            assert all(min(site.widths) == 16 for site in wide)
