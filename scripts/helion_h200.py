"""Tune Helion kernels at several shapes on one GPU, record the runs, and check the record.

    python scripts/helion_h200.py --wheels WHEELS --out OUT     tune for 560 s, check, print a table
    python scripts/helion_h200.py --check OUT                   check only: needs no GPU
    python scripts/helion_h200.py --check OUT --json FILE --data data/h200

The last command keeps the table for docs/measured.md and copies the record into a folder;
`python -m benchmarks.learn pack-helion` makes a shard of the dataset from it. WHEELS is a folder of
wheels, or of what was unpacked from them, that the GPU machine lacks: helion, filecheck, greenlet,
and packaging and psutil where they are missing. Each case is a process of its own. The next one
imports and binds while the last one tunes, and tunes when that has ended: times are measured alone.
A case that dies, or is not done when its share of --total is over, costs no other, and its rows are
kept. Reading the files needs pandas and pyarrow: where these are missing, take OUT to a machine
that has them and --check it there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Case:
    """A kernel and its arguments' shapes; `weight` is its part of the time."""

    name: str
    shapes: list[tuple[int, ...]]
    weight: float


CASES = (
    Case("attention", [(4, 32, 1024, 64)] * 3, 1.5),
    Case("matmul", [(4096, 4096), (4096, 4096)], 1),
    Case("softmax", [(8192, 4096)], 1),
    Case("attention", [(2, 16, 4096, 128)] * 3, 1.5),
    Case("matmul", [(512, 8192), (8192, 3584)], 1),
    Case("softmax", [(2048, 16384)], 1),
    Case("matmul", [(8192, 1024), (1024, 8192)], 1),
    Case("add", [(8192, 8192)] * 2, 1),
)
Work = Callable[[Case, Path], Callable[[int], None]]  # prepares, and returns the search
LAST_CHECK_S = 6.0  # of a case's share: comparing the result, rebuilding the IR
GRACE_S = 10.0  # after its share, for what Helion does not interrupt; then it is killed
TEXT = """\
Helion {helion} tunes {cases} cases with quick effort, {budget} s each; our one line is
`autotuner_fn=record_autotuning(base)`. It left {rows} rows, {runs} runs and {graphs} graphs, in
which `sundog data validate` finds nothing wrong: they are `data/h200/helion`. "failed" are configs
that Triton could not compile or that need more shared memory than there is. Helion times in the
process that tunes, which leaves one median per config and more configs than its worker process
does in this time."""


def main() -> int:
    options = _parse()
    sys.path[:0] = [os.fspath(ROOT), os.fspath(ROOT / "tests" / "dataset")]
    if options.check is not None:
        return check(options)
    base = options.out / "helion"
    with tempfile.TemporaryDirectory() as cache:
        _add_wheels(options.wheels, options.out, Path(cache))
        _let_helion_import()
        for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "HELION_CACHE_DIR"):
            os.environ.setdefault(name, os.path.join(cache, name.lower()))
        begin = time.monotonic()
        ends = run_all(CASES, base, options.total)
    print(f"{len(CASES)} cases in {time.monotonic() - begin:.0f} s", flush=True)
    for case, end in zip(CASES, ends, strict=True):
        print(f"{end:8} {case.name} {case.shapes}")
    return report(base) or "died" in ends


def check(options: argparse.Namespace) -> int:
    base = options.check / "helion"
    status = report(base)
    if status == 0 and options.json is not None:
        write(base, options.json, options.commit)
    if status == 0 and options.data is not None:
        for ending in ("csv", "meta.jsonl", "ir.jsonl"):
            shutil.copy(f"{base}.{ending}", options.data / f"helion.{ending}")
    return status


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--wheels", type=Path, help="wheels, or a folder of unpacked ones")
    parser.add_argument("--out", type=Path, default=Path("helion_run"), help="where to write")
    parser.add_argument("--total", type=int, default=560, help="seconds for all cases")
    parser.add_argument("--check", type=Path, metavar="OUT", help="only check what is there")
    parser.add_argument("--json", type=Path, help="with --check: a table for docs/measured.md")
    parser.add_argument(
        "--data", type=Path, help="with --check: a folder that the base is copied to"
    )
    parser.add_argument("--commit", default="unknown", help="that the run was made with")
    return parser.parse_args()


def run_all(cases: Sequence[Case], base: Path, total: float, work: Work | None = None) -> list[str]:
    """Run every case in its share of the time; return how each ended: done, cut or died."""
    end = time.monotonic() + total
    ends = []
    following: Child | None = Child(cases[0], base, work or tune)
    for number, case in enumerate(cases):
        child = following
        assert child is not None
        child.wait_until_ready(end - time.monotonic())
        following = (
            Child(cases[number + 1], base, work or tune) if number + 1 < len(cases) else None
        )
        left = end - time.monotonic()
        share = left * case.weight / sum(each.weight for each in cases[number:])
        ends.append(child.finish(share))
        print(
            f"{time.monotonic() - end + total:6.0f} s {ends[-1]} {case.name} {case.shapes}",
            flush=True,
        )
    return ends


class Child:
    """A process that prepares one case, waits for its turn, and tunes."""

    def __init__(self, case: Case, base: Path, work: Work) -> None:
        # Helion initialises CUDA when it is imported, and CUDA does not survive fork().
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_child, args=(work, case, base, theirs))
        self._process.start()
        theirs.close()

    def wait_until_ready(self, seconds: float) -> None:
        self._pipe.poll(max(seconds, 0))

    def finish(self, share: float) -> str:
        """Let it tune for its share of the time, and end it some time after that."""
        with suppress(OSError):  # it died while it prepared
            self._pipe.send(max(int(share - LAST_CHECK_S), 5))
        self._process.join(share + GRACE_S)
        late = self._process.is_alive()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)  # with the compilers it started
        self._process.kill()
        self._process.join()
        return "cut" if late else "done" if self._process.exitcode == 0 else "died"


def _child(work: Work, case: Case, base: Path, pipe: Connection) -> None:
    os.setpgid(0, 0)
    search = work(case, base)
    pipe.send("ready")
    search(pipe.recv())


def _add_wheels(wheels: Path | None, out: Path, cache: Path) -> None:
    """Put the wheels on the path of this process and of its children."""
    out.mkdir(parents=True, exist_ok=True)
    if wheels is None:
        return
    folder = wheels
    if list(wheels.glob("*.whl")):
        folder = cache / "site"
        for wheel in sorted(wheels.glob("*.whl")):
            zipfile.ZipFile(wheel).extractall(folder)
    # Last: what the machine has itself wins over what was carried.
    sys.path.append(os.fspath(folder.resolve()))


def _let_helion_import() -> None:
    """Add the class of errors that helion 1.5.1 imports and torch 2.11 does not have yet."""
    compat: Any = importlib.import_module("torch._inductor.runtime.triton_compat")
    if not hasattr(compat, "IntelGPUError"):
        compat.IntelGPUError = type("IntelGPUError", (Exception,), {})


def tune(case: Case, base: Path) -> Callable[[int], None]:
    """Import and bind, and return the search: as users do it, with one line of ours, the hook."""
    import helion
    import helion_kernels
    import torch

    from sundog.dataset.helion import record_autotuning

    def make(budget: int) -> Any:
        return helion.kernel(
            getattr(helion_kernels, case.name).fn,
            static_shapes=True,
            autotune_effort="quick",
            autotune_budget_seconds=budget,
            autotune_benchmark_subprocess=False,
            autotune_progress_bar=False,
            autotuner_fn=record_autotuning(base),
        )

    torch.manual_seed(0)
    args = tuple(torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in case.shapes)
    _check_ir(make(1), args)

    def search(budget: int) -> None:
        kernel = make(budget)
        config = kernel.autotune(args)
        wanted = _reference(case.name, args, torch)
        torch.testing.assert_close(kernel(*args), wanted, atol=1e-1, rtol=1e-2)
        print(f"{case.name} {case.shapes}: {config}", flush=True)

    return search


def _reference(name: str, args: tuple[Any, ...], torch: Any) -> Any:
    functions = {
        "add": torch.add,
        "matmul": torch.matmul,
        "softmax": lambda x: torch.softmax(x, dim=1),
        "attention": torch.nn.functional.scaled_dot_product_attention,
    }
    return functions[name](*args)


def _check_ir(kernel: Any, args: tuple[Any, ...]) -> None:
    """Check that the record of the kernel on this machine gives its device IR back."""
    from sundog.dataset.helion import describe
    from sundog.dataset.helion.device_rebuild import differences

    bound = kernel.bind(args)
    found = describe(bound, args)
    record = None if found is None else found[1]
    assert record is not None, "no IR record"
    wrong = differences(bound.host_function.device_ir, record, env=bound.env)
    assert wrong == [], wrong[:3]


def report(base: Path) -> int:
    """Read and validate the three files; 1 if anything is wrong. The table comes last."""
    try:
        from sundog.dataset.reader import read
        from sundog.dataset.validate import validate

        data = read(base)
    except ImportError as error:
        print(f"not checked here ({error}); on another machine: --check {base.parent}")
        return 0
    damage = validate(data).damage
    for item in damage:
        print(item)
    print(f"{base}: {len(data.rows)} rows, {len(data.graphs)} graphs, {len(damage)} damaged")
    print(
        f"{'kernel':10} {'configs':>8} {'ok':>5} {'failed':>7} {'again':>6} {'samples':>8} "
        f"{'best ms':>9} {'seconds':>8} end  hardware"
    )
    for run in data.runs.itertuples():
        print(_line(run, data.rows[data.rows.session == run.session]))
    timed = data.rows[data.rows.status == "ok"].session.nunique()
    return 1 if damage or timed < len(CASES) else 0


def _line(run: Any, rows: Any) -> str:
    ended = rows[rows.status != "started"]
    ok = ended[ended.status == "ok"]
    counts = (rows.config_index.nunique(), (ok.repeat == 0).sum(), (ended.status != "ok").sum())
    again, samples = (ended.repeat > 0).sum(), ok.num_samples.fillna(0).sum()
    seconds = run.seconds if run.ended else rows.timestamp_s.max()
    return (
        f"{run.kernel_name:10} {counts[0]:8} {counts[1]:5} {counts[2]:7} {again:6} {samples:8.0f} "
        f"{ok.perf_ms.min():9.4f} {seconds:8.1f} {'' if run.ended else 'cut':4} {run.hardware_name}"
    )


def write(base: Path, path: Path, commit: str) -> None:
    """Write the table of a run that is well, as docs/measured.md shows it."""
    from sundog.dataset.reader import read

    data = read(base)
    runs = list(data.runs.itertuples())
    first = runs[0]
    budgets = [int(run.settings["autotune_budget_seconds"]) for run in runs]
    machine = {
        **{name: first.versions[name] for name in ("torch", "triton", "helion", "python")},
        "gpu": first.hardware_name,
        "commit": commit,
        "date": str(first.started_at),
        "command": "python3 scripts/helion_h200.py --wheels WHEELS --out OUT",
    }
    content = {
        "kind": "table",
        "title": "A Helion tuning run, recorded",
        "text": TEXT.format(
            helion=first.versions["helion"],
            budget=f"{min(budgets)} to {max(budgets)}",
            cases=len(runs),
            rows=len(data.rows),
            runs=len(runs),
            graphs=len(data.graphs),
        ),
        "machine": machine,
        "head": ["kernel", "arguments", "configs", "ok", "failed", "timings", "best", "seconds"],
        "rows": [_cells(run, data.rows[data.rows.session == run.session]) for run in runs],
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def _cells(run: Any, rows: Any) -> list[str]:
    tensors = [each for each in run.arguments if each["kind"] == "tensor"]
    shapes = ["x".join(map(str, each["shape"])) for each in tensors]
    _, configs, ok, failed, _, timings, best, seconds, *_ = _line(run, rows).split()
    seconds += "" if run.ended else ", cut"
    shown = f"{' and '.join(shapes)} {tensors[0]['dtype'].removeprefix('torch.')}"
    return [run.kernel_name, shown, configs, ok, failed, timings, f"{best} ms", seconds]


if __name__ == "__mp_main__":  # Helion's worker processes start here, before they import helion
    _let_helion_import()
if __name__ == "__main__":
    sys.exit(main())
