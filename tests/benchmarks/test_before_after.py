"""Two source trees are compared case by case, by the better round of each."""

from __future__ import annotations

from benchmarks.before_after import AXES, compare
from sundog.ops.op import OPS


def test_the_better_rounds_are_compared() -> None:
    found = {
        ("all_gather", "numel=1", "push"): {"old": [2e-6, 4e-6], "new": [3e-6, 2.5e-6]},
        ("all_gather", "numel=1", "new algorithm"): {"old": [], "new": [1e-6]},
    }
    assert compare(found) == [["all_gather", "numel=1", "push", "2.0 us", "2.5 us", "1.250"]]


def test_the_ops_are_ours() -> None:
    assert set(AXES) <= {name.partition(".")[0] for name in OPS}
