"""Litmus programs with jumps as kernels: a thread is a program, and `at` says where it is.

A program goes round one `while` loop. Each turn makes the access that it is at and follows the
jumps after it. So the checker's schedules decide who gets on, as the progress models want it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from sundog.tools.check.schedules import Report, check

from ..litmus_kernels import load_main
from ..memory_model.litmus import Instruction, Jump, Litmus, Read, Set, Thread, Update, Write

HEAD = (
    "import torch\nimport triton\nimport triton.language as tl\n\n\n@triton.jit\ndef kernel(m):\n"
)
SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
NAMES = {"exch": "xchg", "add": "add", "and": "and", "or": "or", "xor": "xor"}
LONGEST = 16  # jumps in a row


def kernel_of(litmus: Litmus) -> str:
    """Write a module with `main(world)`; ValueError says what cannot be written."""
    places = {name: i for i, name in enumerate(sorted(_places(litmus)))}
    lines = [HEAD]
    for number, thread in enumerate(litmus.threads):
        lines.append(f"    if tl.program_id(0) == {number}:")
        lines += [f"        {line}" for line in _program(litmus, thread, places)]
    start = [litmus.initial.get(name, 0) for name in places]
    lines += ["", "", "def main(world):", f"    m = torch.tensor({start}, dtype=torch.int32)"]
    lines += [f"    kernel[({len(litmus.threads)},)](m)", "    return m.tolist()"]
    return "\n".join(lines) + "\n"


def check_litmus(litmus: Litmus, schedules: int) -> Report:
    """Run a litmus program as a kernel under many schedules, all its threads resident."""
    with tempfile.TemporaryDirectory() as folder:
        main = load_main(Path(folder) / "progress_case.py", kernel_of(litmus))
        return check(main, 1, schedules, num_sms=len(litmus.threads), stop_early=True)


def _places(litmus: Litmus) -> set[str]:
    code = (step for thread in litmus.threads for step in thread.code)
    return {litmus.physical(i.loc) for i in code if isinstance(i, Read | Write | Update)}


def _program(litmus: Litmus, thread: Thread, places: dict[str, int]) -> Iterator[str]:
    code = thread.code
    yield from (f"{name} = 0" for name in sorted(_registers(code)))
    yield "at = 0"
    yield from _follow(code, 0)
    yield f"while at < {len(code)}:"
    word = "if"
    for i, step in enumerate(code):
        if not isinstance(step, Jump | Set):
            yield f"    {word} at == {i}:"
            yield f"        {_access(step, places, litmus)}"
            yield from (f"        {line}" for line in _follow(code, i + 1))
            word = "elif"
    yield from () if word == "elif" else ("    pass",)


def _registers(code: tuple[Instruction, ...]) -> set[str]:
    return {step.into for step in code if isinstance(step, Read | Update | Set)}


def _follow(code: tuple[Instruction, ...], at: int, depth: int = 0) -> Iterator[str]:
    """Write what comes after an access: where the jumps lead to."""
    if depth > LONGEST:
        raise ValueError("jumps that go round without an access are not written here")
    step = code[at] if at < len(code) else None
    if isinstance(step, Set):
        sign = {"add": "+", "sub": "-", "mul": "*", "div": "//"}[step.op]
        yield f"{step.into} = {step.left} {sign} {step.right}"
        yield from _follow(code, at + 1, depth + 1)
    elif isinstance(step, Jump) and (step.left, step.op) == (step.right, "eq"):
        yield from _follow(code, step.to, depth + 1)
    elif isinstance(step, Jump):
        yield f"if {step.left} {SIGNS[step.op]} {step.right}:"
        yield from (f"    {line}" for line in _follow(code, step.to, depth + 1))
        yield "else:"
        yield from (f"    {line}" for line in _follow(code, at + 1, depth + 1))
    else:
        yield f"at = {at}"


def _access(step: Instruction, places: dict[str, int], litmus: Litmus) -> str:
    """Write an access. Triton has no atomic stores: an exchange whose result is not used."""
    if not isinstance(step, Read | Write | Update):
        raise ValueError(f"{type(step).__name__}: not an instruction that a kernel can have here")
    if step.sem == "weak":
        raise ValueError("a plain access that polls is not written as a kernel")
    order = f'sem="{step.sem}", scope="{"gpu" if step.scope == "cta" else step.scope}"'
    at = f"m + {places[litmus.physical(step.loc)]}"
    if isinstance(step, Read):
        return f"{step.into} = tl.atomic_add({at}, 0, {order})"
    if isinstance(step, Write):
        return f"tl.atomic_xchg({at}, {step.value}, {order})"
    if step.op == "cas":
        return f"{step.into} = tl.atomic_cas({at}, {step.compare}, {step.value}, {order})"
    return f"{step.into} = tl.atomic_{NAMES[step.op]}({at}, {step.value}, {order})"
