"""Gluon on the simulator: `gl` operations run as their `tl` twins.

A layout says which thread holds which element. The simulator's programs have no threads, so a
layout's sizes are checked, as the compiler does, and it is then ignored. (Only a compiler notices
that two layouts meet without a conversion: compile for a GPU too, which does not take a GPU.)

The part of Gluon that sundog uses is covered; the rest is refused by name before a kernel starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

from ..errors import CannotInterpret

if TYPE_CHECKING:
    from ..machine.tasks import Launch

# These have the same meaning in both languages. Some are not in every version of Triton.
_SAME = frozenset([
    "abs", "add", "associative_scan", "assume", "atomic_add", "atomic_and", "atomic_cas",
    "atomic_load", "atomic_max", "atomic_min", "atomic_or", "atomic_poll", "atomic_store",
    "atomic_xchg", "atomic_xor", "broadcast", "cast", "cdiv", "ceil", "clamp", "cos", "cumprod",
    "cumsum", "device_assert", "device_print", "div_rn", "erf", "exp", "exp2", "expand_dims",
    "fdiv", "floor", "fma", "inline_asm_elementwise", "join", "load", "log", "log2", "max",
    "max_constancy", "max_contiguous", "maximum", "min", "minimum", "mul", "multiple_of",
    "num_programs", "permute", "program_id", "ravel", "reduce", "reduce_or", "reshape", "rsqrt",
    "sin", "split", "sqrt", "sqrt_rn", "static_assert", "static_print", "static_range", "store",
    "sub", "sum", "to_tensor", "umulhi", "where", "xor_sum",
])  # fmt: skip
# The layouts that `_check` knows, which are not operations.
_LAYOUTS = frozenset(["AutoLayout", "BlockedLayout", "CoalescedLayout", "SliceLayout"])
# What Gluon code may call of `tl` besides the first list: these take no layout.
_ALSO_TL = frozenset(["debug_barrier", "range"])

_NAMES = {
    id(value): name
    for name, value in vars(gl).items()
    if name in _SAME or (callable(value) and vars(tl.core).get(name) is not value)  # Gluon's own
}
_HOME = gl.__name__  # triton.experimental.gluon.language


class Gluon:
    """What kernels call instead of `gl` where `tl` differs, with Gluon's arguments."""

    def __init__(self, builder: Any) -> None:
        self._builder = builder  # has the machine while programs run

    def arange(self, start: Any, end: Any, layout: Any = None) -> Any:
        return self._laid_out(tl.arange(start, end), layout)

    def full(self, shape: Any, value: Any, dtype: Any, layout: Any = None) -> Any:
        return self._laid_out(tl.full(shape, value, dtype), layout)

    def zeros(self, shape: Any, dtype: Any, layout: Any = None) -> Any:
        return self.full(shape, 0, dtype, layout)

    def full_like(
        self, input: Any, value: Any, shape: Any = None, dtype: Any = None, layout: Any = None
    ) -> Any:
        shape = input.shape if shape is None else shape
        return self.full(shape, value, input.dtype if dtype is None else dtype, layout)

    def zeros_like(
        self, input: Any, shape: Any = None, dtype: Any = None, layout: Any = None
    ) -> Any:
        return self.full_like(input, 0, shape, dtype, layout)

    def convert_layout(self, value: Any, layout: Any, assert_trivial: bool = False) -> Any:
        return self._laid_out(value, layout)

    def set_auto_layout(self, value: Any, layout: Any) -> Any:
        return self._laid_out(value, layout)

    def barrier(self, *, cluster: bool = False) -> None:
        tl.debug_barrier()  # a cluster is one CTA here

    thread_barrier = barrier  # its name in Triton 3.6

    def num_warps(self) -> Any:
        return tl.constexpr(self._launch.num_warps)

    def num_ctas(self) -> Any:
        return tl.constexpr(1)

    @property
    def _launch(self) -> Launch:
        launch: Launch = self._builder.machine.program.launch
        return launch

    def _laid_out(self, value: Any, layout: Any) -> Any:
        layout = tl.core._unwrap_if_constexpr(layout)
        shape = [int(tl.core._unwrap_if_constexpr(n)) for n in value.shape]
        if layout is not None and shape:  # a scalar has none
            reason = _check(layout, len(shape), self._launch)
            if reason is not None:
                raise ValueError(f"a tensor of shape {shape} can't have {layout}: {reason}")
        return value


def check_launch(kernel: JITFunction, arguments: dict[str, Any], options: dict[str, Any]) -> None:
    """Refuse a launch of a Gluon kernel with options that the simulator does not have."""
    if options.get("num_ctas", 1) != 1:
        raise CannotInterpret(
            f"kernel {kernel.__name__}: num_ctas={options['num_ctas']}, but clusters of CTAs are "
            "not simulated"
        )
    for name, value in arguments.items():
        kind = type(value)
        if kind.__module__.startswith("triton.experimental.gluon.") and "Layout" not in str(kind):
            raise CannotInterpret(
                f"argument {name} of kernel {kernel.__name__} is a {kind.__module__}."
                f"{kind.__name__}, which is not simulated; pass a tensor"
            )


def twin_name(thing: Any, written: str) -> str | None:
    """Return what to call for a name of Gluon's, None for others. LookupError: not covered."""
    if type(thing) is type(gl):  # a module, whose names come here too
        return None
    name = _NAMES.get(id(thing))
    if name is None:
        if _is_from(_HOME, thing):
            raise LookupError(f"{written} is not simulated")
        return None
    if name in _SAME:
        return f"tl.{name}"
    if name in _LAYOUTS:
        return None
    if not hasattr(Gluon, name):
        raise LookupError(f"{written} is not simulated")
    return f"gluon.{name}"


def not_for_gluon(thing: Any, written: str) -> str | None:
    """Return why a Gluon kernel, or what it calls, can't use something of `triton.language`."""
    if not _is_from("triton.language.", thing) or isinstance(thing, type):
        return None
    if getattr(thing, "__name__", "") in _SAME | _ALSO_TL:
        return None
    if _is_from("triton.language.extra.", thing):
        return f"{written} runs only on a GPU"
    return f"{written} knows no layouts, which a Gluon kernel needs; use what gl has"


def _is_from(home: str, thing: Any) -> bool:
    if not callable(thing) or isinstance(thing, tl.dtype | tl.constexpr):
        return False
    module = thing.fn.__module__ if isinstance(thing, JITFunction) else thing.__module__
    return str(module).startswith(home)


def _check(layout: Any, rank: int, launch: Launch) -> str | None:
    """Return why the compiler would refuse a layout, or None."""
    if isinstance(layout, gl.AutoLayout | gl.CoalescedLayout):
        return None  # found by the compiler
    if isinstance(layout, gl.SliceLayout):
        if not 0 <= layout.dim <= rank:
            return f"dimension {layout.dim} is not one of its parent's {rank + 1}"
        return _check(layout.parent, rank + 1, launch)
    if not isinstance(layout, gl.BlockedLayout):
        return f"{type(layout).__name__} is not simulated"
    sizes = layout.size_per_thread, layout.threads_per_warp, layout.warps_per_cta
    threads, warps = _product(layout.threads_per_warp), _product(layout.warps_per_cta)
    if layout.rank != rank:
        return f"it has {layout.rank} dimensions, the tensor {rank}"
    if sorted(layout.order) != list(range(rank)):
        return f"order {layout.order} does not name each of {rank} dimensions once"
    if any(n < 1 or n & (n - 1) for n in (n for each in sizes for n in each)):
        return "every size must be a power of two"
    if threads not in (32, 64):
        return f"{threads} threads per warp, and no GPU has other than 32 or 64"
    if warps != launch.num_warps:
        return f"{warps} warps, and the kernel is launched with num_warps={launch.num_warps}"
    if getattr(layout, "cga_layout", None):
        return "clusters (cga_layout) are not simulated"
    launch.warp_size = launch.warp_size or threads
    if threads != launch.warp_size:
        return f"{threads} threads per warp, and another layout of this kernel {launch.warp_size}"
    return None


def _product(sizes: Iterable[Any]) -> int:
    return math.prod(int(n) for n in sizes)
