"""What the checker reports: the broken rule, two accesses, why nothing orders them, what to do."""

from __future__ import annotations

import linecache
import os
import re
from dataclasses import asdict, dataclass
from typing import Any

from ..callsite import relative

SILENCE = "no signal, barrier or launch stands between them in either direction"

_NUMBER = re.compile(r"(?<![\w.:])-?\d[\d.]*")  # not that of a line, or a part of a name
_SUNDOG = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_WAITS = os.path.join(_SUNDOG, "device", "signal.py")
_OURS = tuple(os.path.join(_SUNDOG, name) for name in ("device", "compat"))


@dataclass(frozen=True)
class Rule:
    """Something that the checker reports: its name, what it means, and what to do about it."""

    kind: str
    name: str  # "" where the kind says it all
    means: str  # its line in docs/checker.md
    advice: str = ""
    is_verdict: bool = True  # False: the run failed, which says nothing about synchronisation
    is_strict: bool = False  # a remark, and an error only for who asks for it

    def finding(
        self, why: str, first: FoundAccess | None = None, second: FoundAccess | None = None
    ) -> Finding:
        return Finding(
            self.kind, self.name, why, first, second, self.advice, is_strict=self.is_strict
        )


@dataclass(frozen=True)
class FoundAccess:
    """One side of a finding."""

    rank: int
    program: tuple[int, ...] | None  # None: the rank's host
    kernel: str
    file: str
    line: int
    text: str  # the source line
    stack: tuple[str, ...]  # file:line function, innermost first
    verb: str  # load, store, atomic ADD, descriptor load, host read, ...
    sem: str
    scope: str
    allocation: str = ""
    indices: str = ""

    @property
    def atomic(self) -> bool:
        return self.verb.startswith("atomic")

    @property
    def reads(self) -> bool:
        """Return whether it reads only."""
        return self.verb.endswith(("load", "read"))

    @property
    def who(self) -> tuple[int, tuple[int, ...] | None, str]:
        return self.rank, self.program, self.kernel

    def __str__(self) -> str:
        who = "its host" if self.program is None else f"program {self.program} of {self.kernel}"
        order = f" ({self.sem}, {self.scope})" if self.sem else ""
        where = f" {self.allocation}{self.indices}" if self.allocation else ""
        lines = [f"rank {self.rank}, {who}: {self.verb}{order}{where}"]
        lines += [f"    {self.file}:{self.line}: {self.text}"]
        here = f"{self.file}:{self.line} "
        lines += [f"    in the call chain: {at}" for at in self.stack if not at.startswith(here)]
        return "\n".join(lines)


@dataclass
class Finding:
    """What `sundog check` reports. At most one per kind, pair of source lines and direction."""

    kind: str  # of the rule: race, deadlock and so on
    rule: str  # the name of the rule
    why: str
    first: FoundAccess | None = None
    second: FoundAccess | None = None
    suggestion: str = ""
    token: str = ""  # replays the interleaving
    count: int = 1
    is_strict: bool = False  # as its rule

    def key(self) -> tuple:
        """Return what tells it from others: kind, lines, direction, one program or two.

        A read after a write and a write after a read on the same two lines need different orders.
        """
        sides = [a for a in (self.first, self.second) if a is not None]
        if not sides:
            return self.kind, _NUMBER.sub("#", self.why.split("\n")[0])
        lines = sorted((a.file, a.line) for a in sides)
        return self.kind, *lines, tuple(a.reads for a in sides), len({a.who for a in sides})

    def absorb(self, other: Finding) -> None:
        """Count another one with the same key; it takes over where it knows of a signal."""
        count = self.count + other.count
        if self.why == SILENCE != other.why:
            vars(self).update(vars(other))
        self.count = count

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        times = f", {self.count} times" if self.count > 1 else ""
        lines = [f"{self.kind}{times}: {self.rule}" if self.rule else f"{self.kind}{times}"]
        lines += [f"  {_indent(str(a))}" for a in (self.first, self.second) if a is not None]
        lines.append(f"  why: {_indent(self.why)}")
        if self.suggestion:
            lines.append(f"  do:  {self.suggestion}")
        if self.token:
            lines.append(f"  replay: --schedule {self.token}")
        return "\n".join(lines)


def _indent(text: str) -> str:
    return text.replace("\n", "\n  ")


@dataclass(eq=False, slots=True)  # compared by identity: there is one for each place
class AccessEvent:
    """Where and how an actor makes an access; all its accesses there share one."""

    actor: Any  # clocks.Actor, or clocks.StreamActor for a host
    verb: str
    writes: bool
    atomic: bool
    tensor: bool
    sem: str = ""
    scope: str = ""
    proxy: bool = False
    size: int = 0  # bytes of an atomic
    stack: tuple[tuple[str, int, str], ...] = ()
    looks: Any = None  # rules.Looks: the rules that its accesses concern
    alike: int = 0  # of atomics for the whole system: those of this size are atomic to each other
    latest: Any = None  # shadow.PastAccess: its last access

    @property
    def where(self) -> tuple[str, int, str]:
        """Return the line to show: the user's, also if one of sundog's primitives makes it."""
        user = (at for at in self.stack if not at[0].startswith(_OURS))
        return next(user, self.stack[0] if self.stack else ("?", 0, ""))

    @property
    def is_ours(self) -> bool:
        """Return whether it has no line of the user's: a kernel that stands for torch's own."""
        return self.where[0].startswith(_OURS)

    @property
    def waits(self) -> bool:
        """Return whether it polls in a wait of sundog's: that only ends with what it waits for."""
        return bool(self.stack) and self.stack[0][0].startswith(_WAITS)

    @property
    def callers(self) -> tuple[tuple[str, int, str], ...]:
        """Return `where` and the lines that called it, the kernel's last."""
        place = self.stack.index(self.where) if self.where in self.stack else 0
        return self.stack[place:] or (self.where,)

    def access(self, allocation: str, indices: str) -> FoundAccess:
        path, line, _ = self.where
        stack = tuple(f"{relative(p)}:{n} {name}" for p, n, name in self.stack)
        return FoundAccess(
            self.actor.rank,
            self.actor.index,
            self.actor.kernel,
            relative(path),
            line,
            linecache.getline(path, line).strip(),
            stack,
            self.verb,
            self.sem,
            self.scope,
            allocation,
            indices,
        )
