"""`memory` and `signal` for Gluon kernels: the same names, the same order of arguments.

Most are the same functions. A tile of pointers keeps its layout, so a layout with 16 bytes per
thread still loads and stores 16 bytes at a time. Only the functions that make a tile, a lane per
peer, are written again: in Gluon a tile needs a layout.

An atomic on a tile takes value and mask as tiles: before Triton 3.9 Gluon does not broadcast a
scalar there.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import signal as _signal
from . import trace
from .memory import (
    atomic_add,
    atomic_and,
    atomic_cas,
    atomic_max,
    atomic_min,
    atomic_or,
    atomic_xchg,
    atomic_xor,
    copy,
    get,
    load,
    put,
    store,
    translate,
)
from .signal import barrier_programs, put_signal, signal, wait

__all__ = [
    "atomic_add", "atomic_and", "atomic_cas", "atomic_max", "atomic_min", "atomic_or",
    "atomic_xchg", "atomic_xor", "barrier_programs", "barrier_ranks", "copy", "get",
    "load", "put", "put_signal", "signal", "signal_all", "store", "translate", "wait", "wait_all",
]  # fmt: skip


def lane_layout(each: Any, num_warps: Any, _semantic: Any = None) -> Any:
    """Return a layout with `each` elements per thread. The compiler passes `_semantic`."""
    if _semantic is None:
        return gl.AutoLayout()  # the simulator: no threads
    each, warps = gl._unwrap_if_constexpr(each), gl._unwrap_if_constexpr(num_warps)
    threads = _semantic.builder.options.warp_size
    return gl.constexpr(gl.BlockedLayout([each], [threads], [warps], [0]))


def pair_layout(num_warps: Any, _semantic: Any = None) -> Any:
    """Return a layout of rows of two, with a row per thread. The compiler passes `_semantic`."""
    if _semantic is None:
        return gl.AutoLayout()  # the simulator: no threads
    warps, threads = gl._unwrap_if_constexpr(num_warps), _semantic.builder.options.warp_size
    return gl.constexpr(gl.BlockedLayout([1, 2], [threads, 1], [warps, 1], [1, 0]))


def slice_layout(dim: Any, parent: Any, _semantic: Any = None) -> Any:
    """Return the layout of a tile that `expand_dims` makes one of `parent`'s at `dim`."""
    if _semantic is None:
        return gl.AutoLayout()
    dim, parent = gl._unwrap_if_constexpr(dim), gl._unwrap_if_constexpr(parent)
    return gl.constexpr(gl.SliceLayout(dim, parent))


for _layout in (lane_layout, pair_layout, slice_layout):
    setattr(_layout, "__triton_builtin__", True)  # noqa: B010  # so it runs at compile time


@gluon.jit
def signal_all(flags, epoch, ctx, LANES: gl.constexpr, TRACE: gl.constexpr = trace.OFF):
    """Set `flags[my rank]` to `epoch` at every rank, a lane per peer. Orders like `signal`."""
    trace.begin(trace.SIGNAL, flags, epoch, trace.ALL, ctx, TRACE)
    lane = gl.arange(0, triton.next_power_of_2(LANES), lane_layout(1, gl.num_warps()))
    _signal._signal_lanes(flags, lane, epoch, ctx, TRACE)


@gluon.jit
def wait_all(flags, epoch, ctx, LANES: gl.constexpr, TRACE: gl.constexpr = trace.OFF):
    """Return once `flags[peer]` of every peer has reached `epoch`. Orders like `wait`; bounded."""
    trace.begin(trace.WAIT, flags, epoch, trace.ALL, ctx, TRACE)
    lane = gl.arange(0, triton.next_power_of_2(LANES), lane_layout(1, gl.num_warps()))
    _signal._wait_lanes(flags, lane, epoch, ctx)
    trace.end(trace.WAIT, flags, epoch, trace.ALL, ctx, TRACE)


@gluon.jit
def barrier_ranks(flags, epoch, ctx, LANES: gl.constexpr, TRACE: gl.constexpr = trace.OFF):
    """Wait until every rank has arrived with this `epoch`. See `signal.barrier_ranks`."""
    trace.begin(trace.BARRIER, flags, epoch, trace.ALL, ctx, TRACE)
    lane = gl.arange(0, triton.next_power_of_2(LANES), lane_layout(1, gl.num_warps()))
    _signal._signal_lanes(flags, lane, epoch, ctx, TRACE)
    wait_all(flags, epoch, ctx, LANES)
    trace.end(trace.BARRIER, flags, epoch, trace.ALL, ctx, TRACE)
