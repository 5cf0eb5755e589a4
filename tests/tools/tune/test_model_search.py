"""The search that a model leads, and the model of the ops that ships with sundog."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

import numpy
import pytest

from benchmarks.learn.train_ops import data_hash, examples, medians, replayed, train
from benchmarks.tuning_runs import sessions
from sundog.learn import op_model
from sundog.learn.op_model import MODEL, Trees, fields_of, predict
from sundog.tools.tune.measure import Where
from sundog.tools.tune.space import (
    SEARCHES,
    Space,
    _improvement,
    by_model,
    jobs,
    pattern,
    proposals,
    update,
)
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
    wanted = proposals(space, measured, 16)
    assert all(point.y > 0 for point in wanted), wanted
    assert not set(measured) & set(wanted), "nothing is proposed twice"
    without: dict[Point, float | None] = {p: t for p, t in measured.items() if t is not None}
    assert [p for p in proposals(space, without, 17) if p != Point(5, 5)][:16] == wanted
    before = proposals(space, {}, 4)
    assert all(point.y == 0 for point in before)


def test_a_small_budget_is_spent_one_config_at_a_time() -> None:
    """Each measurement counts for the next proposal; a large budget asks for several at once."""
    space = Space(POINTS, tuple(float(p.x + p.y) for p in POINTS))
    for budget, most in ((5, 1), (20, 2), (36, 3)):
        asked: list[int] = []

        def evaluate(
            configs: list[Point], generation: int, asked: list[int] = asked
        ) -> list[float | None]:
            asked.append(len(configs))
            return [1.0 + p.x for p in configs]

        by_model(space, evaluate, budget, random.Random(0))
        assert max(asked) == most
        assert sum(asked) == budget


@pytest.mark.parametrize("ordered", [1, 2, 5, 7])
@pytest.mark.parametrize("budget", [1, 4, 5, 6, 9])
def test_the_first_of_the_order_come_before_any_update(ordered: int, budget: int) -> None:
    """Of y = 0, which the model likes most, each is slower than the last: an update leaves it."""
    scores = tuple(0.1 * p.y + 0.001 * p.x for p in POINTS)
    space = Space(tuple(sorted(POINTS, key=lambda p: (p.y, p.x))), tuple(sorted(scores)), ordered)
    asked: list[list[Point]] = []

    def time(point: Point) -> float:
        return 1.0 if point.y else 1.0 + point.x

    def evaluate(configs: list[Point], generation: int) -> list[float | None]:
        asked.append(configs)
        return [time(p) for p in configs]

    by_model(space, evaluate, budget, random.Random(0))
    assert asked[0] == list(space.configs[: min(ordered, budget)]), "the order, all at once"
    measured: dict[Point, float | None] = {p: time(p) for p in asked[0]}
    for configs in asked[1:]:
        assert configs == proposals(space, measured, 1), "one at a time, by what was measured"
        measured |= {p: time(p) for p in configs}
    assert len(measured) == budget
    if budget > ordered == 5:
        assert asked[1] != [space.configs[5]], "the next of the order"


def test_a_disliked_default_is_measured_as_well() -> None:
    space = Space(POINTS, tuple(float(p.x + p.y) for p in reversed(POINTS)), 3)
    asked: list[list[Point]] = []

    def evaluate(configs: list[Point], generation: int) -> list[float | None]:
        asked.append(configs)
        return [None for _ in configs]

    by_model(space, evaluate, 8, random.Random(0))
    assert asked[0][0] == POINTS[0]
    assert asked[0][1:] == proposals(space, {}, 3)
    assert len({p for configs in asked for p in configs}) == 8, "where all fail, others are tried"


def test_an_update_draws_what_is_alike_with_it() -> None:
    """Two configs took longer than the model said: others with their `kind` and size follow."""
    configs = [(kind, size) for kind in ("row", "column") for size in (64, 128, 1024)]
    scores = [0.0] * 6
    mean, gain = update(configs, scores, {0: 1.3, 3: 1.0})
    assert mean[0] == pytest.approx(math.log(1.3), abs=0.02)
    assert mean[3] == pytest.approx(0.0, abs=0.02)
    assert mean[1] > mean[4], "as slow as its neighbour"
    assert abs(mean[1] - mean[0]) < abs(mean[2] - mean[0]), "what is far away is drawn less"
    assert gain[4] > gain[1]
    assert min(gain) >= 0
    nothing, none = update(configs, scores, {})
    assert list(nothing) == scores
    assert list(none) == [0.0] * 6


def test_expected_improvement_is_the_mean_of_what_is_gained() -> None:
    steps = numpy.linspace(-8, 8, 20_001)
    weight = numpy.exp(-steps * steps / 2) / math.sqrt(2 * math.pi) * (steps[1] - steps[0])
    for ahead, spread in ((0.1, 0.2), (-0.3, 0.2), (0.0, 1.0)):
        wanted = (numpy.maximum(ahead + spread * steps, 0) * weight).sum()
        (found,) = _improvement(numpy.array([ahead]), numpy.array([spread]))
        assert found == pytest.approx(wanted, rel=1e-4)


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


def test_five_configs_come_near_the_best_of_an_unseen_problem() -> None:
    known = examples(DATA)
    held_out = next(each for each in known if each.name == "all_gather.gluon numel=4194304")
    trees = train([each for each in known if each is not held_out], {})
    found = [replayed(held_out, trees, by_model, 5, seed) for seed in range(3)]
    assert max(found) <= 1.02
    assert sum(found) <= sum(replayed(held_out, None, pattern, 5, seed) for seed in range(3))


def test_the_page_has_what_the_replay_gives() -> None:
    """Of the problem that the model gets wrong: what a change of the search moves first."""
    known = examples(DATA)
    held_out = next(each for each in known if each.name == "all_gather.gluon numel=131072")
    trees = train([each for each in known if each is not held_out], {})
    cells = " | ".join(f"{ratio:.3f}" for ratio in medians(held_out, trees, (5, 10)))
    line = f"| `all_gather.gluon` | numel=131072 | 221 | {cells} |"
    assert line in (DATA.parents[1] / "docs" / "tuning.md").read_text().splitlines()
