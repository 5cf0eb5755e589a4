"""Memory instructions of inline PTX: ld, st, atom, red, fence, membar and multimem.

The checker must know who makes an access. Many threads make an access of several lanes, like a
tile's. One lane in a branch that only thread 0 takes is thread 0's; what it acquires reaches the
others at the next CTA barrier. A scalar that all threads load is learnt by all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir

from ..errors import KernelError
from .numerics import Value
from .ptx_arithmetic import as_bits, as_type, bytes_of, is_type
from .ptx_parse import Address, Operand, PtxInstruction, Register

if TYPE_CHECKING:
    from .ptx import _Block

MEMORY = ("ld", "ldu", "st", "atom", "red", "fence", "membar", "multimem")

_SEMANTICS = {
    "relaxed": ir.MEM_SEMANTIC.RELAXED,
    "acquire": ir.MEM_SEMANTIC.ACQUIRE,
    "release": ir.MEM_SEMANTIC.RELEASE,
    "acq_rel": ir.MEM_SEMANTIC.ACQUIRE_RELEASE,
}
_SCOPES = {
    "cta": ir.MEM_SYNC_SCOPE.CTA,
    "cluster": ir.MEM_SYNC_SCOPE.CTA,  # a program is alone in its cluster here
    "gpu": ir.MEM_SYNC_SCOPE.GPU,
    "sys": ir.MEM_SYNC_SCOPE.SYSTEM,
}
_NOT_SIMULATED = ("shared", "local", "param", "const")  # state spaces
_ORDERS = {  # the semantics that each may have
    **dict.fromkeys(("ld", "ldu", "ld_reduce"), ("relaxed", "acquire")),
    **dict.fromkeys(("st", "red"), ("relaxed", "release")),
    "atom": tuple(_SEMANTICS),
}
_CACHES = ("nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt")
_OTHERS = ("global", "weak", "volatile", "mmio", "noftz", "cas", "v2", "v4", "v8", *_CACHES)
_HINTS = ("L1::", "L2::", "acc::")
_PROXIES = ("async", "async.global", "async.shared::cta", "async.shared::cluster")
_FENCES = ("acq_rel", "sc", "acquire", "release")
_NAMES = {"add": "ADD", "exch": "XCHG", "and": "AND", "or": "OR", "xor": "XOR",
          "min": "MIN", "max": "MAX"}  # fmt: skip
_TYPES = {
    **{f"{kind}{bits}": f"uint{bits}" for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64",
    "f16x2": "uint32", "bf16x2": "uint32",
}  # fmt: skip


def run_memory(block: _Block, instruction: PtxInstruction) -> None:
    """Run one of the instructions of MEMORY on the active lanes."""
    if instruction.name in ("fence", "membar"):
        _fence(block, instruction)
        return
    spaces = [part.partition(":")[0] for part in instruction.parts]
    for space in _NOT_SIMULATED:
        if space in spaces:
            raise instruction.refused(f"{space} memory is the compiler's, and not simulated")
    access = _Access(block, instruction)
    if instruction.name == "multimem":
        access.multimem()
    elif instruction.name in ("ld", "ldu"):
        access.load()
    elif instruction.name == "st":
        access.store()
    elif "cas" in instruction.parts:
        access.compare_and_swap()
    else:
        access.read_modify_write()


def _fence(block: _Block, instruction: PtxInstruction) -> None:
    parts = instruction.parts
    if "proxy" in parts:
        kind = ".".join(parts[1:])
        if kind not in _PROXIES:
            raise instruction.refused(f"expected fence.proxy. with one of {', '.join(_PROXIES)}")
        if "shared" not in kind:  # that memory is the compiler's
            block.at(instruction)(block.builder.machine.accesses.proxy_fence)
        return
    if instruction.name == "membar":
        sem, scope = "sc", {"cta": "cta", "gl": "gpu", "sys": "sys"}.get(parts[0] if parts else "")
    else:
        sem = next((part for part in parts if part in _FENCES), "")
        scope = next((part for part in parts if part in _SCOPES), None)
    if not sem or scope is None:
        raise instruction.refused("expected a fence such as fence.acq_rel.sys or membar.gl")
    lanes = block.lanes
    whole = lanes.is_uniform or np.unique(lanes.threads).size == lanes.num_threads
    everyone = whole and bool(block.active.all())
    reach = "cta" if scope == "cluster" else scope
    block.at(instruction)(lambda: block.builder.machine.accesses.fence(sem, reach, everyone))


class _Access:
    """One memory instruction: its ordering, its type and who makes it."""

    def __init__(self, block: _Block, instruction: PtxInstruction) -> None:
        self.block, self.instruction = block, instruction
        self.builder, self.at = block.builder, block.at(instruction)
        parts = instruction.parts
        multimem = instruction.name == "multimem"
        name, words = (parts[0], parts[1:]) if multimem and parts else (instruction.name, parts)
        kinds = [part for part in parts if is_type(part)]
        if not kinds or kinds[-1] not in _TYPES:
            raise instruction.refused("an access needs a type, such as .u32")
        self.kind = kinds[-1]
        self.width = next((int(part[1:]) for part in parts if part in ("v2", "v4", "v8")), 1)
        self.volatile = "volatile" in parts
        self.sem = next((part for part in parts if part in _SEMANTICS), "")
        self._check(name, words)
        default = "sys" if "mmio" in parts else "gpu"
        self.scope = _SCOPES[next((part for part in parts if part in _SCOPES), default)]
        if "mmio" in parts or (not self.sem and instruction.name in ("atom", "red")):
            self.sem = self.sem or "relaxed"

    def _check(self, name: str, words: tuple[str, ...]) -> None:
        """Refuse a part of the opcode that is not known, and an order that PTX does not have."""
        orders = _ORDERS.get(name)
        if orders is None:
            raise self.instruction.refused("this instruction is not known")
        for word in words:
            known = word in (*_SEMANTICS, *_SCOPES, *_NAMES, *_OTHERS) or is_type(word)
            if not known and not word.startswith(_HINTS):
                raise self.instruction.refused(f".{word} is not known")
        if self.sem and self.sem not in orders:
            raise self.instruction.refused(f"{name} has no .{self.sem}: {' or '.join(orders)}")
        if self.sem and name in ("ld", "st") and not any(word in _SCOPES for word in words):
            raise self.instruction.refused(f"{name}.{self.sem} needs a scope: .cta, .gpu or .sys")
        for each in self.instruction.operands[:2]:
            count = len(self.block.parts(each))
            if count != self.width and not isinstance(each, Address) and each != Register("_"):
                raise self.instruction.refused(f"{count} registers for {self.width} values")

    # operands

    def address(self, operand: Operand) -> np.ndarray:
        """Return the addresses of all elements: one row per lane, one column per part."""
        if not isinstance(operand, Address):
            raise self.instruction.refused("expected an address in brackets")
        base = self.block.read(operand.base, "u64", self.instruction)[self.block.active]
        base = base + np.uint64(operand.offset % (1 << 64))
        nbytes = self.width * bytes_of(self.kind)
        wrong = base[base % np.uint64(nbytes) != 0]
        if wrong.size:
            raise KernelError(
                f"inline PTX, line {self.instruction.line}: {self.instruction.text}: address "
                f"{int(wrong[0]):#x} is not a multiple of {nbytes}: a GPU stops with 'misaligned "
                "address'"
            )
        parts = np.arange(self.width, dtype=np.uint64) * np.uint64(bytes_of(self.kind))
        return base[:, None] + parts

    def pointers(self, addresses: np.ndarray) -> Value:
        return Value(addresses.ravel(), tl.pointer_type(self.dtype))

    @property
    def dtype(self) -> Any:
        return getattr(tl, _TYPES[self.kind])

    def values(self, operand: Operand) -> Value:
        """Return the stored values, in the order of the addresses."""
        parts = self.block.parts(operand)
        read = [self.block.read(each, self._raw, self.instruction) for each in parts]
        stacked = np.stack([each[self.block.active] for each in read], axis=1).ravel()
        return Value(np.ascontiguousarray(stacked), self.dtype)

    @property
    def _raw(self) -> str:
        """Return the type to read a register as: memory holds bf16 and pairs as their bits."""
        return f"b{8 * bytes_of(self.kind)}" if self.kind.startswith(("b", "f16x2")) else self.kind

    def write(self, operand: Operand, found: np.ndarray) -> None:
        """Write what was loaded to a register, or to one register per part."""
        block, active = self.block, self.block.active
        rows = found.reshape(-1, self.width)
        for place, target in enumerate(self.block.parts(operand)):
            bits = np.zeros(len(active), np.uint64)
            column = np.ascontiguousarray(rows[:, place])
            bits[active] = column.view(f"u{column.itemsize}").astype(np.uint64)
            if self.kind[0] == "s":  # a narrow signed value fills its register
                typed = column.astype(np.int64).view(np.uint64)
                bits[active] = typed
            block.write_bits(target, bits, self.kind, self.instruction)

    @property
    def is_tile(self) -> bool:
        """Whether the checker should treat it as an access of many threads."""
        lanes = self.block.lanes
        if lanes.is_uniform:
            return self.instruction.name == "st"
        return not lanes.is_thread_zero or self.sem == "acquire"

    @property
    def order(self) -> tuple[Any, Any]:
        return _SEMANTICS[self.sem], self.scope

    # accesses

    def load(self) -> None:
        target, source = self.instruction.operands[:2]
        self.write(target, self._load(self.address(source)))

    def _load(self, addresses: np.ndarray) -> np.ndarray:
        ptrs = self.pointers(addresses)
        if not self.sem:
            volatile = self.volatile
            found = self.at(lambda: self.builder._load(ptrs, None, None, volatile=volatile))
        else:
            everywhere = Value(np.ones(ptrs.data.shape, bool), tl.int1)
            tile = self.is_tile
            found = self.at(
                lambda: self.builder.create_atomic_load(ptrs, everywhere, *self.order, tile=tile)
            )
        return np.asarray(found.data)

    def store(self) -> None:
        target, source = self.instruction.operands[:2]
        self._store(self.address(target), self.values(source))

    def _store(self, addresses: np.ndarray, values: Value) -> None:
        ptrs, tile = self.pointers(addresses), self.is_tile
        if self.volatile:
            self.sem, self.scope = "relaxed", _SCOPES["sys"]
        if not self.sem:
            self.at(lambda: self.builder._store(ptrs, values, None, tile=tile))
            return
        everywhere = Value(np.ones(ptrs.data.shape, bool), tl.int1)
        self.at(
            lambda: self.builder.create_atomic_store(
                ptrs, values, everywhere, *self.order, tile=tile
            )
        )

    def compare_and_swap(self) -> None:
        *target, place, expected, new = self.instruction.operands
        ptrs, tile = self.pointers(self.address(place)), self.is_tile
        old, changed = self.values(expected), self.values(new)
        found = self.at(
            lambda: self.builder.create_atomic_cas(ptrs, old, changed, *self.order, tile=tile)
        )
        for each in target:
            self.write(each, found.data)

    def read_modify_write(self) -> None:
        *target, place, operand = self.instruction.operands
        found = self._modify(self.address(place), self.values(operand))
        for each in target:
            self.write(each, found.data)

    def _modify(self, addresses: np.ndarray, values: Value) -> Value:
        name = next((_NAMES[part] for part in self.instruction.parts if part in _NAMES), "")
        if not name or self.kind.endswith("x2"):
            raise self.instruction.refused("this atomic is not known")
        if (name == "ADD" and self.kind[0] == "f") or (name == "ADD" and self.kind == "bf16"):
            name = "FADD"
        elif name in ("MIN", "MAX") and self.kind[0] in "bu":
            name = f"U{name}"
        ptrs, tile = self.pointers(addresses), self.is_tile
        everywhere = Value(np.ones(ptrs.data.shape, bool), tl.int1)
        op = getattr(ir.ATOMIC_OP, name)
        found: Value = self.at(
            lambda: self.builder.create_atomic_rmw(
                op, ptrs, values, everywhere, *self.order, tile=tile
            )
        )
        return found

    # one address for the memory of all ranks

    def multimem(self) -> None:
        kind, operands = self.instruction.parts[0], self.instruction.operands
        place = operands[1] if kind == "ld_reduce" else operands[0]
        everyone = self.builder.machine.memory.multicast(self.address(place))
        if kind == "st":
            for addresses in everyone:
                self._store(addresses, self.values(operands[1]))
        elif kind == "red":
            for addresses in everyone:
                self._modify(addresses, self.values(operands[1]))
        elif kind == "ld_reduce":
            self.write(operands[0], self._reduced([self._load(each) for each in everyone]))
        else:
            raise self.instruction.refused("this multimem instruction is not known")

    def _reduced(self, parts: list[np.ndarray]) -> np.ndarray:
        """Return the reduction over ranks, accumulated like the switch: halves in float32."""
        functions = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
                     "or": np.bitwise_or, "xor": np.bitwise_xor}  # fmt: skip
        name = next((part for part in self.instruction.parts if part in functions), "")
        if not name:
            raise self.instruction.refused("this reduction is not known")
        half = self.kind in ("f16", "f16x2", "bf16", "bf16x2")
        typed = [as_type(p.view(f"u{p.itemsize}").astype(np.uint64), self.kind) for p in parts]
        total = typed[0].astype(np.float32) if half else typed[0]
        for part in typed[1:]:
            total = functions[name](total, part)
        if half and self.kind.startswith("f16"):
            total = total.astype(np.float16)
        bits = as_bits(total, self.kind)
        return bits.astype(f"u{bytes_of(self.kind)}")
