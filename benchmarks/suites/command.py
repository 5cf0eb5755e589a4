"""`python -m benchmarks suites`: run the suites whose checkouts are given."""

from __future__ import annotations

from pathlib import Path

from . import alloy, dat3m, gsan, rmaracebench
from .verdicts import judge, show

IMPORTERS = {
    "dat3m": dat3m.cases,
    "dat3m_kernels": dat3m.kernel_cases,
    "alloy": alloy.cases,
    "gsan": gsan.cases,
    "rmaracebench": rmaracebench.cases,
}


def run(checkouts: dict[str, Path], path: str) -> bool:
    """Judge every case; say whether each agrees, has a reason or is not expressible."""
    cases = {name: list(IMPORTERS[name](where)) for name, where in checkouts.items()}
    if empty := [name for name, given in cases.items() if not given]:
        raise ValueError(f"{', '.join(empty)}: no case in this checkout. Is it whole?")
    found = [judge(case) for given in cases.values() for case in given]
    show(found, path)
    return not any(verdict.kind == "differs" for verdict in found)
