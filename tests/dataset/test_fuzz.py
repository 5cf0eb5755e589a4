"""A short run of the fuzzer; `python -m benchmarks.fuzz_dataset` is the whole one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_damaged_files_end_no_command_in_a_traceback() -> None:
    command = [sys.executable, "-m", "benchmarks.fuzz_dataset", "--cases", "150"]
    done = subprocess.run(
        [*command, "--processes", "1"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.fspath(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("150 cases in ")
    assert ", 0 failures" in done.stdout
