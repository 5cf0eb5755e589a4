"""Axioms and checker agree on generated litmus programs; many: `python -m benchmarks litmus`."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.litmus_agreement import Counts, allowed, compare, figures, programs
from benchmarks.litmus_kernels import Seen, observe, source
from benchmarks.litmus_programs import cycles
from benchmarks.memory_model.triton_litmus import TritonLitmus, TritonOp, TritonProgram

TILE, BARRIER = TritonOp("store", 0, 1, tile=True), TritonOp("barrier")
LOAD = TritonOp("load", 0, tile=True)
SIGNAL = TritonOp("atomic", 1, 1, "xchg", "release", "gpu")
WAIT, SEEN = TritonOp("atomic", 1, 0, "add", "acquire", "gpu"), TritonOp("guard", value=1, of=0)


def _two(first: tuple[TritonOp, ...], second: tuple[TritonOp, ...], ranks: int = 1) -> TritonLitmus:
    return TritonProgram(0, first), TritonProgram(ranks - 1, second)


def _relaxed(op: TritonOp) -> TritonOp:
    return replace(op, sem="relaxed")


# What the page says of programs, as a consequence of the axioms on the threads of a CTA.
PAGE = {
    "a tile, a CTA barrier, a release": (_two((TILE, BARRIER, SIGNAL), (WAIT, SEEN, LOAD)), False),
    "a tile and a release": (_two((TILE, SIGNAL), (WAIT, SEEN, LOAD)), True),
    "a scalar store and a release": (
        _two((replace(TILE, tile=False), SIGNAL), (WAIT, SEEN, LOAD)),
        False,
    ),
    "a relaxed signal": (_two((TILE, BARRIER, _relaxed(SIGNAL)), (WAIT, SEEN, LOAD)), True),
    "a relaxed wait": (_two((TILE, BARRIER, SIGNAL), (_relaxed(WAIT), SEEN, LOAD)), True),
    "gpu scope between ranks": (_two((TILE, BARRIER, SIGNAL), (WAIT, SEEN, LOAD), 2), True),
    "a scalar load and a release, then a store": (
        _two((replace(LOAD, tile=False), SIGNAL), (WAIT, SEEN, replace(TILE, tile=False))),
        True,
    ),
    "a scalar load, a CTA barrier and a release, then a store": (
        _two((replace(LOAD, tile=False), BARRIER, SIGNAL), (WAIT, SEEN, TILE)),
        False,
    ),
    "atomics that reach": (_two((SIGNAL,), (_relaxed(WAIT),)), False),
    "atomics that do not reach": (_two((SIGNAL,), (replace(WAIT, scope="cta"),)), True),
}


def test_the_page_on_programs_follows_from_the_axioms_on_threads() -> None:
    said = {name: allowed(litmus).strict for name, (litmus, _) in PAGE.items()}
    assert said == {name: race for name, (_, race) in PAGE.items()}
    found = observe([litmus for litmus, _ in PAGE.values()], schedules=30)
    shown = {name: seen.racing for name, seen in zip(PAGE, found, strict=True)}
    assert shown == said


def test_an_observed_write_is_ordered_for_ptx_not_by_the_page() -> None:
    wait = TritonOp("atomic", 1, 0, "add", "relaxed", "gpu")
    both = allowed(_two((_relaxed(SIGNAL),), (wait, SEEN, TritonOp("load", 1))))
    assert (both.races, both.strict) == (False, True)


def test_generated_programs_agree() -> None:
    counts = compare(list(programs(16, seed=7)), schedules=10, counts=Counts())
    assert not counts.differences, counts.differences[0]
    assert counts.programs == 16
    assert 0 < counts.races < 16
    assert counts.claims > 0
    shown = figures(counts, 10, 1.0)
    assert shown.text.startswith(
        "16 generated programs under 10 schedules each, in 1 s of CPU time: 0 differ"
    )
    assert ["of these, outcomes that the simulator showed", str(counts.outcomes_seen)] in shown.rows


def _reads(*words: int) -> tuple[TritonOp, ...]:
    return tuple(TritonOp("atomic", word, 0, "add", "relaxed", "sys") for word in words)


def _write(word: int) -> TritonOp:
    return TritonOp("atomic", word, 1, "xchg", "relaxed", "sys")


def test_the_simulator_shows_every_outcome_that_the_page_claims() -> None:
    shapes = [
        _two((_write(0), *_reads(1)), (_write(1), *_reads(0)), 2),  # SB
        _two((_write(0), _write(1)), _reads(1, 0), 2),  # MP
        _two((_write(0),), _reads(0, 0), 2),  # CoRR
    ]
    for litmus, seen in zip(shapes, observe(shapes, schedules=80), strict=True):
        model = allowed(litmus)
        assert seen.outcomes == model.claimed == model.outcomes


def test_polls_after_guards_may_both_read_old_values() -> None:
    first, guard = TritonOp("atomic", 0, 1, "cas", "relaxed", "sys"), TritonOp("guard", of=0)
    litmus = _two((first, guard, *_reads(1)), (_write(1), guard, *_reads(0)))
    assert (0, 0, 0, 0) in allowed(litmus).outcomes
    assert not compare([litmus], schedules=40, counts=Counts()).differences


def test_load_buffering_is_allowed_and_not_claimed() -> None:
    model = allowed(_two((*_reads(0), _write(1)), (*_reads(1), _write(0)), 2))
    assert (1, 0, 1, 0) in model.outcomes
    assert model.claimed is not None
    assert (1, 0, 1, 0) not in model.claimed


def test_every_kind_of_difference_is_reported() -> None:
    litmus = _two((TILE, BARRIER, SIGNAL), (WAIT, SEEN, LOAD))
    clean = allowed(litmus)
    wrong = Counts().plus(litmus, clean, Seen({(9, 9, 9)}, racing=True, other=["a deadlock"]))
    text = "\n".join(wrong.differences)
    assert "reports a race, the axioms say False" in text
    assert "showed {(9, 9, 9)}, which the axioms forbid" in text
    assert "a deadlock" in text
    unknown = replace(clean, races=True, claimed=set())
    text = "\n".join(Counts().plus(litmus, unknown, Seen({(0, 0, -1)})).differences)
    assert "PTX has a race that the page does not know" in text
    assert "more than the page claims" in text


def test_cycles_are_written_once_and_joined_by_a_write() -> None:
    two = set(cycles(2))
    assert ("RRd", "WWd") in two  # message passing
    assert ("WWd", "RRd") not in two
    assert ("WRd", "WRd") in two  # store buffering
    assert not any(a == b == "RRd" for a, b in two)


def test_a_line_of_the_text_belongs_to_its_litmus() -> None:
    text, owner = source([PAGE["a tile and a release"][0], _two((SIGNAL,), (WAIT,))])
    lines = text.splitlines()
    exchanges = [i for i, line in enumerate(lines, 1) if "atomic_xchg" in line]
    assert [owner[i] for i in exchanges] == [0, 1]
