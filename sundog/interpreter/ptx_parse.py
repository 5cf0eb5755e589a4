"""The text of inline PTX, or of AMD's assembly, as instructions, each with its line.

A parsed block is flat: braces only group, and registers and labels are known by name. What the
parser does not understand is refused with its line, never skipped.
"""

from __future__ import annotations

import functools
import re
import struct
from dataclasses import dataclass, field

from ..errors import CannotInterpret


@dataclass(frozen=True)
class Register:
    """A register, an argument of the block ($0), a special register (%tid.x) or a label."""

    name: str


@dataclass(frozen=True)
class Immediate:
    """A number as written. `bits` is set for a float that was written as its bits."""

    value: int | float
    bits: int = 0


@dataclass(frozen=True)
class Address:
    """[base + offset]."""

    base: Register | Immediate
    offset: int


MALFORMED = (IndexError, KeyError, TypeError, ValueError)  # of an instruction whose form is wrong
_UNKNOWN_FORM = "this form of the instruction is not known"
Operand = Register | Immediate | Address | tuple["Operand", ...]


@dataclass(frozen=True)
class PtxInstruction:
    """One instruction: `@!guard name.parts operands;` on a line of the block, from 1."""

    name: str
    parts: tuple[str, ...]
    operands: tuple[Operand, ...]
    line: int
    text: str
    guard: str = ""
    negated: bool = False
    in_loop: bool = False  # a later instruction may branch back to it, or before it

    @property
    def opcode(self) -> str:
        return ".".join((self.name, *self.parts))

    def refused(self, why: str = _UNKNOWN_FORM) -> CannotInterpret:
        return CannotInterpret(f"inline PTX, line {self.line}: {self.text.strip()}: {why}")


@dataclass
class PtxBlock:
    """A block of inline PTX."""

    instructions: list[PtxInstruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # the instruction after each
    declared: dict[str, int] = field(default_factory=dict)  # registers, and how many parts each has

    def uses(self, *names: str) -> bool:
        return any(each.name in names for each in self.instructions)

    def mentions(self, *specials: str) -> bool:
        """Return whether an instruction reads one of these special registers."""
        found = [r.name for each in self.instructions for r in _registers(each.operands)]
        return any(name.startswith(specials) for name in found)


_LABEL = re.compile(r"\s*([A-Za-z_$%][\w$%]*)\s*:(?!:)")
_OPCODE = re.compile(r"(?:@(!?)\s*([%\w$]+)\s+)?([A-Za-z][\w.:]*)\s*(.*)", re.DOTALL)
_DECLARED = re.compile(r"([%\w$]+)(?:<(\d+)>)?$")
_FEWEST = {"ld": 2, "ldu": 2, "st": 2, "atom": 3, "red": 2, "multimem": 2, "mov": 2, "cvta": 2,
           "setp": 3, "cvt": 2, "selp": 4, "bra": 1}  # fmt: skip
_ADDRESS = re.compile(r"\[\s*([^+\-\]\s]+)\s*([+-]?)\s*([^\]]*)\]$")
_NAME = re.compile(r"[\w%$.]+")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


@functools.lru_cache(maxsize=256)
def parse(text: str) -> PtxBlock:
    """Parse the text of a block. Raise CannotInterpret, with the line, for what is unknown."""
    found = PtxBlock()
    blank = _COMMENT.sub(lambda m: "\n" * m.group().count("\n") or " ", _as_ptx(text))
    at, line = 0, 1
    while at < len(blank):
        character = blank[at]
        if character in "{};" or character.isspace():
            line += character == "\n"
            at += 1
            continue
        label = _LABEL.match(blank, at)
        if label:
            found.labels[label.group(1)] = len(found.instructions)
            line += label.group().count("\n")
            at = label.end()
            continue
        end = blank.find(";", at)
        end = len(blank) if end < 0 else end
        statement = blank[at:end]
        try:
            _add(found, statement, line)
        except MALFORMED as error:
            raise _refused(statement.strip(), line, _UNKNOWN_FORM) from error
        line += statement.count("\n")
        at = end
    return _with_loops(found)


def _add(found: PtxBlock, statement: str, line: int) -> None:
    if statement.startswith(".reg"):
        _declare(found, statement, line)
        return
    match = _OPCODE.match(statement)
    if match is None:
        text = statement.strip()
        raise CannotInterpret(f"inline PTX, line {line}: {text}: not an instruction we know")
    negated, guard, opcode, rest = match.groups()
    name, *parts = opcode.split(".")
    operands = tuple(_operand(each, line, statement) for each in _split(rest))
    instruction = PtxInstruction(
        name, tuple(parts), operands, line, " ".join(statement.split()), guard or "", bool(negated)
    )
    fewest = _FEWEST.get(name, 0) + ("cas" in parts)
    if len(operands) < fewest:
        raise instruction.refused(f"expected at least {fewest} operands, found {len(operands)}")
    found.instructions.append(instruction)


def _declare(found: PtxBlock, statement: str, line: int) -> None:
    words = statement.split(None, 1)[1].strip()
    width = 1
    while words.startswith("."):
        kind, _, words = words.partition(" ")
        width = int(kind[2:]) if kind in (".v2", ".v4") else width
        words = words.strip()
    for name in words.split(","):
        match = _DECLARED.match(name.strip())
        if match is None:
            raise CannotInterpret(f"inline PTX, line {line}: {statement.strip()}: not a register")
        base, count = match.groups()
        names = [base] if count is None else [f"{base}{n}" for n in range(int(count))]
        found.declared |= dict.fromkeys(names, width)


def _split(text: str) -> list[str]:
    """Split operands at commas that are not inside brackets or braces."""
    parts, depth, last = [], 0, 0
    for at, character in enumerate(text):
        depth += (character in "[{(") - (character in "]})")
        if character == "," and depth == 0:
            parts.append(text[last:at])
            last = at + 1
    parts.append(text[last:])
    return [part.strip() for part in parts if part.strip()]


def _operand(text: str, line: int, statement: str) -> Operand:
    if text.startswith("{"):
        return tuple(_operand(part, line, statement) for part in _split(text.strip("{} \n")))
    if "|" in text:  # two predicates, p|q
        return tuple(_operand(part.strip(), line, statement) for part in text.split("|"))
    if text.startswith("["):
        match = _ADDRESS.match(text)
        base, sign, offset = match.groups() if match else ("", "", "")
        number = _number(offset) if sign else Immediate(0)
        if not base or not isinstance(number, Immediate):
            raise CannotInterpret(f"inline PTX, line {line}: {statement.strip()}: address {text}")
        inner = _operand(base, line, statement)
        assert isinstance(inner, Register | Immediate)
        return Address(inner, int(number.value) * (-1 if sign == "-" else 1))
    if not (number := _number(text)) and not _NAME.fullmatch(text):
        raise CannotInterpret(f"inline PTX, line {line}: {statement.strip()}: operand {text}")
    return number or Register(text)


def _number(text: str) -> Immediate | None:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        bits = int(text[2:], 16)
        return Immediate(struct.unpack("<f", struct.pack("<I", bits))[0], 32)
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        bits = int(text[2:], 16)
        return Immediate(struct.unpack("<d", struct.pack("<Q", bits))[0], 64)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)[uU]?", text):
        return Immediate(int(text.rstrip("uU"), 0))
    if re.fullmatch(r"-?\d+\.\d*([eE][-+]?\d+)?", text):
        return Immediate(float(text))
    return None


def _with_loops(found: PtxBlock) -> PtxBlock:
    """Mark the instructions that lie between a label and a later branch to it."""
    spans = []
    for place, each in enumerate(found.instructions):
        if each.name == "bra":
            target = each.operands[-1]
            name = target.name if isinstance(target, Register) else ""
            if name not in found.labels:
                raise each.refused(f"there is no label {name!r}")
            spans.append((found.labels[name], place))
    found.instructions = [
        PtxInstruction(**{**vars(each), "in_loop": any(a <= n <= b for a, b in spans)})
        for n, each in enumerate(found.instructions)
    ]
    return found


def _registers(operands: tuple[Operand, ...]) -> list[Register]:
    found: list[Register] = []
    for each in operands:
        if isinstance(each, Register):
            found.append(each)
        elif isinstance(each, Address) and isinstance(each.base, Register):
            found.append(each.base)
        elif isinstance(each, tuple):
            found += _registers(each)
    return found


# Inline assembly of AMD GPUs, translated line by line to PTX with the same meaning. It covers what
# public Triton kernels use, by LLVM's memory model of gfx942: loads, stores and atomics with their
# scope in `sc0` and `sc1`, the write-back and the invalidation of caches (a release and an acquire
# fence), waits, sleeps, clocks and the barrier. An `s_waitcnt` by itself publishes nothing: it
# completes an earlier `buffer_wbl2`.

_AMD = re.compile(r"^\s*(s|v|global|flat|buffer)_\w+", re.MULTILINE)
_SCOPES = {(): "", ("sc0",): "cta", ("sc1",): "gpu", ("sc0", "sc1"): "sys"}
_WIDTHS = {"dword": "b32", "b32": "b32", "dwordx2": "b64", "b64": "b64", "ushort": "u16",
           "short": "b16", "ubyte": "u8", "byte": "b8"}  # fmt: skip
_ATOMICS = {"add": "add.u", "swap": "exch.b", "and": "and.b", "or": "or.b",
            "xor": "xor.b", "smax": "max.s", "umax": "max.u", "smin": "min.s",
            "umin": "min.u"}  # fmt: skip
_NOTHING = ("s_nop", "s_setprio", "s_inst_prefetch", "s_clause")
_SIMPLE = {"s_sleep": "nanosleep.u32 {0}", "s_barrier": "bar.sync 0",
           "s_memrealtime": "mov.u64 {0}, %globaltimer", "s_memtime": "mov.u64 {0}, %clock64",
           "v_mov_b32": "mov.b32 {0}, {1}", "v_mov_b32_e32": "mov.b32 {0}, {1}",
           "s_mov_b32": "mov.b32 {0}, {1}", "s_mov_b64": "mov.b64 {0}, {1}"}  # fmt: skip


def _as_ptx(text: str) -> str:
    """Return PTX with an instruction on the line of each of AMD's; PTX is returned unchanged."""
    if not _AMD.search(text):
        return text
    released, found = "", []  # the scope of a write-back that no wait has completed yet
    for number, line in enumerate(text.split("\n"), 1):
        statement = re.split(r";|//", line)[0].strip()
        name, _, rest = statement.partition(" ")
        if name == "s_waitcnt":
            found.append(f"fence.release.{released};" if released and "vmcnt(0)" in rest else "")
            released = "" if found[-1] else released
        elif name == "buffer_wbl2":
            found.append("")
            released = _scope(rest.split(), statement, number)
        else:
            try:
                found.append(_translated(name, rest, statement, number))
            except MALFORMED as error:
                raise _refused(statement, number, _UNKNOWN_FORM) from error
    if released:
        raise _refused(statement, number, "a buffer_wbl2 needs `s_waitcnt vmcnt(0)` after it")
    return "\n".join(found)


def _translated(name: str, rest: str, statement: str, number: int) -> str:
    if not name or name in _NOTHING:
        return ""
    if name in _SIMPLE:
        operands = [each.strip() for each in rest.split(",")]
        return _SIMPLE[name].format(*operands) + ";"
    if name == "buffer_inv":
        return f"fence.acquire.{_scope(rest.split(), statement, number)};"
    match = re.match(r"(?:global|flat)_(load|store|atomic)_(\w+)$", name)
    if match is None:
        raise _refused(statement, number, "this instruction of AMD's is not known")
    operands, words = _operands(rest)
    if match[1] == "atomic":
        return _atomic(match[2], operands, words, statement, number)
    if match[2] not in _WIDTHS or len(operands) != 2:
        raise _refused(statement, number, "expected one or two words at an address, with `off`")
    scope = _SCOPES[tuple(word for word in ("sc0", "sc1") if word in words)]
    order = f".relaxed.{scope}" if scope else ""
    target, source = operands
    offset = _offset(words)
    if match[1] == "load":
        return f"ld{order}.global.{_WIDTHS[match[2]]} {target}, [{source}{offset}];"
    return f"st{order}.global.{_WIDTHS[match[2]]} [{target}{offset}], {source};"


def _atomic(kind: str, given: list[str], words: list[str], statement: str, number: int) -> str:
    """Translate an atomic: `sc0` requests the old value, `sc1` is the scope."""
    wide = kind.endswith("_x2")
    operation = _ATOMICS.get(kind.removesuffix("_x2"))
    returns = "sc0" in words
    if operation is None or len(given) != 2 + returns:
        raise _refused(statement, number, "this atomic of AMD's is not known")
    order = f"relaxed.{'sys' if 'sc1' in words else 'gpu'}.global.{operation}{64 if wide else 32}"
    target = f"{given[0]}, " if returns else ""
    place, value = given[-2:]
    return f"{'atom' if returns else 'red'}.{order} {target}[{place}{_offset(words)}], {value};"


def _operands(rest: str) -> tuple[list[str], list[str]]:
    """Return the registers, and the words after them: `off`, an offset, scopes and hints."""
    parts = [each.strip() for each in rest.split(",")]
    last = parts.pop().split()
    if last[0] != "off":
        parts.append(last.pop(0))
    return parts, last


def _offset(words: list[str]) -> str:
    found = next((word.partition(":")[2] for word in words if word.startswith("offset:")), "")
    return f"+{found}".replace("+-", "-") if found else ""


def _scope(words: list[str], statement: str, number: int) -> str:
    scope = _SCOPES[tuple(word for word in ("sc0", "sc1") if word in words)]
    if not scope:
        raise _refused(statement, number, "expected a scope: sc0, sc1 or both")
    return scope


def _refused(statement: str, number: int, why: str) -> CannotInterpret:
    return CannotInterpret(f"inline assembly, line {number}: {statement}: {why}")
