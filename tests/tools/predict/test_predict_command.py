"""`sundog predict`: tables, crossings, files, and sentences for what can't be."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from sundog.hardware.description import read
from sundog.ops.op import OPS
from sundog.tools.predict.predict_command import (
    Asked,
    PredictOptions,
    crossings,
    parse_axis,
    points,
    run,
)

SIZES = "numel=1024..16777216"


def test_an_axis_is_a_list_or_powers_of_two() -> None:
    assert parse_axis("numel=8,24") == ("numel", [8, 24])
    assert parse_axis("numel=3..20") == ("numel", [3, 6, 12])


def test_small_and_large_cross(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(PredictOptions("all_reduce", "h200x8", SIZES)) == 0
    told = capsys.readouterr().out
    assert "h200x8: one_shot is the fastest up to" in told
    assert "two_shot from" in told
    assert "8 H200 SXM joined by" in told


@pytest.mark.parametrize("op", sorted({name.partition(".")[0] for name in OPS}))
def test_every_op_has_a_usual_axis(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without an axis: sizes that all ranks can share, of a dtype that the op takes."""
    assert run(PredictOptions(op, "h200x8", world=3)) == 0
    found = capsys.readouterr().out
    assert "last row: Problem(" in found
    assert ("float8_e4m3fn, size" if "scaled" in op else "torch.bfloat16") in found


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"problem": "m4096"}, "'m4096' in 'm4096': expected name=value"),
        ({"axis": "numel=8", "simulate": True}, "--axis are for models, not for a simulation"),
        ({"op": "matmul_reduce_scatter", "axis": "m=9"}, "push: m 9 does not divide by 8 ranks"),
    ],
    ids=str,
)
def test_nothing_that_was_asked_is_left_out(
    options: dict[str, Any], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(PredictOptions(**{"op": "all_reduce", "machine": "h200x8", **options})) == 2
    assert sentence in capsys.readouterr().err


def test_crossings_are_where_the_fastest_changes() -> None:
    asked = Asked("all_reduce", 8, {}, parse_axis(SIZES))
    found = points(asked, read("h200x8"))
    changes = sum(a.best != b.best for a, b in itertools.pairwise(found))
    assert len(crossings(found)) == changes >= 1
    for point in found:
        assert [*point.times.values()] == sorted(point.times.values(), key=lambda t: t.seconds)


def test_a_comparison_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    options = PredictOptions(
        "all_gather", "h200x8,mi300x8", "numel=8388608", world=2, compare=True, json=str(path)
    )  # two MI300X have one wire between them
    assert run(options) == 0
    told = capsys.readouterr().out
    assert "stores (link)" in told
    assert "mi300x8: push" in told
    first, second = json.loads(path.read_text())
    assert (first["machine"], second["machine"]) == ("h200x8", "mi300x8")
    assert first["times"]["push"]["seconds"] < second["times"]["push"]["seconds"]


def test_a_late_rank_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, late = (tmp_path / name for name in ("plain.json", "late.json"))
    plot = tmp_path / "plot.png"
    axis = "m=1024,4096"
    run(PredictOptions("all_gather_matmul", "h200x8", axis, "n=4096,k=4096", json=str(plain)))
    options = PredictOptions(
        "all_gather_matmul", "h200x8", axis, "n=4096,k=4096", late=50.0, json=str(late),
        plot=str(plot),
    )  # fmt: skip
    assert run(options) == 0
    for a, b in zip(json.loads(plain.read_text()), json.loads(late.read_text()), strict=True):
        gained = b["times"]["barrier"]["seconds"] - a["times"]["barrier"]["seconds"]
        assert gained == pytest.approx(50e-6)
    assert plot.read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()


@pytest.mark.parametrize("axis", ["dtype=float16,float32", "numel=0,5", "op=sum,max", "numel=7"])
def test_a_plot_of_what_is_no_growing_size(
    axis: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dtype, an empty tensor, one size: every point is in the picture, with its name."""
    import matplotlib.pyplot as plt

    drawn: list[Any] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    assert run(PredictOptions("all_reduce", "h200x8", axis, plot=str(tmp_path / "p.png"))) == 0
    axes, count = drawn[0].axes[0], len(axis.split(","))
    for line in axes.lines:
        left, right = axes.get_xlim()
        assert len(line.get_xdata()) == count
        assert all(left <= at <= right for at in line.get_xdata())
        assert line.get_marker() == "."
    if axis != "numel=7":
        words = [label.get_text().removeprefix("torch.") for label in axes.get_xticklabels()]
        assert words == axis.partition("=")[2].split(",")
    capsys.readouterr()


def test_an_algorithm_has_one_color(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is the fastest on a machine."""
    import matplotlib.pyplot as plt

    drawn: list[Any] = []
    monkeypatch.setattr(plt, "close", drawn.append)
    options = PredictOptions(
        "all_gather_matmul", "h200x8,h200-shared", "m=1024", "n=3584,k=8192",
        plot=str(tmp_path / "p.png"),
    )  # fmt: skip
    assert run(options) == 0
    colors: dict[str, set[Any]] = {}
    for line in drawn[0].axes[0].lines:
        colors.setdefault(str(line.get_label()).partition(",")[0], set()).add(line.get_color())
    assert len(colors) >= 3
    assert all(len(each) == 1 for each in colors.values())


FP8 = "numel=64,dtype=float8_e4m3fn"
WRONG = [
    (PredictOptions("all_reduce", "", SIZES), "--machine is missing: give one of h100x8"),
    (PredictOptions("all_reduce", "h300", SIZES), "machine 'h300' is not known"),
    (PredictOptions("all_reduce", "h200x8", "numel"), "--axis 'numel': expected NAME="),
    (PredictOptions("all_reduce", "h200x8", "numel=9..3"), "the smaller one first"),
    (PredictOptions("all_reduce", "h200x8", "rows=9"), "Problem has no 'rows'"),
    (PredictOptions("all_reduce", "h200x8", SIZES, world=9), "h200x8 has 8 GPUs, and 9 ranks"),
    (PredictOptions("all_reduc", "h200x8", SIZES), "did you mean 'all_reduce'"),
    (PredictOptions("all_reduce", "h200x8", SIZES, late=-1.0), "--late at least 0"),
    (PredictOptions("all_reduce", "h200x8", SIZES, late=float("nan")), "and --late at least 0"),
    (PredictOptions("all_reduce", "h200x8", SIZES, "dtype=float8_e4m3fn"), "no reduction of"),
    (PredictOptions("reduce", "h200x8", problem=FP8, simulate=True), "reduction of torch.float8"),
    (PredictOptions("reduce", "h200x8", simulate=True, sms=-3), "--sms must be at least 0"),
    (PredictOptions("reduce", "h200x8", simulate=True, sms=500), "500 SMs per rank, and a GPU of"),
    (PredictOptions("all_reduce", "tests.json", SIZES), "machine 'tests.json' is not known"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=[each[1] for each in WRONG])
def test_what_cannot_be_predicted(
    options: PredictOptions, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(options) == 2
    told = capsys.readouterr()
    assert message in " ".join((told.out + told.err).split())
