"""RMARaceBench's OpenSHMEM programs: in C, each with the two lines of its race or without one.

Each becomes a kernel that calls our stand-ins for SHMEM: a process is a rank, and an OpenMP thread
a program. The checker must find the race between these two lines, or none at all.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from sundog.checker.findings import FoundAccess
from sundog.tools.check.schedules import CANNOT_INTERPRET, check

from ..litmus_kernels import load_main
from .c_programs import read_program
from .omp_pragmas import THREADS
from .places import Slots
from .shmem_threads import Walker
from .verdicts import Case

SUITE = "RMARaceBench OpenSHMEM"
SCHEDULES = 6
SAME_WIDTH = (
    "OpenSHMEM promises nothing for atomics of two types on one word; on GPUs, those of one width "
    "are atomic to each other, and a set is an exchange of bits"
)
KNOWN = {
    "001-shmem-atomic-different-ctx-remote-yes": (
        "the contexts belong to two teams, between which OpenSHMEM promises no atomicity; on GPUs, "
        "a context has no atomicity of its own"
    ),
    "006-shmem-atomic-double-long-remote-yes": SAME_WIDTH,
    "008-shmem-atomic-int-float-remote-yes": SAME_WIDTH,
    "009-shmem-atomic-int-float-sameorigin-remote-yes": SAME_WIDTH,
}
HEAD = """import triton
import triton.language as tl

from benchmarks.suites.shmem_calls import *


@triton.jit
def wide(pointer):
    return pointer.to(tl.pointer_type(tl.int64), bitcast=True)


@triton.jit
def kernel(variables):
    me, thread = my_pe(), tl.program_id(0)
"""


def cases(checkout: Path) -> Iterator[Case]:
    """Yield every OpenSHMEM program of a checkout."""
    for path in sorted((checkout / "SHMEM").glob("*/*.c")):
        text = path.read_text()
        label = json.loads(re.search(r"RACE LABELS BEGIN\s*/\*(.*?)\*/", text, re.S)[1])  # type: ignore[index]
        pair = sorted(int(each.split("@")[1]) for each in label.get("RACE_PAIR", []))
        expected = _race(pair) if pair else "no race"
        find = partial(_find, text, label["NPROCS"], pair)
        yield Case(
            SUITE, f"{path.parent.name}/{path.name}", expected, find, KNOWN.get(path.stem, "")
        )


def _race(lines: Any) -> str:
    return "race between lines {} and {}".format(*lines)


def kernel_of(text: str, processes: int) -> tuple[str, dict[int, int]]:
    """Write a program as a module with `main(world)`; say which line of C each line is from."""
    constants: dict[str, Any] = {}
    functions, slots = read_program(text, constants), Slots()
    threads = THREADS if "#pragma omp parallel" in text else 1
    walked = {
        (process, thread): Walker(process, processes, thread, functions, constants, slots).run()
        for process in range(processes)
        for thread in range(threads)
    }
    lines = [*HEAD.splitlines(), *_names(slots)]
    origin: dict[int, int] = {}
    for (process, thread), done in walked.items():
        lines.append(f"    if (me == {process}) & (thread == {thread}):")
        for number, texts in [*done, (0, "pass")]:
            for each in texts.split("\n"):
                lines.append(f"        {each}")
                origin[len(lines)] = number
    words = sum(slots.sizes.values()) + 1
    lines += ["", "", "def main(world):", f"    kernel[({threads},)](prepare(world, {words}))"]
    return "\n".join(lines) + "\n", origin


def _names(slots: Slots) -> Iterator[str]:
    yield "    sent = variables.to(tl.pointer_type(tl.int32), bitcast=True)"
    at = 1
    for name, size in slots.sizes.items():
        yield f"    {name} = (variables + {at}).to(tl.pointer_type(tl.int32), bitcast=True)"
        at += size


def _find(text: str, processes: int, pair: list[int]) -> str:
    source, origin = kernel_of(text, processes)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rma_case.py"
        main = load_main(path, source)
        report = check(main, processes, SCHEDULES, num_sms=THREADS)
    for finding in report.findings:
        if finding.rule == CANNOT_INTERPRET or finding.kind == "error":
            raise ValueError(f"the simulator does not run it: {finding.why.splitlines()[0]}")
    found = sorted(
        {
            tuple(sorted(_line(side, origin) for side in (f.first, f.second)))
            for f in report.findings
            if f.kind == "race"
        }
    )
    if tuple(pair) in found:
        return _race(pair)
    others = sorted({f.kind for f in report.findings if f.kind != "race"})
    return "; ".join([*map(_race, found), *others]) or "no race"


def _line(side: FoundAccess | None, origin: dict[int, int]) -> int:
    """Return the line of C: that of the kernel's own frame, not of what it calls."""
    assert side is not None
    lines = [re.search(r"rma_case\.py:(\d+)", at) for at in side.stack]
    return next((origin.get(int(found[1]), 0) for found in lines if found), 0)
