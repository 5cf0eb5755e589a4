"""Random small multi-rank programs, on which the checker and the oracle must agree.

Hypothesis makes a `Case`: what each rank's host does and what each program of its kernels does, on
a few words that they share. It is written out as a Python file with one operation per line, run on
the simulator under the checker, and the order in which the operations really happened goes to
`oracle.races`. Both must name the same pairs of lines. What an operation is (its bytes, semantics,
scope, whether it is a tile) is taken from the case, not from the checker's trace.

    python tests/support/generated.py --programs 5000 --seed 0
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from hypothesis import HealthCheck, Phase, given, seed, settings
from rich.progress import Progress

from sundog.checker.layouts import READ_BACK_TILE
from sundog.tools.check.schedules import Report

from .generated_cases import LOCAL, Case, HostOp, Op, cases
from .generated_source import FIRST, Site, Text, source
from .oracle import Event, Race, races
from .traced import Trace, traced

__all__ = ["Verdicts", "compare", "each_case", "verdicts"]

Pairs = set[tuple[int, int]]


# from what happened to the oracle's events


def _lanes(rank: int, op: Op | HostOp) -> tuple[tuple[int, int], ...]:
    """Symbolic addresses: a thousand per rank, and per rank for its ordinary tensor."""
    base = 1000 * (rank + 10 if op.owner == LOCAL else op.owner) + 4 * op.word
    if isinstance(op, HostOp):
        return tuple((base + 4 * i, 4) for i in range(op.count))
    masked = op.masked and op.lanes > 0 and op.name != "cas"
    count = max(op.lanes, 1) - masked
    if op.byte >= 0:
        return tuple((base + op.byte + i, 1) for i in range(count))
    return tuple((base + 4 * i, 4) for i in range(count))


def _events(site: Site, op: Op | HostOp) -> list[Event]:
    lanes = _lanes(site[0], op)
    if isinstance(op, HostOp):
        source = _lanes(site[0], HostOp("read", site[0], 7, 1)) if op.kind == "copy" else lanes
        read, write = Event("host_read", *site, source), Event("host_write", *site, lanes)
        return {"read": [read], "write": [write], "copy": [read, write]}[op.kind]
    if op.kind == "barrier":
        return [Event("barrier", *site)]
    kind = "atomic" if op.name else "volatile" if op.kind == "wait" else op.kind
    sem, scope = (op.sem, op.scope) if op.name else ("", "")
    if kind == "volatile":
        sem, scope = "relaxed", "sys"
    # The interpreter can't tell a tensor of one element from a scalar; one thread makes it, too.
    return [Event(kind, *site, lanes, sem, scope, op.lanes > 1)]


def _linear(text: Text, trace: list[tuple]) -> tuple[list[Event], list[int]]:
    """The run as the oracle wants it: every operation from the case, in the order of the trace."""
    events, lines = [], []
    numbers: dict[tuple[int, int], int] = {}  # of launches: the trace's to those of the rank
    for kind, rank, launch, program, line, where, *how, lags in trace:
        made = []
        if kind == "world_barrier":
            made = [Event(kind, -1)]
        elif kind == "launch":
            numbers[rank, launch] = sum(r == rank for r, _ in numbers)
            made = [Event(kind, rank, numbers[rank, launch])]
        elif kind == "barrier":
            made = [Event(kind, rank, numbers[rank, launch], program)]
        elif line in text.ops and kind != "end":
            site, op = text.ops[line]
            made = [replace(e, lags=lags) for e in _events(site, op) if e.kind == kind]
            same = bool(made) and site[0] == rank
            same &= not where or _as_traced(made[0]) == (len(where), *how)
            assert same, (
                f"line {line} is {op} of {site}, the trace says {kind} {rank} {where} {how}"
            )
        events += made
        lines += [line or 0] * len(made)
    _check_complete(text, events)
    return events, lines


def _as_traced(event: Event) -> tuple[int, int, str, str, bool | None]:
    if event.launch < 0:  # of a host: words side by side are traced as one large element
        return 1, sum(size for _, size in event.lanes), event.sem, event.scope, None
    return len(event.lanes), event.lanes[0][1], event.sem, event.scope, event.tile


def _check_complete(text: Text, events: list[Event]) -> None:
    """The trace has all that each host and program did, in that order; only waits repeat."""
    wanted: dict[Site, list[Event]] = defaultdict(list)
    happened: dict[Site, list[Event]] = defaultdict(list)
    for site, op in text.ops.values():
        wanted[site] += [e for e in _events(site, op) if e.lanes or e.kind == "barrier"]
    for event in events:
        if event.kind in ("launch", "world_barrier") or not (
            event.lanes or event.kind == "barrier"
        ):
            continue
        if happened[event.actor][-1:] != [event] or event.kind not in (
            "atomic",
            "volatile",
            "load",
        ):
            happened[event.actor].append(event)
    for site, ops in wanted.items():
        assert _once(ops) == _once(happened[site]), f"{site} did {happened[site]}, not {ops}"


def _once(events: list[Event]) -> list[Event]:
    return [e for e, before in zip(events, [None, *events], strict=False) if e != before]


# both verdicts


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _checked(case: Case, text: Text, folder: Path) -> tuple[Report, Trace]:
    path = folder / "generated_case.py"
    path.write_text("\n".join(text.lines) + "\n")
    main = _import(path).main
    return traced(main, case.world_size, case.schedule, case.num_sms, strict=True)


@dataclass
class Verdicts:
    """What the checker found and what the oracle demands, as pairs of lines."""

    text: Text
    events: list[Event]
    lines: list[int]
    found: Pairs
    expected: Pairs
    missed: Pairs  # no finding stands for them


def verdicts(case: Case, folder: Path) -> Verdicts:
    """Run a case once and judge that run twice."""
    text = source(case)
    report, trace = _checked(case, text, folder)
    racing_kinds = ("race", "kernel boundary")  # the oracle gives no order at a kernel's end either
    races_found = [
        finding
        for finding in report.findings
        if finding.kind in racing_kinds and finding.rule != READ_BACK_TILE.name
    ]  # the oracle has no threads
    others = [f for f in report.findings if f.kind not in (*racing_kinds, "portability")]
    assert not others, others[0]
    events, lines = _linear(text, trace)
    racing = races(events)
    found = {_pair(finding.first.line, finding.second.line) for finding in races_found}
    expected = {_pair(lines[race.first], lines[race.second]) for race in racing}
    missed = _missed(text, events, racing, found)
    short = {_pair(lines[race.first], lines[race.second]) for race in missed}
    return Verdicts(text, events, lines, found, expected, short)


def compare(case: Case, folder: Path) -> int:
    """Number of racing pairs of lines; AssertionError if checker and oracle differ."""
    both = verdicts(case, folder)
    wrong = both.found - both.expected
    assert not wrong | both.missed, _explain(case, both, wrong)
    return len(both.expected)


def _missed(text: Text, events: list[Event], racing: list[Race], found: Pairs) -> list[Race]:
    """Return the races that no finding stands for.

    A finding stands for the races between the same two programs on a byte: the checker may forget
    an access for a later one of the same program that nothing orders differently, and whatever
    is `hidden` by a later access that itself races.
    """
    covered = {
        (frozenset(text.ops[line][0] for line in pair), byte)
        for pair in found
        if text.ops.keys() >= {*pair}
        for byte in _bytes(text, pair[0]) & _bytes(text, pair[1])
    }
    return [
        race
        for race in racing
        if not race.hidden
        and (frozenset(events[at].actor for at in (race.first, race.second)), race.byte)
        not in covered
    ]


def _bytes(text: Text, line: int) -> set[int]:
    lanes = [lane for event in _events(*text.ops[line]) for lane in event.lanes]
    return {byte for address, size in lanes for byte in range(address, address + size)}


def _pair(a: int, b: int) -> tuple[int, int]:
    return min(a, b), max(a, b)


def _explain(case: Case, both: Verdicts, wrong: Pairs) -> str:
    out = [f"checker only: {sorted(wrong)}; oracle only: {sorted(both.missed)}"]
    out += [f"{at}  {line}" for at, line in enumerate(both.text.lines[FIRST - 1 :], FIRST)]
    out += ["", f"{case.schedule}, {case.num_sms} SMs; in this order:"]
    for event, line in zip(both.events, both.lines, strict=True):
        out.append(f"  rank {event.rank} {line or event.kind}")
    return "\n".join(out)


def each_case(number: int, start: int, on_case: Callable[[int], Any]) -> None:
    """Compare on `number` cases; a disagreement is shrunk, then raised."""

    @seed(start)
    @settings(
        max_examples=number,
        database=None,
        report_multiple_bugs=False,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def run(case: Case) -> None:
        with tempfile.TemporaryDirectory() as folder:
            on_case(compare(case, Path(folder)))

    run()


def main(programs: int = 5000, seed: int = 0) -> None:
    """Compare checker and oracle on generated programs; exit status 1 if they ever differ."""
    counts: list[int] = []
    with Progress() as progress:
        task = progress.add_task("programs", total=programs)

        def on_case(racing: int) -> None:
            counts.append(racing)
            progress.advance(task)

        try:
            each_case(programs, seed, on_case)
        except AssertionError as error:
            progress.stop()
            print(error)
            sys.exit(1)
    clean = sum(count == 0 for count in counts)
    print(f"{len(counts)} programs agree: {clean} clean, {sum(counts)} racing pairs in the others")


if __name__ == "__main__":
    typer.run(main)
