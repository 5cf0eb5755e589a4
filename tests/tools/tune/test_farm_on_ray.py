"""Two measurers on a Ray cluster of this machine, whose GPUs are numbers in its resources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ray[client]'")

from benchmarks.farm import on_gpus, who_measured

pytestmark = pytest.mark.sim_only


@pytest.mark.timeout(240)
def test_two_measurers_have_a_gpu_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SUNDOG_FARM_NOTES", "TRITON_CACHE_DIR", "SUNDOG_CACHE"):
        monkeypatch.setenv(name, "")  # so that what the cluster gets ends with the test
    found = on_gpus(tmp_path, gpus=2, budget=12)
    farm: dict[str, Any] = found["farm"]
    assert (farm["failed"], farm["rows_more_than_once"]) == (0, 0)
    assert farm["rows"] == farm["configs"] > 20
    assert farm["timers"] == ["synthetic"], "every row says that its clock is made up"
    assert all(gpu.endswith(":0") for gpu in found["measurements by GPU"]), "one of each node"
    assert len(found["measurements by GPU"]) == found["processes"] == 2
    assert found["beside another one on its GPU"] == 0
    assert found["beside one on another GPU"] > 0, "the GPUs measure side by side"


def test_what_shares_a_gpu_is_counted() -> None:
    apart = [("0", 7, 0.0, 1.0), ("1", 8, 0.5, 1.5), ("0", 7, 1.0, 2.0)]
    assert who_measured(apart)["beside another one on its GPU"] == 0
    assert who_measured(apart)["beside one on another GPU"] == 2
    assert who_measured([*apart, ("0", 9, 1.5, 3.0)])["beside another one on its GPU"] == 1
