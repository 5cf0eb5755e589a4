"""A campaign of injected faults: `python -m benchmarks.faults --backend shm --count 100`.

Every fault must be named on every other rank within the timeout plus 2 s, every process must end
with a non-zero exit status, and nothing may be left: no process, nothing in /dev/shm, no memory of
the GPU. Cases run in waves; each case is a session of processes of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .fault_process import lead, session_members, warm
from .fault_programs import CONTROL, KINDS, Case, control_cases, make_case
from .fault_verdicts import COLUMNS, Verdict, as_json, judge, line, rows_of

ON_GPU = ("virtual", "symm")
_TRIES = 3  # more, to come to the fault
_GPU_NOISE = 64  # MiB; what the driver keeps for itself


# running


def campaign(cases: list[Case], jobs: int, end: float, console: Console) -> list[Verdict]:
    """Run the cases in waves of `jobs` and judge each; no wave starts after `end`.

    A case that never struck runs again. That happens on a busy machine, where a healthy rank is
    late by more than the timeout.
    """
    verdicts: dict[Case, Verdict] = {}
    waiting = [(case, 0) for case in cases]
    while waiting and time.monotonic() < end:
        wave, waiting = waiting[:jobs], waiting[jobs:]
        for (case, tries), verdict in zip(wave, _wave([case for case, _ in wave]), strict=True):
            verdicts[case] = verdict
            if case.kind != CONTROL and not verdict.struck and tries < _TRIES:
                waiting.append((case, tries + 1))
            elif not (verdict.good or (case.kind == CONTROL and not any(verdict.statuses))):
                console.print(line(verdict), markup=False, highlight=False)
    return [verdicts[case] for case in cases if case in verdicts]


def _wave(cases: list[Case]) -> list[Verdict]:
    """Run some cases at the same time. Killed ranks get no MPS, which may not survive them."""
    backend = cases[0].backend
    before = _outside(backend)
    folder = tempfile.mkdtemp(prefix="sundog-faults-")  # no object that a fork removes at its exit
    places = [Path(folder) / str(number) for number in range(len(cases))]
    shares = backend in ON_GPU and not any(case.kind == "killed" for case in cases)
    with mps() if shares else nullcontext():
        leaders = [_start(case, place) for case, place in zip(cases, places, strict=True)]
        left = []
        for leader in leaders:
            os.waitpid(leader, 0)
            left.append(_end_session(leader))
    shared, memory = _left_outside(before, backend)
    verdicts = [
        judge(case, place, "; ".join(filter(None, (mine, memory))), shared)
        for case, place, mine in zip(cases, places, left, strict=True)
    ]
    shutil.rmtree(folder)
    return verdicts


def _start(case: Case, folder: Path) -> int:
    folder.mkdir()
    pid = os.fork()
    if pid == 0:
        try:
            lead(case, folder)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        os._exit(70)
    return pid


def _end_session(leader: int) -> str:
    """Say which processes are left after a moment, and end them."""
    deadline = time.monotonic() + 1
    while (members := session_members(leader)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in members:
        os.kill(pid, signal.SIGKILL)
    return f"{len(members)} processes left" if members else ""


def _outside(backend: str) -> tuple[set[str], int]:
    """Return what the machine holds: names in /dev/shm, MiB of the GPU."""
    names = set(os.listdir("/dev/shm"))
    return names, _gpu_memory() if backend in ON_GPU else 0


def _left_outside(before: tuple[set[str], int], backend: str) -> tuple[list[str], str]:
    """Return new names in /dev/shm, and a word about the GPU's memory if some is not back."""
    for attempt in range(20 if backend in ON_GPU else 1):  # the driver takes a moment
        names, used = _outside(backend)
        grown = used - before[1]
        if grown <= _GPU_NOISE:
            break
        time.sleep(0.1 * (attempt > 0))
    return sorted(names - before[0]), f"GPU memory: {grown:+} MiB" if grown > _GPU_NOISE else ""


def _gpu_memory() -> int:
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    return sum(int(line) for line in done.stdout.split())


@contextmanager
def mps() -> Iterator[None]:
    """Run the daemon that lets processes run at the same time on a GPU, if it is installed.

    Without it they take turns, and a wait that counts polls lasts longer than its timeout.
    """
    program = shutil.which("nvidia-cuda-mps-control")
    if program is None:
        yield
        return
    folder = tempfile.mkdtemp(prefix="sundog-mps-")
    known = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    os.environ |= known
    subprocess.run([program, "-d"], check=True, timeout=30)
    try:
        yield
    finally:
        subprocess.run([program], input="quit\n", text=True, timeout=30)
        for name in known:
            del os.environ[name]
        shutil.rmtree(folder, ignore_errors=True)


# showing


def _machine(backend: str) -> dict[str, str]:
    """Ask a forked process: in this one CUDA must not start, or its forks could not use it."""
    read, write = os.pipe()
    if os.fork() == 0:
        from .result_files import machine

        os.write(write, json.dumps(machine()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        known = json.loads(file.read())
    os.wait()
    words = [Path(word).name if word[:1] == "/" else word for word in sys.argv[1:]]
    known["command"] = " ".join(["python -m benchmarks.faults", *words])
    return {**known, "gpu": known["gpu"] or f"{os.cpu_count()} CPU cores"}


def main(
    backend: Annotated[str, typer.Option(help="sim, shm, virtual or symm")],
    count: Annotated[int, typer.Option(min=0, help="faults to inject")] = 100,
    seed: Annotated[int, typer.Option(help="of all random choices")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="cases at a time")] = 1,
    json_file: Annotated[str, typer.Option("--json", help="write every case to this file")] = "",
    only: Annotated[str, typer.Option(help="one kind of fault, or case numbers: 3,14")] = "",
    control: Annotated[bool, typer.Option(help="run programs without faults first")] = True,
    minutes: Annotated[float, typer.Option(help="start nothing after this time")] = 60.0,
) -> None:
    """Inject faults and count those that were named, in time, with nothing left."""
    if backend not in KINDS:
        raise typer.BadParameter(f"backend {backend!r}: expected one of {', '.join(KINDS)}")
    console = Console(width=160)
    warm(backend)
    begin = time.monotonic()
    cases = [make_case(number, seed, backend) for number in range(count)]
    if only:
        wanted = only.split(",")
        cases = [case for case in cases if case.kind == only or str(case.number) in wanted]
    controls = control_cases(backend) if control else []
    verdicts = _run(cases, controls, jobs, begin + 60 * minutes, console)
    if len(verdicts) < len(cases) + len(controls):
        missing = len(cases) + len(controls) - len(verdicts)
        console.print(f"{missing} cases did not run: {minutes:g} minutes were over")
    found = [as_json(verdict) for verdict in verdicts]
    seconds = time.monotonic() - begin
    _show(found, backend, seconds, console)
    if json_file:
        content = {"kind": "faults", "backend": backend, "seed": seed, "seconds": round(seconds, 1)}
        content |= {"machine": _machine(backend), "cases": found}
        Path(json_file).write_text(json.dumps(content, separators=(",", ":")) + "\n")
    bad = [v for v in verdicts if v.case.kind != CONTROL and not v.good]  # not struck: not good
    broken = [v for v in verdicts if v.case.kind == CONTROL and any(v.statuses)]
    raise typer.Exit(1 if bad or broken else 0)


def _run(
    cases: list[Case], controls: list[Case], jobs: int, end: float, console: Console
) -> list[Verdict]:
    """Run those without a fault, which fill Triton's cache, then the rest, killed ranks last."""
    apart = [case for case in cases if case.kind == "killed" and case.backend in ON_GPU]
    rest = [case for case in cases if case not in apart]
    verdicts = campaign(controls, 2 * jobs if jobs > 1 else 1, end, console)
    return verdicts + campaign(rest, jobs, end, console) + campaign(apart, 1, end, console)


def _show(found: list[dict[str, Any]], backend: str, seconds: float, console: Console) -> None:
    table = Table(*COLUMNS, title=f"Faults on {backend}, {seconds:.0f} s")
    for row in rows_of(found):
        table.add_row(*row)
    console.print(table)
    missed = sum(not case["struck"] and case["kind"] != CONTROL for case in found)
    if missed:
        console.print(f"{missed} cases ended before their fault, {_TRIES + 1} times each")
    controls = [case for case in found if case["kind"] == CONTROL]
    failed = [case for case in controls if any(case["statuses"])]
    console.print(f"{len(controls)} programs without a fault, {len(failed)} of them failed")


if __name__ == "__main__":
    typer.run(main)
