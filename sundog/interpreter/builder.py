"""The interpreter's instruction set: every load, store and atomic of a kernel comes through here.

The builder computes. The machine (`builder.machine`, set while programs run) decides when the
program continues and what it may touch. Arithmetic is in the base class.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as native
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterOptions, TensorDescHandle

from ..device import proxy, trace
from ..errors import CannotInterpret, KernelError
from .arithmetic import Arithmetic
from .branches import held, of_thread_zero
from .folding import corners
from .numerics import Value, is_raw, narrow, np_dtype, poison_like, round_to_tf32, same_bits, widen
from .ptx import run_ptx

EXTERNS: dict[str, Callable[..., Value]] = {}  # by symbol: functions of libraries that we know

_SEM = {
    ir.MEM_SEMANTIC.RELAXED: "relaxed",
    ir.MEM_SEMANTIC.ACQUIRE: "acquire",
    ir.MEM_SEMANTIC.RELEASE: "release",
    ir.MEM_SEMANTIC.ACQUIRE_RELEASE: "acq_rel",
}
_SCOPE = {
    ir.MEM_SYNC_SCOPE.CTA: "cta",
    ir.MEM_SYNC_SCOPE.GPU: "gpu",
    ir.MEM_SYNC_SCOPE.SYSTEM: "sys",
}


class Atomics(Arithmetic):
    def create_atomic_rmw(
        self,
        op: Any,
        ptr: Value,
        value: Value,
        mask: Value,
        sem: Any,
        scope: Any,
        proxy: bool = False,
        tile: bool | None = None,
    ) -> Value:
        # The native atomics, unlike its loads and stores, assume that every array is contiguous.
        chosen = np.ascontiguousarray(self._held(ptr, full_mask(array_of(mask), ptr.data), tile))
        ptr = Value(np.ascontiguousarray(ptr.data), ptr.dtype)
        dtype = value.dtype.scalar
        data = _spread(value, ptr)
        if dtype.is_floating() and dtype.primitive_bitwidth == 16 and op == ir.ATOMIC_OP.FADD:
            execute = _add_16_bits(ptr, data, dtype, chosen)
        else:
            rmw = self.ir_rmw_op_to_interpreter_rmw_op[op]
            native_sem = self.ir_sem_to_interpreter_sem[sem]
            # The native exchange only takes integers, and only bits matter to it.
            bits = data.view(f"i{data.itemsize}") if op == ir.ATOMIC_OP.XCHG else data

            def execute() -> np.ndarray:
                old = native.atomic_rmw(rmw, ptr.data, bits, chosen, native_sem)
                return old.view(data.dtype)

        operands = (op.name, data.tobytes())
        return self._atomic(execute, ptr, dtype, chosen, operands, sem, scope, proxy, tile)

    def create_atomic_cas(
        self,
        ptr: Value,
        expected: Value,
        value: Value,
        sem: Any,
        scope: Any,
        tile: bool | None = None,
    ) -> Value:
        element = ptr.get_element_ty()
        expected, value = (same_bits(each, element) for each in (expected, value))
        if not expected.dtype.scalar == value.dtype.scalar == element:
            kinds = f"{expected.dtype.scalar} and {value.dtype.scalar}"
            raise ValueError(f"atomic_cas of {element} with {kinds}; cast them")
        native_sem = self.ir_sem_to_interpreter_sem[sem]
        ptr = Value(np.ascontiguousarray(ptr.data), ptr.dtype)
        chosen = self._held(ptr, np.ones(ptr.data.shape, bool), tile)
        compare, new = _spread(expected, ptr)[chosen], _spread(value, ptr)[chosen]

        def execute() -> np.ndarray:
            old = np.zeros(ptr.data.shape, compare.dtype)
            old[chosen] = native.atomic_cas(ptr.data[chosen], compare, new, native_sem)
            return old

        operands = ("CAS", compare.tobytes() + new.tobytes())
        return self._atomic(
            execute, ptr, value.dtype.scalar, chosen, operands, sem, scope, tile=tile
        )

    def _atomic(
        self,
        execute: Callable[[], np.ndarray],
        ptr: Value,
        dtype: tl.dtype,
        chosen: np.ndarray,
        operands: tuple[str, bytes],
        sem: Any,
        scope: Any,
        proxy: bool = False,
        tile: bool | None = None,
    ) -> Value:
        kind = np_dtype(dtype)
        addresses = ptr.data[chosen]
        tile = is_tile(ptr.data) if tile is None else tile

        def recall(older: bytes) -> np.ndarray:
            old = np.zeros(chosen.shape, kind)
            old[chosen] = np.frombuffer(older, kind)
            return old

        order = _SEM[sem], _SCOPE[scope]
        old = self.machine.accesses.atomic(
            execute, recall, addresses, kind.itemsize, operands, *order, tile, proxy
        )
        if addresses.size < chosen.size:  # the other lanes have no old value
            verb = "load" if operands[0] in ("LOAD", "VOLATILE") else "atomic"
            old = np.where(chosen, old, self.machine.undefined.fill(chosen, dtype, verb))
        return Value(old, dtype)

    # Triton 3.9's own entry points

    def create_atomic_load(
        self, ptr: Value, mask: Value, sem: Any, scope: Any, tile: bool | None = None
    ) -> Value:
        element = ptr.get_element_ty()
        dtype = np_dtype(element)
        chosen = full_mask(array_of(mask), ptr.data)

        def execute() -> np.ndarray:
            return native.load(ptr.data, chosen, np.zeros(ptr.data.shape, dtype), dtype)

        return self._atomic(execute, ptr, element, chosen, ("LOAD", b""), sem, scope, tile=tile)

    def create_atomic_store(
        self,
        ptr: Value,
        value: Value,
        mask: Value,
        sem: Any,
        scope: Any,
        tile: bool | None = None,
    ) -> None:
        chosen = full_mask(array_of(mask), ptr.data)

        def execute() -> np.ndarray:
            native.store(ptr.data, np.broadcast_to(value.data, ptr.data.shape), chosen)
            return value.data

        operands = ("STORE", value.data.tobytes())
        self._atomic(execute, ptr, value.dtype.scalar, chosen, operands, sem, scope, tile=tile)

    def create_atomic_poll(
        self, ptr: Value, expected: Value, timeout_ns: Any, sem: Any, scope: Any
    ) -> Value:
        everywhere = Value(np.ones(ptr.data.shape, bool), tl.int1)
        while True:
            seen = self.create_atomic_load(ptr, everywhere, sem, scope)
            self.machine.program.compared_with("==", expected.data)
            matched = seen.data == expected.data
            if matched.all() or (timeout_ns is not None and self.machine.program.expired):
                return Value(matched, tl.int1)


def is_tile(addresses: np.ndarray) -> bool:
    """Return whether many threads make the access; one thread makes a scalar access."""
    return addresses.shape != (1,)


def array_of(mask: Any) -> np.ndarray:
    # Triton 3.6 and 3.7 pass bare arrays for descriptors
    return mask if isinstance(mask, np.ndarray) else mask.data


def full_mask(mask: np.ndarray | None, addresses: np.ndarray) -> np.ndarray:
    if mask is None:
        return np.ones(addresses.shape, bool)
    return mask if mask.shape == addresses.shape else np.broadcast_to(mask, addresses.shape)


def _spread(value: Value, ptr: Value) -> np.ndarray:
    """Return the value for every address, contiguous, as the native atomics need it."""
    data = value.data
    same = data.shape == ptr.data.shape
    return np.ascontiguousarray(data if same else np.broadcast_to(data, ptr.data.shape))


def _add_16_bits(
    ptr: Value, data: np.ndarray, dtype: tl.dtype, chosen: np.ndarray
) -> Callable[[], np.ndarray]:
    """Add by compare and swap: the interpreter has no 16-bit add. Atomic between processes."""

    def execute() -> np.ndarray:
        old = np.zeros(ptr.data.shape, np.uint16)
        for at in zip(*np.nonzero(chosen), strict=True):
            address = ptr.data[at].reshape(1)
            seen = np.frombuffer(ctypes.string_at(address.item(), 2), np.uint16)
            while True:
                new = _sum_bits(seen, data[at].reshape(1), dtype)
                found = native.atomic_cas(address, seen, new, native.MEM_SEMANTIC.ACQUIRE_RELEASE)
                if found == seen:
                    break
                seen = found
            old[at] = seen[0]
        return old.view(data.dtype)

    return execute


def _sum_bits(bits: np.ndarray, value: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    if is_raw(dtype):
        return narrow(widen(bits, dtype) + widen(value, dtype), dtype)
    return (bits.view(value.dtype) + value).view(np.uint16)


_NAN = (ir.PADDING_OPTION.PAD_NAN,)


class Builder(Atomics):
    """The builder that `triton.language` calls for every operation while a program runs."""

    def __init__(self) -> None:
        super().__init__()
        # The overflow checks double the time of integer arithmetic (a matmul: 1.1 s to 0.5 s).
        # `debug` turns on tl.device_assert.
        self.options = InterpreterOptions(sanitize_overflow=False, debug=True)

    @property
    def grid_idx(self) -> tuple[int, int, int]:
        return self.machine.program.index

    @property
    def grid_dim(self) -> tuple[int, int, int]:
        return self.machine.program.launch.grid

    # memory: the trailing arguments are cache hints, which differ between Triton's versions

    def create_load(self, ptr: Value, *hints: Any) -> Value:
        return self._load(ptr, self._held(ptr, None), None, volatile=hints[-1])

    def create_masked_load(
        self, ptrs: Value, mask: Value, other: Value | None, *hints: Any
    ) -> Value:
        return self._load(ptrs, self._held(ptrs, array_of(mask)), other, volatile=hints[-1])

    def create_store(self, ptr: Value, value: Value, *hints: Any) -> None:
        self._store(ptr, value, self._held(ptr, None))

    def create_masked_store(self, ptrs: Value, value: Value, mask: Value, *hints: Any) -> None:
        self._store(ptrs, value, self._held(ptrs, array_of(mask)))

    def _held(self, ptr: Value, mask: np.ndarray | None, tile: bool | None = None) -> Any:
        """Return a mask without what only threads outside of a branch hold; PTX's has lanes."""
        return mask if tile is not None else held(self.machine.program.mask, ptr.data.shape, mask)

    def _load(
        self,
        ptrs: Value,
        mask: np.ndarray | None,
        other: Value | None,
        *,
        volatile: bool = False,
        proxy: bool = False,
    ) -> Value:
        element = ptrs.get_element_ty()
        dtype = np_dtype(element)
        addresses = ptrs.data
        chosen = full_mask(mask, addresses)
        if volatile:
            return self._volatile_load(ptrs, chosen, other)
        kept, first = _kept(addresses, mask)
        self.machine.accesses.before_load(kept, dtype.itemsize, proxy, is_tile(addresses), first)
        if self.machine.accesses.dry and is_tile(addresses) and element.is_floating():
            return Value(np.zeros(addresses.shape, dtype), element)
        if mask is None:
            fill = np.empty(addresses.shape, dtype)
        elif other is None:
            fill = self.machine.undefined.fill(chosen, element)
        else:
            fill = np.ascontiguousarray(np.broadcast_to(other.data, addresses.shape), dtype)
        return Value(native.load(addresses, chosen, fill, dtype), element)

    def _volatile_load(self, ptrs: Value, chosen: np.ndarray, other: Value | None) -> Value:
        """Load as NVIDIA's compiler does: ld.volatile is ld.relaxed at system scope."""
        element = ptrs.get_element_ty()
        dtype = np_dtype(element)

        def execute() -> np.ndarray:
            return native.load(ptrs.data, chosen, np.zeros(ptrs.data.shape, dtype), dtype)

        order = ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.SYSTEM
        loaded = self._atomic(execute, ptrs, element, chosen, ("VOLATILE", b""), *order)
        if other is None:
            return loaded
        return Value(np.where(chosen, loaded.data, other.data).astype(dtype), element)

    def _store(
        self,
        ptrs: Value,
        value: Value,
        mask: np.ndarray | None,
        *,
        proxy: bool = False,
        tile: bool | None = None,
    ) -> None:
        addresses = ptrs.data
        kept, first = _kept(addresses, mask)
        data = value.data
        tile = is_tile(addresses) if tile is None else tile
        self.machine.accesses.before_store(kept, data.dtype.itemsize, proxy, tile, first)
        if data.size > addresses.size:
            data = of_thread_zero(self.machine.program.mask, data)
        moves = not is_tile(addresses) or not value.dtype.scalar.is_floating()
        if moves or not self.machine.accesses.dry:
            if data.shape != addresses.shape:
                data = np.broadcast_to(data, addresses.shape)
            native.store(addresses, data, full_mask(mask, addresses))
        self.machine.accesses.after_store(kept, data.dtype.itemsize)

    # descriptors: the same memory through the other proxy

    def create_descriptor_load(
        self, desc: TensorDescHandle, indices: list[Value], *hints: Any
    ) -> Value:
        if self.machine.accesses.dry and desc.base.dtype.element_ty.is_floating():
            self.machine.accesses.skipped_load(*corners(desc, indices))
            element = desc.base.dtype.element_ty
            return Value(np.zeros(desc.block_shape, np_dtype(element)), element)
        ptrs, mask = desc.materialize_pointers(indices)
        loaded = self._load(ptrs, array_of(mask), _padding(ptrs, desc.padding), proxy=True)
        if getattr(desc, "round_f32_to_tf32", False) and loaded.dtype == tl.float32:
            return Value(round_to_tf32(loaded.data), tl.float32)
        return loaded

    def create_descriptor_store(
        self, desc: TensorDescHandle, value: Value, indices: list[Value]
    ) -> None:
        ptrs, mask = desc.materialize_pointers(indices)
        self._store(ptrs, value, array_of(mask), proxy=True)

    def create_descriptor_reduce(
        self, kind: Any, desc: TensorDescHandle, value: Value, indices: list[Value]
    ) -> None:
        ptrs, mask = desc.materialize_pointers(indices)
        everyone = Value(array_of(mask), tl.int1)
        name = _unsigned_name(kind.name, value.dtype.scalar)
        sem, scope = ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.GPU
        op = getattr(ir.ATOMIC_OP, name)
        self.create_atomic_rmw(op, ptrs, value, everyone, sem, scope, proxy=True)

    def create_tensor_pointer_load(
        self, ptr: Any, boundary_check: Any, padding_option: Any, *hints: Any
    ) -> Value:
        """Load by a block pointer, which Triton 3.9 no longer has."""
        ptrs, mask = ptr.materialize_pointers(boundary_check)
        other = None if padding_option is None else _padding(ptrs, padding_option)
        return self._load(ptrs, mask, other, volatile=hints[-1])

    def create_barrier(self) -> None:
        if self.machine.program.mask is not None:
            raise KernelError(
                "a CTA barrier in a branch that only some threads of the program take: the others "
                "never reach it. Move it out of the branch."
            )
        self.machine.accesses.cta_barrier()

    # printing and assertions

    def create_print(self, prefix: str, hex: bool, values: list[Value], *signed: Any) -> None:
        for value in values:
            numbers = widen(value.data, value.dtype.scalar)
            numbers = numbers[0] if value.data.shape == (1,) else numbers
            text = _hexadecimal(value.data) if hex else str(numbers)
            print(f"{self.machine.program}:{prefix}{text}")

    def create_assert(self, condition: Value, message: str) -> None:
        if not condition.data.all():
            raise AssertionError(f"tl.device_assert: {message}")

    # what only a GPU can do

    def create_inline_asm(
        self, assembly: str, constraints: str, handles: list[Value], results: list[Any], *more: Any
    ) -> Any:
        """Run inline PTX. `more`: is_pure and pack."""
        if assembly == proxy.FENCE.value:  # one line, which stands for two in compiled code
            self.machine.accesses.proxy_fence()
            found = [Value(np.zeros(1, np.int32), tl.int32)]
        elif assembly == trace.READ_GLOBALTIMER.value:
            found = [Value(np.array([self.machine.accesses.count], np.int64), tl.int64)]
        else:
            found = run_ptx(self, assembly, handles, results, more[-1])
        return SimpleNamespace(get_result=lambda place: found[place])

    def create_grid_dependency_wait(self) -> None:
        """Wait for the previous kernel (`gdc_wait`, which was inline PTX before Triton 3.9)."""
        self.machine.accesses.grid_wait()

    def create_grid_dependency_launch_dependents(self) -> None:
        """Do nothing: a kernel that is launched early starts when it is put on the stream."""

    def create_extern_elementwise(
        self, lib: str, path: str, symbol: str, args: list[Value], *more: Any
    ) -> Any:
        if symbol not in EXTERNS:
            raise CannotInterpret(f"extern function {symbol} runs only on a GPU; use tl operations")
        return EXTERNS[symbol](self, *args)


def _kept(addresses: np.ndarray, mask: np.ndarray | None) -> tuple[np.ndarray, int]:
    """Return the addresses that a mask keeps, and the first one's place in the tile."""
    if mask is None:
        return addresses, 0
    full = full_mask(mask, addresses)
    return addresses[full], int(full.argmax())


def _padding(ptrs: Value, option: Any) -> Value:
    """Return what a descriptor, or a block pointer, reads outside of its tensor."""
    element = ptrs.get_element_ty()
    dtype = np_dtype(element)
    if option in _NAN:
        return Value(poison_like(ptrs.data.shape, dtype, element), element)
    return Value(np.zeros(ptrs.data.shape, dtype), element)


def _unsigned_name(kind: str, dtype: tl.dtype) -> str:
    """Name the atomic of a descriptor's reduction: floats and unsigned integers have others."""
    if kind == "ADD" and dtype.is_floating():
        return "FADD"
    return f"U{kind}" if kind in ("MIN", "MAX") and dtype.is_int_unsigned() else kind


def _hexadecimal(data: np.ndarray) -> str:
    bits = data.view(np.dtype(f"u{data.itemsize}"))
    width = 2 * data.itemsize
    return np.array2string(bits, formatter={"int": lambda n: f"0x{int(n):0{width}x}"})
