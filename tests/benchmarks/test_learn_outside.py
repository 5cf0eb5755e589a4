"""Tasks outside the dataset: the table's figures on invented times, and that the tasks are new."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from benchmarks.learn.kernels import SUBJECTS
from benchmarks.learn.outside import CONFIGS, measure, outside_tasks, steps_until, table
from sundog.tools.tune import tune_triton as tuning

TASKS = outside_tasks()


def test_ten_tasks_and_three_kernels_are_outside_the_dataset() -> None:
    ours = {subject.kernel for subject in SUBJECTS.values()}
    new = {task.kernel for task in TASKS if task.kernel not in ours}
    assert len(TASKS) >= 10
    assert len(new) >= 3
    assert all(30 <= len(task.configs) <= CONFIGS for task in TASKS), [
        len(t.configs) for t in TASKS
    ]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_task_can_be_asked_about(task: Any) -> None:
    """Arguments, grid, trips and configs fit each other, for every config."""
    args = task.make("meta")
    job = tuning._TritonJob.of(task.kernel, task.grid, (), args, task.flops, task.trips)
    for config in task.configs:
        given = {**args, **config}
        assert all(size >= 1 for size in task.grid(given))
        assert task.trips(config) >= 1
        taken = {*job.jit.arg_names, "num_warps", "num_stages"}
        assert set(config) <= taken
        assert set(args) <= taken


def test_figures_of_a_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that likes large blocks, and a model that likes small ones."""
    task = next(each for each in TASKS if each.name.startswith("hard_swish_product 1500000"))
    task = dataclasses.replace(task, configs=task.configs[:12])
    monkeypatch.setattr(tuning._TritonJob, "launch", lambda job, point: point)
    monkeypatch.setattr(
        tuning, "predict", lambda known, target: [each["config"]["BLOCK"] for each in known]
    )
    monkeypatch.setattr(
        tuning._Run,
        "_compile",
        lambda run, points: run.compiled.update(
            {p: tuning.Built(0.1, 32, 0, 0, 4, "") for p in points if p not in run.compiled}
        ),
    )
    monkeypatch.setattr(tuning, "extract_ttir_graph", lambda text, kernel_name: {})
    found = measure(task, "cpu", timer=lambda point: [10.0 / point.BLOCK] * 5)
    largest = max(config["BLOCK"] for config in task.configs)
    assert found["best_ms"] == 10.0 / largest
    assert found["exhaustive"]["over_best"] == 1.0
    assert found["exhaustive"]["measured"] == 12
    assert found["model"]["measured"] == 5
    assert found["model"]["until_near"] is None
    assert found["model"]["over_best"] > 1.02
    assert found["pattern"]["until_near"] is not None
    assert 1 <= found["pattern_replayed"] <= 12
    assert "hard_swish_product" in table([json.loads(json.dumps(found))])


def test_steps_until_near() -> None:
    assert steps_until([1.5, 1.02, 1.0]) == 2
    assert steps_until([1.5, 1.1]) is None
