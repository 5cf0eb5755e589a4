"""Helion's own log, as Helion wrote it, becomes a base that is whole and has the same numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("helion")

from helion.autotuner.logger import _AUTOTUNE_CSV_FIELDS
from test_helion_collect import tune

from sundog.dataset import read
from sundog.dataset.data_command import app
from sundog.dataset.helion.import_log import COLUMNS, import_helion
from sundog.dataset.validate import validate


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Two searches, logged by Helion; sundog records the same ones in `ours`."""
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HELION_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("HELION_AUTOTUNE_FINAL_REBENCHMARK_TOP_K", "1")
    theirs = str(tmp_path / "theirs")
    for name in ("add", "softmax"):
        tune(tmp_path / "ours", name, autotune_log=theirs, autotune_log_details=True)
    return theirs


def test_the_columns_are_helions() -> None:
    assert COLUMNS == _AUTOTUNE_CSV_FIELDS


def test_an_import_has_the_rows_configs_and_graph_of_the_log(log: str, tmp_path: Path) -> None:
    records = [json.loads(line) for line in Path(f"{log}.meta.jsonl").read_text().splitlines()]
    assert all(record["ir_graph"]["nodes"] for record in records)
    shown = CliRunner().invoke(app, ["import", "helion", log, "--out", str(tmp_path / "new")])
    assert shown.exit_code == 0, shown.output
    assert re.search(r"new: \d+ rows, 2 runs, 2 with a graph, 0 damaged lines", shown.output)
    data, ours = read(tmp_path / "new"), read(tmp_path / "ours")
    assert validate(data).damage == []
    assert data.runs.kernel_name.tolist() == ["add", "softmax"]
    assert [json.loads(c) for c in data.rows.config[data.rows.status == "ok"]] == [
        json.loads(c) for c in ours.rows.config[ours.rows.status == "ok"]
    ]
    assert data.rows.perf_ms.dropna().tolist() == ours.rows.perf_ms.dropna().tolist()
    best = ours.runs.best_perf_ms.tolist()
    assert data.runs.best_perf_ms.tolist() == pytest.approx(best, abs=1e-6)  # as Helion rounds
    for record, run in zip(records, data.runs.itertuples(), strict=True):
        graph = data.graph(run.ir_id)
        assert graph.number_of_nodes() == len(record["ir_graph"]["nodes"])
        assert graph.number_of_edges() == len(record["ir_graph"]["edges"])
        assert run.settings["helion_run_id"] == record["run_id"]
        assert record["kernel_source"] == run.kernel_source[0]["text"]


def test_damaged_log_lines_are_named_and_the_rest_is_imported(log: str, tmp_path: Path) -> None:
    whole = import_helion(log, str(tmp_path / "whole"))
    with open(f"{log}.csv", "a") as file:
        file.write("torn\n" + ",".join(["x", "soon", "c", "0", "ok", "1", "1", "c"]) + "\n")
    with open(f"{log}.meta.jsonl", "a") as file:
        file.write('{"run_id": 7}\n{torn')
    shown = CliRunner().invoke(app, ["import", "helion", log])
    assert shown.exit_code == 1
    assert shown.output.count(": left out") == 4
    assert "timestamp_s is not a number: 'soon'" in shown.output
    data = read(f"{log}.imported")
    assert validate(data).damage == []
    assert len(data.rows) == len(read(tmp_path / "whole").rows)
    assert whole.damage == []


def test_an_import_is_refused_where_there_is_no_log_or_a_base(log: str, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n")
    for arguments, text in (
        ((str(tmp_path / "nothing"),), "there is no"),
        ((str(tmp_path / "other"),), "not a log of Helion"),
        ((log, "--out", str(tmp_path / "ours")), "exists already"),
    ):
        shown = CliRunner().invoke(app, ["import", "helion", *arguments])
        assert shown.exit_code == 2
        assert text in shown.output


def test_rows_without_metadata_are_imported_alone(log: str, tmp_path: Path) -> None:
    """Helion without HELION_AUTOTUNE_LOG_DETAILS writes the CSV only."""
    Path(f"{log}.meta.jsonl").unlink()
    found = import_helion(log, str(tmp_path / "new"))
    assert (found.num_runs, found.num_graphs) == (2, 0)
    data = read(tmp_path / "new")
    assert (len(data.runs), validate(data).damage) == (0, [])
    assert len(data.rows)
