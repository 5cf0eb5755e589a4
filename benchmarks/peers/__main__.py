"""`python -m benchmarks.peers NAME=CHECKOUT[@COMMIT] ...`: check other people's kernels."""

from __future__ import annotations

import datetime
import json
import lzma
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import triton
import typer

from ..result_files import read_result
from .case import Case, Repair, repaired
from .mutate import mutate_all
from .one import NAMES, cases
from .page import page

_SECONDS = 900  # of the clock for one case, beside other work; the goal is 60 of the processor


def main(
    checkouts: Annotated[list[str], typer.Argument(help="NAME=PATH[@COMMIT], or results as JSON")],
    json_path: Annotated[str, typer.Option("--json", help="write the results to this file")] = "",
    page_path: Annotated[str, typer.Option("--page", help="write the page to this file")] = "",
    mutate: Annotated[bool, typer.Option(help="try mutants of the kernels instead")] = False,
) -> None:
    """Run and check the kernels of these repositories, and try the repair of every finding."""
    results: list[dict[str, Any]] = []
    for each in checkouts:
        if each.endswith((".json", ".json.xz")):
            earlier: Any = read_result(Path(each))  # a list, where other files hold a table
            results += earlier
            continue
        name, _, place = each.partition("=")
        path, _, commit = place.partition("@")
        if name not in NAMES or not os.path.isdir(path):
            names = ", ".join(NAMES)
            raise typer.BadParameter(f"{each!r}: expected NAME=PATH, with NAME one of {names}")
        if mutate:
            results.append(mutate_all(name, path, commit))
            continue
        results += [_result(name, path, commit, n) for n in range(len(cases(name).CASES))]
    for result in results:
        result.setdefault("made", _made())
    if json_path:
        content = (json.dumps(results, indent=1) + "\n").encode()
        Path(json_path).write_bytes(lzma.compress(content) if json_path[-3:] == ".xz" else content)
    if page_path:
        Path(page_path).write_text(page(results))
    if any(map(_is_ours, results)):
        raise typer.Exit(1)


def _made() -> str:
    """Return when and with what this was made."""
    versions = f"torch {torch.__version__}, Triton {triton.__version__}"
    return f"{datetime.date.today()} on {os.cpu_count()} CPU cores, {versions}"


def _is_ours(result: dict[str, Any]) -> bool:
    """Return whether a failure is our fault: not if it has a finding, or their repair ends it."""
    if "mutants" in result:
        return bool(result["survived"])
    after = result["after repair"]
    mended = after is not None and not after["failures"]
    return bool(result["failures"]) and not result["findings"] and not mended


def _result(name: str, path: str, commit: str, number: int) -> dict[str, Any]:
    case: Case = cases(name).CASES[number]
    found = _run(name, path, number)
    bad = found["findings"] or found["failures"] or found["remarks"]
    after = None
    if case.repairs and bad:
        with repaired(path, cases(name).PACKAGE, case) as folder:
            after = _run(name, folder, number)
    shown = [f["rule"] for f in found["findings"]]
    print(f"{name} {case.kernel}: {shown or 'clean'}, {found['seconds']} s", *found["failures"])
    return {
        "repository": NAMES[name], "commit": commit, "kernel": case.kernel, "path": case.path,
        "world": case.world, "schedules": case.schedules, "note": case.note,
        "kernels": case.kernels, **found,
        "repairs": [_as_json(repair) for repair in case.repairs],
        "after repair": after,
    }  # fmt: skip


def _as_json(repair: Repair) -> dict[str, Any]:
    return {
        "rule": repair.rule,
        "why": repair.why,
        "changes": [str(each) for each in repair.changes],
    }


def _run(name: str, path: str, number: int) -> dict[str, Any]:
    """Run one case in a process of its own: repositories share names, and keep global state."""
    command = [sys.executable, "-m", f"{__package__}.one", name, path, str(number)]
    nothing: dict[str, Any] = {"findings": [], "remarks": [], "seconds": 0.0}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {**nothing, "failures": [f"no result within {_SECONDS} s"]}
    if done.returncode:
        return {**nothing, "failures": done.stderr.strip().splitlines()[-1:]}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    typer.run(main)
