"""What a case of a fault campaign showed: named, in time, by exit status, with nothing left."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from sundog import errors

from .fault_programs import GRACE, Case

COLUMNS = ["fault", "injected", "named by all", "in time", "culprit named", "exit status", "clean"]
_GOOD = ("named", "in_time", "culprit", "status", "clean")  # the last columns
# What ends a traceback; torch.distributed writes the rank before each of its lines.
_SENTENCE = re.compile(r"^(?:\[rank\d+\]: )?(?:[\w.]*\.)?(\w+): (.*)", re.MULTILINE)
_KEPT = 600  # characters of a sentence, in the file
_STACKS = 6000  # and of stacks
_NAMED = {
    name
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, Exception)
}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a case showed, each of them good if true. `sentences`: by rank."""

    case: Case
    struck: bool  # did the rank come to its fault?
    named: bool
    in_time: bool
    culprit: bool
    status: bool
    clean: bool
    seconds: float  # from the fault to the last sentence
    sentences: list[str]
    statuses: list[int | None]
    left: str
    after: list[float]  # seconds from the fault to each rank's sentence
    stacks: str = ""  # of a process that was not in time

    @property
    def good(self) -> bool:
        return self.named and self.in_time and self.status and self.clean


def judge(case: Case, folder: Path, left: str, shared: list[str]) -> Verdict:
    """Read what a case left in its folder. Control cases are good if nothing happened.

    `left`: processes and memory; `shared`: new in the machine's /dev/shm, if the case had no own.
    """
    result = json.loads((folder / "result.json").read_text())
    processes = result["processes"]
    own = result["shared"]
    names = shared if own is None else own
    left = "; ".join(filter(None, (left, f"/dev/shm: {names}" if names else "")))
    events = [_events(folder, rank) for rank in range(case.size)]
    said = [_Said.read(folder, case, events, rank, processes) for rank in range(case.size)]
    others = [each for rank, each in enumerate(said) if rank != case.rank]
    struck = [e["at"] for e in events[case.rank] if e["event"] == "fault"]
    seconds = max((each.at for each in said if each.is_named), default=0.0) - min(struck, default=0)
    statuses = [each["status"] for each in processes]
    late = max((each.at for each in others), default=0.0) - min(struck, default=0)
    in_time = late <= case.timeout + GRACE
    return Verdict(
        case,
        struck=bool(struck),
        named=bool(struck) and all(each.is_named for each in others),
        in_time=in_time,
        culprit=all(each.names(case) for each in others),
        status=all(status not in (0, None) for status in statuses),
        clean=not left and not any(each["hung"] for each in processes),
        seconds=round(seconds, 2),
        sentences=[each.sentence for each in said],
        statuses=statuses,
        left=left + "; hung" * any(each["hung"] for each in processes),
        after=[round(each.at - min(struck, default=each.at), 2) for each in said],
        stacks="" if in_time else _stacks(folder),
    )


def _stacks(folder: Path) -> str:
    """Return the stacks that a process wrote when its time was over, if it did."""
    for path in sorted(folder.glob("output*.txt")):
        _, found, stacks = path.read_text(errors="replace").partition("Timeout (")
        if found:
            return f"{path.stem}: {stacks[:_STACKS]}"
    return ""


@dataclasses.dataclass(frozen=True)
class _Said:
    """The first sentence that a rank, or the process that holds it, was given."""

    sentence: str
    at: float
    is_named: bool

    @classmethod
    def read(
        cls, folder: Path, case: Case, events: list[list[dict]], rank: int, processes: list[dict]
    ) -> _Said:
        place = min(rank, len(processes) - 1)
        for event in events[rank]:
            if event["event"] == "error" and event["type"] in _NAMED:
                return cls(f"{event['type']}: {event['text']}", event["at"], True)
        text = (folder / f"output{place}.txt").read_text(errors="replace")
        found = [each for each in _SENTENCE.finditer(text) if _is_sentence(*each.groups())]
        if found:
            return cls(text[found[-1].start(1) :].strip(), processes[place]["at"], True)
        last = text.strip()[-2000:] if processes[place]["hung"] else text.strip()[-200:]
        return cls(f"no sentence of sundog's: {last}", processes[place]["at"], False)

    def names(self, case: Case) -> bool:
        """Return whether it names the rank that has the fault."""
        ranks = re.findall(r"ranks? (\d+(?:(?:, | and )\d+)*)", self.sentence)
        numbers = {number for each in ranks for number in re.findall(r"\d+", each)}
        return self.is_named and str(case.rank) in numbers


def _is_sentence(kind: str, words: str) -> bool:
    return kind in _NAMED or "injected fault" in words


def _events(folder: Path, rank: int) -> list[dict[str, Any]]:
    path = folder / f"events{rank}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def rows_of(cases: list[dict[str, Any]]) -> list[list[str]]:
    """Return a line per kind of fault, and the sum, from the JSON of a campaign."""
    injected = [case for case in cases if case["struck"]]
    kinds = dict.fromkeys(case["kind"] for case in injected)
    lines = []
    for kind in [*kinds, ""]:
        mine = [case for case in injected if kind in ("", case["kind"])]
        good = [sum(case[name] for case in mine) for name in _GOOD]
        lines.append([kind or "all", str(len(mine)), *map(str, good)])
    return lines


def as_json(verdict: Verdict) -> dict[str, Any]:
    case = dataclasses.asdict(verdict.case)
    about = {name: case[name] for name in ("number", "seed", "kind", "size", "rank", "step")}
    about["ops"] = [step["op"] for step in case["steps"]]
    about |= {name: case[name] for name in ("ending", "store_of_rank_0")}
    found = {each.name: getattr(verdict, each.name) for each in dataclasses.fields(verdict)[1:]}
    found["sentences"] = [text[:_KEPT] for text in verdict.sentences]
    return about | found


def line(verdict: Verdict) -> str:
    case = verdict.case
    bad = [name for name in _GOOD if not getattr(verdict, name)]
    said = "\n".join(
        f"    rank {rank}: {text[:300]}" for rank, text in enumerate(verdict.sentences)
    )
    return (
        f"case {case.number} {case.kind}, rank {case.rank} of {case.size}, step {case.step} "
        f"{case.steps[case.step].op}, ending {case.ending}: not {', '.join(bad)}; "
        f"{verdict.after} s, exit {verdict.statuses} {verdict.left}\n{said}"
        + (f"\n{verdict.stacks}" if verdict.stacks else "")
    )
