"""Litmus programs: a few threads with a few memory operations, as data.

`executions` finds what docs/memory_model.md allows such a program to do, and `progress` whether it
ends. `triton_litmus` writes programs of scalar Triton operations as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import add, and_, eq, floordiv, ge, gt, le, lt, mul, ne, or_, sub, xor

SCOPES = ("cta", "gpu", "sys")
Operand = int | str  # a number, or a register's name
Registers = dict[str, int]
Origins = dict[str, frozenset[int]]  # by register
LONGEST_LOCAL_RUN = 10_000

_BINARY: dict[str, Callable[[int, int], int]] = {
    "add": add, "sub": sub, "mul": mul, "div": floordiv, "and": and_, "or": or_, "xor": xor,
    "max": max, "min": min,
}  # fmt: skip
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": eq,
    "ne": ne,
    "lt": lt,
    "le": le,
    "gt": gt,
    "ge": ge,
}


@dataclass(frozen=True)
class Read:
    """Read `loc` into a register."""

    into: str
    loc: str
    sem: str = "weak"
    scope: str = "sys"
    proxy: str = "generic"


@dataclass(frozen=True)
class Write:
    """Write a value to `loc`."""

    loc: str
    value: Operand
    sem: str = "weak"
    scope: str = "sys"
    proxy: str = "generic"


@dataclass(frozen=True)
class Update:
    """Read, modify and write `loc` in one atomic step; the old value goes into a register.

    `op` is "exch", "cas" (which writes the old value back if it does not swap) or a name of
    arithmetic.
    """

    into: str
    loc: str
    op: str
    value: Operand
    sem: str = "relaxed"
    scope: str = "sys"
    compare: Operand = 0
    proxy: str = "generic"


@dataclass(frozen=True)
class Fence:
    """A fence of the thread: "acquire", "release", "acq_rel" or "sc"."""

    sem: str
    scope: str


@dataclass(frozen=True)
class ProxyFence:
    """A fence between the generic proxy and another one, or between aliases of an address."""

    proxy: str  # "async", "surface", "texture", "constant" or "alias"


@dataclass(frozen=True)
class Barrier:
    """A barrier of the CTA, used once: `name` says which one.

    It waits for every thread of the CTA that has a barrier of this name, or for `quorum` of them.
    With `arrive` the thread does not wait.
    """

    name: Operand
    quorum: int = 0
    arrive: bool = False
    instance: int = 0


@dataclass(frozen=True)
class Set:
    """Compute with registers."""

    into: str
    left: Operand
    op: str = "add"
    right: Operand = 0


@dataclass(frozen=True)
class Jump:
    """Go on at an index of the code if the comparison holds."""

    to: int
    left: Operand = 0
    op: str = "eq"
    right: Operand = 0


Instruction = Read | Write | Update | Fence | ProxyFence | Barrier | Set | Jump


@dataclass(frozen=True)
class Place:
    """Where a thread runs."""

    cta: int
    gpu: int = 0

    def reaches(self, scope: str, other: Place) -> bool:
        """Say whether an operation of this scope, made here, includes a thread placed there."""
        if scope == "cta":
            return self == other
        return scope == "sys" or self.gpu == other.gpu


@dataclass(frozen=True)
class Thread:
    """The code of one thread, and where it runs."""

    code: tuple[Instruction, ...]
    place: Place


@dataclass(frozen=True)
class Litmus:
    """Threads, and the memory they start with.

    `aliases` names the generic address that another generic name stands for, and `views` the
    generic name that a name of another proxy stands for.
    """

    threads: tuple[Thread, ...]
    initial: Mapping[str, int] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    views: Mapping[str, str] = field(default_factory=dict)

    def virtual(self, loc: str) -> str:
        """Return the virtual address of a name: without the proxy it is used through."""
        return self.views.get(loc, loc)

    def physical(self, loc: str) -> str:
        """Return the memory that a name stands for in the end."""
        name = self.virtual(loc)
        return self.aliases.get(name, name)


def evaluate(operand: Operand, registers: Registers) -> int:
    """Return the value of a number or of a register, which starts as 0."""
    return registers.get(operand, 0) if isinstance(operand, str) else operand


def updated(update: Update, old: int, registers: Registers) -> int:
    """Return what an atomic update writes."""
    value = evaluate(update.value, registers)
    if update.op == "exch":
        return value
    if update.op == "cas":
        return value if old == evaluate(update.compare, registers) else old
    return _BINARY[update.op](old, value)


def advance(
    code: tuple[Instruction, ...], at: int, registers: Registers, origins: Origins | None = None
) -> int:
    """Run the instructions that touch no memory; return the index of the next that does.

    `registers` changes, and so does `origins`, which says on what reads a register's value rests.
    What the way through the code rests on is kept there as the register "".
    """
    origins = {} if origins is None else origins
    for _ in range(LONGEST_LOCAL_RUN):
        if at >= len(code) or not isinstance(step := code[at], Set | Jump):
            return at
        left, right = evaluate(step.left, registers), evaluate(step.right, registers)
        both = rests_on(step.left, origins) | rests_on(step.right, origins)
        if isinstance(step, Set):
            registers[step.into] = _BINARY[step.op](left, right)
            origins[step.into] = both
            at += 1
        else:
            origins[""] = rests_on("", origins) | both
            at = step.to if _COMPARE[step.op](left, right) else at + 1
    raise ValueError(f"{LONGEST_LOCAL_RUN} instructions in a row touch no memory: an endless loop")


def rests_on(operand: Operand, origins: Origins) -> frozenset[int]:
    """Return the reads that an operand's value rests on."""
    return origins.get(operand, frozenset()) if isinstance(operand, str) else frozenset()
