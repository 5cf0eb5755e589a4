"""Triton's operators while programs are simulated: Triton's own, with short cuts.

What is overridden here gives the results of the base class faster: in the common cases of
broadcasting and casting nothing has to be done.

It is Triton's interpreter on demand: a `JITFunction` stays one, and its twin runs on numpy.

`twin(kernel)` is the kernel's Python function, rewritten (see `rewrite`). While programs run,
`triton.language` computes with numpy and calling a JITFunction calls its twin; afterwards every
attribute is put back, so the same object compiles for a GPU before, after and in between. No
environment variable is involved.
"""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as stock
from triton.language.semantic import TritonSemantic
from triton.runtime.jit import JITFunction, mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor

from ..errors import CannotInterpret, KernelError
from .arithmetic import map_elementwise, reduce, scan
from .builder import Builder
from .numerics import Block, Tile, Value, is_raw, np_dtype, scalar, tile
from .rewrite import Helpers, called_by_gluon, function_tree, rewrite

_WHOLE = {
    f"{sign}int{bits}": (0, 2**bits - 1) if sign else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for sign in ("", "u")
    for bits in (8, 16, 32, 64)
}
_SAME = frozenset([*_WHOLE, "fp32", "fp64"])  # the type stays: itself, and numbers that fit


class Semantic(TritonSemantic):
    tensor = Tile

    def binary_op_type_checking_impl(self, lhs: Any, rhs: Any, *args: Any, **options: Any) -> Any:
        if isinstance(lhs, tl.tensor) and (name := lhs.dtype.name) in _SAME:
            if isinstance(rhs, tl.tensor):
                if rhs.dtype is lhs.dtype:
                    return self.broadcast_impl_value(lhs, rhs)
            elif type(rhs) is int:
                low, high = _WHOLE.get(name, (-(2**24), 2**24))
                if low <= rhs <= high:
                    return self.broadcast_impl_value(lhs, scalar(rhs, lhs.dtype))
            is_plain = name in _WHOLE and not args[2:] and not options  # no division, no bits
            if is_plain and isinstance(rhs, tl.tensor) and rhs.dtype.name in _WHOLE:
                both = self.integer_promote_impl(lhs.dtype, rhs.dtype)
                return self.broadcast_impl_value(self.cast(lhs, both), self.cast(rhs, both))
        elif args[:1] == (True,) and isinstance(lhs, tl.tensor) and lhs.dtype.is_ptr():
            rhs = self.to_tensor(rhs)
            if rhs.dtype.name in _WHOLE:
                return self.broadcast_impl_value(lhs, rhs)
        return super().binary_op_type_checking_impl(lhs, rhs, *args, **options)

    def scalar_constant(self, value: Any, dtype: tl.dtype) -> Any:
        if dtype is None or is_raw(dtype) or dtype.is_ptr():
            return super().scalar_constant(value, dtype)
        return scalar(value or 0, dtype)  # -0.0 becomes 0.0, as in the base class

    def to_tensor(self, x: Any, check_type: bool = True) -> Any:
        if type(x) is int and -(2**31) <= x < 2**31:
            return scalar(x, tl.int32)
        return x if isinstance(x, tl.tensor) else super().to_tensor(x, check_type)

    def cast(self, input: Any, dst_ty: tl.dtype, fp_downcast_rounding: str | None = None) -> Any:
        source, target = input.dtype, dst_ty.scalar
        if source is target:
            return input
        if source.name in _WHOLE and target.name in _WHOLE:
            data = input.handle.data.astype(np_dtype(target))
            like = input.type
            kind = like.with_element_ty(target) if isinstance(like, Block) else target
            return Tile(Value(data, target), kind)
        return super().cast(input, dst_ty, fp_downcast_rounding)

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if isinstance(left, Block):
            if isinstance(right, Block) and left.sizes == right.sizes:
                return lhs, rhs
            if isinstance(right, Block) and (sizes := _common(left.sizes, right.sizes)):
                return _stretched(lhs, sizes), _stretched(rhs, sizes)
            if not right.is_block():
                return lhs, _splat(rhs, left)
        elif not left.is_block():
            if not right.is_block():
                return lhs, rhs
            if isinstance(right, Block):
                return _splat(lhs, right), rhs
        return super().broadcast_impl_value(lhs, rhs)

    def expand_dims(self, input: Any, axis: int) -> Any:
        if not isinstance(input.type, Block):
            return super().expand_dims(input, axis)
        return tile(np.expand_dims(input.handle.data, axis), input.dtype)

    def arange(self, start: int, end: int, *, ret_ty: Any = None) -> Any:
        if ret_ty is not None:
            return super().arange(start, end, ret_ty=ret_ty)
        found = _ranges.get((start, end))
        if found is None:
            found = _ranges[start, end] = super().arange(start, end)
            found.handle.data.setflags(write=False)
        return Tile(found.handle, found.type)


_ranges: dict[tuple[int, int], Any] = {}  # the tiles of arange, by its arguments


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    """Return the sizes of two tiles together; nothing if they differ, or in their axes."""
    if len(left) != len(right):
        return ()
    sizes = tuple(b if a == 1 else a for a, b in zip(left, right, strict=True))
    return sizes if all(b in (1, n) for b, n in zip(right, sizes, strict=True)) else ()


def _stretched(x: Any, sizes: tuple[int, ...]) -> Any:
    if x.type.sizes == sizes:
        return x
    return tile(np.broadcast_to(x.handle.data, sizes), x.dtype)


def multiple_of(input: Any, values: Any) -> Any:
    """Check the hint: the first of each run of neighbours, along any axis, must be a multiple."""
    values = _unwrapped(values)
    begins = np.array(True)
    for axis in range(len(values)):
        data, step = _along(input, axis)
        begins = begins & np.moveaxis(_breaks(data, data.shape[-1], step, first=True), -1, axis)
    data = np.moveaxis(_along(input, 0)[0], -1, 0)
    for value in values:
        _must_hold("multiple_of", value, data, begins & (data % value != 0))
    return input


def max_contiguous(input: Any, values: Any) -> Any:
    """Check the hint: each group of this many elements must be neighbours."""
    for axis, value in enumerate(_unwrapped(values)):
        data, step = _along(input, axis)
        _must_hold("max_contiguous", value, data, _breaks(data, value, step))
    return input


def max_constancy(input: Any, values: Any) -> Any:
    """Check the hint: each group of this many elements must be equal."""
    for axis, value in enumerate(_unwrapped(values)):
        data, _ = _along(input, axis)
        _must_hold("max_constancy", value, data, _breaks(data, value, 0))
    return input


def _unwrapped(values: Any) -> list[int]:
    values = tl.core._unwrap_if_constexpr(values)
    several = values if isinstance(values, list | tuple | tl.core.tuple) else [values]
    return [int(tl.core._unwrap_if_constexpr(value)) for value in several]


def _along(x: Any, axis: int) -> tuple[np.ndarray, int]:
    """Return the values with one axis last, and the distance between neighbours."""
    data = x.handle.data.reshape(x.type.shape if x.type.is_block() else (1,))
    if data.dtype == np.uint64:
        data = data.view(np.int64)
    step = x.dtype.element_ty.primitive_bitwidth // 8 if x.dtype.is_ptr() else 1
    return np.moveaxis(data, axis, -1), max(step, 1)


def _breaks(data: np.ndarray, value: int, step: int, first: bool = False) -> np.ndarray:
    """Return which elements do not follow the one before them, in groups of `value`.

    The first of a group has none before it, so it may or may not count as a break.
    """
    found = np.zeros(data.shape, bool)
    found[..., 1:] = data[..., 1:] != data[..., :-1] + step
    found[..., ::value] = first
    return found


def _must_hold(hint: str, value: int, data: np.ndarray, wrong: np.ndarray) -> None:
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0].tolist())
        raise KernelError(
            f"tl.{hint}({value}) is false: element {list(at)} is {data[at]}. Compiled code relies "
            "on it and may access other memory; leave the hint out, or make it true."
        )


def _splat(value: Any, like: Block) -> Tile:
    if value.handle.data.size > 1:
        raise CannotInterpret("a value per thread (%tid) meets a tile: that is not simulated")
    one = value.handle.data
    data = np.ndarray(like.sizes, one.dtype, one, strides=(0,) * len(like.sizes))
    data.setflags(write=False)  # as of np.broadcast_to, which takes ten times as long
    return Tile(Value(data, value.handle.dtype), like.with_element_ty(value.type))


_MISSING = object()
_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift",
    "lt", "le", "gt", "ge", "eq", "ne",
)  # fmt: skip
_twins: weakref.WeakKeyDictionary[Callable, Callable] = weakref.WeakKeyDictionary()
_replacements: dict[Callable, Callable] = {}
_recorders: list[dict[Callable, JITFunction]] = []


class Language:
    """`triton.language` with every attribute that the interpreter replaces, in both versions."""

    def __init__(self) -> None:
        self.builder = Builder()
        self.semantic = Semantic(self.builder)
        self.helpers = Helpers(self.semantic)
        self.patched = False
        self._changes: list[tuple[Any, str, Any, Any]] = []  # owner, name, theirs, ours
        ours = {**self._stock_changes(), **self._own_changes()}
        del ours[tl.tensor, "__bool__"]  # conditions are rewritten; see Helpers.truth
        for (owner, name), value in ours.items():
            self._changes.append((owner, name, vars(owner).get(name, _MISSING), value))

    def patch(self) -> None:
        if not self.patched:
            for owner, name, _, ours in self._changes:
                setattr(owner, name, ours)
            self.patched = True

    def restore(self) -> None:
        if self.patched:
            for owner, name, theirs, _ in reversed(self._changes):
                _put_back(owner, name, theirs)
            self.patched = False

    def _stock_changes(self) -> dict[tuple[Any, str], Any]:
        """Let Triton patch once with our builder, note the changes, and undo them.

        It compares attributes, since Triton's own restore copies inherited ones down the hierarchy.
        """
        classes = [member for member in vars(tl.core).values() if inspect.isclass(member)]
        owners = [tl, tl.core, tl.math, tl.standard, *classes]
        before = [dict(vars(owner)) for owner in owners]
        builders = stock.interpreter_builder, stock.interpreter_semantic
        stock.interpreter_builder, stock.interpreter_semantic = self.builder, self.semantic
        try:
            stock._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        finally:
            stock.interpreter_builder, stock.interpreter_semantic = builders
        changes: dict[tuple[Any, str], Any] = {}
        for owner, theirs in zip(owners, before, strict=True):
            for name, value in dict(vars(owner)).items():
                if value is not theirs.get(name, _MISSING):
                    changes[owner, name] = self._bind(value)
                    _put_back(owner, name, theirs.get(name, _MISSING))
        return changes

    def _bind(self, patched: Any) -> Any:
        """Bind our keywords once, where Triton's wrapper filters its own on every call."""
        member = (getattr(patched, "__kwdefaults__", None) or {}).get("member")
        if member is None:
            return patched
        inner = getattr(member, "__wrapped__", member)  # without the check that a keyword is passed
        semantic = self.semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        return call

    def _own_changes(self) -> dict[tuple[Any, str], Any]:
        changes: dict[tuple[Any, str], Any] = {
            (JITFunction, "__call__"): _call_twin,
            (JITFunction, "__get__"): _bound,
            # numpy 2.4 refuses int() of an array with one axis
            (tl.tensor, "__index__"): lambda tensor: int(tensor.handle.data.item()),
        }
        for lang in (tl, tl.core):
            changes[lang, "range"] = self.helpers.range
            changes[lang, "reduce"] = reduce
            changes[lang, "associative_scan"] = scan
            changes[lang, "map_elementwise"] = map_elementwise
            changes[lang, "multiple_of"] = multiple_of
            changes[lang, "max_contiguous"] = max_contiguous
            changes[lang, "max_constancy"] = max_constancy
            changes[lang, "dot_scaled"] = _no_scaled_product
        for kind in (tl.dtype, tl.pointer_type, tl.block_type):
            changes[kind, "to_ir"] = lambda dtype, builder: dtype  # our builder takes it unchanged
        for name in _OPERATORS:
            changes[tl.constexpr, f"__{name}__"] = _on_tensors(name)
        for name, member in vars(tl.tensor).items():
            if isinstance(member, JITFunction):  # x.sum(): a method only once it is a function
                changes[tl.tensor, name] = _as_method(member)
        return changes


@functools.cache
def language() -> Language:
    """Return the one Language of this process, since what it patches is process-wide."""
    return Language()


def _put_back(owner: Any, name: str, value: Any) -> None:
    if value is _MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _on_tensors(name: str) -> Callable:
    """Make N + x a tensor, where Triton's own operator would make an unusable constexpr."""
    own, plain = getattr(tl.constexpr, f"__{name}__"), getattr(operator, f"__{name}__")

    def call(self: tl.constexpr, other: Any) -> Any:
        return plain(self.value, other) if isinstance(other, tl.tensor) else own(self, other)

    return call


def _as_method(function: JITFunction) -> Callable:
    return lambda *args, **kwargs: function(*args, **kwargs)


def _call_twin(self: JITFunction, *args: Any, **kwargs: Any) -> Any:
    kwargs.pop("_semantic", None)
    return twin(self)(*args, **kwargs)


def _bound(self: JITFunction, instance: Any, owner: Any = None) -> Any:
    """Return a method bound to its aggregate, or any other function unchanged."""
    is_method = instance is not None and hasattr(owner, "__triton_aggregate__")
    return functools.partial(self, instance) if is_method else self


def _no_scaled_product(*args: Any, **kwargs: Any) -> Any:
    raise CannotInterpret("tl.dot_scaled is not simulated: scale the tiles and use tl.dot")


@contextmanager
def replaced(kernel: JITFunction, tree: ast.FunctionDef) -> Iterator[None]:
    """Run another body for this kernel, by which mutants are made."""
    _replacements[kernel.fn] = rewrite(kernel.fn, tree, language().helpers)
    try:
        yield
    finally:
        del _replacements[kernel.fn]


@contextmanager
def recorded() -> Iterator[list[JITFunction]]:
    """Collect the kernels, and the functions that they call, in the order of their first run."""
    used: dict[Callable, JITFunction] = {}
    _recorders.append(used)
    found: list[JITFunction] = []
    try:
        yield found
    finally:
        _recorders.remove(used)
        found.extend(used.values())


def twin(kernel: JITFunction) -> Callable:
    """Return the Python function that the interpreter runs for a kernel; it is made once."""
    for used in _recorders:
        used.setdefault(kernel.fn, kernel)
    if kernel.fn in _replacements:
        return _replacements[kernel.fn]
    if kernel.is_gluon() and kernel.fn not in _twins:
        for function in reversed(called_by_gluon(kernel)):  # itself last: only if none is refused
            _make_twin(function)
    return _make_twin(kernel)


def _make_twin(kernel: JITFunction) -> Callable:
    if kernel.fn not in _twins:
        _twins[kernel.fn] = rewrite(kernel.fn, function_tree(kernel), language().helpers)
    return _twins[kernel.fn]


def convert_argument(value: Any) -> Any:
    """Convert a launch argument to a kernel's value: a number, a pointer or a descriptor."""
    if isinstance(value, tl.constexpr):
        return value.value
    if isinstance(value, bool):
        return scalar(value, tl.int1)
    if isinstance(value, int):
        return scalar(value, _integer_type(value))
    if isinstance(value, float):
        return scalar(value, tl.float32)
    if isinstance(value, tuple):
        items = map(convert_argument, value)
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, TensorDescriptor):
        return _convert_descriptor(value)
    if hasattr(value, "data_ptr"):
        pointer = tl.str_to_ty(mangle_type(value), None)
        return Tile(Value(np.array([value.data_ptr()], np.uint64), pointer), pointer)
    return value


def _integer_type(value: int) -> tl.dtype:
    if -(2**31) <= value < 2**31:
        return tl.int32
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"argument {value} has more than 64 bits")
    return tl.int64 if value < 2**63 else tl.uint64


def _convert_descriptor(value: TensorDescriptor) -> Any:
    if value.base.numel() == 0:
        raise ValueError(
            f"a descriptor of a tensor of shape {tuple(value.base.shape)}: it has no elements and "
            "no address, and a GPU refuses it; pass another tensor where none is read"
        )
    descriptor = language().semantic.make_tensor_descriptor(
        base=convert_argument(value.base),
        shape=[convert_argument(int(n)) for n in value.shape],
        strides=[*map(convert_argument, map(int, value.strides[:-1])), tl.constexpr(1)],
        block_shape=[tl.constexpr(n) for n in value.block_shape],
        padding_option=value.padding,
    )
    descriptor.handle.round_f32_to_tf32 = getattr(value, "round_f32_to_tf32", False)
    return descriptor
