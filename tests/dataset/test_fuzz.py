"""A short run of the fuzzer; `python -m benchmarks.fuzz_dataset` is the whole one."""

from __future__ import annotations

import os
from pathlib import Path

from support.scripts import python

ROOT = Path(__file__).parents[2]


def test_damaged_files_end_no_command_in_a_traceback() -> None:
    command = ["-m", "benchmarks.fuzz_dataset", "--cases", "150", "--processes", "1"]
    done = python(command, {**os.environ, "PYTHONPATH": os.fspath(ROOT)}, ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("150 cases in ")
    assert ", 0 failures" in done.stdout
