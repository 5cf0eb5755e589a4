"""`python -m benchmarks checker`: what checking costs over simulation, in time and in memory."""

from __future__ import annotations

import contextlib
import io
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from sundog.backends.sim import simulate
from sundog.checker.checker import Checker
from sundog.machine.machine import Machine
from sundog.machine.schedule import from_token
from sundog.ops.op import OPS
from sundog.tools._subject import function_of
from sundog.tools.check.schedules import check, check_once

from .result_files import Figures

RANKS, REPEATS, HEAP = 4, 7, 16 << 20
RATIO_GOAL, SHADOW_GOAL, MINUTE = 1.6, 16, 60


def main(json_path: str) -> None:
    """Print a table. With a path, also write it for docs/measured.md. Needs the examples folder."""
    console = Console(stderr=True)
    targets = track(_targets(), "checking", console=console, transient=True)
    rows = [_row(name, function_of(name, RANKS)) for name in targets]
    seconds = _time(lambda: check(function_of("examples/all_gather.py", 8), 8, schedules=50))
    text = (
        f"The same function of {RANKS} ranks, plain and checked in turn, medians of {REPEATS}, "
        "in time of the processor. "
        f"Goals: at most {RATIO_GOAL} times the time, {SHADOW_GOAL} bytes of shadow per byte. "
        f"`examples/all_gather.py` on 8 ranks with 50 schedules took {seconds:.1f} s (goal: under "
        f"{MINUTE} s)."
    )
    head = ["target", "plain", "checked", "ratio", "shadow bytes per byte"]
    Figures("What checking costs", text, head, rows).show(json_path, on_cpu=True)


def _targets() -> list[str]:
    return [*OPS, *(str(path) for path in sorted(Path("examples").glob("*.py")))]


def _row(name: str, function: Callable[..., Any]) -> list[str]:
    plain, checked = [], []
    for seed in range(REPEATS + 1):
        token = f"random:{seed}"
        plain.append(_time(partial(_simulate, function, token)))
        checked.append(_time(partial(check_once, function, RANKS, token, heap_size=HEAP)))
    a, b = statistics.median(plain[1:]), statistics.median(checked[1:])  # the first warms up
    return [
        name,
        f"{1e3 * a:.0f} ms",
        f"{1e3 * b:.0f} ms",
        f"{b / a:.2f}",
        f"{_shadow(function):.1f}",
    ]


def _simulate(function: Callable[..., Any], token: str) -> Machine:
    machine = Machine(from_token(token), 16, expire=False)
    simulate(machine, function, RANKS, HEAP)
    return machine


def _shadow(function: Callable[..., Any]) -> float:
    """Return the bytes of shadow memory over the bytes that they stand for."""
    machine = Machine(from_token("random:0"), 16, expire=False)
    machine.checker = Checker(machine.memory)
    with contextlib.redirect_stdout(io.StringIO()):
        simulate(machine, function, RANKS, HEAP)
    shadows = list(machine.checker.shadows)
    return sum(s.numbers.nbytes for s in shadows) / sum(s.end - s.start for s in shadows)


def _time(run: Callable[[], Any]) -> float:
    """Return the processor's time, which other work on the machine changes little."""
    start = time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        run()
    return time.process_time() - start
