"""What `python -m benchmarks mutants` says that an op's mutants cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import mutant_cost
from benchmarks.mutant_cost import Cost

pytestmark = pytest.mark.sim_only


def test_only_forked_processes_run_side_by_side() -> None:
    assert Cost("gather.pull", 0, "3 of 3", alone=10.0, together=8.0).seconds == 14.0


def test_the_slowest_op_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    costs = {
        "fast": Cost("fast", 0, "2 of 2", 9.0, 2.0),
        "slow": Cost("slow", 1, "3 of 4", 1.0, 30.0),
    }
    monkeypatch.setattr(mutant_cost, "_measured", costs.get)
    mutant_cost.main(str(tmp_path / "costs.json"), [*costs])
    rows = json.loads((tmp_path / "costs.json").read_text())["rows"]
    assert rows == [
        ["slow", "3 of 4", "1", "1 s", "30 s", "16 s"],
        ["fast", "2 of 2", "0", "9 s", "2 s", "10 s"],
    ]
