"""Check one case of one repository in a process of its own, and print the result as JSON."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

from sundog.checker.findings import Finding
from sundog.compat.cuda import provide
from sundog.compat.rank import as_rank
from sundog.tools.check.schedules import check

from .compiled import noted_launches, ordering

NAMES = {
    "kraken": "meta-pytorch/kraken",
    "kraken_tests": "meta-pytorch/kraken: its tests",
    "recipes": "yifuwang/symm-mem-recipes",
    "helion": "pytorch/helion",
    "flashinfer": "flashinfer-ai/flashinfer",
    "sglang": "sgl-project/sglang",
    "vllm": "vllm-project/vllm",
    "torchtitan": "pytorch/torchtitan",
    "torchcomms": "meta-pytorch/torchcomms",
    "iris": "ROCm/iris",
    "triton_distributed": "ByteDance-Seed/Triton-distributed",
}


def cases(name: str) -> Any:
    """Return the adapter of a repository."""
    if name not in NAMES:
        raise ValueError(f"{name!r}: expected one of {', '.join(NAMES)}")
    return importlib.import_module(f"{__package__}.{name}")


def main(name: str, path: str, number: int) -> dict[str, Any]:
    """Run the case on many schedules; findings are about their code, errors about the run."""
    os.environ["SUNDOG_PEERS_CHECKOUT"] = path
    sys.path.insert(0, path)
    provide()
    case = cases(name).CASES[number]
    begin = time.process_time()
    how = {"num_sms": case.num_sms, "heap_size": 64 << 20}
    with noted_launches() as launches:
        report = check(as_rank(case.program), case.world, case.schedules, **how)
    seconds = round(time.process_time() - begin, 1)
    verdicts = [_short(f) for f in report.findings if f.first is not None]
    failures = [f.why for f in report.findings if f.first is None]
    remarks = [_short(f) for f in report.remarks]
    found = {"findings": verdicts, "failures": failures, "remarks": remarks, "seconds": seconds}
    return {**found, "ptx": ordering(launches)} if verdicts else found


def _short(finding: Finding) -> dict[str, Any]:
    sides = [side for side in (finding.first, finding.second) if side is not None]
    return {
        "rule": finding.rule or finding.kind,
        "why": finding.why,
        "sides": [f"{s.verb} at {s.file}:{s.line}" for s in sides],
        "replay": finding.token,
    }


if __name__ == "__main__":
    print("\n" + json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
