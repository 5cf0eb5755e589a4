"""What programs in C call, for kernels on the simulator: OpenSHMEM on our stand-ins, OpenMP.

A process is a rank and an OpenMP thread a program of its kernel. Puts, gets and signals are those
of `sundog.compat.shmem`. What GPU libraries do not have is made of their parts here: atomics,
contexts, locks, teams and a reduction.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from sundog.compat import shmem
from sundog.compat.errands import leave
from sundog.compat.shmem import asm, stand_in, tensor

barrier_all, sync_all, fence = (shmem.NAMES[name] for name in ("barrier_all", "sync_all", "fence"))
my_pe, wait_until, remote_ptr = (
    shmem.NAMES[name] for name in ("my_pe", "wait_until", "remote_ptr")
)


def prepare(world: Any, words: int) -> Any:
    """Allocate the variables of a program, 8 bytes each, and what barriers count in."""
    found = world.zeros((words,), torch.int64, "variables")
    world.zeros((2,), torch.int64, shmem.WORDS)
    world.barrier()
    return found


def _flag(value: Any) -> Any:
    return tl.core._unwrap_if_constexpr(value)


@stand_in
def put(builder: Any, to: Any, source: Any, nbytes: Any, pe: Any, nbi: Any, context: Any) -> None:
    shmem.put(builder, "thread", _flag(nbi), to, source, nbytes, pe, _flag(context))


@stand_in
def get(builder: Any, to: Any, source: Any, nbytes: Any, pe: Any, nbi: Any) -> None:
    shmem.get(builder, "thread", _flag(nbi), to, source, nbytes, pe)


@stand_in
def put_signal(
    builder: Any, to: Any, source: Any, nbytes: Any, word: Any, value: Any, op: Any, pe: Any,
    nbi: Any,
) -> None:  # fmt: skip
    words = (to, source, nbytes, word, value, op, pe)
    shmem.put_signal(builder, "thread", _flag(nbi), *words)


@stand_in
def quiet(builder: Any, context: Any) -> None:
    shmem.quiet(builder, _flag(context))


@stand_in
def signal_fetch(builder: Any, word: Any) -> Any:
    return asm("ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [tensor(word)], tl.int64)


@stand_in
def atomic(
    builder: Any, name: Any, into: Any, word: Any, value: Any, compare: Any, pe: Any, nbi: Any
) -> None:
    """Make an atomic on another rank; `into` gets what it found, if it is not None."""
    into, there = _flag(into), shmem.translated(builder, word, pe)

    def work() -> None:
        found = _update(_flag(name), there, value, compare)
        if into is not None:
            tl.store(into, found)

    if into is None or _flag(nbi):  # a fence orders what fetches nothing
        leave(builder, work, puts=into is None)
    else:
        work()


def _update(name: str, there: Any, value: Any, compare: Any) -> Any:
    order = {"sem": "relaxed", "scope": "sys"}
    if name == "fetch":
        return asm("ld.relaxed.sys.global.b32 $0, [$1];", "=r,l", [there])
    if name == "set":
        return tl.atomic_xchg(there, value, **order)
    if name == "compare_swap":
        return tl.atomic_cas(there, tensor(compare, tl.int32), tensor(value, tl.int32), **order)
    return tl.atomic_add(there, value, **order)


@triton.jit
def set_lock(word):  # type: ignore[no-untyped-def]
    at, free, held = remote_ptr(word, 0), tl.full([], 0, tl.int64), tl.full([], 1, tl.int64)
    while tl.atomic_cas(at, free, held, sem="acquire", scope="sys") != 0:
        pass


@triton.jit
def clear_lock(word):  # type: ignore[no-untyped-def]
    quiet(0)
    tl.debug_barrier()
    tl.atomic_xchg(remote_ptr(word, 0), 0, sem="release", scope="sys")


@triton.jit
def meet_team(word, count, FIRST: tl.constexpr, STRIDE: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Meet the processes of a team; what was put is completed by nobody."""
    tl.debug_barrier()
    for member in tl.static_range(SIZE):
        there = remote_ptr(word, FIRST + member * STRIDE)
        tl.atomic_add(there, 1, sem="release", scope="sys")
    while tl.atomic_add(word, 0, sem="acquire", scope="sys") < count * SIZE:
        pass


@triton.jit
def reduce(to, source, parts, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum a word of all processes: each sends its own to all, which is all that they wait for."""
    value = tl.load(source).to(tl.int64)
    tl.debug_barrier()
    for peer in tl.static_range(SIZE):
        there = remote_ptr(parts + my_pe(), peer)
        tl.atomic_xchg(there, value + (1 << 40), sem="release", scope="sys")
    total = tl.zeros([], tl.int64)
    for peer in tl.static_range(SIZE):
        part = tl.atomic_add(parts + peer, 0, sem="acquire", scope="sys")
        while part == 0:
            part = tl.atomic_add(parts + peer, 0, sem="acquire", scope="sys")
        total += part - (1 << 40)
    tl.store(to, total.to(tl.int32))


# OpenMP: the threads of a process


@triton.jit
def tell(word):  # type: ignore[no-untyped-def]
    tl.debug_barrier()  # what the program read comes before it too
    tl.atomic_add(word, 1, sem="release", scope="gpu")


@triton.jit
def hear(word, count):  # type: ignore[no-untyped-def]
    while tl.atomic_add(word, 0, sem="acquire", scope="gpu") < count:
        pass


@triton.jit
def meet(word, count):  # type: ignore[no-untyped-def]
    tell(word)
    hear(word, count)
