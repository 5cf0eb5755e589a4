"""kill -9, a full disk, torn lines: only what was being written is lost, and the base goes on."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from telemetry import graph, graphs_of, info, metas_of, rows_of

from sundog.dataset import Recorder, read
from sundog.dataset.files import AppendFile
from sundog.dataset.graph_file import IrFile
from sundog.dataset.validate import validate

TUNE = """
import sys, time
sys.path.insert(0, {tests!r})
from telemetry import graph, info
from sundog.dataset import Recorder
with Recorder({base!r}, info(), graph=graph()) as recorder:
    for i in range(10**9):
        trial = recorder.start({{"B": i}}, decorator=f"B={{i}}")
        time.sleep(0.002)
        trial.end("ok", samples=[1.0 + i, 2.0 + i])
"""


def write_run(base: str, configs: int = 3) -> None:
    with Recorder(base, info(), graph=graph()) as recorder:
        for block in range(configs):
            recorder.start({"B": block}, decorator=f"B={block}, C").end("ok", perf_ms=1.0)


def test_kill_9_then_validate_then_a_second_run(tmp_path: Path) -> None:
    base = str(tmp_path / "b")
    code = TUNE.format(tests=str(Path(__file__).parent), base=base)
    tuner = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 60
    while not (os.path.exists(f"{base}.csv") and len(rows_of(base)) > 20):
        assert time.monotonic() < deadline, "the tuner wrote nothing"
        time.sleep(0.02)
    tuner.kill()
    assert tuner.wait() == -signal.SIGKILL

    first = read(base)
    report = validate(first)
    assert report.damage == []
    assert any("no end record" in str(note) for note in report.notes)
    assert len(first.rows) > 20
    assert first.runs.ended.tolist() == [False]

    write_run(base)
    data = read(base)
    assert validate(data).damage == []
    assert len(data.rows) == len(first.rows) + 6
    assert data.runs.ended.tolist() == [False, True]
    # One run_id, two sessions, one graph: told apart, never mixed unasked.
    assert data.runs.run_id.nunique() == 1
    assert data.runs.session.nunique() == 2
    assert len(data.graphs) == 1
    with pytest.raises(ValueError, match="2 sessions"):
        data.select(info().run_id)
    assert len(data.select(data.runs.session[1])) == 6


@given(cut=st.floats(0, 1), ending=st.sampled_from(["csv", "meta.jsonl", "ir.jsonl"]))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_torn_anywhere(tmp_path_factory: pytest.TempPathFactory, cut: float, ending: str) -> None:
    """Cut a file at any byte: the lines before the cut are read, and a second run is whole."""
    base = str(tmp_path_factory.mktemp("torn") / "b")
    write_run(base)
    path = Path(f"{base}.{ending}")
    whole = path.read_bytes()
    kept = whole[: int(cut * len(whole))]
    path.write_bytes(kept)
    torn = bool(kept) and not kept.endswith(b"\n")

    data = read(base)
    named = [d for d in data.damage if "torn" in d.text]
    assert [(d.file, d.line) for d in named] == [(str(path), kept.count(b"\n") + 1)] * torn

    write_run(base, configs=2)
    again = read(base)
    session = again.runs.session.iloc[-1]
    assert len(again.select(session)) == 4
    assert again.runs.ended.iloc[-1]
    assert path.read_bytes().startswith(kept)
    if ending == "csv":
        # A row that lacked its newline only is whole after the repair.
        lines = max(kept.count(b"\n") - 1, 0)
        assert len(again.rows) - 4 in (lines, lines + torn)
    # The record that was torn is written anew by the run that needs it.
    assert again.graph(graph()["ir_id"]).number_of_nodes() == 2


def test_torn_inside_quotes_does_not_swallow_the_next_rows(tmp_path: Path) -> None:
    base = str(tmp_path / "b")
    write_run(base)
    path = Path(f"{base}.csv")
    text = path.read_text()
    path.write_text(text[: text.rindex(', C"')])  # in the middle of a quoted decorator
    write_run(base)
    data = read(base)
    assert len(data.rows) == 5 + 6
    (damage,) = data.damage
    assert (damage.line, "cells instead of" in damage.text) == (7, True)
    report = validate(data)
    lost, *others = report.damage
    assert others == data.damage
    assert "5 rows, but its end record counts 6 (ok 2 instead of 3)" in lost.text
    # What was left open is said: the attempt whose end row is lost.
    assert any("B=2, C never ended" in note.text for note in report.notes)


FULL = """
import os, resource, sys
sys.dont_write_bytecode = True  # cut off, it would end every later import
sys.path.insert(0, {tests!r})
from telemetry import info
from sundog.dataset import Recorder
recorder = Recorder({base!r}, info())
trial = recorder.start({{"B": 0}})
path = {base!r} + ".csv"
# Room for half a row more: what a full disk does, in the middle of a row.
resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(path) + 200, resource.RLIM_INFINITY))
for i in range(3):
    trial.end("ok", perf_ms=1.0 + i)
print(len(recorder.pending), open(path, "rb").read()[-1:])
if {recovers}:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    trial.end("ok", perf_ms=9.0)
recorder.close()
"""


@pytest.mark.parametrize("recovers", [False, True])
def test_full_disk_in_the_middle_of_a_row(tmp_path: Path, recovers: bool) -> None:
    base = str(tmp_path / "b")
    with Recorder(base, info()) as recorder:
        recorder.start({"B": 0}).end("ok", perf_ms=0.5)
    code = FULL.format(tests=str(Path(__file__).parent), base=base, recovers=recovers)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "3 b'\\n'"  # three rows wait; the file ends with a whole line
    assert done.stderr.count("cannot be written: File too large") == 1
    data = read(base)
    assert data.damage == []
    times = data.rows.perf_ms.dropna().tolist()
    assert times == ([0.5, 1.0, 2.0, 3.0, 9.0] if recovers else [0.5])
    if recovers:
        assert metas_of(base)[-1]["best"]["perf_ms"] == 2.5
    else:  # what never reached the disk is in the log
        assert "lines were not written" in done.stderr
        assert all(f",ok,{ms}.000000," in done.stderr for ms in (1, 2, 3))
    write_run(base)
    assert validate(read(base)).damage == []


def test_no_space_keeps_rows_and_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = 1000  # rows
    write = os.write

    def fail(fd: int, data: bytes) -> int:
        nonlocal room
        if room > 0:
            room -= 1
            return write(fd, data)
        if len(data) > 10:
            return write(fd, data[:10])  # a short write, as the last block gives
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", fail)
    base = str(tmp_path / "b")
    with caplog.at_level(logging.WARNING, "sundog.dataset"), Recorder(base, info()) as recorder:
        recorder.start({"B": 0}).end("ok", perf_ms=1.0)
        room = 0
        trials = [recorder.start({"B": i}) for i in range(1, 20)]
        for trial in trials:
            trial.end("ok", perf_ms=2.0)
            room = 3 if trial is trials[9] else room  # some of those that wait
        assert len(recorder.pending) == 2 * 19 - 3
        room = 1000
    assert [r.getMessage().count("No space left") for r in caplog.records] == [1]
    data = read(base)
    # Rows that wait are tried once more at close.
    assert (len(data.rows), data.damage) == (40, [])
    assert json.loads(data.rows.config.iloc[-1]) == {"B": 19}


def test_a_start_record_that_waits_is_written_with_the_next_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: AppendFile, line: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    base = str(tmp_path / "b")
    with monkeypatch.context() as patch:
        patch.setattr(AppendFile, "append", full)
        recorder = Recorder(base, info())
    recorder.start({"B": 0}).end("ok", perf_ms=1.0)
    data = read(base)  # as if it were killed now
    assert (len(data.rows), len(data.runs)) == (2, 1)
    assert validate(data).damage == []


def test_an_interrupt_neither_loses_nor_doubles_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write
    interrupt_at = {"after": 0, "half": 0}

    def interrupted(fd: int, data: bytes) -> int:
        if interrupt_at["after"]:
            interrupt_at["after"] = 0
            write(fd, data)
            raise KeyboardInterrupt
        if interrupt_at["half"]:
            interrupt_at["half"] = 0
            write(fd, data[: len(data) // 2])
            raise KeyboardInterrupt
        return write(fd, data)

    monkeypatch.setattr(os, "write", interrupted)
    base = str(tmp_path / "b")
    with Recorder(base, info()) as recorder:
        for when in interrupt_at:
            trial = recorder.start({"when": when})
            interrupt_at[when] = 1
            with pytest.raises(KeyboardInterrupt):
                trial.end("ok", perf_ms=1.0)
    data = read(base)
    assert data.rows.status.tolist() == ["started", "ok"] * 2
    assert validate(data).damage == []


def test_a_living_writer_mends_what_a_dying_one_left(tmp_path: Path) -> None:
    """Quotes are closed where they are open: else a reader would take the next row for text."""
    file = AppendFile(str(tmp_path / "f"), "a,b\n")
    file.append("1,2\n")
    for torn, mended in (('3,"4', '3,"4"'), ('"3,', '"3,"'), ('3,"4"', '3,"4"'), ("3", "3")):
        with open(tmp_path / "f", "a") as other:
            other.write(torn)
        file.append("5,6\n")
        assert (tmp_path / "f").read_text().endswith(f"\n{mended}\n5,6\n")


def test_a_torn_graph_is_written_anew(tmp_path: Path) -> None:
    """Also where it was torn after a closing brace, which looks like its end."""
    path = str(tmp_path / "b.ir.jsonl")
    IrFile(path).add(graph(4))
    whole = Path(path).read_bytes()
    old = json.dumps(graph(4), separators=(",", ":")).encode() + b"\n"
    for line in (whole, old):
        ends = [match.end() for match in re.finditer(rb"\}", line[:-2])]
        assert ends or line is whole
        for end in [*ends, len(line) // 2, len(line) - 2]:
            Path(path).write_bytes(line[:end])
            IrFile(path).add(graph(3))
            IrFile(path).add(graph(4))
            lines = Path(path).read_bytes().splitlines(keepends=True)
            assert (len(lines), lines[0]) == (3, line[:end] + b"\n")
            Path(path).write_bytes(b"".join(lines[1:]))
            assert graphs_of(tmp_path / "b") == [{"run_id": None, **graph(n)} for n in (3, 4)]
