"""docs/dataset.md lists exactly the fields of the schema, and the writer writes exactly those."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from telemetry import graph, graphs_of, info

from sundog.dataset import CSV_COLUMNS, STATUSES, IrGraphRecord, KernelData, Recorder
from sundog.dataset.hardware import HARDWARE_FIELDS, hardware
from sundog.dataset.schema import (
    CSV_FIELDS,
    IR_LINE_FIELDS,
    META_END_FIELDS,
    META_START_FIELDS,
    file_names,
)

PAGE = Path(__file__).parents[2] / "docs" / "dataset.md"


def tables() -> list[list[tuple[str, str, str]]]:
    """The field tables of the page, in order: (name, type, meaning) of each row."""
    found = []
    for block in PAGE.read_text().split("| field | type | meaning |\n|---|---|---|\n")[1:]:
        rows = []
        for line in block.split("\n\n")[0].splitlines():
            match = re.fullmatch(r"\| `(\w+)` \| (\w+) \| (.+) \|", line)
            assert match, line
            rows.append(match.groups())
        found.append(rows)
    return found  # type: ignore[return-value]


def test_the_page_lists_the_schema() -> None:
    csv, start, machine, end, line, ir = tables()
    assert csv == [tuple(field) for field in CSV_FIELDS]
    assert start == [tuple(field) for field in META_START_FIELDS]
    assert end == [tuple(field) for field in META_END_FIELDS]
    assert [name for name, _, _ in machine] == list(HARDWARE_FIELDS) == list(hardware())
    assert line == [tuple(field) for field in IR_LINE_FIELDS]
    assert [name for name, _, _ in ir] == list(IrGraphRecord.__annotations__)


def test_the_page_lists_the_statuses() -> None:
    (line,) = (x for x in PAGE.read_text().splitlines() if x.startswith("Statuses: "))
    assert tuple(re.findall(r"`(\w+)`", line)) == STATUSES


def test_the_writer_writes_the_schema(tmp_path: Path) -> None:
    base = str(tmp_path / "b")
    with Recorder(base, info(), graph=graph()) as recorder:
        recorder.start({"B": 1}).end("ok", perf_ms=1.0)
    csv, meta, ir = (Path(name).read_text().splitlines() for name in file_names(base))
    start, end = (json.loads(line) for line in meta)
    assert csv[0].split(",") == list(CSV_COLUMNS)
    assert set(start) == {field.name for field in META_START_FIELDS}
    assert set(end) == {field.name for field in META_END_FIELDS}
    assert list(json.loads(ir[0])) == [field.name for field in IR_LINE_FIELDS]
    assert set(graphs_of(base)[0]) == set(IrGraphRecord.__annotations__)
    assert set(end["best"]) == {"config_index", "sample_id", "perf_ms", "decorator", "config"}


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both programs, as they stand; of the third, which needs the data, the names."""
    monkeypatch.chdir(tmp_path)
    write, read, kernels = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    times = iter([[1.0, 2.0], [0.5]])
    space = {
        "kernel": tables,
        "x": 1,
        "y": 2,
        "ir_record": graph(),
        "configs": [{"B": 1}, {"B": 2}],
        "measure": lambda config: next(times),
        "ir_id": graph()["ir_id"],
    }
    exec(write, space)
    read = read.replace('"3f2a91"', "data.runs.session[0][:6]")
    exec(read, space)
    assert space["data"].runs.best_perf_ms.tolist() == [0.5]  # type: ignore[attr-defined]
    assert space["data"].damage == []  # type: ignore[attr-defined]
    compile(kernels, str(PAGE), "exec")
    named = set(re.findall(r"data\.(\w+)", kernels))
    assert len(named) >= 7
    assert all(hasattr(KernelData, name) for name in named)
