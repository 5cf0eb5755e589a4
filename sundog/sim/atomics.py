"""Atomics of the interpreter's instruction set, Triton 3.9's own entry points among them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as native
from triton._C.libtriton import ir

from .arithmetic import Arithmetic
from .handle import Handle
from .memory import poison_like
from .numerics import is_raw, narrow, np_dtype, widen

__all__ = ["Atomics", "array_of", "full_mask", "is_tile"]

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
        ptr: Handle,
        value: Handle,
        mask: Handle,
        sem: Any,
        scope: Any,
        proxy: bool = False,
    ) -> Handle:
        # The native atomics, unlike its loads and stores, take every array to be contiguous.
        chosen = np.ascontiguousarray(full_mask(array_of(mask), ptr.data))
        ptr = Handle(np.ascontiguousarray(ptr.data), ptr.dtype)
        dtype = value.dtype.scalar
        data = _spread(value, ptr)
        if dtype.is_floating() and dtype.primitive_bitwidth == 16 and op == ir.ATOMIC_OP.FADD:
            execute = _add_16_bits(ptr, data, dtype, chosen)
        else:
            rmw = self.ir_rmw_op_to_interpreter_rmw_op[op]
            native_sem = self.ir_sem_to_interpreter_sem[sem]
            # The native exchange knows only integers, and only bits matter to it.
            bits = data.view(f"i{data.itemsize}") if op == ir.ATOMIC_OP.XCHG else data

            def execute() -> np.ndarray:
                old = native.atomic_rmw(rmw, ptr.data, bits, chosen, native_sem)
                return old.view(data.dtype)

        operands = (op.name, data.tobytes())
        return self._atomic(execute, ptr, dtype, chosen, operands, sem, scope, proxy)

    def create_atomic_cas(
        self, ptr: Handle, expected: Handle, value: Handle, sem: Any, scope: Any
    ) -> Handle:
        element = ptr.get_element_ty()
        if not expected.dtype.scalar == value.dtype.scalar == element:
            kinds = f"{expected.dtype.scalar} and {value.dtype.scalar}"
            raise ValueError(f"atomic_cas of {element} with {kinds}; cast them")
        native_sem = self.ir_sem_to_interpreter_sem[sem]
        ptr = Handle(np.ascontiguousarray(ptr.data), ptr.dtype)
        compare, new = _spread(expected, ptr), _spread(value, ptr)

        def execute() -> np.ndarray:
            return native.atomic_cas(ptr.data, compare, new, native_sem)

        operands = ("CAS", compare.tobytes() + new.tobytes())
        everywhere = np.ones(ptr.data.shape, bool)
        return self._atomic(execute, ptr, value.dtype.scalar, everywhere, operands, sem, scope)

    def _atomic(
        self,
        execute: Callable[[], np.ndarray],
        ptr: Handle,
        dtype: tl.dtype,
        chosen: np.ndarray,
        operands: tuple[str, bytes],
        sem: Any,
        scope: Any,
        proxy: bool = False,
    ) -> Handle:
        kind = np_dtype(dtype)
        addresses = ptr.data[chosen]
        tile = is_tile(ptr.data)
        old = self.machine.accesses.atomic(
            execute, addresses, kind.itemsize, operands, _SEM[sem], _SCOPE[scope], tile, proxy
        )
        if addresses.size < chosen.size:  # the other lanes have no old value
            old = np.where(chosen, old, poison_like(chosen.shape, kind, dtype))
        return Handle(old, dtype)

    # Triton 3.9's own entry points

    def create_atomic_load(self, ptr: Handle, mask: Handle, sem: Any, scope: Any) -> Handle:
        element = ptr.get_element_ty()
        dtype = np_dtype(element)
        chosen = full_mask(array_of(mask), ptr.data)

        def execute() -> np.ndarray:
            return native.load(ptr.data, chosen, np.zeros(ptr.data.shape, dtype), dtype)

        return self._atomic(execute, ptr, element, chosen, ("LOAD", b""), sem, scope)

    def create_atomic_store(
        self, ptr: Handle, value: Handle, mask: Handle, sem: Any, scope: Any
    ) -> None:
        chosen = full_mask(array_of(mask), ptr.data)

        def execute() -> np.ndarray:
            native.store(ptr.data, np.broadcast_to(value.data, ptr.data.shape), chosen)
            return value.data

        operands = ("STORE", value.data.tobytes())
        self._atomic(execute, ptr, value.dtype.scalar, chosen, operands, sem, scope)

    def create_atomic_poll(
        self, ptr: Handle, expected: Handle, timeout_ns: Any, sem: Any, scope: Any
    ) -> Handle:
        everywhere = Handle(np.ones(ptr.data.shape, bool), tl.int1)
        while True:
            seen = self.create_atomic_load(ptr, everywhere, sem, scope)
            self.machine.program.compared_with("==", expected.data)
            matched = seen.data == expected.data
            if matched.all() or (timeout_ns is not None and self.machine.program.expired):
                return Handle(matched, tl.int1)


def is_tile(addresses: np.ndarray) -> bool:
    """Made by many threads, where a scalar access is made by one."""
    return addresses.shape != (1,)


def array_of(mask: Any) -> np.ndarray:
    # Triton 3.6 and 3.7 pass bare arrays for descriptors
    return mask if isinstance(mask, np.ndarray) else mask.data


def full_mask(mask: np.ndarray | None, addresses: np.ndarray) -> np.ndarray:
    if mask is None:
        return np.ones(addresses.shape, bool)
    return mask if mask.shape == addresses.shape else np.broadcast_to(mask, addresses.shape)


def _spread(value: Handle, ptr: Handle) -> np.ndarray:
    """The value for every address, side by side in memory, as the native atomics want it."""
    data = value.data
    same = data.shape == ptr.data.shape
    return np.ascontiguousarray(data if same else np.broadcast_to(data, ptr.data.shape))


def _add_16_bits(
    ptr: Handle, data: np.ndarray, dtype: tl.dtype, chosen: np.ndarray
) -> Callable[[], np.ndarray]:
    """By compare and swap, as the interpreter has no 16-bit add; atomic between processes."""

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
