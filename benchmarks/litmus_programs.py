"""Small Triton litmus programs: all cycles of a few accesses, annotated at random, and random ones.

A cycle (as diy makes them) is a ring of threads. Each has one access or two; the last access of a
thread and the first of the next touch the same word, and at least one of the two writes. A program
made of a cycle asks for exactly the outcomes that a weak memory may show.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random

from .memory_model.litmus import SCOPES
from .memory_model.triton_litmus import TritonLitmus, TritonOp, TritonProgram

MOST_WRITES = 4  # to one word: the evaluator tries all their orders

SEMS = ("relaxed", "acquire", "release", "acq_rel")
SHAPES = ("R", "W", "RRd", "RWd", "WRd", "WWd", "RRs", "RWs", "WRs", "WWs")  # d: different words


def cycles(threads: int) -> Iterator[tuple[str, ...]]:
    """Yield each ring of threads once, whatever thread it is written from."""
    for ring in product(SHAPES, repeat=threads):
        turns = [ring[i:] + ring[:i] for i in range(threads)]
        ends = zip(ring, turns[1] if threads > 1 else ring, strict=True)
        joined = all("W" in a.rstrip("ds")[-1] + b[0] for a, b in ends)
        if ring == min(turns) and joined and any(shape.endswith("d") for shape in ring):
            yield ring


def from_cycle(ring: tuple[str, ...], seed: int) -> TritonLitmus:
    """Annotate a ring: which accesses are atomic, with what order and scope, and where they run."""
    make = _Maker(Random(f"{ring} {seed}"))
    words, word = sum(shape.endswith("d") for shape in ring), 0
    bodies = []
    for shape in ring:
        body = []
        for i, access in enumerate(shape.rstrip("ds")):
            if i and shape.endswith("d"):
                word = (word + 1) % words
            body.append(make.access(access, word))
        bodies.append(body)
    return make.programs(bodies)


def from_seed(seed: int) -> TritonLitmus:
    """Make programs of random operations on two words."""
    random = Random(seed)
    make = _Maker(random)
    lengths = [random.randint(1, 3) for _ in range(random.choice((2, 2, 3)))]
    return make.programs(
        [[make.access(random.choice("RW"), random.randrange(2)) for _ in range(n)] for n in lengths]
    )


def small(programs: TritonLitmus) -> bool:
    """Say whether the evaluator can enumerate it in about a second."""
    ops = [op for program in programs for op in program.ops if op.kind in ("store", "atomic")]
    return all(sum(op.word == word for op in ops) <= MOST_WRITES for word in range(len(ops)))


class _Maker:
    """Choices that hold for a whole litmus: how much is atomic, and with what order and scope."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.atomic = random.choice((0.3, 0.6, 1, 1))
        self.sems = random.choice((("relaxed",), ("matching",), ("matching",), SEMS))
        self.scopes = random.choice((("sys",), ("sys",), ("gpu",), SCOPES))
        self.ranks = random.choice((1, 2))
        self.stored = 0

    def access(self, access: str, word: int) -> TritonOp:
        """Make a read or a write; each write has a value of its own."""
        self.stored += access == "W"
        if self.random.random() >= self.atomic:
            kind = "store" if access == "W" else "load"
            return TritonOp(kind, word, self.stored, tile=self.random.random() < 0.3)
        sem, scope = self.random.choice(self.sems), self.random.choice(self.scopes)
        if sem == "matching":
            sem = "release" if access == "W" else "acquire"
        if access == "R":
            return TritonOp("atomic", word, 0, "add", sem, scope)
        name = self.random.choice(("xchg", "xchg", "xchg", "add", "cas"))
        return TritonOp("atomic", word, self.stored, name, sem, scope)

    def programs(self, bodies: list[list[TritonOp]]) -> TritonLitmus:
        """Place the bodies, with guards after atomics and CTA barriers between operations."""
        values = [(op.word, op.value) for body in bodies for op in body if op.kind != "load"]
        return tuple(
            TritonProgram(self.random.randrange(self.ranks), tuple(self._decorated(body, values)))
            for body in bodies
        )

    def _decorated(self, body: list[TritonOp], values: list[tuple[int, int]]) -> Iterator[TritonOp]:
        count = 0
        for i, op in enumerate(body):
            if i and self.random.random() < 0.3:
                count += 1
                yield TritonOp("barrier")
            yield op
            count += 1
            if op.kind == "atomic" and i + 1 < len(body) and self.random.random() < 0.5:
                wanted = [0, *(value for word, value in values if word == op.word and value)]
                count += 1
                yield TritonOp("guard", value=self.random.choice(wanted), of=count - 2)
