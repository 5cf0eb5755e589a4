"""Which litmus programs always end, and under which promises of the scheduler."""

from __future__ import annotations

import pytest

from benchmarks.memory_model.litmus import Barrier, Jump, Litmus, Place, Read, Thread, Update, Write
from benchmarks.memory_model.progress import MODELS, Stuck, find_stuck

WAIT = (Read("seen", "f", "relaxed", "gpu"), Jump(0, "seen", "eq", 0))
SIGNAL = (Write("f", 1, "relaxed", "gpu"),)


def _threads(*codes: tuple, places: tuple[int, ...] = (0, 1, 2)) -> Litmus:
    return Litmus(tuple(Thread(code, Place(p)) for code, p in zip(codes, places, strict=False)))


def _ends(program: Litmus) -> set[str]:
    """The models under which the program always ends."""
    return {model for model in MODELS if find_stuck(program, model) is None}


@pytest.mark.parametrize(
    ("program", "models"),
    [
        # the signal's thread may never be started under obe, nor if it is not the lowest
        (_threads(WAIT, SIGNAL), {"fair"}),
        (_threads(SIGNAL, WAIT), {"fair", "hsa", "hsa_obe", "lobe"}),
        (_threads(SIGNAL, SIGNAL), set(MODELS)),
        (_threads(WAIT), set()),
        (_threads(WAIT, WAIT), set()),
    ],
)
def test_models_of_progress(program: Litmus, models: set[str]) -> None:
    assert _ends(program) == models


def test_a_started_holder_of_a_lock_runs_on_under_obe() -> None:
    lock = Update("was", "m", "exch", 1, "acquire", "gpu")
    code = (lock, Jump(0, "was", "ne", 0), Write("m", 0, "release", "gpu"))
    assert _ends(_threads(code, code)) == {"fair", "obe", "hsa_obe", "lobe"}


@pytest.mark.parametrize(
    ("sem", "scope", "ends"),
    [("relaxed", "gpu", True), ("weak", "gpu", False), ("relaxed", "cta", False)],
)
def test_only_a_morally_strong_write_must_be_seen(sem: str, scope: str, ends: bool) -> None:
    wait = (Read("seen", "f", sem, scope), Jump(0, "seen", "eq", 0))
    assert (find_stuck(_threads((Write("f", 1, sem, scope),), wait)) is None) == ends


def test_who_spins_is_named() -> None:
    stuck = find_stuck(_threads(WAIT, WAIT, ()))
    assert stuck is not None
    assert stuck.spinning == {0, 1}


def test_barriers_wait_for_all_that_have_one_of_the_name() -> None:
    assert find_stuck(_threads((Barrier(1),), (Barrier(1),), (), places=(0, 0, 0))) is None
    short = find_stuck(_threads((Barrier(1, 3),), (Barrier(1, 3),), (), places=(0, 0, 0)))
    assert short == Stuck(frozenset(), frozenset({0, 1}))
    skipped = (Jump(2, 0, "eq", 0), Barrier(1))
    assert find_stuck(_threads((Barrier(1),), skipped, places=(0, 0))) is not None
