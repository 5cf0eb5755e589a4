"""Hold the page, the evaluator and the checker to each other on generated litmus programs.

For each program: the checker reports a race in some schedule if and only if the axioms know an
execution with one; every outcome that the simulator shows is one that the axioms allow; and if all
accesses are atomic, it is one of those that the page claims the simulator can show.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count as count_from
from itertools import islice
from random import Random
from time import process_time

from rich.progress import track

from .litmus_kernels import Seen, observe
from .litmus_programs import cycles, from_cycle, from_seed, small
from .memory_model.axioms import Effect
from .memory_model.executions import executions
from .memory_model.litmus import Instruction, Litmus, Read, Registers, Thread, Update
from .memory_model.triton_litmus import TritonLitmus, as_threads, results_of
from .result_files import Figures

BATCH = 25
MORE = 200  # schedules for a program whose race has not been found
Outcomes = set[tuple[int, ...]]


@dataclass(frozen=True)
class Allowed:
    """What the axioms say of one litmus."""

    outcomes: Outcomes
    races: bool  # by PTX
    strict: bool  # by the page, on which an observation orders nothing
    claimed: Outcomes | None  # what the simulator can show; None if nothing is claimed


def programs(count: int, seed: int = 0) -> Iterator[TritonLitmus]:
    """Yield litmus programs: half from cycles, half of random operations."""
    random = Random(seed)
    rings = [*cycles(2), *cycles(3)]
    made = (
        from_cycle(random.choice(rings), random.randrange(1 << 30))
        if number % 2
        else from_seed(random.randrange(1 << 30))
        for number in count_from(0)
    )
    return islice(filter(small, made), count)


def allowed(litmus: TritonLitmus) -> Allowed:
    """Ask the axioms. Once both races are known, one execution per outcome is enough."""
    outcomes: Outcomes = set()
    races = strict = False

    def wanted(registers: tuple[Registers, ...]) -> bool:
        return not (races and strict) or results_of(litmus, registers) not in outcomes

    for registers, x in executions(as_threads(litmus), wanted=wanted):
        outcomes.add(results_of(litmus, registers))
        races |= _between_programs(x.races)
        strict |= _between_programs(x.strict_races)
    for registers, _ in executions(_with_reads(litmus), wanted=wanted):
        outcomes.add(results_of(litmus, registers))
    return Allowed(outcomes, races, strict, None if strict else _claimed(litmus))


def _with_reads(litmus: TritonLitmus) -> Litmus:
    """Let polls only read: on the page, one that writes back what it found makes no write.

    As updates they would depend on what a guard before them read.
    """
    whole = as_threads(litmus)
    return Litmus(tuple(Thread(tuple(map(_poll, t.code)), t.place) for t in whole.threads))


def _between_programs(pairs: list[tuple[Effect, Effect]]) -> bool:
    return any(a.place != b.place for a, b in pairs)


def _claimed(litmus: TritonLitmus) -> Outcomes | None:
    """Apply the page's claim: polls read any coherent write, all else is in one order.

    That excludes what follows from program order, reads-from and coherence in a circle, that is,
    load buffering and 2+2W.
    """
    ops = [op for program in litmus for op in program.ops if op.kind not in ("barrier", "guard")]
    if any(op.kind != "atomic" or op.name == "cas" for op in ops):
        return None
    found: Outcomes = set()

    def wanted(registers: tuple[Registers, ...]) -> bool:
        return results_of(litmus, registers) not in found

    for registers, x in executions(_with_reads(litmus), wanted=wanted):
        if (x.effects.po | x.rf | x.co).acyclic:
            found.add(results_of(litmus, registers))
    return found


def _poll(step: Instruction) -> Instruction:
    """Turn an update that adds 0 and does not release into a read."""
    if not isinstance(step, Update) or (step.op, step.value) != ("add", 0):
        return step
    if step.sem not in ("relaxed", "acquire"):
        return step
    return Read(step.into, step.loc, step.sem, step.scope)


@dataclass
class Counts:
    """What was compared, and what differs."""

    programs: int = 0
    races: int = 0
    races_by_page_only: int = 0
    outcomes_allowed: int = 0
    outcomes_seen: int = 0
    claims: int = 0
    claimed: int = 0
    claimed_seen: int = 0
    complete: int = 0
    differences: tuple[str, ...] = ()

    def plus(self, litmus: TritonLitmus, model: Allowed, seen: Seen) -> Counts:
        """Add one program."""
        claim = model.claimed
        shown = len(seen.outcomes & claim) if claim is not None else 0
        return Counts(
            self.programs + 1,
            self.races + model.races,
            self.races_by_page_only + (model.strict and not model.races),
            self.outcomes_allowed + len(model.outcomes),
            self.outcomes_seen + len(seen.outcomes),
            self.claims + (claim is not None),
            self.claimed + (len(claim) if claim is not None else 0),
            self.claimed_seen + shown,
            self.complete + (claim is not None and shown == len(claim)),
            self.differences + tuple(_differences(litmus, model, seen)),
        )


def _differences(litmus: TritonLitmus, model: Allowed, seen: Seen) -> Iterator[str]:
    if model.races and not model.strict:
        yield f"PTX has a race that the page does not know: {litmus}"
    if seen.racing != model.strict:
        found = "reports a race" if seen.racing else f"reports no race in {MORE} schedules"
        yield f"the checker {found}, the axioms say {model.strict}: {litmus}"
    if more := seen.outcomes - model.outcomes:
        yield f"the simulator showed {more}, which the axioms forbid: {litmus}"
    if model.claimed is not None and (more := seen.outcomes - model.claimed):
        yield f"the simulator showed {more}, more than the page claims: {litmus}"
    yield from (f"{text}: {litmus}" for text in seen.other)


def compare(batch: list[TritonLitmus], schedules: int, counts: Counts) -> Counts:
    """Run a batch on both sides."""
    models = [allowed(litmus) for litmus in batch]
    for litmus, model, seen in zip(batch, models, observe(batch, schedules), strict=True):
        if model.strict and not seen.racing:
            seen = replace(observe([litmus], MORE)[0], outcomes=seen.outcomes)
        counts = counts.plus(litmus, model, seen)
    return counts


def main(count: int, schedules: int, seed: int, path: str) -> bool:
    """Compare many programs, print what differs; say whether nothing does."""
    left, counts, start = list(programs(count, seed)), Counts(), process_time()
    for first in track(range(0, count, BATCH), "litmus programs"):
        counts = compare(left[first : first + BATCH], schedules, counts)
    figures(counts, schedules, process_time() - start).show(path, on_cpu=True)
    print("\n".join(counts.differences))
    return not counts.differences


def figures(counts: Counts, schedules: int, seconds: float) -> Figures:
    """Make the table of what was compared."""
    text = (
        f"{counts.programs:,} generated programs under {schedules} schedules each, in "
        f"{seconds:.0f} s of CPU time: {len(counts.differences)} differ."
    )
    rows: list[tuple[str, int]] = [
        ("programs with a race, by axioms and checker", counts.races),
        ("with a race on the page and none in PTX", counts.races_by_page_only),
        ("outcomes that the axioms allow", counts.outcomes_allowed),
        ("of these, outcomes that the simulator showed", counts.outcomes_seen),
        ("programs of atomics alone, without a race", counts.claims),
        ("their outcomes that the page claims can be shown", counts.claimed),
        ("of these, shown", counts.claimed_seen),
        ("programs with all claimed outcomes shown", counts.complete),
    ]
    title = "Axioms and checker on litmus programs"
    return Figures(title, text, ["what", "number"], [[name, f"{n:,}"] for name, n in rows])
