"""The collector: what it plans, and that a crash, a kill or a second run loses nothing.

Nothing is timed here. A stand-in for the GPU makes times up; kernels are compiled for sm_90.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from support.scripts import python

from benchmarks.learn import draw
from benchmarks.learn.__main__ import unmeasured
from benchmarks.learn.collect import Collector, Options
from benchmarks.learn.compile_ahead import Cell, cell_key, plain_text
from benchmarks.learn.draw import drawn
from benchmarks.learn.kernels import SUBJECTS
from benchmarks.learn.measure import Measured, Unit, made_up
from benchmarks.learn.plan import CONTROLS, known_units, units
from benchmarks.learn.record import Records, cell_of, read_lines, read_rows, read_xz
from benchmarks.learn.subject import Task, shape_kind
from sundog.learn.features import occupancy

ROOT = Path(__file__).parents[2]


def test_kernels_agree_with_their_references() -> None:
    """In Triton's interpreter, which must be on before a kernel is defined."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = python(["-m", "benchmarks.learn", "check"], environment, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("right") == len(SUBJECTS)


def test_the_dataset_has_enough_kernels_and_tasks() -> None:
    assert len(SUBJECTS) >= 60
    assert sum(len(each.shapes) * len(each.dtypes) for each in SUBJECTS.values()) >= 800


def test_kernels_without_rows_are_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unmeasured("h200")
    assert capsys.readouterr().out.split() == [], "the collections have every kernel"
    monkeypatch.setitem(SUBJECTS, "brand_new", SUBJECTS["matmul"])
    unmeasured("h200")
    assert capsys.readouterr().out.split() == ["brand_new"]


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_space_has_50_to_500_configs(name: str) -> None:
    subject = SUBJECTS[name]
    assert 50 <= len(subject.configs) <= 500
    assert len({cell_key(Cell(name, "", {}, config)) for config in subject.configs}) == len(
        subject.configs
    )
    assert len({shape_kind(shape) for shape in subject.shapes}) >= 2


def test_every_control_is_a_cell_of_the_plan() -> None:
    for control in CONTROLS:
        subject = SUBJECTS[control.name]
        assert control.config in subject.configs
        assert control.shape in subject.shapes


def test_a_plan_that_is_cut_has_every_kernel() -> None:
    planned = units([], set(), 4)
    assert {cell.name for cells in planned[:400] for cell in cells} == set(SUBJECTS)
    served = [len({str(cell.shape) for cell in cells}) for cells in planned]
    assert sum(served) / len(served) > 3, "one binary serves several shapes"
    keys = [cell_key(cell) for cells in planned for cell in cells]
    assert len(keys) == len(set(keys))
    assert len(units([], set(keys[:100]), 4)) < len(planned)


@pytest.mark.parametrize("name", SUBJECTS)
def test_new_shapes_need_no_new_binary(name: str) -> None:
    own, new = SUBJECTS[name], drawn(SUBJECTS[name], 10)
    (dtype,) = new.dtypes
    assert drawn(own, 10).shapes == new.shapes, "a draw that can be repeated"
    assert not [shape for shape in new.shapes if shape in own.shapes]
    assert len({str(shape) for shape in new.shapes}) == 10
    config = own.configs[0]
    known = {Task(own, shape, dtype).binary_key(config) for shape in own.shapes}
    assert {Task(own, shape, dtype).binary_key(config) for shape in new.shapes} <= known


def test_new_shapes_are_of_all_kinds() -> None:
    new = [shape for subject in SUBJECTS.values() for shape in drawn(subject, 10).shapes]
    kinds = Counter(shape_kind(shape) for shape in new)
    assert set(kinds) == {"power of two", "model", "prime", "odd"}
    assert kinds["prime"] + kinds["odd"] > len(new) / 6, "as in the first plan"


def test_a_plan_of_new_shapes_has_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = [cell for cells in units(["swiglu", "matmul"], set(), 4, shapes=3) for cell in cells]
    assert len({(cell.name, str(cell.shape)) for cell in planned}) == 6
    assert not [cell for cell in planned if cell.shape in SUBJECTS[cell.name].shapes]
    monkeypatch.setattr(draw, "_alike", lambda shape, *_: shape["m"] == 4096)
    with pytest.raises(ValueError, match=r"top_k: \d+ new shapes of 1000: ask for fewer"):
        units(["top_k"], set(), 4, shapes=1000)


def test_repeated_rows_are_drawn_from_measured_ones() -> None:
    known = [cell for cells in units(["swiglu"], set(), 4) for cell in cells]
    again = known_units(known, 9)
    keys = [cell_key(cell) for cells in again for cell in cells]
    assert len(keys) == len(set(keys)) == 9
    assert set(keys) < {cell_key(cell) for cell in known}
    assert {cell.repeat for cells in again for cell in cells} == {1}
    assert known_units(known, 9) == again, "a draw that can be repeated"


def test_each_specialisation_of_triton_has_its_own_binary() -> None:
    subject = SUBJECTS["swiglu"]
    even, also, prime = (
        Task(subject, shape, "bfloat16")
        for shape in ({"m": 32, "n": 64}, {"m": 64, "n": 64}, {"m": 31, "n": 61})
    )
    config = subject.configs[0]
    assert even.binary_key(config) == also.binary_key(config) != prime.binary_key(config)
    other = {**config, "WAVES": config["WAVES"] + 1}
    assert even.binary_key(other) == even.binary_key(config), "the grid is not in the binary"


def test_a_crash_costs_one_row_and_a_second_run_repeats_none(tmp_path: Path) -> None:
    names = ["dequantise_rows"]
    victim = cell_key(units(names, set(), 1)[0][1])

    def measure(unit: Unit) -> list[Measured]:
        if any(cell_key(cell) == victim for cell in unit.cells):
            os._exit(3)
        return made_up(unit)

    options = Options(tmp_path, 1.0, names, workers=1, configs=1, clock="made-up")
    counts = Collector(options, measure).run()["counts"]
    rows = [row for row in read_rows(tmp_path) if not row["control"]]
    first = [row for row in rows if not row["repeat"]]
    planned = [cell_key(cell) for cells in units(names, set(), 1) for cell in cells]
    assert sorted(cell_key(cell_of(row)) for row in first) == sorted(planned)
    assert {cell_key(cell_of(row)): row["status"] for row in first}[victim] == "crash"
    assert [row["status"] for row in first].count("ok") == len(planned) - 1
    assert counts["restarts"] == 1
    assert counts["rows control"] >= len(CONTROLS)
    again = Collector(options, measure).run()["counts"]
    assert "rows ok" not in again
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"torn": ')  # a kill in the middle of a line
    assert "rows ok" not in Collector(options, measure).run()["counts"]


def test_a_run_in_which_nothing_works_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.learn.collect._MOST_FAILURES", 3)

    def measure(unit: Unit) -> list[Measured]:
        return [Measured("error", error="no such GPU") for _ in unit.cells]

    options = Options(tmp_path, 5.0, ["dequantise_rows"], workers=1, clock="made-up")
    with pytest.raises(RuntimeError, match=r"none could be measured.*no such GPU"):
        Collector(options, measure).run()
    assert list(read_rows(tmp_path)), "what was tried is kept"


def test_ir_is_stored_once_without_places(tmp_path: Path) -> None:
    options = Options(tmp_path, 1.0, ["dequantise_rows"], workers=1, configs=2, clock="made-up")
    Collector(options).run()
    found = list(read_xz(tmp_path / "ir.xz"))
    binaries = list(read_lines(tmp_path / "binaries.jsonl"))
    named = {line[stage] for line in binaries for stage in ("ttir", "ttgir")}
    assert {line["id"] for line in found} == named
    assert len(found) == len(named)
    assert not any("loc(" in line["text"] or ".py" in line["text"] for line in found)
    about = json.loads((tmp_path / "run.json").read_text())
    assert about["clock"] == "made-up"


def test_moved_rows_are_neither_lost_nor_doubled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.learn.record._ROWS", 10)
    cells = [cell for cells in units(["dequantise_rows"], set(), 4) for cell in cells][:37]
    records = Records(tmp_path)
    for number, cell in enumerate(cells):
        records.add_row(cell, Measured("ok", [number]), None)
    records._packer.submit(lambda: None).result()
    assert [row["samples_ns"] for row in read_rows(tmp_path)] == [[n] for n in range(37)]
    assert len(list(read_lines(tmp_path / "rows.jsonl"))) == 7
    moved = list(read_xz(tmp_path / "rows.xz"))[-10:]
    (tmp_path / "rows.moving.jsonl").write_text("".join(json.dumps(row) + "\n" for row in moved))
    assert len(list(read_rows(tmp_path))) == 37, "a kill between writing and deleting"
    records = Records(tmp_path)
    assert len(records.known) == 37
    records.close({"clock": "made-up"})
    assert [row["samples_ns"] for row in read_rows(tmp_path)] == [[n] for n in range(37)]
    assert not (tmp_path / "rows.moving.jsonl").exists()
    assert (tmp_path / "rows.jsonl").read_text() == ""


def test_locations_are_cut_and_code_is_kept() -> None:
    text = (
        '#loc1 = loc("a b (c).py":1:2)\n'
        '  %0 = tt.load %a : !tt.ptr<f32> loc(callsite(#loc4 at "x)y"(#loc2)))\n'
        "  %1 = ttg.local_alloc %0 : (f32) -> f32 loc(#loc)\n"
    )
    assert plain_text(text) == (
        "  %0 = tt.load %a : !tt.ptr<f32>\n  %1 = ttg.local_alloc %0 : (f32) -> f32\n"
    )


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "expected"),
    [(32, 0, 4, 1.0), (255, 0, 8, 0.125), (64, 100 << 10, 4, 0.125), (128, 0, 16, 0.25)],
)
def test_occupancy(registers: int, shared: int, warps: int, expected: float) -> None:
    assert occupancy(registers, shared, warps) == expected
