"""Inline PTX on the simulator: `tl.inline_asm_elementwise` runs here, instruction by instruction.

All lanes of a block (see `ptx_lanes`) run together. After a branch that some lanes take, those at
the earliest instruction continue first, so that they meet again. Loads, stores and atomics are the
builder's, so the machine and the checker treat them like Triton's own. An unknown instruction is
refused, with its line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import CannotInterpret, KernelError
from .numerics import Value, np_dtype
from .ptx_arithmetic import BINARY, COMPARE, UNARY, as_bits, as_type, bytes_of, converted, is_type
from .ptx_lanes import Lanes, choose_lanes, locate
from .ptx_memory import MEMORY, run_memory
from .ptx_parse import (
    MALFORMED,
    Address,
    Immediate,
    Operand,
    PtxBlock,
    PtxInstruction,
    Register,
    parse,
)

if TYPE_CHECKING:
    from .builder import Builder

_MOST_STEPS = 1 << 20  # steps of one block without a memory access that could end its loop
_IGNORED = ("nanosleep", "prefetch", "prefetchu", "pmevent", "setmaxnreg")
_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_WARP = 32  # threads
_PARTS = {"x": 0, "y": 1, "z": 2, "w": 3}


def run_ptx(
    builder: Builder, text: str, handles: list[Value], results: list[Any], pack: int
) -> list[Value]:
    """Run a block on these arguments and return its results, one per type."""
    assembly = parse(text.replace("$$", "$").replace("${:uid}", "0"))  # as LLVM does
    program = builder.machine.program
    shapes = [r.shape for r in results if r.is_block()]
    size = max((handle.data.size for handle in handles), default=1)
    if pack > 1 and (program.mask is not None or size % pack):
        raise CannotInterpret(f"inline PTX with pack={pack} on {size} elements, or in a branch")
    num_threads = program.launch.num_warps * 32
    is_tile = bool(shapes)
    lanes = choose_lanes(assembly, size // pack, is_tile, num_threads, program.mask)
    block = _Block(builder, assembly, lanes, text)
    kinds = [result.scalar for result in results]
    widths = [_width(kind, pack) for kind in kinds]
    at = sum(widths)
    for handle in handles:
        at = block.give(at, handle, pack)
    block.num_arguments = at
    if lanes.count:
        block.run()
    values, at = [], 0
    for kind, width, result in zip(kinds, widths, results, strict=True):
        shape = tuple(int(n) for n in result.shape) if result.is_block() else None
        values.append(block.take(at, width, kind, pack, shape))
        at += width
    return values


def _width(kind: Any, pack: int) -> int:
    """Return the registers that `pack` elements take: those below 32 bits share one."""
    bits = 64 if kind.is_ptr() else kind.primitive_bitwidth
    return max(1, pack * bits // 32) if bits < 32 else pack


class _Block:
    """One run of a block: its registers, and where each lane is."""

    def __init__(self, builder: Builder, assembly: PtxBlock, lanes: Lanes, text: str) -> None:
        self.builder, self.assembly, self.lanes = builder, assembly, lanes
        self.registers: dict[str, np.ndarray] = {}
        self.num_arguments = 0  # with the results: $0 and following
        self.at = locate(text)
        self.active = np.ones(lanes.count, bool)

    # arguments and results

    def give(self, at: int, handle: Value, pack: int) -> int:
        """Put an argument into the registers from $at on. Return the next one's number."""
        bits = handle.data.view(f"u{handle.data.itemsize}").astype(np.uint64).reshape(-1, pack)
        if bits.shape[0] == 1:
            chosen = np.broadcast_to(bits, (self.lanes.count, pack))
        else:
            chosen = bits[self.lanes.elements]
        size, width = handle.data.itemsize, _width(handle.dtype.scalar, pack)
        for place in range(width):
            share = chosen[:, place * pack // width : (place + 1) * pack // width]
            shifts = np.arange(share.shape[1], dtype=np.uint64) * np.uint64(8 * size)
            self.registers[f"${at + place}"] = (share << shifts).sum(axis=1, dtype=np.uint64)
        return at + width

    def take(self, at: int, width: int, kind: Any, pack: int, shape: Any) -> Value:
        dtype = np_dtype(kind)
        if pack == 1:
            found = self._cut(self.register(f"${at}"), dtype)
            return Value(self.lanes.spread(found, shape), kind)
        per, size = pack // width, dtype.itemsize
        parts = [
            self._cut(self.register(f"${at + n // per}") >> np.uint64(8 * size * (n % per)), dtype)
            for n in range(pack)
        ]
        return Value(np.stack(parts, axis=1).reshape(shape or (-1,)), kind)

    def _cut(self, bits: np.ndarray, dtype: np.dtype) -> np.ndarray:
        if dtype.kind == "b":
            return np.asarray(bits & np.uint64(1), bool)
        return bits.astype(f"u{dtype.itemsize}").view(dtype)

    def register(self, name: str) -> np.ndarray:
        return self.registers.setdefault(name, np.zeros(self.lanes.count, np.uint64))

    # control

    def run(self) -> None:
        places = np.zeros(self.lanes.count, int)
        instructions, end = self.assembly.instructions, len(self.assembly.instructions)
        steps = 0
        while (place := int(places.min())) < end:
            here = places == place
            instruction = instructions[place]
            self.active = here & self._guard(instruction)
            places[here] = place + 1
            if instruction.name == "bra":
                target = self._target(instruction)
                places[self.active] = target
                if target <= place and self.active.any():
                    self.builder.machine.accesses.turned()
            elif self.active.any():
                self.step(instruction)
            steps = 0 if instruction.name in MEMORY else steps + 1
            if steps > _MOST_STEPS:
                raise KernelError(f"inline PTX, line {instruction.line}: the loop never ends")

    def _guard(self, instruction: PtxInstruction) -> Any:
        if not instruction.guard:
            return True
        holds = self.read(Register(instruction.guard), "pred", instruction)
        return ~holds if instruction.negated else holds

    def _target(self, instruction: PtxInstruction) -> int:
        label = instruction.operands[-1]
        assert isinstance(label, Register)
        return self.assembly.labels[label.name]

    # operands

    def read(self, operand: Operand, kind: str, instruction: PtxInstruction) -> np.ndarray:
        """Return an operand's values on all lanes, in this type."""
        if isinstance(operand, Immediate):
            return self._immediate(operand, kind)
        if isinstance(operand, tuple):
            return as_type(self._joined(operand, kind, instruction), kind)
        if not isinstance(operand, Register):
            raise instruction.refused("expected a value, not an address")
        return as_type(self.bits(operand.name, instruction), kind)

    def bits(self, name: str, instruction: PtxInstruction) -> np.ndarray:
        if name in self.registers:
            return self.registers[name]
        special = self._special(name)
        if special is not None:
            return np.broadcast_to(np.asarray(special, np.uint64), self.lanes.count)
        self._check(name, instruction)
        return self.register(name)

    def _immediate(self, operand: Immediate, kind: str) -> np.ndarray:
        value: Any = operand.value
        dtype = as_type(np.zeros(1, np.uint64), kind).dtype
        if isinstance(value, int) and dtype.kind in "iu":
            bits = np.uint64(value % (1 << 64))
            return as_type(np.full(self.lanes.count, bits), kind)
        if isinstance(value, float) and dtype.kind in "iu":  # a float's bits, as mov.b32 takes them
            like = np.array([value], f"f{dtype.itemsize}").view(f"u{dtype.itemsize}")
            return np.broadcast_to(like.astype(dtype), self.lanes.count)
        return np.full(self.lanes.count, value).astype(dtype)

    def parts(self, operand: Operand) -> tuple[Operand, ...]:
        """Return the registers that an operand names: one, {a, b}, or those of a vector."""
        if isinstance(operand, tuple):
            return operand
        count = self.assembly.declared.get(operand.name, 1) if isinstance(operand, Register) else 1
        if count == 1:
            return (operand,)
        assert isinstance(operand, Register)
        return tuple(Register(f"{operand.name}.{part}") for part in [*_PARTS][:count])

    def _joined(self, parts: tuple[Operand, ...], kind: str, instruction: Any) -> np.ndarray:
        """Return {low, high} as one value."""
        width = bytes_of(kind) * 8 // len(parts)
        joined = np.zeros(self.lanes.count, np.uint64)
        for place, part in enumerate(parts):
            bits = self.read(part, f"b{width}", instruction).astype(np.uint64)
            joined |= bits << np.uint64(place * width)
        return joined

    def write(self, operand: Operand, values: np.ndarray, kind: str, instruction: Any) -> None:
        """Write a destination on the active lanes."""
        self.write_bits(operand, as_bits(np.asarray(values), kind), kind, instruction)

    def write_bits(self, operand: Operand, bits: np.ndarray, kind: str, instruction: Any) -> None:
        if isinstance(operand, tuple):
            width = np.uint64(bytes_of(kind) * 8 // len(operand))
            low = np.uint64((1 << int(width)) - 1)
            for place, part in enumerate(operand):
                self.write_bits(part, bits >> np.uint64(place) * width & low, kind, instruction)
            return
        if not isinstance(operand, Register):
            raise instruction.refused("the destination is not a register")
        if operand.name == "_":
            return
        self._check(operand.name, instruction)
        old = self.register(operand.name)
        self.registers[operand.name] = np.where(self.active, bits, old)

    def _check(self, name: str, instruction: PtxInstruction) -> None:
        base, _, part = name.partition(".")
        known = self.assembly.declared
        if name.startswith("$") and name[1:].isdigit():
            if int(name[1:]) < self.num_arguments:
                return
            raise instruction.refused(
                f"the block has {self.num_arguments} results and arguments, from $0"
            )
        if base in known and (not part or part in _PARTS):
            return
        raise instruction.refused(f"register {name} is neither declared nor one that we know")

    def _special(self, name: str) -> Any:
        program, threads = self.builder.machine.program, self.lanes.threads
        base, _, axis = name.partition(".")
        if base == "%tid":
            return threads if axis == "x" else 0
        if base == "%ntid":
            return self.lanes.num_threads if axis == "x" else 1
        if base in ("%ctaid", "%nctaid"):
            return (program.index if base == "%ctaid" else program.launch.grid)["xyz".index(axis)]
        if name.startswith(("%globaltimer", "%clock")):
            return self.builder.machine.accesses.count
        number = program.number % self.builder.machine.num_sms
        known = {"%laneid": threads % 32, "%warpid": threads // 32, "%smid": number,
                 "%nsmid": self.builder.machine.num_sms, "WARP_SZ": 32, "%nwarpid": 64}  # fmt: skip
        return known.get(name)

    # instructions

    def step(self, instruction: PtxInstruction) -> None:
        name, parts = instruction.name, instruction.parts
        if name in MEMORY:
            run_memory(self, instruction)
        elif name in ("bar", "barrier"):
            if "sync" not in parts or not self._is_of_all(instruction.operands[1:]):
                raise instruction.refused("only a barrier of all threads is known: bar.sync 0")
            if "warp" in parts and self.lanes.num_threads > _WARP:
                return  # it orders the threads of one warp, of which a program has several
            self._whole_program(instruction)
            self.at(instruction)(self.builder.create_barrier)
        elif name == "griddepcontrol":
            if "wait" in parts:
                self.builder.machine.accesses.grid_wait()
        elif name == "trap":
            raise KernelError(f"inline PTX, line {instruction.line}: {instruction.text}: it traps")
        elif name not in _IGNORED:
            try:
                self._compute(instruction)
            except MALFORMED as error:
                raise instruction.refused() from error

    def _is_of_all(self, count: tuple[Operand, ...]) -> bool:
        """Return whether a barrier is for all threads: it gives their number, or none."""
        return count in ((), (Immediate(self.lanes.num_threads),))

    def _whole_program(self, instruction: PtxInstruction) -> None:
        if not self.active.all():
            raise KernelError(
                f"inline PTX, line {instruction.line}: {instruction.text}: only some threads reach "
                "this barrier, and the others wait at it for ever. Move it out of the branch."
            )

    def _compute(self, instruction: PtxInstruction) -> None:
        name, operands = instruction.name, instruction.operands
        kinds = [part for part in instruction.parts if is_type(part)]
        if not kinds or not operands:
            raise instruction.refused("this instruction is not known")
        kind, half = kinds[-1], ".hi" if "hi" in instruction.parts else ""
        target, given = operands[0], operands[1:]
        if name in ("mov", "cvta"):
            self._move(instruction, kind)
        elif name == "setp":
            self._compare(instruction, kind)
        elif name == "cvt":
            bits = as_bits(self.read(given[0], kinds[1], instruction), kinds[1])
            self.write_bits(target, converted(instruction, bits, *kinds[:2]), kinds[0], instruction)
        elif name == "selp":
            a, b = (self.read(each, kind, instruction) for each in given[:2])
            chosen = self.read(given[2], "pred", instruction)
            self.write(target, np.where(chosen, a, b), kind, instruction)
        elif name + half in BINARY and len(given) == 2:
            wide = "wide" in instruction.parts
            shift = name in ("shl", "shr")
            a = self.read(given[0], kind, instruction)
            b = self.read(given[1], "u32" if shift else kind, instruction)
            self._write_sum(target, BINARY[name + half], (a, b), kind, wide, instruction)
        elif name in ("mad", "fma") and len(given) == 3:
            wide = "wide" in instruction.parts
            a, b = (self.read(each, kind, instruction) for each in given[:2])
            c = self.read(given[2], _wide(kind) if wide else kind, instruction)
            product = BINARY["mul" + half]
            fused = (lambda x, y: product(x, y) + c) if a.dtype.kind != "f" else _fused(c)
            self._write_sum(target, fused, (a, b), kind, wide, instruction)
        elif name in UNARY and len(given) == 1:
            self.write(
                target, UNARY[name](self.read(given[0], kind, instruction)), kind, instruction
            )
        else:
            raise instruction.refused("this instruction is not known")

    def _write_sum(
        self, target: Operand, function: Any, given: Any, kind: str, wide: bool, instruction: Any
    ) -> None:
        kind = _wide(kind) if wide else kind
        if wide:
            given = [each.astype(f"{each.dtype.kind}{2 * each.itemsize}") for each in given]
        self.write(target, function(*given), kind, instruction)

    def _move(self, instruction: PtxInstruction, kind: str) -> None:
        target, source = instruction.operands[:2]
        parts, given = self.parts(target), self.parts(source)
        if not isinstance(target, tuple) and len(parts) > 1:
            given = given * len(parts) if len(given) == 1 else given  # mov.v4.b32 %acc, 0 fills all
            for part, each in zip(parts, given, strict=True):
                self.write(part, self.read(each, kind, instruction), kind, instruction)
            return
        if isinstance(target, tuple):  # {a, b} = a value, cut into parts
            self.write_bits(
                target, as_bits(self.read(source, kind, instruction), kind), kind, instruction
            )
            return
        self.write(target, self.read(source, kind, instruction), kind, instruction)

    def _compare(self, instruction: PtxInstruction, kind: str) -> None:
        target, left, right, *others = instruction.operands
        sign = next((part for part in instruction.parts if part in COMPARE), "")
        join = next((part for part in instruction.parts if part in ("and", "or", "xor")), "")
        if not sign or len(others) != bool(join) or isinstance(target, Address):
            raise instruction.refused("this comparison is not known")
        a, b = self.read(left, kind, instruction), self.read(right, kind, instruction)
        self.builder.machine.program.compared_with(_SIGNS.get(sign, sign), b[self.active])
        found = COMPARE[sign](a, b)
        for each, holds in zip(self.parts(target), (found, ~found), strict=False):  # p, or p|q
            if join:
                holds = BINARY[join](holds, self.read(others[0], "pred", instruction))
            self.write(each, holds, "pred", instruction)


def _wide(kind: str) -> str:
    return f"{kind[0]}{2 * int(kind[1:])}"


def _fused(c: np.ndarray) -> Any:
    return lambda x, y: (x.astype("f8") * y + c).astype(x.dtype)
