"""Read one instruction of a litmus test in Vulkan, if our model has what it says.

A workgroup stands for a CTA, a queue family for a GPU and a device for the system. Vulkan knows
more than PTX: private accesses, storage classes, availability and visibility as operations of
their own, barriers of control without memory, subgroups. A test is expressible if none of that
makes a difference in it; ValueError says which of them does. An order must cover the classes of
plain accesses; only one that another thread may meet needs availability and visibility; a private
access is like another where nothing makes an order; a barrier without memory is like another where
fences stand beside it.
"""

from __future__ import annotations

import re

from ..memory_model.litmus import Barrier, Fence, Instruction, Place, Read, Set, Update, Write
from .ptx_words import JUMPS, jump, operand, words_of

SCOPES = {"wg": "cta", "qf": "gpu", "dv": "sys"}
SEMS = {"acq": "acquire", "rel": "release", "acq_rel": "acq_rel"}
RELEASES, ACQUIRES = {"rel", "acq_rel"}, {"acq", "acq_rel"}
ORDERS = RELEASES | ACQUIRES
Words = tuple[str, list[str], list[str]]


class Vulkan:
    """What the whole test uses, which decides how an instruction may be read."""

    def __init__(self, heads: list[str], columns: list[list[str]]) -> None:
        self._places = [_numbers(head) for head in heads]
        self.places = [Place(wg, qf) for _, wg, qf in self._places]
        self._threads = [[words_of(line) for line in column] for column in columns]
        self._lines = [words for thread in self._threads for words in thread]
        plain = [parts for name, parts, _ in self._lines if _is_plain(name, parts)]
        # An atomic synchronises whatever its own class is; what is ordered is plain.
        self._classes = {p for parts in plain for p in parts if re.fullmatch(r"sc\d", p)}
        orders = [words for words in self._lines if ORDERS & set(words[1]) or words[0] == "cbar"]
        self._alone = len(heads) == 1 or not orders  # nothing could order a private access
        self._all_available = all(
            tag in words[1]
            for tag, own, other in (("semav", RELEASES, ACQUIRES), ("semvis", ACQUIRES, RELEASES))
            for words in self._lines
            if own & set(words[1]) and self._may_meet(words, other)
        )

    def _may_meet(self, words: Words, sems: set[str]) -> bool:
        """Say whether an order of these kinds is made at the same place, or by fence or barrier."""
        here = _place(words)
        partners = [_place(other) for other in self._lines if sems & set(other[1])]
        return any(not here or not there or there == here for there in partners)

    def _fenced(self) -> bool:
        """Say whether fences do all that a barrier without order leaves out."""
        return all(
            _is_fenced(thread[:i][::-1], RELEASES) and _is_fenced(thread[i + 1 :], ACQUIRES)
            for thread in self._threads
            for i, words in enumerate(thread)
            if words[0] == "cbar" and not ORDERS & set(words[1])
        )

    def instruction(self, line: str, labels: dict[str, int]) -> Instruction:
        """Read an instruction; `labels` are indices of the thread's code."""
        name, parts, operands = words_of(line)
        if name == "goto" or name in JUMPS:
            return jump(name, operands, labels)
        if name in ("add", "sub", "mul", "div"):
            return Set(operands[0], operand(operands[1]), name, operand(operands[2]))
        if name in ("avdevice", "visdevice"):
            raise ValueError("availability and visibility to the device are not in our model")
        if name == "membar":
            return Fence(self._sem(parts), self._scope(parts))
        if name == "cbar":
            return self._barrier(parts, operands)
        return self._access(name, parts, operands)

    def _access(self, name: str, parts: list[str], operands: list[str]) -> Instruction:
        if name not in ("ld", "st", "rmw"):
            raise ValueError(f"{name}: not an instruction that is read here")
        if "atom" in parts:
            sem, scope = self._sem(parts), self._scope(parts)
        else:
            self._check_plain(parts)
            sem, scope = "weak", "sys"
        if name == "ld":
            return Read(operands[0], operands[1], sem, scope)
        if name == "st":
            return Write(operands[0], operand(operands[1]), sem, scope)
        op = parts[-1] if parts[-1] in ("add", "sub", "and", "or", "xor") else "exch"
        return Update(operands[0], operands[1], op, operand(operands[2]), sem, scope)

    def _check_plain(self, parts: list[str]) -> None:
        """Require a plain access to be available and visible to every thread of the test."""
        if "av" in parts or "vis" in parts:
            self._reach(self._scope(parts))
        elif "nonpriv" not in parts and not self._alone:
            raise ValueError("private accesses, which nothing orders, are not in our model")
        elif not self._alone and not self._all_available:
            raise ValueError("availability and visibility, left out here, are not in our model")

    def _reach(self, scope: str) -> None:
        if not all(a.reaches(scope, b) for a in self.places for b in self.places):
            raise ValueError(
                f"a plain access that is available or visible at {scope} scope only is not in our "
                "model"
            )

    def _sem(self, parts: list[str]) -> str:
        sem = next((SEMS[part] for part in parts if part in SEMS), "relaxed")
        classes = {part.removeprefix("sem") for part in parts if part.startswith("semsc")}
        if sem != "relaxed" and not self._classes <= classes:
            raise ValueError("order of some storage classes only is not in our model")
        return sem

    def _scope(self, parts: list[str]) -> str:
        if "sg" in parts:
            if any(a[1:] == b[1:] and a != b for a in self._places for b in self._places):
                raise ValueError("a scope narrower than a CTA is not in our model")
            return "cta"
        return next(SCOPES[part] for part in parts if part in SCOPES)

    def _barrier(self, parts: list[str], operands: list[str]) -> Barrier:
        if self._sem(parts) != "acq_rel" and not self._fenced():
            raise ValueError("a barrier that orders no memory is not in our model")
        met = {
            place
            for place, thread in zip(self._places, self._threads, strict=True)
            if any(name == "cbar" and others[0] == operands[0] for name, _, others in thread)
        }
        if "sg" not in parts or len(met) > 1:  # all that meet are of one subgroup
            self._scope(parts)  # of its memory; the threads of a workgroup meet at it
        named = operand(operands[1]) if len(operands) > 1 else 0
        quorum = int(operands[2]) if len(operands) > 2 else 0
        return Barrier(named, quorum, instance=int(operands[0]))


def _numbers(head: str) -> tuple[int, int, int]:
    """Read the subgroup, workgroup and queue family of a thread."""
    found = re.search(r"sg\s+(\d+)\s*,\s*wg\s+(\d+)\s*,\s*qf\s+(\d+)", head)
    if found is None:
        raise ValueError(f"{head.strip()!r}: no place of a thread")
    return int(found[1]), int(found[2]), int(found[3])


def _is_plain(name: str, parts: list[str]) -> bool:
    return name in ("ld", "st", "rmw") and "atom" not in parts


def _place(words: Words) -> str:
    """Return the place of an access; nothing for a fence or a barrier."""
    name, _, operands = words
    return {"ld": operands[1:2], "rmw": operands[1:2], "st": operands[:1]}.get(name, [""])[0]


def _is_fenced(lines: list[Words], sems: set[str]) -> bool:
    """Say whether a fence comes before the first plain access."""
    for name, parts, _ in lines:
        if name == "membar" and sems & set(parts):
            return True
        if _is_plain(name, parts):
            return False
    return True
