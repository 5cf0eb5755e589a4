"""Read one instruction of a litmus test in PTX."""

from __future__ import annotations

import re

from ..memory_model.litmus import (
    Barrier,
    Fence,
    Instruction,
    Jump,
    Place,
    ProxyFence,
    Read,
    Set,
    Update,
    Write,
)

PROXIES = {"ld": "generic", "tld": "texture", "suld": "surface", "cold": "constant",
           "st": "generic", "sust": "surface", "atom": "generic", "suatom": "surface",
           "red": "generic", "sured": "surface"}  # fmt: skip
JUMPS = {"beq": "eq", "bne": "ne", "bge": "ge", "ble": "le", "bgt": "gt", "blt": "lt"}


def ptx_place(text: str) -> Place:
    """Read where a thread runs."""
    match = re.search(r"cta\s+(\d+)\s*,\s*gpu\s+(\d+)", text)
    if match is None:
        raise ValueError(f"{text.strip()!r}: no place of a thread")
    return Place(int(match[1]), int(match[2]))


def ptx_instruction(line: str, labels: dict[str, int]) -> Instruction:
    """Read an instruction; `labels` are indices of the thread's code."""
    name, parts, operands = words_of(line)
    if name == "goto" or name in JUMPS:
        return jump(name, operands, labels)
    if name == "fence":
        return ProxyFence(parts[1]) if parts[0] == "proxy" else Fence(parts[0], parts[1])
    if name == "bar":
        named = operand(operands[1]) if len(operands) > 1 else 0
        quorum = int(operands[2]) if len(operands) > 2 else 0
        return Barrier(named, quorum, parts[1] == "arrive", int(operands[0]))
    if name in ("add", "sub", "mul", "div"):
        return Set(operands[0], operand(operands[1]), name, operand(operands[2]))
    return _access(name, parts, operands)


def words_of(line: str) -> tuple[str, list[str], list[str]]:
    """Split a line into its name, what follows that after dots, and its operands."""
    word, _, rest = line.partition(" ")
    name, *parts = word.split(".")
    return name, parts, [part.strip() for part in rest.split(",")] if rest.strip() else []


def jump(name: str, operands: list[str], labels: dict[str, int]) -> Jump:
    """Read a jump, with a comparison or without."""
    if name == "goto":
        return Jump(labels[operands[0]])
    return Jump(labels[operands[2]], operand(operands[0]), JUMPS[name], operand(operands[1]))


def _access(name: str, parts: list[str], operands: list[str]) -> Instruction:
    if name not in PROXIES:
        raise ValueError(f"{name}: not an instruction that is read here")
    proxy = PROXIES[name]
    if not parts:
        return Set(operands[0], operand(operands[1]))
    sem, scope = parts[0], parts[1] if len(parts) > 1 else "sys"
    if name in ("ld", "tld", "suld", "cold"):
        return Read(operands[0], operands[1], sem, scope, proxy)
    if name in ("st", "sust"):
        return Write(operands[0], operand(operands[1]), sem, scope, proxy)
    into = operands.pop(0) if name in ("atom", "suatom") else "unused"
    compare = operand(operands[1]) if parts[2] == "cas" else 0
    value = operand(operands[-1])
    return Update(into, operands[0], parts[2], value, sem, scope, compare, proxy)


def operand(text: str) -> int | str:
    """Read a number or a register."""
    return text if text.startswith("r") else int(text)
