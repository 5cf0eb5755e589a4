"""Tune four Helion kernels at several shapes on one GPU, record the runs, and check the record.

    python scripts/helion_h200.py --wheels WHEELS --out OUT     tune for 330 s, check, print a table
    python scripts/helion_h200.py --check OUT                   check only: needs no GPU
    python scripts/helion_h200.py --check OUT --json FILE --data data/h200

The last command keeps the table for docs/measured.md and copies the rows into the dataset. WHEELS
is a folder of wheels, or of what was unpacked from them, that the GPU machine lacks: helion,
filecheck, greenlet, and packaging and psutil where they are missing. Each case is a process of its
own, so one that dies costs no other; all share --total seconds. Reading the files needs pandas and
pyarrow: where these are missing, take OUT to a machine that has them and --check it there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CASES: tuple[tuple[str, list[tuple[int, ...]]], ...] = (
    ("attention", [(4, 32, 1024, 64)] * 3),
    ("attention", [(2, 16, 4096, 128)] * 3),
    ("matmul", [(4096, 4096), (4096, 4096)]),
    ("matmul", [(8192, 1024), (1024, 8192)]),
    ("matmul", [(512, 8192), (8192, 3584)]),
    ("softmax", [(8192, 4096)]),
    ("softmax", [(2048, 16384)]),
    ("add", [(8192, 8192)] * 2),
    ("add", [(1024, 4096)] * 2),
)
SPARE = 14  # seconds of a case's share for imports, binding, the baseline and the last check
TEXT = """\
Helion {helion} tunes {cases} cases with quick effort, about {budget} s each; our one line is
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
        failed = [
            case for number, case in enumerate(CASES) if not run(number, base, begin, options)
        ]
    print(f"tuned {len(CASES) - len(failed)} cases in {time.monotonic() - begin:.0f} s", flush=True)
    for name, shapes in failed:
        print(f"failed: {name} {shapes}")
    return report(base) or bool(failed)


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
    parser.add_argument("--total", type=int, default=330, help="seconds for all cases")
    parser.add_argument("--check", type=Path, metavar="OUT", help="only check what is there")
    parser.add_argument("--json", type=Path, help="with --check: a table for docs/measured.md")
    parser.add_argument(
        "--data", type=Path, help="with --check: a folder that the base is copied to"
    )
    parser.add_argument("--commit", default="unknown", help="that the run was made with")
    return parser.parse_args()


def run(number: int, base: Path, begin: float, options: argparse.Namespace) -> bool:
    """Tune one case in a child, in an equal part of the time left; False if it died or failed."""
    name, shapes = CASES[number]
    share = (begin + options.total - time.monotonic()) / (len(CASES) - number)
    budget = max(int(share) - SPARE, 5)
    # Helion initialises CUDA when it is imported, and CUDA does not survive fork().
    child = multiprocessing.get_context("spawn").Process(
        target=tune, args=(name, shapes, base, budget)
    )
    child.start()
    child.join(share + SPARE)
    if child.is_alive():
        child.kill()
        child.join()
    return child.exitcode == 0


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


def tune(name: str, shapes: list[tuple[int, ...]], base: Path, budget: int) -> None:
    """Tune as a user does: the only line of ours is the hook."""
    import helion
    import helion_kernels
    import torch

    from sundog.dataset.helion import record_autotuning

    kernel = helion.kernel(
        getattr(helion_kernels, name).fn,
        static_shapes=True,
        autotune_effort="quick",
        autotune_budget_seconds=budget,
        autotune_benchmark_subprocess=False,
        autotune_progress_bar=False,
        autotuner_fn=record_autotuning(base),
    )
    torch.manual_seed(0)
    args = tuple(torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes)
    config = kernel.autotune(args)
    torch.testing.assert_close(kernel(*args), _reference(name, args, torch), atol=1e-1, rtol=1e-2)
    _check_ir(kernel, args)
    print(f"{name} {shapes}: {config}", flush=True)


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
    """Reads and validates the three files; 1 if anything is wrong. The table comes last."""
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
        f"{'best ms':>9} {'seconds':>8}  hardware"
    )
    for run in data.runs.itertuples():
        print(_line(run, data.rows[data.rows.session == run.session]))
    return 1 if damage or len(data.runs) < len(CASES) else 0


def _line(run: Any, rows: Any) -> str:
    ended = rows[rows.status != "started"]
    ok = ended[ended.status == "ok"]
    counts = (rows.config_index.nunique(), (ok.repeat == 0).sum(), (ended.status != "ok").sum())
    again, samples = (ended.repeat > 0).sum(), ok.num_samples.fillna(0).sum()
    return (
        f"{run.kernel_name:10} {counts[0]:8} {counts[1]:5} {counts[2]:7} {again:6} {samples:8.0f} "
        f"{run.best_perf_ms:9.4f} {run.seconds:8.1f}  {run.hardware_name}"
    )


def write(base: Path, path: Path, commit: str) -> None:
    """Write the table of a run that is well, as docs/measured.md shows it."""
    from sundog.dataset.reader import read

    data = read(base)
    runs = list(data.runs.itertuples())
    first = runs[0]
    budget = first.settings["autotune_budget_seconds"]
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
            budget=budget,
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
    shown = f"{' and '.join(shapes)} {tensors[0]['dtype'].removeprefix('torch.')}"
    return [run.kernel_name, shown, configs, ok, failed, timings, f"{best} ms", seconds]


if __name__ == "__mp_main__":  # Helion's worker processes start here, before they import helion
    _let_helion_import()
if __name__ == "__main__":
    sys.exit(main())
