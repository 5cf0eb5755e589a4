"""The interpreter's instruction set: every load, store and atomic of a kernel comes through here.

The builder computes; the machine (`builder.machine`, set while programs run) decides when the
program goes on and what it may touch. Arithmetic is in the base class.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton._C.libtriton import interpreter as native
from triton._C.libtriton import ir
from triton.runtime.interpreter import InterpreterOptions, TensorDescHandle

from ..device import proxy, trace
from ..errors import CannotInterpret
from .atomics import Atomics, array_of, full_mask, is_tile
from .handle import Handle
from .memory import poison_like
from .numerics import np_dtype, round_to_tf32, widen

__all__ = ["Builder"]

_NAN = (ir.PADDING_OPTION.PAD_NAN,)


class Builder(Atomics):
    """What `triton.language` calls for every operation while a program runs."""

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

    def create_load(self, ptr: Handle, *hints: Any) -> Handle:
        return self._load(ptr, None, None, volatile=hints[-1])

    def create_masked_load(
        self, ptrs: Handle, mask: Handle, other: Handle | None, *hints: Any
    ) -> Handle:
        return self._load(ptrs, array_of(mask), other, volatile=hints[-1])

    def create_store(self, ptr: Handle, value: Handle, *hints: Any) -> None:
        self._store(ptr, value, None)

    def create_masked_store(self, ptrs: Handle, value: Handle, mask: Handle, *hints: Any) -> None:
        self._store(ptrs, value, array_of(mask))

    def _load(
        self,
        ptrs: Handle,
        mask: np.ndarray | None,
        other: Handle | None,
        *,
        volatile: bool = False,
        proxy: bool = False,
    ) -> Handle:
        element = ptrs.get_element_ty()
        dtype = np_dtype(element)
        addresses = ptrs.data
        chosen = full_mask(mask, addresses)
        self.machine.accesses.before_load(
            _chosen(addresses, mask), dtype.itemsize, volatile, proxy, is_tile(addresses)
        )
        if mask is None:
            fill = np.empty(addresses.shape, dtype)
        elif other is None:
            fill = poison_like(addresses.shape, dtype, element)
        else:
            fill = np.ascontiguousarray(np.broadcast_to(other.data, addresses.shape), dtype)
        return Handle(native.load(addresses, chosen, fill, dtype), element)

    def _store(
        self, ptrs: Handle, value: Handle, mask: np.ndarray | None, *, proxy: bool = False
    ) -> None:
        addresses = ptrs.data
        chosen = _chosen(addresses, mask)
        data = value.data
        self.machine.accesses.before_store(chosen, data.dtype.itemsize, proxy, is_tile(addresses))
        if data.shape != addresses.shape:
            data = np.broadcast_to(data, addresses.shape)
        native.store(addresses, data, full_mask(mask, addresses))
        self.machine.accesses.after_store(chosen, data.dtype.itemsize)

    # descriptors: the same memory through the other proxy

    def create_descriptor_load(
        self, desc: TensorDescHandle, indices: list[Handle], *hints: Any
    ) -> Handle:
        ptrs, mask = desc.materialize_pointers(indices)
        loaded = self._load(ptrs, array_of(mask), _padding(ptrs, desc.padding), proxy=True)
        if getattr(desc, "round_f32_to_tf32", False) and loaded.dtype == tl.float32:
            return Handle(round_to_tf32(loaded.data), tl.float32)
        return loaded

    def create_descriptor_store(
        self, desc: TensorDescHandle, value: Handle, indices: list[Handle]
    ) -> None:
        ptrs, mask = desc.materialize_pointers(indices)
        self._store(ptrs, value, array_of(mask), proxy=True)

    def create_descriptor_reduce(
        self, kind: Any, desc: TensorDescHandle, value: Handle, indices: list[Handle]
    ) -> None:
        ptrs, mask = desc.materialize_pointers(indices)
        everyone = Handle(array_of(mask), tl.int1)
        name = _unsigned_name(kind.name, value.dtype.scalar)
        sem, scope = ir.MEM_SEMANTIC.RELAXED, ir.MEM_SYNC_SCOPE.GPU
        op = getattr(ir.ATOMIC_OP, name)
        self.create_atomic_rmw(op, ptrs, value, everyone, sem, scope, proxy=True)

    def create_tensor_pointer_load(
        self, ptr: Any, boundary_check: Any, padding_option: Any, *hints: Any
    ) -> Handle:
        """Block pointers, which Triton 3.9 no longer has."""
        ptrs, mask = ptr.materialize_pointers(boundary_check)
        other = None if padding_option is None else _padding(ptrs, padding_option)
        return self._load(ptrs, mask, other, volatile=hints[-1])

    def create_barrier(self) -> None:
        self.machine.accesses.cta_barrier()

    # for people

    def create_print(self, prefix: str, hex: bool, values: list[Handle], *signed: Any) -> None:
        for value in values:
            numbers = widen(value.data, value.dtype.scalar)
            numbers = numbers[0] if value.data.shape == (1,) else numbers
            text = _hexadecimal(value.data) if hex else str(numbers)
            print(f"{self.machine.program}:{prefix}{text}")

    def create_assert(self, condition: Handle, message: str) -> None:
        if not condition.data.all():
            raise AssertionError(f"tl.device_assert: {message}")

    # what only a GPU can do

    def create_inline_asm(self, assembly: str, *args: Any) -> Any:
        if assembly == proxy.FENCE.value:
            self.machine.accesses.proxy_fence()
            nothing = Handle(np.zeros(1, np.int32), tl.int32)
            return SimpleNamespace(get_result=lambda place: nothing)
        if assembly == trace.READ_GLOBALTIMER.value:
            now = Handle(np.array([self.machine.accesses.count], np.int64), tl.int64)
            return SimpleNamespace(get_result=lambda place: now)
        raise CannotInterpret("inline assembly runs only on a GPU; use tl operations")

    def create_extern_elementwise(self, lib: str, path: str, symbol: str, *args: Any) -> Any:
        raise CannotInterpret(f"extern function {symbol} runs only on a GPU; use tl operations")


def _chosen(addresses: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    return addresses if mask is None else addresses[full_mask(mask, addresses)]


def _padding(ptrs: Handle, option: Any) -> Handle:
    """What a descriptor, or a block pointer, reads outside of its tensor."""
    element = ptrs.get_element_ty()
    dtype = np_dtype(element)
    if option in _NAN:
        return Handle(poison_like(ptrs.data.shape, dtype, element), element)
    return Handle(np.zeros(ptrs.data.shape, dtype), element)


def _unsigned_name(kind: str, dtype: tl.dtype) -> str:
    """The atomic of a descriptor's reduction: floats and unsigned integers have their own."""
    if kind == "ADD" and dtype.is_floating():
        return "FADD"
    return f"U{kind}" if kind in ("MIN", "MAX") and dtype.is_int_unsigned() else kind


def _hexadecimal(data: np.ndarray) -> str:
    bits = data.view(np.dtype(f"u{data.itemsize}"))
    width = 2 * data.itemsize
    return np.array2string(bits, formatter={"int": lambda n: f"0x{int(n):0{width}x}"})
