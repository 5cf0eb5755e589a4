"""What `check --json` says about a schedule that showed something: events, edges and waits.

A schedule with a finding runs once more, and every access is kept in the order in which it was
made: an event. An event happens before the later ones of its lane (a program, or a rank's host).
Edges give the order between lanes. An edge that is "heard" gives none: a signal was read, but
without a release, without an acquire, or with a scope that does not reach.
"""

from __future__ import annotations

import itertools
import linecache
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import knobs
from ...backends.sim import simulate
from ...callsite import relative
from ...checker.checker import Checker
from ...checker.encounter import Found
from ...checker.findings import AccessEvent, Finding, FoundAccess
from ...checker.scopes import both_reach
from ...checker.shadow import Span
from ...checker.signals import ACQUIRES, RELEASES, Heard
from ...errors import Deadlock
from ...machine.accesses import Touch
from ...machine.machine import Machine
from ...machine.polling import kernel_frames, site_of, stack_of
from ...machine.schedule import from_token
from ...machine.tasks import Program, Stream
from ...report.sections import CHECK_SCHEMA_VERSION
from ...world.world import World
from ..timing import machine
from .mutation import Outcome, Verdicts
from .schedules import Report

if TYPE_CHECKING:
    from .._options import CheckOptions

MOST_EVENTS = 20_000  # that a run keeps: the last ones
_MOST_RUNS = 8
_AROUND = 6  # source lines before the first place of a file, and after its last

ORDER, HEARD, LAUNCH, END, BARRIER = "order", "heard", "launch", "end", "barrier"


class Place(NamedTuple):
    """Where a lane does something. All events there share one."""

    lane: int
    what: str
    sem: str
    scope: str
    file: str
    line: int


@dataclass
class Run:
    """One schedule, as it ran. An event is [place, memory, times]; an edge [from, to, kind]."""

    token: str
    lanes: dict[tuple[int, str, tuple[int, ...] | None], int] = field(default_factory=dict)
    places: dict[Place, int] = field(default_factory=dict)
    events: list[list[Any]] = field(default_factory=list)
    edges: dict[tuple[int, int, str], None] = field(default_factory=dict)
    pairs: dict[tuple, tuple[int, int]] = field(default_factory=dict)  # events by finding
    waits: list[dict[str, Any]] = field(default_factory=list)
    hosts: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""
    paths: dict[str, str] = field(default_factory=dict)  # of files, as a place names them

    def as_json(self) -> dict[str, Any]:
        """Return JSON without events before the last MOST_EVENTS, and without their edges."""
        first = max(len(self.events) - MOST_EVENTS, 0)
        lanes = [{"rank": rank, "kernel": k, "program": p} for rank, k, p in self.lanes]
        return {
            "token": self.token,
            "lanes": lanes,
            "dropped": first,
            "places": [place._asdict() for place in self.places],
            "events": self.events[first:],
            "edges": [[a - first, b - first, kind] for a, b, kind in self.edges if a >= first],
            "waits": self.waits,
            "hosts": self.hosts,
            "failure": self.failure,
        }

    def forget_unwinding(self) -> None:
        """Drop the ends of kernels after the last step of a run that failed: nothing ended."""
        what = [place.what for place in self.places]
        while self.events and what[self.events[-1][0]] == "kernel end":
            self.events.pop()
        self.edges = {edge: None for edge in self.edges if edge[1] < len(self.events)}

    def pair(self, finding: Finding) -> list[int]:
        """Return the finding's two events, as numbers of the JSON; [] if they are not there.

        What only the compiler confirms is found after the run: by rank, file and line.
        """
        first = max(len(self.events) - MOST_EVENTS, 0)
        pair = self.pairs.get(finding.key()) or [
            self._last_at(side) for side in (finding.first, finding.second) if side is not None
        ]
        return [at - first for at in pair] if all(at >= first for at in pair) else []

    def _last_at(self, side: FoundAccess) -> int:
        lane = self.lanes.get((side.rank, side.kernel, side.program))
        here = {
            number
            for place, number in self.places.items()
            if (place.lane, place.file, place.line) == (lane, side.file, side.line)
        }
        return max((at for at, event in enumerate(self.events) if event[0] in here), default=-1)


class _Recording(Checker):
    """A checker that also keeps what it was shown."""

    run: Run

    def begin(self, run: Run) -> None:
        self.run = run
        self._latest: dict[AccessEvent, int] = {}
        self._sent: dict[tuple[Any, int], int] = {}  # the event of an actor's atomic, by its step
        self._began: dict[int, int] = {}  # launch: the host's event
        self._ends: dict[int, dict[Any, int]] = {}  # launch: each actor's last event
        self._edges_of: set[tuple[Any, Any]] = set()

    def world_barrier(self, streams: list[Stream]) -> None:
        super().world_barrier(streams)
        ranks = dict.fromkeys(stream.rank for stream in streams)
        events = [self._add(rank, "host", None, "world barrier") for rank in ranks]
        for a, b in itertools.pairwise(events):
            self.run.edges[a, b, BARRIER] = None

    def fence(self, program: Program, sem: str, scope: str, everyone: bool) -> None:
        super().fence(program, sem, scope, everyone)
        name = f"fence.{sem}.{scope}"
        self._of_actor(self._actors[program], name, stack_of(site_of(kernel_frames())))

    def proxy_fence(self, program: Program) -> None:
        super().proxy_fence(program)
        self._of_actor(self._actors[program], "proxy fence", stack_of(site_of(kernel_frames())))

    def atomic(self, program: Program, *args: Any) -> None:
        actor = self._actors[program]
        step = actor.steps
        super().atomic(program, *args)
        self._sent[actor, step] = here = self._ends[actor.launch][actor]
        for heard in list(actor.heard.values()):
            self._hear(actor, heard, here)

    def _hear(self, actor: Any, heard: Heard, here: int) -> None:
        """Draw an edge from a signal that was read now; a later poll that reads it adds none."""
        signal = heard.signal
        key = (actor, (signal.actor, signal.step, signal.addresses[0]))
        source = self._sent.get((signal.actor, signal.step))
        if key in self._edges_of or source is None or self._latest.get(heard.event) != here:
            return
        self._edges_of.add(key)
        pair = signal.event.sem in RELEASES and heard.event.sem in ACQUIRES
        ordered = pair and both_reach(signal.event, heard.event)
        self.run.edges[source, here, ORDER if ordered else HEARD] = None

    def _note(
        self,
        what: str,
        rank: int | None,
        launch: int | None,
        event: Any = None,
        touch: Touch | None = None,
        tensor: bool | None = None,
    ) -> None:
        if isinstance(event, AccessEvent):
            self._access_event(event, touch)
        elif what == "barrier":
            self._of_actor(event, "CTA barrier", stack_of(site_of(kernel_frames())))
        elif what in ("launch", "end") and rank is not None and launch is not None:
            self._launch(what, rank, launch)

    def _launch(self, what: str, rank: int, launch: int) -> None:
        here = self._add(rank, "host", None, f"kernel {what}")
        if what == "launch":
            self._began[launch], self._ends[launch] = here, {}
        for last in self._ends[launch].values():
            self.run.edges[last, here, END] = None

    def _access_event(self, event: AccessEvent, touch: Touch | None) -> None:
        memory = _memory(touch)
        if event.actor.index is None:
            place = (event.verb, event.sem, event.scope, [event.where])
            self._latest[event] = self._add(event.actor.rank, "host", None, *place, memory=memory)
        else:
            how = event.verb, [event.where], event.sem, event.scope
            self._latest[event] = self._of_actor(event.actor, *how, memory=memory)

    def _of_actor(
        self, actor: Any, what: str, stack: list, sem: str = "", scope: str = "", memory: str = ""
    ) -> int:
        lane = actor.rank, actor.kernel, actor.index
        here = self._add(*lane, what, sem, scope, stack, memory)
        if actor not in self._ends[actor.launch]:
            self.run.edges[self._began[actor.launch], here, LAUNCH] = None
        self._ends[actor.launch][actor] = here
        return here

    def _add(
        self,
        rank: int,
        kernel: str,
        index: tuple[int, ...] | None,
        what: str,
        sem: str = "",
        scope: str = "",
        stack: list | None = None,
        memory: str = "",
    ) -> int:
        """Append an event; one like the last of all is the same, made several times: a poll."""
        run = self.run
        lane = run.lanes.setdefault((rank, kernel, index), len(run.lanes))
        file, line = (relative(stack[0][0]), stack[0][1]) if stack else ("", 0)
        if stack:
            run.paths[file] = stack[0][0]
        place = Place(lane, what, sem, scope, file, line)
        number = run.places.setdefault(place, len(run.places))
        if run.events and run.events[-1][:2] == [number, memory]:
            run.events[-1][2] += 1
        else:
            run.events.append([number, memory, 1])
        return len(run.events) - 1

    def _report(self, found: Found, event: AccessEvent, span: Span) -> None:
        known = set(self.findings)
        super()._report(found, event, span)
        here = self._latest.get(event)
        for key in self.findings.keys() - known:
            earlier = self._latest.get(found.earlier) if found.earlier is not None else here
            if earlier is not None and here is not None:
                self.run.pairs[key] = earlier, here


def _memory(touch: Touch | None) -> str:
    """Name what is touched: flag[0], inbox[0:1000]."""
    if touch is None or touch.region is None or not touch.addresses.size:
        return ""
    region = touch.region
    low, high = int(touch.addresses.min()), int(touch.addresses.max())
    first, last = ((at - region.start) // region.itemsize for at in (low, high))
    return f"{region.name}[{first}]" if first == last else f"{region.name}[{first}:{last + 1}]"


def record_runs(
    fn: Callable[[World], Any], size: int, findings: list[Finding], num_sms: int = 0
) -> list[Run]:
    """Run the findings' schedules again; return what happened."""
    tokens = list(dict.fromkeys(finding.token for finding in findings if finding.token))
    return [_record(fn, size, token, num_sms) for token in tokens[:_MOST_RUNS]]


def _record(fn: Callable[[World], Any], size: int, token: str, num_sms: int) -> Run:
    machine = Machine(from_token(token), num_sms or knobs.num_sms.get(), expire=False)
    checker = _Recording(machine.memory, machine.schedule.pick)
    checker.begin(Run(token))
    machine.checker = checker
    simulate(machine, fn, size, knobs.heap_size.get() or 16 << 20)
    run = checker.run
    if machine.failure is not None:
        run.failure = type(machine.failure).__name__
        run.forget_unwinding()
    if isinstance(machine.failure, Deadlock):
        run.waits = [asdict(wait) for wait in machine.failure.waits]  # type: ignore[call-overload]
        run.hosts = list(_hosts(str(machine.failure)))
    return run


# As machine/deadlock.py says it: afterwards the hosts are unwound.
_HOST = re.compile(
    r"^  rank (\d+): its host (?:(has returned)|(is running)|waits for (.*?) \(([^()]+:\d+)\))",
    re.M,
)


def _hosts(message: str) -> Iterator[dict[str, Any]]:
    """Return what each rank's host did when nothing could run any more."""
    for rank, returned, running, waits_for, at in _HOST.findall(message):
        state = "returned" if returned else "runs" if running else "waits"
        yield {"rank": int(rank), "state": state, "waits_for": waits_for, "at": at}


def _source(runs: list[Run]) -> dict[str, Any]:
    """Return the lines around all places of each file: {file: {first, lines}}."""
    paths = {file: path for run in runs for file, path in run.paths.items()}
    places = {(place.file, place.line) for run in runs for place in run.places}
    found = {}
    for file, full in sorted(paths.items()):
        lines = linecache.getlines(full)
        here = [line for path, line in places if path == file and line <= len(lines)]
        if here:
            first, last = max(min(here) - _AROUND, 1), max(here) + _AROUND
            text = [line.rstrip("\n") for line in lines[first - 1 : last]]
            found[file] = {"first": first, "lines": text}
    return found


def content_of(
    options: CheckOptions,
    checked: list[tuple[Callable[[World], Any], Report]],
    mutants: tuple[list[Outcome], Verdicts],
    coverage: str,
) -> dict[str, Any]:
    """Return what `check --json` writes, of one function or of several; see docs/report.md."""
    runs: list[Run] = []
    findings: list[dict[str, Any]] = []
    remarks: list[dict[str, Any]] = []
    for fn, report in checked:
        found = [*report.findings, *report.remarks]
        shown = record_runs(fn, options.ranks, found, options.sms)
        findings += [_placed(finding, shown, len(runs)) for finding in report.findings]
        remarks += [_placed(finding, shown, len(runs)) for finding in report.remarks]
        runs += shown
    outcomes, verdicts = mutants
    return {
        "kind": "check", "schema_version": CHECK_SCHEMA_VERSION, "machine": machine(),
        "target": options.target, "world": options.ranks, "coverage": coverage,
        "schedules": sum(report.schedules for _, report in checked), "asked": options.schedules,
        "findings": findings,
        "notes": list(dict.fromkeys(note for _, report in checked for note in report.notes)),
        "remarks": remarks,
        "mutants": [
            {"name": o.name, "where": o.mutant.where, "what": o.mutant.what,
             "killed_by": o.killed_by, "accepted": verdicts.accepted.get(o.name, ""),
             "schedules": o.report.schedules, "diff": o.mutant.diff}
            for o in outcomes
        ],
        "runs": [run.as_json() for run in runs], "source": _source(runs),
    }  # fmt: skip


def _placed(finding: Finding, runs: list[Run], before: int) -> dict[str, Any]:
    """Return a finding with the run that shows it, and its two events there."""
    shown = {run.token: (before + number, run) for number, run in enumerate(runs)}
    number, run = shown.get(finding.token, (-1, None))
    return finding.as_json() | {"run": number, "events": run.pair(finding) if run else []}
