"""The interpreter's instruction set, with memory that is watched and arithmetic that is right.

Every load, store and atomic of a kernel comes through here. The builder computes; the machine
(`builder.machine`, set while programs run) decides when the program goes on and what it may touch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as native
from triton._C.libtriton import ir
from triton.runtime.interpreter import (
    InterpreterBuilder,
    InterpreterOptions,
    TensorDescHandle,
    TensorHandle,
    _get_np_dtype,
)

from ..errors import CannotInterpret
from .memory import poison_like
from .numerics import is_raw, narrow, widen

if TYPE_CHECKING:
    from .machine import Machine

__all__ = ["Builder"]

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
_COMPARISONS = {
    np.less: "<",
    np.less_equal: "<=",
    np.greater: ">",
    np.greater_equal: ">=",
    np.equal: "==",
    np.not_equal: "!=",
}


class Builder(InterpreterBuilder):
    """What `triton.language` calls for every operation while a program runs."""

    machine: Machine

    def __init__(self) -> None:
        super().__init__()
        # The overflow checks double the time of integer arithmetic (a matmul: 1.1 s to 0.5 s).
        self.options = InterpreterOptions(sanitize_overflow=False)

    @property
    def grid_idx(self) -> tuple[int, int, int]:
        return self.machine.program.index

    @property
    def grid_dim(self) -> tuple[int, int, int]:
        return self.machine.program.launch.grid

    # memory: the trailing arguments are cache hints, which differ between Triton's versions

    def create_load(self, ptr: TensorHandle, *hints: Any) -> TensorHandle:
        return self._load(ptr, None, None, volatile=hints[-1])

    def create_masked_load(
        self, ptrs: TensorHandle, mask: TensorHandle, other: TensorHandle | None, *hints: Any
    ) -> TensorHandle:
        return self._load(ptrs, _array(mask), other, volatile=hints[-1])

    def create_store(self, ptr: TensorHandle, value: TensorHandle, *hints: Any) -> None:
        self._store(ptr, value, None)

    def create_masked_store(
        self, ptrs: TensorHandle, value: TensorHandle, mask: TensorHandle, *hints: Any
    ) -> None:
        self._store(ptrs, value, _array(mask))

    def _load(
        self,
        ptrs: TensorHandle,
        mask: np.ndarray | None,
        other: TensorHandle | None,
        *,
        volatile: bool = False,
        proxy: bool = False,
    ) -> TensorHandle:
        element = ptrs.get_element_ty()
        dtype = _get_np_dtype(element)
        addresses = ptrs.data
        self.machine.before_load(_chosen(addresses, mask), dtype.itemsize, volatile, proxy)
        if other is not None:
            fill = np.ascontiguousarray(np.broadcast_to(other.data, addresses.shape), dtype)
        elif mask is None:
            fill = np.empty(addresses.shape, dtype)
        else:
            fill = poison_like(addresses.shape, dtype, element)
        return TensorHandle(native.load(addresses, _full(mask, addresses), fill, dtype), element)

    def _store(
        self,
        ptrs: TensorHandle,
        value: TensorHandle,
        mask: np.ndarray | None,
        *,
        proxy: bool = False,
    ) -> None:
        chosen = _chosen(ptrs.data, mask)
        data = value.data
        self.machine.before_store(chosen, data.dtype.itemsize, proxy)
        if data.shape != ptrs.data.shape:
            data = np.broadcast_to(data, ptrs.data.shape)
        native.store(ptrs.data, data, _full(mask, ptrs.data))
        self.machine.after_store(chosen, data.dtype.itemsize)

    # descriptors: the same memory through the other proxy

    def create_descriptor_load(
        self, desc: TensorDescHandle, indices: list[TensorHandle], *hints: Any
    ) -> TensorHandle:
        ptrs, mask = desc.materialize_pointers(indices)
        element = ptrs.get_element_ty()
        dtype = _get_np_dtype(element)
        fill = np.zeros(ptrs.data.shape, dtype)
        if desc.padding == ir.PADDING_OPTION.PAD_NAN:
            fill = poison_like(ptrs.data.shape, dtype, element)
        loaded = self._load(ptrs, _array(mask), TensorHandle(fill, element), proxy=True)
        if getattr(desc, "round_f32_to_tf32", False) and element == tl.float32:
            from triton.runtime.interpreter import _round_f32_to_tf32

            loaded = TensorHandle(_round_f32_to_tf32(loaded.data), element)
        return loaded

    def create_descriptor_store(
        self, desc: TensorDescHandle, value: TensorHandle, indices: list[TensorHandle]
    ) -> None:
        ptrs, mask = desc.materialize_pointers(indices)
        self._store(ptrs, value, _array(mask), proxy=True)

    # atomics

    def create_atomic_rmw(
        self,
        op: Any,
        ptr: TensorHandle,
        value: TensorHandle,
        mask: TensorHandle,
        sem: Any,
        scope: Any,
    ) -> TensorHandle:
        chosen = _full(_array(mask), ptr.data)
        if value.dtype.scalar == tl.bfloat16 and op == ir.ATOMIC_OP.FADD:
            execute = self._bfloat16_add(ptr, value, chosen)
        else:
            rmw = self.ir_rmw_op_to_interpreter_rmw_op[op]
            native_sem = self.ir_sem_to_interpreter_sem[sem]

            def execute() -> np.ndarray:
                return native.atomic_rmw(rmw, ptr.data, value.data, chosen, native_sem)

        operands = (op.name, value.data.tobytes())
        old = self.machine.atomic(
            execute, ptr.data[chosen], value.data.itemsize, operands, _SEM[sem], _SCOPE[scope]
        )
        return TensorHandle(old, value.dtype.scalar)

    def create_atomic_cas(
        self, ptr: TensorHandle, expected: TensorHandle, value: TensorHandle, sem: Any, scope: Any
    ) -> TensorHandle:
        native_sem = self.ir_sem_to_interpreter_sem[sem]

        def execute() -> np.ndarray:
            return native.atomic_cas(ptr.data, expected.data, value.data, native_sem)

        operands = ("CAS", expected.data.tobytes() + value.data.tobytes())
        old = self.machine.atomic(
            execute, ptr.data.ravel(), value.data.itemsize, operands, _SEM[sem], _SCOPE[scope]
        )
        return TensorHandle(old, expected.dtype.scalar)

    def _bfloat16_add(
        self, ptr: TensorHandle, value: TensorHandle, chosen: np.ndarray
    ) -> Callable[[], np.ndarray]:
        """By compare and swap, as the interpreter has no 16-bit add; atomic between processes."""

        def execute() -> np.ndarray:
            old = np.zeros(ptr.data.shape, np.uint16)
            for at in zip(*np.nonzero(chosen), strict=True):
                address = ptr.data[at].reshape(1)
                seen = native.load(address, np.ones(1, bool), np.zeros(1, np.uint16), np.uint16)
                while True:
                    total = widen(seen, tl.bfloat16) + widen(value.data[at], tl.bfloat16)
                    new = narrow(total, tl.bfloat16)
                    found = native.atomic_cas(
                        address, seen, new, native.MEM_SEMANTIC.ACQUIRE_RELEASE
                    )
                    if found == seen:
                        break
                    seen = found
                old[at] = seen[0]
            return old

        return execute

    # Triton 3.9's own entry points

    def create_atomic_load(
        self, ptr: TensorHandle, mask: TensorHandle, sem: Any, scope: Any
    ) -> TensorHandle:
        element = ptr.get_element_ty()
        dtype = _get_np_dtype(element)
        chosen = _full(_array(mask), ptr.data)

        def execute() -> np.ndarray:
            fill = poison_like(ptr.data.shape, dtype, element)
            return native.load(ptr.data, chosen, fill, dtype)

        old = self.machine.atomic(
            execute, ptr.data[chosen], dtype.itemsize, ("LOAD", b""), _SEM[sem], _SCOPE[scope]
        )
        return TensorHandle(old, element)

    def create_atomic_store(
        self, ptr: TensorHandle, value: TensorHandle, mask: TensorHandle, sem: Any, scope: Any
    ) -> None:
        chosen = _full(_array(mask), ptr.data)

        def execute() -> np.ndarray:
            native.store(ptr.data, np.broadcast_to(value.data, ptr.data.shape), chosen)
            return value.data

        operands = ("STORE", value.data.tobytes())
        self.machine.atomic(
            execute, ptr.data[chosen], value.data.itemsize, operands, _SEM[sem], _SCOPE[scope]
        )

    def create_atomic_poll(
        self, ptr: TensorHandle, expected: TensorHandle, timeout_ns: Any, sem: Any, scope: Any
    ) -> TensorHandle:
        everywhere = TensorHandle(np.ones(ptr.data.shape, bool), tl.int1)
        while True:
            seen = self.create_atomic_load(ptr, everywhere, sem, scope)
            self.machine.program.compared_with("==", expected.data)
            matched = seen.data == expected.data
            if matched.all() or (timeout_ns is not None and self.machine.program.expired):
                return TensorHandle(matched, tl.int1)

    def create_barrier(self) -> None:
        self.machine.cta_barrier()

    # arithmetic: as the base class, on numbers instead of bits

    def binary_op(self, lhs: TensorHandle, rhs: TensorHandle, op: Any) -> TensorHandle:
        dtype = lhs.dtype.scalar
        if is_raw(dtype):
            return _result(op(widen(lhs.data, dtype), widen(rhs.data, rhs.dtype.scalar)), dtype)
        if op in _COMPARISONS:
            self.machine.program.compared_with(_COMPARISONS[op], rhs.data)
            return TensorHandle(op(lhs.data, rhs.data), tl.int1)
        return super().binary_op(lhs, rhs, op)

    def unary_op(self, arg: TensorHandle, op: Any) -> TensorHandle:
        dtype = arg.dtype.scalar
        return _result(op(widen(arg.data, dtype)), dtype)

    def create_fneg(self, arg: TensorHandle) -> TensorHandle:
        return self.unary_op(arg, np.negative)

    def create_rsqrt(self, arg: TensorHandle) -> TensorHandle:
        return self.unary_op(arg, lambda x: (1 / np.sqrt(x)).astype(x.dtype))

    def create_clampf(
        self, arg: TensorHandle, lo: TensorHandle, hi: TensorHandle, propagate_nans: Any
    ) -> TensorHandle:
        dtype = arg.dtype.scalar
        if not is_raw(dtype):
            return super().create_clampf(arg, lo, hi, propagate_nans)
        numbers = [widen(x.data, dtype) for x in (arg, lo, hi)]
        return _result(np.clip(*numbers), dtype)

    def create_fma(self, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
        dtype = z.dtype.scalar
        if dtype == tl.float64:
            return TensorHandle(x.data * y.data + z.data, dtype)
        # float64 holds the product of two float32 exactly: one rounding, as on a GPU, but for ties
        wide = [widen(v.data, dtype).astype(np.float64) for v in (x, y, z)]
        return _result((wide[0] * wide[1] + wide[2]).astype(np.float32), dtype)

    def cast_impl(self, src: TensorHandle, dst_type: Any) -> TensorHandle:
        source, target = src.dtype.scalar, dst_type.scalar
        if not is_raw(source) and not is_raw(target):
            return super().cast_impl(src, dst_type)
        numbers = widen(src.data, source)
        if is_raw(target):
            return TensorHandle(narrow(numbers, target), target)
        return TensorHandle(numbers.astype(_get_np_dtype(target)), target)

    def create_fp_to_fp(
        self, src: TensorHandle, dst_type: Any, rounding_mode: Any = None
    ) -> TensorHandle:
        if rounding_mode == ir.ROUNDING_MODE.RTZ:
            return super().create_fp_to_fp(src, dst_type, rounding_mode)
        return self.cast_impl(src, dst_type)

    def create_dot(
        self, a: TensorHandle, b: TensorHandle, d: TensorHandle, *precision: Any
    ) -> TensorHandle:
        product = np.matmul(
            widen(a.data, a.dtype.scalar), widen(b.data, b.dtype.scalar), dtype=d.data.dtype
        )
        return TensorHandle(product + d.data, d.dtype.scalar)

    # what only a GPU can do

    def create_inline_asm(self, *args: Any) -> Any:
        raise CannotInterpret("inline assembly runs only on a GPU; use tl operations")

    def create_extern_elementwise(self, lib: str, path: str, symbol: str, *args: Any) -> Any:
        raise CannotInterpret(f"extern function {symbol} runs only on a GPU; use tl operations")


def _array(mask: TensorHandle | np.ndarray) -> np.ndarray:
    # Triton 3.6 and 3.7 pass bare arrays for descriptors
    return mask if isinstance(mask, np.ndarray) else mask.data


def _full(mask: np.ndarray | None, addresses: np.ndarray) -> np.ndarray:
    if mask is None:
        return np.ones(addresses.shape, bool)
    return mask if mask.shape == addresses.shape else np.broadcast_to(mask, addresses.shape)


def _chosen(addresses: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    return addresses if mask is None else addresses[_full(mask, addresses)]


def _result(numbers: np.ndarray, dtype: tl.dtype) -> TensorHandle:
    if numbers.dtype == np.bool_:
        return TensorHandle(numbers, tl.int1)
    return TensorHandle(narrow(numbers, dtype), dtype)
