"""`python -m benchmarks interleavings`: every interleaving of the collectives, up to a time.

Two ranks, two programs, two calls of each, as `sundog check OP --exhaustive` does.
"""

from __future__ import annotations

import contextlib
import io

from rich.console import Console
from rich.progress import track

from sundog.ops.op import OPS
from sundog.tools.check.exhaustive import Coverage, check_all, small_calls

from .result_files import Figures

RANKS = 2


def main(seconds: float, json_path: str) -> bool:
    """Print a table, and what was found; say whether nothing was."""
    collectives = [name for name, module in OPS.items() if ".collectives." in module]
    console = Console(stderr=True)
    coverages = {name: _cover(name, seconds) for name in track(collectives, console=console)}
    rows = [_row(name, coverage) for name, coverage in coverages.items()]
    text = (
        f"{RANKS} ranks, 2 programs each, 2 calls back to back, at most {seconds:.0f} s for each "
        "op. The share is that of the decisions that are known when the time ends."
    )
    head = ["op", "inequivalent interleavings", "cut short as equivalent", "share", "s"]
    Figures("Every interleaving of the collectives", text, head, rows).show(json_path, on_cpu=True)
    found = [str(each.report) for each in coverages.values() if each.report.findings]
    print("\n".join(found))
    return not found


def _cover(name: str, seconds: float) -> Coverage:
    with contextlib.redirect_stdout(io.StringIO()):
        return check_all(small_calls(name, RANKS)[name], RANKS, seconds=seconds)


def _row(name: str, coverage: Coverage) -> list[str]:
    share = "all" if coverage.is_complete else f"{coverage.share:.2%}"
    numbers = f"{coverage.runs:,}", f"{coverage.redundant:,}"
    return [name, *numbers, share, f"{coverage.seconds:.0f}"]
