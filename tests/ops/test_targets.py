"""What the package knows of a GPU: every entry was measured, and `auto` chooses well by them."""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from sundog.ops import load, select
from sundog.ops.load import algorithms, find
from sundog.ops.select import Entry, choose, read_entries

MEASURED = Path(__file__).parents[2] / "docs" / "measured"
NUM_SMS = {"nvidia-h200": 132}
TARGETS = sorted((Path(select.__file__).parent / "targets").glob("*.json"))


def rows_of(name: str) -> dict[tuple[str, str, str], float]:
    """Medians by algorithm, problem and config, as a file of docs/measured has them."""
    content = json.loads((MEASURED / name).read_text())
    return {
        (row["variant"], row["problem"], row["config"]): statistics.median(
            1e-9 * max(ranks) for ranks in row["times"]["samples_ns"]
        )
        for row in content["rows"]
        if row["times"]
    }


def made(kind: Any, plain: dict[str, Any]) -> Any:
    return kind(**{k: load.value(v) if isinstance(v, str) else v for k, v in plain.items()})


@pytest.mark.parametrize("path", TARGETS, ids=lambda path: path.stem)
def test_every_entry_is_of_a_file_of_measurements(path: Path) -> None:
    by_run: dict[str, list[Entry]] = defaultdict(list)
    for entry in read_entries(path):
        by_run[entry.run].append(entry)
    for run, found in by_run.items():
        if run.startswith("data/"):
            continue  # a tuning run: tests/tools/tune/test_tune_replay.py
        content = json.loads((MEASURED / run).read_text())
        for entry in found:
            module = find(entry.op)
            problem, config = made(module.Problem, entry.problem), made(module.Config, entry.config)
            assert module.valid(problem, config) is None
            op, _, algo = entry.op.partition(".")
            if content["kind"] == "table":  # of which no samples were kept
                listed = [
                    row for row in content["rows"] if row[0] == op and row[2].startswith(algo)
                ]
                assert f"{1e6 * entry.seconds:,.1f} us" in [row[3] for row in listed]
            else:
                measured = rows_of(run)[algo, str(problem), str(config)]
                assert entry.seconds == pytest.approx(measured, abs=1e-9)


JUDGED = sorted(MEASURED.glob("h200-auto-*.json"))
FUSED = 1.02  # times the better of fused and unfused
BEST = 1.1  # times the best of a collective's algorithms


def problem_of(kind: Any, text: str) -> Any:
    """'Problem(m=16, dtype=torch.bfloat16, bias=None)' as a Problem."""
    words = re.findall(r"(\w+)=([^,()]+)", text.removeprefix("Problem"))
    plain = {k: v.removeprefix("torch.").strip("'") for k, v in words}
    known = {"None": None, "True": True, "False": False}
    return kind(**{k: known[v] if v in known else load.value(v) for k, v in plain.items()})


@pytest.mark.parametrize("path", JUDGED, ids=lambda path: path.stem)
def test_auto_on_sizes_that_are_not_in_the_table(
    path: Path, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setenv("SUNDOG_CACHE", str(tmp_path))  # nothing of the user's
    content = json.loads(path.read_text())
    op, num_sms = content["op"], NUM_SMS["nvidia-h200"] // content["world"]
    times: dict[Any, dict[str, float]] = defaultdict(dict)
    for (algo, text, _), seconds in rows_of(path.name).items():
        if algo in algorithms(op):  # others are baselines
            times[problem_of(find(op).Problem, text)][algo] = seconds
    assert len(times) >= 4
    table = select.entries("nvidia-h200")
    known = [entry.problem for entry in table if entry.op.partition(".")[0] == op]
    worst = FUSED if "matmul" in op else BEST
    for problem, by_algo in times.items():
        assert load.plain(problem) not in known
        chosen = choose(op, problem, "nvidia-h200", num_sms)
        assert by_algo[chosen.algo] <= worst * min(by_algo.values()), (chosen.why, by_algo)
