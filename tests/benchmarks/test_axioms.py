"""Well-known litmus shapes: what the axioms of docs/memory_model.md allow and what they forbid."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import pytest

from benchmarks.memory_model.axioms import (
    Execution,
    atomicity,
    causality,
    coherence,
    fence_sc,
    no_thin_air,
    sc_per_location,
)
from benchmarks.memory_model.executions import Ending, candidates, executions, outcomes
from benchmarks.memory_model.litmus import (
    SCOPES,
    Barrier,
    Fence,
    Instruction,
    Jump,
    Litmus,
    Place,
    ProxyFence,
    Read,
    Set,
    Thread,
    Update,
    Write,
)
from benchmarks.memory_model.relations import Relation

# A shape's access: "Wx1" writes 1 to x; "Rx0" reads x and must see 0 for the outcome asked about.


@dataclass(frozen=True)
class Shape:
    """A program with one question: can all its reads see these values, and memory end like this?

    `needs` is the weakest kind of synchronisation that forbids it, if the scopes reach everybody.
    """

    threads: str
    needs: str
    ends: str = ""  # "x2" asks for x to end as 2


LEVELS = ("nothing", "relaxed", "release and acquire", "fence.acq_rel", "fence.sc")
SHAPES = {
    "MP": Shape("Wx1 Wy1 | Ry1 Rx0", "release and acquire"),
    "LB": Shape("Rx1 Wy1 | Ry1 Wx1", "release and acquire"),
    "S": Shape("Wx2 Wy1 | Ry1 Wx1", "release and acquire", "x2"),
    "ISA2": Shape("Wx1 Wy1 | Ry1 Wz1 | Rz1 Rx0", "release and acquire"),
    "WRC": Shape("Wx1 | Rx1 Wy1 | Ry1 Rx0", "release and acquire"),
    "WWC": Shape("Wx2 | Rx2 Wy1 | Ry1 Wx1", "release and acquire", "x2"),
    "3.LB": Shape("Rx1 Wy1 | Ry1 Wz1 | Rz1 Wx1", "release and acquire"),
    "SB": Shape("Wx1 Ry0 | Wy1 Rx0", "fence.sc"),
    "R": Shape("Wx1 Wy1 | Wy2 Rx0", "fence.sc", "y2"),
    "2+2W": Shape("Wx1 Wy2 | Wy1 Wx2", "fence.sc", "x1 y1"),
    "RWC": Shape("Wx1 | Rx1 Ry0 | Wy1 Rx0", "fence.sc"),
    "IRIW": Shape("Wx1 | Rx1 Ry0 | Ry1 Rx0 | Wy1", "fence.sc"),
    "3.SB": Shape("Wx1 Ry0 | Wy1 Rz0 | Wz1 Rx0", "fence.sc"),
    "WRW+WR": Shape("Wx1 | Rx1 Wy1 | Wy2 Rx0", "fence.sc", "y2"),
    "CoRR": Shape("Wx1 | Rx1 Rx0", "relaxed"),
    "CoRW2": Shape("Rx2 Wx1 | Wx2", "relaxed", "x2"),
    "CoRR2": Shape("Wx1 | Wx2 | Rx1 Rx2 | Rx2 Rx1", "relaxed"),
    "CoWR": Shape("Wx1 Rx0", "nothing"),
    "CoWW": Shape("Wx1 Wx2", "nothing", "x1"),
    "CoRW1": Shape("Rx1 Wx1", "nothing"),
}
PLACES = {  # of thread t, so that only this scope or a wider one reaches from each to each
    "cta": lambda t: Place(0, 0),
    "gpu": lambda t: Place(t, 0),
    "sys": lambda t: Place(t, t),
}


def _thread(text: str, number: int, level: str, scope: str) -> list[Instruction]:
    sems = {"nothing": ("weak", "weak"), "release and acquire": ("release", "acquire")}
    write, read = sems.get(level, ("relaxed", "relaxed"))
    code: list[Instruction] = []
    for i, (kind, loc, value) in enumerate(text.split()):
        if i and level.startswith("fence"):
            code.append(Fence(level.removeprefix("fence."), scope))
        if kind == "W":
            code.append(Write(loc, int(value), write, scope))
        else:
            code.append(Read(f"{number}.{i}", loc, read, scope))
    return code


def _program(shape: Shape, level: str, scope: str, apart: str) -> Litmus:
    texts = enumerate(shape.threads.split("|"))
    codes = [tuple(_thread(text, t, level, scope)) for t, text in texts]
    return _placed(*codes, apart=apart)


def _placed(*codes: tuple[Instruction, ...], apart: str = "gpu") -> Litmus:
    return Litmus(tuple(Thread(code, PLACES[apart](t)) for t, code in enumerate(codes)))


def _asked(shape: Shape, outcome: Ending) -> bool:
    reads = {
        f"{t}.{i}": int(word[2])
        for t, text in enumerate(shape.threads.split("|"))
        for i, word in enumerate(text.split())
        if word[0] == "R"
    }
    seen = {name: value for each in outcome.registers for name, value in each.items()}
    ends = all(int(value) in outcome.memory[loc] for loc, value in shape.ends.split())
    return seen == reads and ends


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_forbidden_by_what_it_needs_and_no_less(name: str) -> None:
    shape = SHAPES[name]
    for level, scope, apart in product(LEVELS, SCOPES, SCOPES):
        found = any(_asked(shape, end) for end in outcomes(_program(shape, level, scope, apart)))
        reaches = shape.needs == "nothing" or SCOPES.index(scope) >= SCOPES.index(apart)
        enough = LEVELS.index(level) >= LEVELS.index(shape.needs)
        assert found == (not (reaches and enough)), (level, scope, apart)


# Message passing with weak data: the ways to send the flag, and what makes each fail.

DATA, SEE = Write("x", 1), Read("data", "x")
SIGNAL, WAIT = Write("f", 1, "release", "gpu"), Read("flag", "f", "acquire", "gpu")
RAISE, LOOK = Write("f", 1, "relaxed", "gpu"), Read("flag", "f", "relaxed", "gpu")


def _stale(program: Litmus, flag: int = 1) -> bool:
    """Say whether the last thread can see the flag and not the data."""
    ends = [end.registers[-1] for end in outcomes(program)]
    return any(end["flag"] == flag and end["data"] == 0 for end in ends)


MESSAGES = {
    "release and acquire": ((DATA, SIGNAL), (WAIT, SEE), False),
    "a relaxed flag": ((DATA, RAISE), (LOOK, SEE), True),
    "a release only": ((DATA, SIGNAL), (LOOK, SEE), True),
    "an acquire only": ((DATA, RAISE), (WAIT, SEE), True),
    "fences on both sides": (
        (DATA, Fence("acq_rel", "gpu"), RAISE), (LOOK, Fence("acq_rel", "gpu"), SEE), False,
    ),
    "a release fence and an acquire": (
        (DATA, Fence("release", "gpu"), RAISE), (WAIT, SEE), False,
    ),
    "a fence that does not reach": (
        (DATA, Fence("acq_rel", "cta"), RAISE), (LOOK, Fence("acq_rel", "gpu"), SEE), True,
    ),
    "a weak flag after a fence": (
        (DATA, Fence("acq_rel", "sys"), Write("f", 1)), (LOOK, Fence("acq_rel", "sys"), SEE), True,
    ),
    "a release at cta scope": ((DATA, Write("f", 1, "release", "cta")), (WAIT, SEE), True),
    "an acquire at cta scope": ((DATA, SIGNAL), (Read("flag", "f", "acquire", "cta"), SEE), True),
    "a release to the flag, then a relaxed write": (
        (DATA, Write("f", 7, "release", "gpu"), RAISE), (WAIT, SEE), False,
    ),
    "a relaxed read of the flag, then an acquire of it": (
        (DATA, SIGNAL), (LOOK, Read("again", "f", "acquire", "gpu"), SEE), False,
    ),
    "a release elsewhere, then a relaxed write": (
        (DATA, Write("g", 1, "release", "gpu"), RAISE), (WAIT, SEE), True,
    ),
    "an exchange that releases and an add that acquires": (
        (DATA, Update("old", "f", "exch", 1, "release", "gpu")),
        (Update("flag", "f", "add", 0, "acquire", "gpu"), SEE),
        False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_of_weak_data(name: str) -> None:
    producer, consumer, stale = MESSAGES[name]
    program = _placed(producer, consumer)
    assert _stale(program) == stale
    raced = [end for end in outcomes(program) if end.races and end.registers[1]["flag"] == 1]
    assert bool(raced) == stale, "with the flag seen, the data race is what makes data stale"


def test_updates_carry_a_release_and_a_plain_store_breaks_it() -> None:
    count = Update("old", "f", "add", 1, "relaxed", "gpu")
    assert not _stale(_placed((DATA, SIGNAL), (count,), (WAIT, SEE)), flag=2)
    weak = (LOOK_AGAIN, Jump(3, "old", "ne", 1), Write("f", 2))
    assert _stale(_placed((DATA, SIGNAL), weak, (WAIT, SEE)), flag=2)


LOOK_AGAIN = Read("old", "f", "relaxed", "gpu")


def test_a_cta_barrier_orders_its_threads_and_no_others() -> None:
    apart = _placed((DATA, Barrier(1)), (Barrier(1), SEE, Set("flag", 1)), apart="gpu")
    together = _placed((DATA, Barrier(1)), (Barrier(1), SEE, Set("flag", 1)), apart="cta")
    assert _stale(apart)
    assert not _stale(together)
    crossed = _placed((Barrier(1), Barrier(2)), (Barrier(2), Barrier(1)), apart="cta")
    assert not list(outcomes(crossed)), "each waits for the other, so that nothing ends"


@pytest.mark.parametrize(
    ("before", "after", "stale"),
    [
        ((), (ProxyFence("async"),), False),
        ((), (), True),
        ((ProxyFence("async"),), (), True),  # the fence belongs to the CTA that reads
        ((), (ProxyFence("texture"),), True),
    ],
)
def test_an_async_proxy_read_needs_a_fence_of_its_own_cta(
    before: tuple, after: tuple, stale: bool
) -> None:
    read = Read("data", "x", proxy="async")
    program = _placed((DATA, *before, SIGNAL), (WAIT, *after, read))
    assert _stale(program) == stale


def test_updates_lose_no_count_if_their_scopes_reach() -> None:
    def ends(scope: str) -> set[int]:
        add = (Update("old", "x", "add", 1, "relaxed", scope),)
        return {value for end in outcomes(_placed(add, add)) for value in end.memory["x"]}

    assert ends("gpu") == {2}
    assert ends("cta") == {1, 2}


def test_no_value_out_of_thin_air() -> None:
    copies = _placed((Read("a", "x"), Write("y", "a")), (Read("b", "y"), Write("x", "b")))
    assert {(end.registers[0]["a"], end.registers[1]["b"]) for end in outcomes(copies)} == {(0, 0)}


def test_two_strong_accesses_whose_scopes_reach_do_not_race() -> None:
    def races(sem: str, scope: str) -> bool:
        write, read = Write("x", 1, sem, scope), Read("a", "x", sem, scope)
        return any(end.races for end in outcomes(_placed((write,), (read,))))

    assert not races("relaxed", "gpu")
    assert races("relaxed", "cta")
    assert races("weak", "gpu")


# Each axiom rejects a candidate of its own, also where another one would reject it too.


def _rejected(litmus: Litmus, seen: dict[str, int], axiom: Callable[[Execution], bool]) -> bool:
    """Say whether the axiom rejects every candidate in which the reads see these values."""
    judged = [
        axiom(x)
        for registers, x in candidates(litmus)
        if seen.items() <= {k: v for each in registers for k, v in each.items()}.items()
    ]
    assert judged, "no candidate has these values"
    return not any(judged)


def test_causality_rejects_a_read_of_an_older_write() -> None:
    assert _rejected(_placed((DATA, SIGNAL), (WAIT, SEE)), {"flag": 1, "data": 0}, causality)


def test_sc_per_location_rejects_a_strong_read_that_goes_back() -> None:
    again = Read("again", "f", "relaxed", "gpu")
    assert _rejected(_placed((RAISE,), (LOOK, again)), {"flag": 1, "again": 0}, sc_per_location)


def test_atomicity_rejects_a_strong_write_inside_an_update() -> None:
    add = (Update("old", "x", "add", 1, "relaxed", "gpu"),)
    write = (Write("x", 5, "relaxed", "gpu"), Read("data", "x", "relaxed", "gpu"))
    between = [
        x
        for registers, x in candidates(_placed(add, write))
        if registers[0]["old"] == 0 and registers[1]["data"] == 1 and x.rf
    ]
    assert between
    assert any(not atomicity(x) for x in between)
    assert all(atomicity(x) for _, x in executions(_placed(add, write)))


def test_no_thin_air_rejects_a_value_that_rests_on_itself() -> None:
    """The value 2 exists in one trace, which reads backwards, so two copies could hand it round."""
    back = (
        Read("first", "w", "relaxed", "gpu"),
        Read("then", "w", "relaxed", "gpu"),
        Jump(5, "first", "eq", 0),
        Jump(5, "then", "ne", 0),
        Write("x", 2),
    )
    copies = ((Read("a", "x"), Write("y", "a")), (Read("b", "y"), Write("x", "b")))
    litmus = _placed(*copies, back, (Write("w", 1, "relaxed", "gpu"),))
    seen = {"a": 2, "b": 2, "first": 0}
    assert _rejected(litmus, seen, no_thin_air)


def test_coherence_rejects_an_order_that_causality_forbids() -> None:
    (_, x), *_ = candidates(_placed((Write("x", 1), Write("x", 2))))
    assert coherence(x)
    assert not coherence(Execution(x.synchronised, Relation.empty(x.effects.size)))


def test_fence_sc_rejects_an_order_of_fences_against_a_barrier() -> None:
    fence = Fence("sc", "gpu")
    litmus = _placed((fence, Barrier(1)), (Barrier(1), fence), apart="cta")
    judged = {(0, 3) in x.synchronised.fence_order: fence_sc(x) for _, x in candidates(litmus)}
    assert judged == {True: True, False: False}


def test_executions_that_are_not_wanted_are_left_out() -> None:
    litmus = _placed((Write("x", 1),), (Write("x", 2),), (Read("r", "x"),))
    everything = [registers for registers, _ in executions(litmus)]
    values = {registers[2]["r"] for registers in everything}
    seen: set[int] = set()
    for registers, _ in executions(litmus, wanted=lambda registers: registers[2]["r"] not in seen):
        seen.add(registers[2]["r"])
    assert seen == values == {0, 1, 2}
    left = list(executions(litmus, wanted=lambda registers: registers[2]["r"] == 1))
    assert [registers[2]["r"] for registers, _ in left] == [1] * everything.count(left[0][0])
