"""Checker and oracle agree on generated programs; all: `python tests/support/generated.py`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from support.generated import compare, each_case, verdicts
from support.generated_cases import Case, Op, Phase
from support.generated_source import source
from support.oracle import Event, races

pytestmark = pytest.mark.compat

BARRIER = Op("barrier")
TILE = Op("store", owner=1, lanes=4)
READ = Op("load", owner=1, lanes=4)


def _signal(sem: str = "release", scope: str = "sys", lanes: int = 0) -> Op:
    return Op("atomic", owner=1, word=8, lanes=lanes, name="xchg", sem=sem, scope=scope)


def _wait(sem: str = "acquire", scope: str = "sys", lanes: int = 0, name: str = "add") -> Op:
    return Op("wait", owner=1, word=8, lanes=lanes, name=name, sem=sem, scope=scope)


def _message(producer: tuple[Op, ...], consumer: tuple[Op, ...]) -> Case:
    """Rank 0 sends a tile to rank 1."""
    ranks = (Phase((), (producer,), ()), Phase((), (consumer,), ()))
    return Case((ranks,), (True,), "random:3", 16)


def _racing_texts(case: Case, folder: Path) -> set[tuple[str, str]]:
    both = verdicts(case, folder)
    assert both.found == both.expected
    return {(_verb(both.text.lines, a), _verb(both.text.lines, b)) for a, b in both.expected}


def _verb(lines: list[str], line: int) -> str:
    return lines[line - 1].split("tl.")[1].split("(")[0]


GOOD = _message((TILE, BARRIER, _signal()), (_wait(), READ))
TILES = {("store", "load")}


def test_correct_message_is_clean_for_both(tmp_path: Path) -> None:
    assert _racing_texts(GOOD, tmp_path) == set()


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        ((TILE, _signal()), (_wait(), READ)),
        ((TILE, BARRIER, _signal("relaxed")), (_wait(), READ)),
        ((TILE, BARRIER, _signal()), (_wait("relaxed"), READ)),
        ((TILE, BARRIER, _signal(lanes=2)), (_wait(lanes=2), READ)),
    ],
    ids=["no barrier before", "relaxed signal", "relaxed wait", "no barrier after tensor wait"],
)
def test_each_part_left_out_is_a_race_for_both(
    producer: tuple[Op, ...], consumer: tuple[Op, ...], tmp_path: Path
) -> None:
    assert _racing_texts(_message(producer, consumer), tmp_path) == TILES


def test_a_scope_that_does_not_reach_races_on_the_flag_too(tmp_path: Path) -> None:
    case = _message((TILE, BARRIER, _signal(scope="gpu")), (_wait(scope="gpu"), READ))
    assert _racing_texts(case, tmp_path) == TILES | {("atomic_xchg", "atomic_add")}


def _atomic(sem: str, scope: str = "sys", lanes: int = 0) -> Op:
    return Op("atomic", owner=1, word=8, lanes=lanes, name="add", sem=sem, scope=scope)


HALF = Op("store", owner=1, word=8, byte=2)
WORD = Op("store", owner=1, word=0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        ((_atomic("release", "gpu"), _atomic("release")), (_wait(),)),
        ((_atomic("release", "gpu"), BARRIER, _atomic("release")), (_wait(lanes=2),)),
        ((_atomic("release", lanes=2), _atomic("acq_rel")), (_wait(), _wait(name=""))),
        ((TILE, BARRIER, _signal(), HALF), (_wait(), READ)),
        (
            (WORD, _atomic("release"), *[_atomic("release", lanes=2)] * 2),
            (_wait(), *[_atomic("acquire")] * 3, READ),
        ),
        (
            (WORD, _atomic("release", "cta"), _atomic("acquire"), _atomic("release", lanes=2)),
            (_wait(), READ),
        ),
    ],
    ids=[
        "an acquire comes after what it learns",
        "a lane comes after what it learns",
        "a scalar atomic does not hide a tensor one",
        "half of a word is overwritten",
        "a tensor release after a scalar one",
        "a signal to itself",
    ],
)
def test_past_disagreements_stay_fixed(
    producer: tuple[Op, ...], consumer: tuple[Op, ...], seed: int, tmp_path: Path
) -> None:
    compare(dataclasses.replace(_message(producer, consumer), schedule=f"random:{seed}"), tmp_path)


def test_a_plain_store_breaks_the_release_sequence() -> None:
    word, data = ((0, 4),), ((64, 4),)
    start = [Event("launch", rank, 0) for rank in (0, 1, 2)]
    send = [
        Event("store", 0, 0, 0, data),
        Event("atomic", 0, 0, 0, word, "release", "sys"),
    ]
    through = Event("atomic", 1, 0, 0, word, "relaxed", "sys")
    over = Event("store", 1, 0, 0, word)
    read = [Event("atomic", 2, 0, 0, word, "acquire", "sys"), Event("load", 2, 0, 0, data)]
    assert races([*start, *send, through, *read]) == []
    broken = races([*start, *send, through, over, *read])
    assert (3, 8) in {(race.first, race.second) for race in broken}


def test_the_comparison_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    racing = _message((TILE, _signal()), (_wait(), READ))
    assert compare(racing, tmp_path) == 1
    monkeypatch.setattr("support.generated.races", lambda events: [])
    with pytest.raises(AssertionError, match="checker only"):
        compare(racing, tmp_path)
    monkeypatch.setattr("support.generated.races", races)
    monkeypatch.setattr("sundog.checker.checker.looks_at", lambda event: (((), ()),) * 2)
    with pytest.raises(AssertionError, match="oracle only"):
        compare(racing, tmp_path)


def test_one_operation_per_line() -> None:
    text = source(GOOD)
    assert [op for _, op in text.ops.values()] == [TILE, BARRIER, _signal(), _wait(), READ]


@pytest.mark.long
def test_checker_and_oracle_agree() -> None:
    counts: list[int] = []
    each_case(150, 0, counts.append)
    assert len(counts) >= 150
    assert 0 < sum(count == 0 for count in counts) < len(counts)  # clean ones and racing ones
