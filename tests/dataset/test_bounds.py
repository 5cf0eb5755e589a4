"""Pipes, long lines, full disks and values that JSON cannot hold: named, and bounded."""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from telemetry import as_version_1, graph, info, metas_of, rows_of
from typer.testing import CliRunner

from sundog.dataset import Recorder, check_base, read
from sundog.dataset.data_command import app
from sundog.dataset.files import MAX_LINE
from sundog.dataset.identity import config_json
from sundog.dataset.validate import validate

ENDINGS = ("csv", "meta.jsonl", "ir.jsonl")
COMMANDS = ("info", "validate", "join", "export", "show")


def write_run(base: str) -> None:
    with Recorder(base, info(), graph=graph()) as recorder:
        recorder.start({"B": 1}).end("ok", perf_ms=1.0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_pipe_in_place_of_a_file_is_refused(tmp_path: Path, ending: str) -> None:
    base = str(tmp_path / "b")
    write_run(base)
    os.unlink(f"{base}.{ending}")
    os.mkfifo(f"{base}.{ending}")
    for command in COMMANDS:
        shown = CliRunner().invoke(app, [command, base])
        assert shown.exit_code == 2
        assert "is not a regular file" in shown.output
    reason = check_base(base)
    assert reason is not None
    assert "is not a regular file" in reason
    with Recorder(base, info(), graph=graph(3)) as recorder:  # does not wait either
        recorder.start({"B": 1}).end("ok", perf_ms=1.0)


def circular() -> list[Any]:
    found: list[Any] = []
    found += [found, found]
    return found


def doubled() -> list[Any]:
    found: list[Any] = []
    for _ in range(60):
        found = [found, found]
    return found


@pytest.mark.parametrize("config", [circular(), doubled(), {"x": "y" * (1 << 21)}])
def test_a_config_that_json_cannot_hold_leaves_no_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, config: Any
) -> None:
    base = str(tmp_path / "b")
    with caplog.at_level(logging.WARNING, "sundog.dataset"), Recorder(base, info()) as recorder:
        recorder.start({"B": 0}).end("ok", perf_ms=1.0)
        recorder.start(config).end("ok", perf_ms=2.0)
        recorder.start({"B": 1}).end("ok", perf_ms=3.0)
    assert [r["config_index"] for r in rows_of(base)] == ["0", "0", "1", "1"]
    assert all(len(r["sample_id"]) == 64 for r in rows_of(base))
    assert sum("is not recorded" in r.getMessage() for r in caplog.records) == 1
    assert validate(read(base)).damage == []


def test_a_large_integer_is_kept(tmp_path: Path) -> None:
    base = str(tmp_path / "b")
    with Recorder(base, info()) as recorder:
        for n in (10**5000, 10**5000 + 1):
            recorder.start({"n": n}).end("ok", perf_ms=1.0)
    assert len({r["sample_id"] for r in rows_of(base)}) == 2
    assert int(json.loads(rows_of(base)[0]["config"])["n"], 16) == 10**5000
    assert validate(read(base)).damage == []


def test_configs_that_differ_are_not_merged() -> None:
    groups = [
        [{1: 2}, {"1": 2}, {1.0: 2}, {True: 2}, {"1 (int)": 2}, {"1 (int) (str)": 2}],
        [{"p": "/a/b/x.cu"}, {"p": "/a/c/x.cu"}, {"p": "x.cu"}],
        [{"/a/b/x": 1}, {"/a/c/x": 1}],
        [{"n": 1}, {"n": True}, {"n": 1.0}, {"n": "1"}],
    ]
    for group in groups:
        assert len({config_json(config) for config in group}) == len(group), group
    assert config_json({"p": "/a/b/x.cu"}).count("/") == 0  # and no folder is in the record
    assert config_json({"B": 1, "A": [1, None]}) == '{"A":[1,null],"B":1}'


@pytest.mark.parametrize("value", [10**19, -(10**19), True, "x", 1.5, [1], object()])
def test_a_generation_that_is_no_integer_is_left_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    base = str(tmp_path / "b")
    with caplog.at_level(logging.WARNING, "sundog.dataset"), Recorder(base, info()) as recorder:
        recorder.start({"B": 1}, generation=value).end("ok", perf_ms=1.0)
    assert [r["generation"] for r in rows_of(base)] == ["", ""]
    assert len(caplog.records) == 1
    assert len(read(base).rows) == 2


@pytest.mark.parametrize("value", [0, 7, -1, 2**63 - 1, -(2**63), np.int32(5), None])
def test_what_the_writer_takes_the_reader_keeps(tmp_path: Path, value: Any) -> None:
    base = str(tmp_path / "b")
    with Recorder(base, info()) as recorder:
        recorder.start({"B": 1}, generation=value).end("ok", perf_ms=1.0)
    data = read(base)
    assert data.rows.generation.dropna().tolist() == ([] if value is None else [value, value])
    assert validate(data).damage == []


@pytest.mark.parametrize("time", [1e-12, 5e-324, 1e300, 1.7e308, 0.0, 123.456, 1e-3])
def test_extreme_times_are_kept(tmp_path: Path, time: float) -> None:
    base = str(tmp_path / "b")
    with Recorder(base, info()) as recorder:
        recorder.start({"B": 1}).end("ok", perf_ms=time, samples=[time])
    data = read(base)
    assert data.rows.perf_ms.dropna().tolist() == [time]
    assert data.rows.min_ms.dropna().tolist() == [time]
    assert validate(data).damage == []


@pytest.mark.parametrize("time", [10**400, -1.0, float("inf"), float("nan"), "x", [], None])
def test_a_time_that_is_none_keeps_its_row(tmp_path: Path, time: Any) -> None:
    base = str(tmp_path / "b")
    with Recorder(base, info()) as recorder:
        recorder.start({"B": 1}).end("ok", perf_ms=time, ir_id=[None], metrics=circular())
    row = rows_of(base)[1]
    assert (row["status"], row["perf_ms"]) == ("error", "")
    assert row["error"].startswith("ok without a time")
    assert validate(read(base)).damage == []


def test_a_run_that_json_cannot_hold_has_rows_without_metadata(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from dataclasses import replace

    bad = [
        replace(info(), world=10**30),
        replace(info(), settings={"x": float("nan")}),
        replace(info(), kernel_source=[{"name": 7}]),
        replace(info(), hardware=circular()),  # type: ignore[arg-type]
    ]
    for number, each in enumerate(bad):
        base = str(tmp_path / f"b{number}")
        with caplog.at_level(logging.WARNING, "sundog.dataset"), Recorder(base, each) as recorder:
            recorder.start({"B": 1}).end("ok", perf_ms=1.0)
        assert len(caplog.records) == number + 1
        data = read(base)
        assert (len(data.rows), len(data.runs)) == (2, 0)
        assert validate(data).damage == []


# VmHWM, not ru_maxrss: a child's ru_maxrss begins at what its parent had.
LONG = """
import sys
from sundog.dataset import read
from sundog.dataset.validate import validate
data = read(sys.argv[1])
print([(d.line, d.text) for d in validate(data).damage], len(data.rows), len(data.runs))
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(int(peak.split()[1]) >> 10)
"""


@pytest.mark.parametrize("ended", [True, False])
def test_a_long_line_takes_bounded_memory(tmp_path: Path, ended: bool) -> None:
    """Sparse files, each with a line of zeros that is longer than any that is read."""
    base = str(tmp_path / "b")
    write_run(base)
    as_version_1(base)
    for ending in ENDINGS:
        with open(f"{base}.{ending}", "r+b") as file:
            lines = len(file.readlines())
            file.truncate(file.tell() + 4 * MAX_LINE)
            file.seek(0, os.SEEK_END)
            file.write(b"\n" * ended)
    done = subprocess.run(
        [sys.executable, "-c", LONG, base], capture_output=True, text=True, check=True
    )
    found, peak = done.stdout.splitlines()
    text = f"a line of more than {MAX_LINE} bytes" if ended else "the last line is torn after 2684"
    assert found.count(text) == 3
    assert f"({lines + 1}, '{text}" in found
    assert found.endswith(" 2 1")
    assert int(peak) < 600  # MB; pandas and pyarrow alone take 150


def test_export_to_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    base, out = str(tmp_path / "b"), tmp_path / "x"
    with Recorder(base, info(), graph=graph()) as recorder:
        for block in range(300):
            recorder.start({"B": block}).end("ok", perf_ms=1.0 + block)
    for command, name in (("export", "x.parquet"), ("join", "x.csv"), ("show", None)):
        target = str(out) if command != "join" else f"{out}.csv"
        if name is not None:
            (tmp_path / name).write_bytes(b"old")
        before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
        # Room for 2 KB: what a full disk does, in the middle of the file.
        code = (
            "import resource, signal, sys\n"
            "sys.dont_write_bytecode = True\n"  # cut off, it would end every later import
            "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
            "from sundog.dataset.data_command import app\n"
            f"resource.setrlimit(resource.RLIMIT_FSIZE, (2000, {resource.RLIM_INFINITY}))\n"
            f"app([{command!r}, {base!r}, '--out', {target!r}])\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 2, done.stderr
        assert "cannot be written: " in done.stderr
        assert "Traceback" not in done.stderr
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_old_and_new_lines_in_one_file(tmp_path: Path) -> None:
    """A base of the first version goes on in the new one."""
    base = str(tmp_path / "b")
    write_run(base)
    as_version_1(base)
    assert {m["schema_version"] for m in metas_of(base)} == {1}
    with Recorder(base, info("second"), graph=graph(5)) as recorder:
        recorder.start({"B": 1}).end("ok", perf_ms=1.0)
    data = read(base)
    assert validate(data).damage == []
    assert [m["schema_version"] for m in metas_of(base)] == [1, 1, 2, 2]
    for n in (2, 5):
        assert data.graph(graph(n)["ir_id"]).number_of_nodes() == n
