"""`validate` names every line that is removed, repeated, moved or torn, and every wrong value."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from telemetry import graph, info

from sundog.dataset import CSV_COLUMNS, Recorder, read
from sundog.dataset.files import AppendFile
from sundog.dataset.schema import CSV_FIELDS, META_END_FIELDS, META_START_FIELDS
from sundog.dataset.validate import validate

ENDINGS = ("csv", "meta.jsonl", "ir.jsonl")
VALUES = (("", "x", "-1", "1e400"), ("", "[", "a" * 64))  # of numbers, of text
NULLS = {
    "start": ("kernel_source", "codegen_settings", "arguments", "settings", "backend", "hardware")
    + ("versions", "ir_id"),
    "end": ("best", "error"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three runs in one base, the second killed: it has no end record."""
    base = str(tmp_path_factory.mktemp("run") / "b")
    with Recorder(base, info("a"), graph=graph(2)) as recorder:
        recorder.start({"B": 1}, decorator="B=1").end("ok", samples=[1, 2, 3])
    killed = Recorder(base, info("b"), graph=graph(6))
    killed.start({"B": 1})
    with Recorder(base, info("c")) as recorder:
        trial = recorder.start({"B": 1}, generation=1)
        trial.end("ok", perf_ms=0.5, ir_id=[recorder.add_graph(graph(n)) for n in (3, 4)])
        trial.end("ok", perf_ms=0.7, metrics={"spills": 0}, timer="events", compile_time_s=0.5)
        recorder.start({"B": 2})
    assert validate(read(base)).damage == []
    return base


@pytest.fixture
def base(run: str, tmp_path: Path) -> str:
    for ending in ENDINGS:
        shutil.copy(f"{run}.{ending}", tmp_path / f"b.{ending}")
    return str(tmp_path / "b")


def found(base: str) -> list[str]:
    """What is named: damage, or the refusal of a CSV with another first line."""
    try:
        report = validate(read(base))
    except ValueError as error:
        return [str(error)]
    return [str(each) for each in report.damage]


def variants(lines: list[bytes], at: int) -> Iterator[tuple[str, list[bytes]]]:
    """What may happen to one line."""
    others = lines[:at] + lines[at + 1 :]
    yield "removed", others
    yield "repeated", lines[: at + 1] + lines[at:]
    yield "repeated at the end", [*lines, lines[at]]
    for to in {1, at - 1, at + 1, len(lines) - 1}:
        if to != at and 0 <= to < len(lines):
            yield f"moved to {to}", others[:to] + [lines[at]] + others[to:]
    for cut in (len(lines[at]) // 2, len(lines[at]) - 2):
        yield (
            f"torn after {cut} and ended",
            [*lines[:at], lines[at][:cut] + b"\n", *lines[at + 1 :]],
        )
    yield "torn, and the file with it", [*lines[:at], lines[at][: len(lines[at]) // 2]]
    yield "cut off with all that follows", lines[:at]


@pytest.mark.timeout(300)  # hundreds of reads: 119 s at a load of 25
@pytest.mark.parametrize("ending", ENDINGS)
def test_each_line_removed_repeated_moved_or_torn(base: str, ending: str) -> None:
    path = Path(f"{base}.{ending}")
    lines = path.read_bytes().splitlines(keepends=True)
    missed = []
    for at in range(len(lines)):
        for what, changed in variants(lines, at):
            if changed == lines:
                continue
            path.write_bytes(b"".join(changed))
            named = found(base)
            if ending == "meta.jsonl" and at == len(lines) - 1 and not named:
                # The last end record is gone: the run looks killed, which is a note.
                named = [n.text for n in validate(read(base)).notes if "no end record" in n.text]
                named = named[1:]  # the first is of the run that was killed
            if not named:
                missed.append((at + 1, what))
    assert missed == []


def test_an_emptied_csv_is_named(base: str) -> None:
    header = Path(f"{base}.csv").read_bytes().splitlines(keepends=True)[0]
    for text in (b"", header):
        Path(f"{base}.csv").write_bytes(text)
        assert any("0 rows, but its end record counts 2 (" in each for each in found(base))


def wrong_values(kind: str) -> Iterator[Any]:
    yield from ({}, "x", True, None, -1, 10**400, [{}])
    if kind in ("int", "float"):
        yield from ("1", 2**70)


def is_right(value: Any, field: Any, event: str) -> bool:
    """What a reader must take: the test does not ask for more than the schema says."""
    name = field.name
    if value is None:
        return name in NULLS[event]
    if name in ("settings", "codegen_settings", "hardware", "versions", "counts"):
        return isinstance(value, dict) and (name != "counts" or value == {})
    if name in ("arguments", "kernel_source"):
        return value == []
    if name == "session":
        return event == "start" and value == "x"
    return name in ("kernel_name", "backend", "error") and isinstance(value, str)


@pytest.mark.parametrize("event", ["start", "end"])
def test_each_field_of_a_record_with_a_wrong_value(base: str, event: str) -> None:
    path = Path(f"{base}.meta.jsonl")
    lines = path.read_text().splitlines()
    at = len(lines) - 1 if event == "end" else len(lines) - 2
    record = json.loads(lines[at])
    assert record["event"] == event
    for field in META_START_FIELDS if event == "start" else META_END_FIELDS:
        for value in wrong_values(field.type):
            changed = json.dumps({**record, field.name: value})
            path.write_text("\n".join([*lines[:at], changed, *lines[at + 1 :]]) + "\n")
            data = read(base)
            damage = [d.text for d in data.damage if d.line == at + 1]
            gaps = [d.text for d in data.gaps if d.line == at + 1]
            assert damage or gaps, (field.name, value)  # any change at all
            if not is_right(value, field, event) and field.name not in ("chain", "event"):
                assert damage[0].startswith(field.name), (field.name, value, damage)


@pytest.mark.timeout(300)
def test_each_cell_of_a_row_with_a_wrong_value(base: str) -> None:
    path = Path(f"{base}.csv")
    lines = path.read_text().splitlines(keepends=True)
    cells = next(csv.reader([lines[-2]]))
    assert cells[CSV_COLUMNS.index("repeat")] == "1"
    missed = []
    for column, field in enumerate(CSV_FIELDS):
        for value in VALUES[field.type == "text"]:
            if value == cells[column]:
                continue
            row = io.StringIO()
            csv.writer(row, lineterminator="\n").writerow(
                [*cells[:column], value, *cells[column + 1 :]]
            )
            path.write_text("".join([*lines[:-2], row.getvalue(), lines[-1]]))
            named = found(base)
            if not named:
                missed.append((field.name, value))
            impossible = value in ("x", "1e400")
            if field.type in ("int", "float") and impossible:
                assert f"{base}.csv:{len(lines) - 1}: {field.name} " in named[0], (value, named)
    assert missed == []


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ir_id", [None, 7, "x", "0" * 64]),
        ("run_id", [7, "x", "0" * 64]),
        ("reference", [7, "x", "0" * 64]),
        ("depth", [-1, 9, "x", None]),
        ("num_nodes", [-1, 5, "x", None, True]),
        ("num_links", [-1, 5, "x", None]),
        ("packed", [None, 7, "", "x", "\u20ac", "0000Ac"]),
        ("chain", ["", "x", 7, None]),
        ("schema_version", [1, 3, "x", None, True]),
    ],
)
def test_each_field_of_a_graph_with_a_wrong_value(base: str, name: str, values: list[Any]) -> None:
    path = Path(f"{base}.ir.jsonl")
    lines = path.read_text().splitlines()
    assert json.loads(lines[3])["reference"]
    for at in (0, 1, 2, 3):
        record = json.loads(lines[at])
        for value in values:
            changed = [*lines[:at], json.dumps({**record, name: value}), *lines[at + 1 :]]
            if record[name] != value:
                path.write_text("\n".join(changed) + "\n")
                assert found(base), (at, value)


def test_a_note_has_the_lines_that_a_killed_run_left(base: str) -> None:
    notes = [note.text for note in validate(read(base)).notes]
    assert any("no end record (killed, or running)" in note for note in notes)
    assert any("never ended" in note for note in notes)


def test_two_runs_at_once_are_whole(tmp_path: Path) -> None:
    """Their rows are interleaved: each has its own count and hash."""
    base = str(tmp_path / "b")
    with Recorder(base, info("a")) as one, Recorder(base, info("b")) as two:
        for block in range(4):
            trials = [one.start({"B": block}), two.start({"B": block})]
            for trial in trials:
                trial.end("ok", perf_ms=1.0)
    assert validate(read(base)).damage == []
    lines = Path(f"{base}.csv").read_text().splitlines(keepends=True)
    assert len(lines) == 17
    lines[3], lines[4] = lines[4], lines[3]
    Path(f"{base}.csv").write_text("".join(lines))
    assert found(base)


def test_waiting_rows_are_written_between_another_runs_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk was full at first: the rows of one run come late, and others' between them."""
    base, append, num_calls = str(tmp_path / "b"), AppendFile.append, 0

    def interleaved(file: AppendFile, line: str) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls <= 2:
            raise OSError(28, "No space left on device")
        append(file, line)
        if file is one._csv and num_calls < 20:
            two.start({"B": num_calls})

    with Recorder(base, info("b")) as two, Recorder(base, info("a")) as one:
        monkeypatch.setattr(AppendFile, "append", interleaved)
        trial = one.start({"B": 1})
        trial.end("ok", perf_ms=1.0)
        trial.end("ok", perf_ms=2.0)
    sessions = read(base).rows.session.tolist()
    own = [i for i, session in enumerate(sessions) if session == one.session]
    assert own[-1] - own[0] + 1 > len(own) == 3  # others between
    assert validate(read(base)).damage == []


def test_rows_of_a_killed_run_that_were_moved_are_named(tmp_path: Path) -> None:
    base = str(tmp_path / "b")
    killed = Recorder(base, info("a"))
    for number in range(5):
        killed.start({"B": number}).end("ok", perf_ms=1 + number)
    assert found(base) == []
    lines = Path(f"{base}.csv").read_bytes().splitlines(keepends=True)
    for at in range(1, len(lines)):
        for to in range(1, len(lines)):
            others = lines[:at] + lines[at + 1 :]
            Path(f"{base}.csv").write_bytes(b"".join([*others[:to], lines[at], *others[to:]]))
            assert at == to or "rows were moved" in found(base)[0]
