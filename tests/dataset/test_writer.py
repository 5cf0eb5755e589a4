"""What the writer promises while nothing dies: rows, sidecars, once-only graphs, never an error."""

from __future__ import annotations

import csv
import json
import logging
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from telemetry import graph, graphs_of, info, metas_of, rows_of

from sundog.dataset import CSV_COLUMNS, Recorder, check_base
from sundog.dataset.rows import format_row, percentiles

SPECIFIED = [
    "run_id",
    "kernel_id",
    "sample_id",
    "timestamp_s",
    "config_index",
    "generation",
    "status",
    "perf_ms",
    "compile_time_s",
    "decorator",
    "config",
]


def test_columns_are_the_specified_then_ours(tmp_path: Path) -> None:
    with Recorder(tmp_path / "b") as recorder:
        recorder.start({})
    assert (tmp_path / "b.csv").read_text().splitlines()[0] == ",".join(CSV_COLUMNS)
    assert list(CSV_COLUMNS[:11]) == SPECIFIED


def test_rows_of_a_run(tmp_path: Path) -> None:
    clock = iter([100.0, 100.5, 102.0, 103.0, 104.0, 105.0, 106.0]).__next__
    base = tmp_path / "b"
    with Recorder(base, info(), clock=clock) as recorder:
        first = recorder.start({"B": 64, "A": [1, None]}, decorator="B=64", generation=3)
        first.end("ok", samples=[3.0, 1.0, 2.0], compile_time_s=0.25, timer="events")
        second = recorder.start({"B": 128})
        second.end("timeout", error="no answer in 3 s")
        first.end("ok", perf_ms=2.5, metrics={"registers": 40})
    rows = rows_of(base)
    assert [r["status"] for r in rows] == ["started", "ok", "started", "timeout", "ok"]
    assert [r["repeat"] for r in rows] == ["0", "0", "0", "0", "1"]
    assert [r["config_index"] for r in rows] == ["0", "0", "1", "1", "0"]
    assert [float(r["timestamp_s"]) for r in rows] == [0.5, 2.0, 3.0, 4.0, 5.0]
    ok = rows[1]
    assert (ok["perf_ms"], ok["min_ms"], ok["max_ms"]) == ("2.000000", "1.000000", "3.000000")
    assert (ok["p10_ms"], ok["p90_ms"], ok["num_samples"]) == ("1.200000", "2.800000", "3")
    assert json.loads(ok["config"]) == {"A": [1, None], "B": 64}
    assert (ok["decorator"], ok["generation"], ok["world"]) == ("B=64", "3", "2")
    assert rows[3]["error"] == "no answer in 3 s"
    assert rows[3]["perf_ms"] == ""
    assert json.loads(rows[4]["metrics"]) == {"registers": 40}
    assert len({r["run_id"] for r in rows}) == len({r["session"] for r in rows}) == 1
    assert rows[0]["sample_id"] == rows[4]["sample_id"] != rows[2]["sample_id"]


def test_start_record_is_there_before_the_run_ends(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "b", info(), graph=graph())
    (start,) = metas_of(tmp_path / "b")
    assert (start["event"], start["run_id"]) == ("start", info().run_id)
    assert start["ir_id"] == graph()["ir_id"]
    trial = recorder.start({"B": 1}, decorator="B=1")
    trial.end("ok", perf_ms=2.0)
    trial.end("ok", perf_ms=4.0)
    recorder.start({"B": 2}).end("ok", perf_ms=3.5)
    recorder.start({"B": 3}).end("error", error="x")
    recorder.close()
    end = metas_of(tmp_path / "b")[1]
    # The median of 2 and 4 is below 3.5.
    assert end["best"]["config"] == {"B": 1}
    assert end["best"]["perf_ms"] == 3.0
    assert end["counts"] == {"started": 3, "ok": 3, "error": 1}
    assert (end["num_configs"], end["error"], end["unwritten"]) == (3, None, 0)


def test_exception_ends_the_run_and_is_named(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Recorder(tmp_path / "b", info()):
        raise KeyError("x")
    assert metas_of(tmp_path / "b")[1]["error"] == "KeyError: 'x'"


def test_no_metadata_no_sidecars_and_no_graph_no_ir_file(tmp_path: Path) -> None:
    with Recorder(tmp_path / "bare") as recorder:
        recorder.start({"B": 1}).end("ok", perf_ms=1.0)
        assert recorder.add_graph(graph()) is None
    with Recorder(tmp_path / "meta", info()) as recorder:
        recorder.start({"B": 1}).end("ok", perf_ms=1.0)
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"bare.csv", "meta.csv", "meta.meta.jsonl"}


def test_base_with_dots_keeps_them(tmp_path: Path) -> None:
    for base in ("run.v1", "run.v2"):
        with Recorder(tmp_path / base, info(), graph=graph()) as recorder:
            recorder.start({})
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {f"run.v{i}.{end}" for i in (1, 2) for end in ("csv", "meta.jsonl", "ir.jsonl")}


def test_recording_after_close_does_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "b", info(), graph=graph())
    trial = recorder.start({"B": 1})
    recorder.close()
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    trial.end("ok", perf_ms=1.0)
    recorder.start({"B": 2}).end("ok", perf_ms=1.0)
    recorder.add_graph(graph(5))
    recorder.close()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_graph_is_written_once_per_base(tmp_path: Path) -> None:
    for _ in range(2):
        with Recorder(tmp_path / "b", info(), graph=graph(2)) as recorder:
            assert recorder.add_graph(graph(3)) == graph(3)["ir_id"]
            assert recorder.add_graph(graph(3)) == graph(3)["ir_id"]
    lines = (tmp_path / "b.ir.jsonl").read_text().splitlines()
    named = [{**graph(n), "run_id": info().run_id} for n in (2, 3)]
    assert len(lines) == 2
    assert graphs_of(tmp_path / "b") == named


def test_several_graphs_of_one_configuration(tmp_path: Path) -> None:
    with Recorder(tmp_path / "b", info()) as recorder:
        ids = [recorder.add_graph(graph(n)) for n in (2, 3)]
        recorder.start({}).end("compiled", ir_id=ids)
    assert rows_of(tmp_path / "b")[1]["ir_id"].split() == ids


@pytest.mark.parametrize("bad", ["file", "header"])
def test_a_base_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bad: str
) -> None:
    base = tmp_path / "file" / "b" if bad == "file" else tmp_path / "b"
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "b.csv").write_text("run_id,timestamp_s,config_id\n")
    reason = check_base(str(base))
    assert reason is not None
    assert ("cannot be written" in reason) == (bad == "file")
    assert ("other columns" in reason) == (bad == "header")
    with caplog.at_level(logging.WARNING, "sundog.dataset"), Recorder(base) as recorder:
        for block in range(5):
            recorder.start({"B": block}).end("ok", perf_ms=1.0)
        assert len(recorder.pending) == 10  # kept, for the caller
    assert [r.getMessage().startswith(reason) for r in caplog.records] == [True, False]
    assert "10 lines were not written" in caplog.records[1].getMessage()
    assert (tmp_path / "b.csv").read_text() == "run_id,timestamp_s,config_id\n"


def test_check_base_leaves_nothing(tmp_path: Path) -> None:
    assert check_base(str(tmp_path / "new" / "b")) is None
    assert list((tmp_path / "new").iterdir()) == []
    with Recorder(tmp_path / "b", info(), graph=graph()) as recorder:
        recorder.start({})
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    assert check_base(str(tmp_path / "b")) is None
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before


def test_bad_values_become_null_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def __str__(self) -> str:
            raise RuntimeError("no")

    with caplog.at_level(logging.WARNING, "sundog.dataset"), Recorder(tmp_path / "b") as recorder:
        for _ in range(2):
            recorder.start({"x": Broken(), "y": float("inf")}).end(
                "exploded",
                perf_ms="fast",  # type: ignore[arg-type]
                samples=[float("nan")],
                metrics={"z": Broken()},
            )
        recorder.start({}).end("started")
        bad = {**graph(), "nodes": [{"id": float("nan")}]}
        del bad["ir_id"]
        assert recorder.add_graph(bad) is None  # type: ignore[arg-type]
    assert len(caplog.records) == 3
    assert rows_of(tmp_path / "b")[-1]["error"] == "status started: unknown"
    row = rows_of(tmp_path / "b")[1]
    assert (row["status"], row["error"]) == ("error", "status exploded: unknown")
    assert (row["perf_ms"], row["num_samples"]) == ("", "")
    assert json.loads(row["config"])["y"] == "inf"


def test_a_graph_that_fails_is_null_in_the_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "b.ir.jsonl").mkdir()
    caplog.set_level(logging.WARNING, "sundog.dataset")
    with Recorder(tmp_path / "b", info(), graph=graph()) as recorder:
        recorder.start({}).end("ok", perf_ms=1.0, ir_id=recorder.add_graph(graph(3)))
    assert metas_of(tmp_path / "b")[0]["ir_id"] is None
    assert rows_of(tmp_path / "b")[1]["ir_id"] == ""
    assert len(caplog.records) == 1


def test_removed_files_are_made_again(tmp_path: Path) -> None:
    with Recorder(tmp_path / "b") as recorder:
        recorder.start({"B": 1})
        (tmp_path / "b.csv").unlink()
        recorder.start({"B": 2})
    assert [json.loads(r["config"]) for r in rows_of(tmp_path / "b")] == [{"B": 2}]


def test_error_text_has_no_machine_path(tmp_path: Path) -> None:
    with Recorder(tmp_path / "b") as recorder:
        text = f'File "{tmp_path}/x/k.py", line 3\nValueError: 1/2 of https://h/a/b'
        recorder.start({}).end("error", error=text)
    assert rows_of(tmp_path / "b")[1]["error"] == (
        'File "k.py", line 3\\nValueError: 1/2 of https://h/a/b'
    )


@given(st.text(), st.text())
@example("a\\nb", "a\nb")
@settings(max_examples=200, deadline=None)
def test_any_text_is_one_line_and_comes_back(decorator: str, error: str) -> None:
    line = format_row({"decorator": decorator, "error": error, "status": "ok"})
    assert line.encode().decode().splitlines() == [line[:-1]]
    (cells,) = csv.reader([line], strict=True)
    row = dict(zip(CSV_COLUMNS, cells, strict=True))
    for name, text in (("decorator", decorator), ("error", error)):
        # latin-1 with backslashreplace: the usual way to undo unicode_escape on any text.
        raw = row[name].encode("latin-1", "backslashreplace")
        assert raw.decode("unicode_escape") == text


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=50))
def test_percentiles_are_numpys(samples: list[float]) -> None:
    import numpy as np

    found = percentiles(samples)
    for name, q in (("min", 0), ("p10", 10), ("p50", 50), ("p90", 90), ("max", 100)):
        assert found[f"{name}_ms"] == pytest.approx(np.percentile(samples, q))
