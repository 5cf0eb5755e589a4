"""torch's own tests of functional collectives and DTensor on the process group "sundog".

    python benchmarks/torch_own_tests.py CHECKOUT [--group torch] [--json FILE] NAMES

CHECKOUT is pytorch's repository, at a commit near the version that is installed; NAMES are files
below its test/distributed. The tests run unmodified. A test that asks for gloo gets "sundog", and
tests that run ranks as threads, on torch's group for threads, run them as processes. `--group
torch` leaves torch's groups in place: what fails there too does not fail because of sundog. torch's
test classes import expecttest. Tests on torch's LocalTensorMode, which has no group, are left out.
Processes are forked: each would read torch and the file again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.testing._internal import common_distributed as common

_PER_TEST = 240  # seconds
_REPLACED = ("gloo", "threaded", "cpu:gloo", None)
Process: Any = processes.get_context("fork").Process


def main() -> None:
    """Run each file in a process of its own, so that one that hangs costs only its time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--group", choices=("sundog", "torch"), default="sundog")
    parser.add_argument("--json", default="", help="where to write every test's outcome")
    parser.add_argument("--seconds", type=int, default=300, help="for one file")
    parser.add_argument("--only", default="", help="tests whose names have this text")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)  # where a file's go
    parser.add_argument("names", nargs="+")
    options = parser.parse_args()
    if options.one:
        run_file(options.checkout, options.names[0], options.group, options.one, options.only)
        return
    found: dict[str, Any] = {}
    for name in options.names:
        found[name] = _in_process(options, name)
        print(_row(name, found[name]), flush=True)
        if options.json:
            head = {"torch": torch.__version__, "group": options.group, "files": found}
            Path(options.json).write_text(json.dumps(head, indent=1) + "\n")


def _in_process(options: argparse.Namespace, name: str) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
        command = [sys.executable, __file__, str(options.checkout), "--group", options.group]
        command += ["--one", file.name, "--only", options.only, name]
        began, ended = time.monotonic(), True
        nowhere = subprocess.DEVNULL
        child = subprocess.Popen(command, stdout=nowhere, stderr=nowhere, start_new_session=True)
        try:
            child.wait(options.seconds)
        except subprocess.TimeoutExpired:
            ended = False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # its ranks too, which would go on without it
        child.wait()
        tests = [json.loads(line) for line in file]
    return {"ended": ended, "seconds": round(time.monotonic() - began), "tests": tests}


def _row(name: str, found: dict[str, Any]) -> str:
    outcomes = [test["outcome"] for test in found["tests"]]
    counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))
    return f"{name}: {counts}, {found['seconds']} s{'' if found['ended'] else ', cut'}"


# in the process of one file


def run_file(checkout: Path, name: str, group: str, outcomes: str, only: str = "") -> None:
    """Run a file's tests whose names have the text `only`; write a line of JSON after each."""
    common.TIMEOUT_DEFAULT = _PER_TEST
    continuous: Any = common.MultiProcContinuousTest  # its processes go on from test to test
    continuous.timeout = timedelta(seconds=_PER_TEST)
    case: Any = common.MultiProcessTestCase
    case._spawn_processes = lambda case: case._start_processes(Process)
    processes.set_start_method("fork")  # MultiProcContinuousTest would spawn, without "sundog"
    if group == "sundog":
        _put_sundog_in_place()
    path = checkout / "test/distributed" / name
    sys.path[:0] = [str(checkout / "test"), str(path.parent)]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    tests = unittest.defaultTestLoader.loadTestsFromModule(module)
    with open(outcomes, "w", buffering=1) as file:
        chosen = [test for test in _with_groups(tests) if only in test.id()]
        unittest.TestSuite(chosen).run(_Outcomes(file))


def _with_groups(tests: Any) -> Iterator[Any]:
    for each in tests:
        if isinstance(each, unittest.TestSuite):
            yield from _with_groups(each)
        elif "WithLocalTensor" not in type(each).__name__:
            yield each


class _Outcomes(unittest.TestResult):
    def __init__(self, file: Any) -> None:
        super().__init__()
        self._file = file

    def _note(self, test: Any, outcome: str, text: str = "") -> None:
        self._file.write(json.dumps({"test": test.id(), "outcome": outcome, "why": text}) + "\n")

    def addSuccess(self, test: Any) -> None:
        self._note(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:
        self._note(test, "skipped", reason)

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self._note(test, "skipped", "torch expects it to fail")

    def addUnexpectedSuccess(self, test: Any) -> None:
        self._note(test, "passed", "torch expects it to fail")

    def addFailure(self, test: Any, err: Any) -> None:
        self._note(test, "failed", str(err[1])[-2000:])

    def addError(self, test: Any, err: Any) -> None:
        self.addFailure(test, err)


def _put_sundog_in_place() -> None:
    from sundog.ops.op import OPS

    # Before the forks: each rank would import them again.
    for each in ("sundog.torch.process_group", "sundog.backends.shm", *OPS.values()):
        importlib.import_module(each)
    original: Any = dist.init_process_group

    def initialise(backend: Any = None, *given: Any, **options: Any) -> Any:
        return original("sundog" if backend in _REPLACED else backend, *given, **options)

    dist.init_process_group = dist.distributed_c10d.init_process_group = initialise
    case: Any = common.MultiThreadedTestCase
    case._spawn_threads, case._join_threads = _start_ranks, classmethod(_join_ranks)


# ranks as processes, where a test asks for threads


def _start_ranks(case: Any) -> None:
    case._said = said = processes.get_context("fork").SimpleQueue()
    name, size = case._current_test_name, case.world_size
    store = tempfile.NamedTemporaryFile(delete=False).name  # noqa: SIM115 -- the ranks' own
    kind = type(case)
    case.threads = [
        Process(target=_run_rank, args=(kind, name, rank, size, store, said))
        for rank in range(size)
    ]
    kind._latest = said
    for each in case.threads:
        each.start()


def _run_rank(kind: Any, name: str, rank: int, size: int, store: str, said: Any) -> None:
    try:
        if dist.is_initialized():  # a fake group, which an earlier test left in the parent
            dist.destroy_process_group()
        case = kind(name)
        case.rank = rank
        options: Any = {"rank": rank, "world_size": size, "store": dist.FileStore(store, size)}
        dist.init_process_group("threaded", **options)
        case.perThreadSetUp()
        getattr(case, name)()
        dist.barrier()  # nobody leaves while another one still talks to it
        dist.destroy_process_group()
        case.perThreadTearDown()
    except unittest.SkipTest as skip:
        said.put((rank, "skipped", str(skip)))
    except SystemExit as end:  # torch's own way to skip in a rank
        skips: dict[Any, str] = {
            each.exit_code: each.message for each in common.TEST_SKIPS.values()
        }
        said.put(
            (rank, "skipped" if end.code in skips else "failed", skips.get(end.code, str(end)))
        )
    except BaseException as error:
        said.put((rank, "failed", f"{type(error).__name__}: {error}"))


def _join_ranks(kind: Any, ranks: list[Any], fn: Any) -> None:
    end = time.monotonic() + _PER_TEST
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
    late = [rank for rank in ranks if rank.is_alive()]
    for rank in late:
        rank.kill()
    said = []
    while not kind._latest.empty():
        said.append(kind._latest.get())
    failed = [text for _, outcome, text in said if outcome == "failed"]
    if failed or late:
        raise AssertionError(failed[0] if failed else f"{len(late)} ranks after {_PER_TEST} s")
    if said:
        raise unittest.SkipTest(said[0][2])
    if any(rank.exitcode for rank in ranks):
        raise AssertionError(f"ranks ended with {[rank.exitcode for rank in ranks]}")


if __name__ == "__main__":
    main()
