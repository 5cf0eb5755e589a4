"""The search that a model leads, and the model of the ops that ships with sundog."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.learn.train_ops import data_hash, examples, replayed, train
from benchmarks.tuning_runs import sessions
from sundog.learn import op_model
from sundog.learn.op_model import MODEL, Trees, fields_of, predict
from sundog.tools.tune.measure import Where
from sundog.tools.tune.space import SEARCHES, Space, by_model, jobs, pattern, proposals
from sundog.tools.tune.tune import describe_all

DATA = Path(__file__).parents[3] / "data" / "h200"


@dataclass(frozen=True)
class Point:
    x: int
    y: int


POINTS = tuple(Point(x, y) for x in range(6) for y in range(6))


def test_a_right_model_needs_one_generation() -> None:
    space = Space(POINTS, tuple(float(p.x + p.y) for p in reversed(POINTS)))
    asked: list[Point] = []

    def evaluate(configs: list[Point], generation: int) -> list[float | None]:
        asked.extend(configs)
        return [10.0 - p.x - p.y if p.x + p.y < 10 else 0.5 for p in configs]

    by_model(space, evaluate, 5, random.Random(0))
    assert asked[0] == POINTS[0], "the default comes first"
    assert len(asked) == 5
    assert Point(0, 0) in asked[:2]


def test_what_is_measured_corrects_the_model() -> None:
    """All of y = 0 was slower than expected, so the rest falls back; a failure says nothing."""
    space = Space(POINTS, tuple(0.1 * p.y for p in POINTS))
    measured = {Point(0, 0): 9.0, Point(1, 0): 9.0, Point(0, 1): 1.0, Point(5, 5): None}
    wanted = proposals(space, measured, 4)
    assert all(point.y == 1 for point in wanted), wanted
    before = proposals(space, {}, 4)
    assert all(point.y == 0 for point in before)


def test_without_scores_the_pattern_search_runs() -> None:
    asked: dict[str, list[Point]] = {"model": [], "pattern": []}
    for name in asked:

        def evaluate(configs: list[Point], generation: int, name: str = name) -> list[float | None]:
            asked[name].extend(configs)
            return [1.0 + p.x for p in configs]

        SEARCHES[name](Space(POINTS), evaluate, 12, random.Random(2))
    assert asked["model"] == asked["pattern"]


def test_the_shipped_model_is_of_the_data_in_this_checkout() -> None:
    trees = Trees.load(MODEL)
    assert trees.about["data"] == data_hash(examples(DATA)), "run train-ops again"
    assert trees.about["version"] == 1
    assert MODEL.stat().st_size < 2_000_000


def test_it_knows_its_target_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = jobs("all_gather.gluon", "numel=262144,dtype=bfloat16", 8)
    space = Space.of(job, 16)
    scores = predict(job.op, job.problem, space.configs, "nvidia-h200")
    assert scores is not None
    assert len(set(scores)) > 10
    assert predict(job.op, job.problem, space.configs, "amd-mi300x") is None
    assert predict("all_to_all.push", job.problem, space.configs, "nvidia-h200") is None
    where = Where("nvidia-h200", "sm_90", 16, {})
    (described,) = describe_all([job], where, "virtual", {"search": "model"})
    assert described.space.scores == tuple(scores)
    (described,) = describe_all([job], where, "virtual", {"search": "pattern"})
    assert described.space.scores == ()
    monkeypatch.setattr(op_model, "_model", lambda: None)
    assert predict(job.op, job.problem, space.configs, "nvidia-h200") is None


def test_runs_of_helion_are_no_tunings_of_ops() -> None:
    assert sessions(str(DATA / "helion")) == []
    assert len(sessions(str(DATA / "all_reduce"))) > 3


def test_training_and_tuning_name_fields_alike() -> None:
    known = examples(DATA)
    example = next(each for each in known if each.session.op == "all_gather.gluon")
    (job,) = jobs("all_gather.gluon", f"numel={example.problem['numel']},dtype=bfloat16", 8)
    config = next(iter(example.session.times))
    tuned, trained = fields_of(job.op, job.problem, config), example.line(config)
    columns = Trees.load(MODEL).about["columns"]
    assert {n: tuned.get(n) for n in columns} == {n: trained.get(n) for n in columns}


def test_on_a_problem_that_was_left_out_five_configs_are_near_the_best() -> None:
    known = examples(DATA)
    held_out = next(each for each in known if each.name == "all_gather.gluon numel=4194304")
    trees = train([each for each in known if each is not held_out], {})
    found = [replayed(held_out, trees, by_model, 5, seed) for seed in range(3)]
    assert max(found) <= 1.02
    assert sum(found) <= sum(replayed(held_out, None, pattern, 5, seed) for seed in range(3))
