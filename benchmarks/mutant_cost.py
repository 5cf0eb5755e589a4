"""`python -m benchmarks mutants`: what `sundog check OP --mutate` costs, with its defaults."""

from __future__ import annotations

import contextlib
import io
import json
import re
import resource
import subprocess
import sys
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.progress import track

from sundog.ops.op import OPS
from sundog.tools._options import CheckOptions
from sundog.tools.check.check_command import run

from .result_files import Figures

RANKS, SCHEDULES, CORES, GOAL = 4, 50, 2, 240  # the command's defaults; the goal in seconds


@dataclass(frozen=True)
class Cost:
    """Seconds of the processor that one command took, and how it ended."""

    target: str
    status: int
    killed: str  # of how many
    alone: float  # in the first process: imports, the kernel's first schedules, its mutants made
    together: float  # in the forked ones, on all cores: other schedules, and the mutants

    @property
    def seconds(self) -> float:
        """Return how long it takes on idle cores: only the forked processes run side by side."""
        return self.alone + self.together / CORES


def main(json_path: str, targets: list[str]) -> None:
    """Print a table, the slowest first. With a path, also write it for docs/measured.md."""
    console = Console(stderr=True)
    shown = track(targets or [*OPS], "mutating", console=console, transient=True)
    costs = sorted((_measured(target) for target in shown), key=lambda c: -c.seconds)
    text = (
        f"`sundog check OP --mutate` with its defaults: {RANKS} ranks, {SCHEDULES} schedules. The "
        "kernel's first schedule runs in the first process, the others and the mutants in one for "
        "each core. Seconds of the processor, in the first process and in the others, and what "
        f"they make on {CORES} idle cores. Goal: at most {GOAL} s."
    )
    head = ["target", "mutants killed", "status", "first process", "others", f"on {CORES} cores"]
    rows = [
        [
            c.target,
            c.killed,
            str(c.status),
            *(f"{t:.0f} s" for t in (c.alone, c.together, c.seconds)),
        ]
        for c in costs
    ]
    Figures("What mutants cost", text, head, rows).show(json_path, on_cpu=True)


def _measured(target: str) -> Cost:
    """Run the command in a process of its own, so that it imports and compiles as a user's does."""
    words = [sys.executable, "-m", "benchmarks.mutant_cost", target]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return Cost(**json.loads(done.stdout))


def _cost(target: str) -> Cost:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        status = run(CheckOptions(target, RANKS, SCHEDULES, seed=0, mutate=True))
    found = re.search(r"(\d+ of \d+) mutants killed", printed.getvalue())
    seconds = []
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        seconds.append(used.ru_utime + used.ru_stime)
    return Cost(target, status, found[1] if found else "none", *seconds)


if __name__ == "__main__":
    print(json.dumps(asdict(_cost(sys.argv[1]))))
