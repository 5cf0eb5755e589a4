"""Litmus programs of Triton operations, and what each becomes on the threads of its CTA.

The page's rules on programs follow from the axioms on threads. Two threads stand for a CTA: thread
0, which makes scalar atomics and scalar stores, and one that stands for all others. Both make a
scalar load; the other one makes tiles, since thread 0's release must not publish them. After an
atomic the compiler hands its result to all warps: thread 0 arrives at a barrier, and the other one
waits there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .litmus import Barrier, Instruction, Jump, Litmus, Place, Read, Thread, Update, Write

RESULTS = ("load", "atomic")  # the kinds of operations that return a value


@dataclass(frozen=True)
class TritonOp:
    """One operation of a program. A guard ends the program unless an atomic returned `value`."""

    kind: str  # "load", "store", "atomic", "barrier" or "guard"
    word: int = 0
    value: int = 0
    name: str = ""  # of the atomic: "xchg", "add" or "cas" (from 0)
    sem: str = "relaxed"
    scope: str = "gpu"
    tile: bool = False
    of: int = -1  # a guard's: the index of the atomic


@dataclass(frozen=True)
class TritonProgram:
    """One program, and the rank it runs on."""

    rank: int
    ops: tuple[TritonOp, ...]


TritonLitmus = tuple[TritonProgram, ...]


def as_threads(programs: TritonLitmus) -> Litmus:
    """Write the programs as threads: two per program, or one if the other would do nothing."""
    threads = []
    for number, program in enumerate(programs):
        place = Place(number, program.rank)
        alone = not any(op.kind == "load" or op.tile for op in program.ops)
        threads.append(Thread(_code(number, program, 0, alone), place))
        if not alone:
            threads.append(Thread(_code(number, program, 1, alone), place))
    return Litmus(tuple(threads))


def results_of(programs: TritonLitmus, registers: tuple[dict[str, int], ...]) -> tuple[int, ...]:
    """Return what each load and atomic returned, in the order of the text; -1 if it did not run."""
    merged = {name: value for each in registers for name, value in each.items()}
    return tuple(
        merged.get(f"{number}.{i}{'w' if op.tile else ''}", -1)
        for number, program in enumerate(programs)
        for i, op in enumerate(program.ops)
        if op.kind in RESULTS
    )


def _code(number: int, program: TritonProgram, thread: int, alone: bool) -> tuple[Instruction, ...]:
    """Write one thread's part. The other thread's registers have a name of their own."""
    code: list[Instruction] = []
    guards: list[int] = []  # indices of the jumps, which go to the end
    guarded = {op.of for op in program.ops if op.kind == "guard"}
    for i, op in enumerate(program.ops):
        if op.kind == "guard":
            guards.append(len(code))
            code.append(Jump(0, _register(number, op.of, thread), "ne", op.value))
        else:
            code += _op(number, i, op, thread, alone, i in guarded)
    for at in guards:
        code[at] = Jump(len(code), code[at].left, "ne", code[at].right)  # type: ignore[union-attr]
    return tuple(code)


def _register(number: int, i: int, thread: int) -> str:
    return f"{number}.{i}{'w' if thread else ''}"


def _op(
    number: int, i: int, op: TritonOp, thread: int, alone: bool, guarded: bool
) -> Iterator[Instruction]:
    name, word = _register(number, i, thread), f"x{op.word}"
    if op.kind == "barrier":
        if not alone:
            yield Barrier(2 * i)
    elif op.kind == "load":
        if thread or not op.tile:
            yield Read(name, word)
    elif op.kind == "store":
        if thread == op.tile:
            yield Write(word, op.value)
    else:
        yield from _atomic(number, i, op, thread, alone, guarded)


def _atomic(
    number: int, i: int, op: TritonOp, thread: int, alone: bool, guarded: bool
) -> Iterator[Instruction]:
    """Thread 0 makes it and hands the result over through shared memory, if a guard wants it."""
    name, shared = _register(number, i, thread), f"shared.{number}.{i}"
    if thread == 0:
        kind = {"xchg": "exch"}.get(op.name, op.name)
        yield Update(name, f"x{op.word}", kind, op.value, op.sem, op.scope)
        if guarded and not alone:
            yield Write(shared, name)
    if not alone:
        yield Barrier(2 * i + 1, arrive=thread == 0)
    if thread and guarded:
        yield Read(name, shared)
