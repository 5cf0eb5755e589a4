"""Several processes on one base, forked or not: no line is lost, mixed or written twice."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from telemetry import graph, info

from sundog.dataset import Recorder, read
from sundog.dataset.files import AppendFile


def _write_many(base: str, worker: int, count: int) -> None:
    with Recorder(base, info(f"kernel{worker % 2}")) as recorder:
        for i in range(count):
            ir_id = recorder.add_graph(graph(2 + i % 7))
            trial = recorder.start({"worker": worker, "i": i, "pad": "x" * (i % 50) * 100})
            trial.end("ok", perf_ms=1.0 + i, ir_id=ir_id)


def test_several_processes_write_one_base(tmp_path: Path) -> None:
    from sundog.dataset.validate import validate

    base = str(tmp_path / "b")
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_write_many, args=(base, w, 100)) for w in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [w.exitcode for w in workers] == [0] * 4
    data = read(base)
    assert validate(data).damage == []
    assert (len(data.rows), len(data.runs), len(data.graphs)) == (800, 4, 7)
    assert data.rows.groupby("session", observed=True).size().tolist() == [200] * 4


def test_a_forked_child_waits_for_the_lock_of_its_parent(tmp_path: Path) -> None:
    file = AppendFile(str(tmp_path / "f"))
    with file.locked():
        child = os.fork()
        if child == 0:
            file.append("child\n")
            os._exit(0)
        time.sleep(0.3)
        assert (tmp_path / "f").read_text() == ""
    deadline = time.monotonic() + 10
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child waits for a lock that nobody holds")
        time.sleep(0.01)
    assert (tmp_path / "f").read_text() == "child\n"


def test_a_forked_child_may_go_on_with_the_file(tmp_path: Path) -> None:
    file = AppendFile(str(tmp_path / "f"), "head\n")
    file.append("parent\n")
    child = os.fork()
    if child == 0:
        for _ in range(200):
            file.append("child" * 2000 + "\n")
        os._exit(0)
    for _ in range(200):
        file.append("parent" * 2000 + "\n")
    assert os.waitpid(child, 0)[1] == 0
    lines = (tmp_path / "f").read_text().splitlines()
    assert lines[:2] == ["head", "parent"]
    assert len(lines) == 402
    assert set(lines[2:]) == {"child" * 2000, "parent" * 2000}
