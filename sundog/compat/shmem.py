"""Stand-ins for NVSHMEM's device library and those with its names, following OpenSHMEM 1.5.

They exist to check kernels on a CPU; compiled for a GPU they raise an error that says so. Puts
reach the peer late on purpose: at `quiet`, `fence`, a barrier, a wait, or the end of the program.
Only the first three order them (see errands). A put without `nbi` has read its source when it
returns; one with `nbi` reads it late too. `signal_op` is a relaxed atomic, so by itself it orders
nothing. A put with a signal delivers its data first.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import triton.language as tl
from triton._C.libtriton import ir

from ..errors import CannotInterpret, SundogError
from ..interpreter.builder import EXTERNS
from ..interpreter.interpreter import language
from ..interpreter.numerics import Tile, Value, scalar
from .errands import complete, deliver, leave

WORDS = "shmem barrier words"  # the allocation that `barrier_all` counts in
_SIGNS = ("eq", "ne", "gt", "le", "lt", "ge")  # NVSHMEM_CMP_*, in their order
_SET, _ADD = 9, 10  # NVSHMEM_SIGNAL_*
_SETS, _ADDS = (_SET, 0), (_ADD, 5)  # also the numbers that torch's module documents
_epochs: weakref.WeakKeyDictionary[Any, dict[int, int]] = weakref.WeakKeyDictionary()


def stand_in(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function of the builder callable in kernels. Compiled for a GPU it raises an error."""

    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        if _semantic is not None:
            raise SundogError(
                f"{function.__name__} is sundog's stand-in, to check kernels on a CPU: install the "
                "library itself to compile for a GPU"
            )
        return function(language().builder, *args, **kwargs)

    # not functools.wraps: the compiler looks for `_semantic` in the signature
    call.__name__ = call.__qualname__ = function.__name__
    call.__triton_builtin__ = True  # type: ignore[attr-defined]
    return call


def tensor(value: Any, dtype: Any = None) -> Any:
    found = language().semantic.to_tensor(tl.core._unwrap_if_constexpr(value))
    return found if dtype is None or found.dtype == dtype else tl.cast(found, dtype)


def plain(value: Any) -> Any:
    value = tl.core._unwrap_if_constexpr(value)
    return int(value.handle.data.item()) if isinstance(value, tl.tensor) else value


# addresses


def peer_address(memory: Any, address: int, rank: int) -> int:
    """Return another rank's address of what this rank has at this address."""
    mine = memory.find(address, address + 1)
    if mine is None or not mine.is_heap:
        raise CannotInterpret(
            f"address {address:#x} is not in symmetric memory, so no other rank has its like: "
            "allocate the tensor on the symmetric heap"
        )
    for region in memory._regions:
        if region.rank == rank and region.name == mine.name and region.is_heap:
            if memory.reach is not None:  # the library reaches all symmetric memory
                memory.reach.allow(mine.rank, region.start)
            return int(region.start + address - mine.start)
    raise CannotInterpret(f"rank {rank} has no {mine.name}: is it a rank of this world?")


def num_ranks(machine: Any) -> int:
    """Return the size of the world. On `shm` a machine runs one rank and maps all heaps."""
    ranks = [region.rank for region in machine.memory._regions if region.is_heap]
    return max(len(machine.hosts), 1 + max(ranks, default=0))


def translated(builder: Any, pointer: Any, rank: Any) -> Any:
    pointer, peers = tensor(pointer), tensor(rank).handle.data.ravel()
    addresses = pointer.handle.data.ravel()
    count = max(addresses.size, peers.size)
    mask = builder.machine.program.mask
    chosen = np.ones(count, bool) if mask is None or count == 1 else mask
    found = np.broadcast_to(addresses, count).copy()
    size = num_ranks(builder.machine)
    base = int(addresses[np.flatnonzero(chosen)[0]] if addresses.size > 1 else addresses[0])
    for at in np.flatnonzero(chosen):
        peer = int(peers[at % peers.size])
        if 0 <= peer < size:  # one distance for all threads, also for those past the end
            distance = peer_address(builder.machine.memory, base, peer) - base
            found[at] = np.uint64(int(found[at]) + distance)
        elif count == 1:
            raise CannotInterpret(f"rank {peer} of a world of {size}: is it a rank of this world?")
    return Tile(Value(found, pointer.dtype), pointer.type)


def multicast(builder: Any, team: Any, pointer: Any) -> Any:
    """Return the address that stands for this place in all ranks' memory."""
    pointer, memory = tensor(pointer), builder.machine.memory
    address = int(pointer.handle.data.item())
    for start, end, bases in memory.multicasts:
        for base in bases:
            if base <= address < base + end - start:
                found = np.array([start + address - base], np.uint64)
                return Tile(Value(found, pointer.dtype), pointer.type)
    raise CannotInterpret("remote_mc_ptr of memory that has no multicast address")


# puts and gets


def _each_call(builder: Any, scope: str, *values: Any) -> Iterator[list[int]]:
    """Yield the arguments of each call of a program: one, or one per warp or thread."""
    given = [np.asarray(tensor(value).handle.data).ravel() for value in values]
    mask, count = builder.machine.program.mask, max(each.size for each in given)
    if count == 1:
        yield [int(each[0]) for each in given]
        return
    if scope == "block":
        raise CannotInterpret("a call of the whole block with arguments that differ per thread")
    threads = range(0, count, 32 if scope == "warp" else 1)
    for thread in threads:
        if mask is None or mask[thread : thread + (32 if scope == "warp" else 1)].any():
            yield [int(each[thread % each.size]) for each in given]


def _words(start: int, nbytes: int, width: int) -> Value:
    kind = tl.pointer_type(getattr(tl, f"uint{8 * width}"))
    return Value(np.arange(start, start + nbytes, width, dtype=np.uint64), kind)


class MemoryCopy:
    """A copy whose load and store may be done at different times."""

    def __init__(self, builder: Any, to: int, source: int, nbytes: int) -> None:
        self._builder, self._width = builder, math.gcd(8, to, source, nbytes)
        self._to, self._source = (_words(at, nbytes, self._width) for at in (to, source))
        self._data: list[Value] = []

    def load(self) -> None:
        """Read the source. One that is read late is read now too: it may be read at any time."""
        if self._source.data.size:
            self._data = [self._builder._load(self._source, None, None)]

    def store(self) -> None:
        for data in self._data:  # by the thread that signals, since the library has its own barrier
            self._builder._store(self._to, data, None, tile=False)

    def copy(self) -> None:
        self.load()
        self.store()


def put(
    builder: Any, scope: str, nbi: bool, to: Any, source: Any, nbytes: Any, pe: Any,
    context: int = 0,
) -> None:  # fmt: skip
    for target, origin, count, rank in _each_call(builder, scope, to, source, nbytes, pe):
        remote = peer_address(builder.machine.memory, target, rank)
        transfer = MemoryCopy(builder, remote, origin, count)
        transfer.load()
        if nbi:  # a fence orders puts, not the reads of their sources
            leave(builder, transfer.load, False, context)
        leave(builder, transfer.store, True, context)


def put_number(builder: Any, to: Any, value: Any, pe: Any) -> None:
    """Put one number of 32 bits, which has been read when the call returns."""
    for target, number, rank in _each_call(builder, "thread", to, value, pe):
        place = _words(peer_address(builder.machine.memory, target, rank), 4, 4)
        data = Value(np.array([number & 0xFFFFFFFF], np.uint32), tl.uint32)
        leave(builder, functools.partial(builder._store, place, data, None, tile=False), True)


def get(builder: Any, scope: str, nbi: bool, to: Any, source: Any, nbytes: Any, pe: Any) -> None:
    for target, origin, count, rank in _each_call(builder, scope, to, source, nbytes, pe):
        remote = peer_address(builder.machine.memory, origin, rank)
        transfer = MemoryCopy(builder, target, remote, count)
        if nbi:
            leave(builder, transfer.copy, False)
        else:
            transfer.copy()


def put_signal(
    builder: Any, scope: str, nbi: bool, to: Any, source: Any, nbytes: Any, word: Any,
    value: Any, op: Any, pe: Any,
) -> None:  # fmt: skip
    calls = _each_call(builder, scope, to, source, nbytes, word, value, op, pe)
    for target, origin, count, flag, amount, kind, rank in calls:
        memory = builder.machine.memory
        transfer = MemoryCopy(builder, peer_address(memory, target, rank), origin, count)
        word_there = peer_address(memory, flag, rank)
        transfer.load()
        whole = functools.partial(_put_whole, builder, transfer, nbi, word_there, amount, kind)
        errand = leave(builder, whole, True)
        if not nbi:
            builder.machine.program.late.remove(errand)
            errand()


def _put_whole(
    builder: Any, transfer: MemoryCopy, nbi: bool, word: int, value: int, op: int
) -> None:
    if nbi:
        transfer.load()
        builder.machine.accesses.cta_barrier()  # orders what all threads read before the signal
    transfer.store()
    _signal(builder, word, value, op)


def _signal(builder: Any, word: int, value: int, op: int) -> None:
    address = Value(np.array([word], np.uint64), tl.pointer_type(tl.int64))
    everywhere, amount = Value(np.ones(1, bool), tl.int1), Value(np.array([value]), tl.int64)
    # the data that was put comes before the word, for those who wait for it
    order = ir.MEM_SEMANTIC.RELEASE, ir.MEM_SYNC_SCOPE.SYSTEM
    if _adds(op):
        builder.create_atomic_rmw(ir.ATOMIC_OP.ADD, address, amount, everywhere, *order, tile=False)
    else:
        builder.create_atomic_store(address, amount, everywhere, *order, tile=False)


# on the host


def initialise(rank: Any) -> None:
    """Allocate the words of `barrier_all`, once per rank."""
    if "shmem" not in rank.dicts:
        rank.dicts["shmem"] = {"words": rank.world.zeros(2, torch.int64, WORDS)}
        dist.barrier()  # every rank's words are zero before the first barrier


# signals and order


def _adds(op: int) -> bool:
    if op not in (*_SETS, *_ADDS):
        raise CannotInterpret(f"signal operation {op}: expected NVSHMEM_SIGNAL_SET or _ADD")
    return op in _ADDS


def asm(text: str, constraints: str, args: list[Any], dtype: Any = tl.int32) -> Any:
    return tl.inline_asm_elementwise(text, constraints, args, dtype=dtype, is_pure=False, pack=1)


def signal_op(builder: Any, word: Any, value: Any, op: Any, pe: Any) -> None:
    remote, amount = translated(builder, word, pe), tensor(value, tl.int64)
    if _adds(plain(op)):  # every thread that calls it adds
        asm("red.relaxed.sys.global.add.u64 [$1], $2; mov.u32 $0, 0;", "=r,l,l", [remote, amount])
        return
    program = builder.machine.program
    mask = program.mask
    if mask is None:  # all threads write the same value, so one of them writes for all
        program.mask = np.arange(program.launch.num_warps * 32) == 0
    try:
        asm("st.relaxed.sys.global.b64 [$1], $2; mov.u32 $0, 0;", "=r,l,l", [remote, amount])
    finally:
        program.mask = mask


def wait_until(builder: Any, word: Any, comparison: Any, value: Any) -> Any:
    deliver(builder)
    return poll(tensor(word), _SIGNS[plain(comparison)], value, "acquire.sys")


def poll(pointer: Any, sign: str, value: Any, order: str) -> Any:
    """Load a word in this order until it compares like this; return it."""
    bits = pointer.dtype.element_ty.primitive_bitwidth
    kind = getattr(tl, f"int{bits}")
    letter = "l" if bits == 64 else "r"
    text = f"""{{
        .reg .b{bits} %seen;
        .reg .pred %there;
        again:
            ld.{order}.global.b{bits} %seen, [$1];
            setp.{sign}.s{bits} %there, %seen, $2;
            @!%there bra again;
        mov.b{bits} $0, %seen;
    }}"""
    return asm(text, f"={letter},l,{letter}", [pointer, tensor(value, kind)], kind)


def fence(builder: Any, context: int = 0) -> None:
    """Order earlier puts before later ones."""
    complete(builder, puts_only=True, context=context)
    builder.machine.accesses.fence("sc", "sys", builder.machine.program.mask is None)


def quiet(builder: Any, context: int = 0) -> None:
    """Wait until everything that was begun is done, including gets and reads of sources."""
    complete(builder, context=context)
    builder.machine.accesses.fence("sc", "sys", builder.machine.program.mask is None)


def barrier(builder: Any) -> None:
    """Complete what was begun, and wait for all ranks."""
    complete(builder)
    sync(builder)


def sync(builder: Any) -> None:
    """Wait for all ranks: each adds one to every rank's word, and waits until all have."""
    machine = builder.machine
    rank, size = machine.program.rank, num_ranks(machine)
    epochs = _epochs.setdefault(machine, {})
    epochs[rank] = epochs.get(rank, 0) + 1
    mine = [r for r in machine.memory._regions if r.name == WORDS and r.rank == rank]
    if not mine:
        raise CannotInterpret(
            "barrier_all before the library is initialised on the host: allocate a tensor first, "
            'with torch\'s set_backend("NVSHMEM") before it'
        )
    alone = machine.program.mask is not None
    if not alone:
        builder.create_barrier()  # what all threads did comes before the release
    one = Tile(
        Value(np.array([mine[0].start], np.uint64), tl.pointer_type(tl.int64)),
        tl.pointer_type(tl.int64),
    )
    for peer in range(size):
        address = peer_address(machine.memory, mine[0].start, peer)
        _signal(builder, address, 1, _ADD)
    wait_until(builder, one, _SIGNS.index("ge"), epochs[rank] * size)
    if not alone:
        builder.create_barrier()  # what one thread acquired reaches all threads


def _constant(value: Any) -> Any:
    return lambda builder, *args: scalar(value(builder), tl.int32)


def _functions() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for suffix in ("", "_wave", "_warp", "_block", "_wg"):
        scope = {"_wave": "warp", "_wg": "block"}.get(suffix, suffix.strip("_") or "thread")
        for name, function in (("putmem", put), ("getmem", get), ("putmem_signal", put_signal)):
            for nbi in (False, True):
                bound = functools.partial(_with, function, scope, nbi)
                found[f"{name}{'_nbi' * nbi}{suffix}"] = bound
        found[f"barrier_all{suffix}"] = barrier
        found[f"sync_all{suffix}"] = sync
    found |= {
        "signal_op": signal_op, "signal_wait_until": wait_until, "fence": fence, "quiet": quiet,
        "wait_until": wait_until, "int_p": put_number,
        "remote_ptr": translated, "remote_mc_ptr": multicast,
        "my_pe": _constant(lambda builder: builder.machine.program.rank),
        "n_pes": _constant(lambda builder: num_ranks(builder.machine)),
    }  # fmt: skip
    return found


def device() -> dict[str, Any]:
    """Return the names of a SHMEM device library, such as libshmem_device."""
    found = _functions()
    numbers = {f"NVSHMEM_CMP_{sign.upper()}": n for n, sign in enumerate(_SIGNS)}
    numbers |= {"NVSHMEM_SIGNAL_SET": _SET, "NVSHMEM_SIGNAL_ADD": _ADD, "NVSHMEMX_TEAM_NODE": 2,
                "NVSHMEM_TEAM_WORLD": 0, "NVSHMEM_TEAM_SHARED": 1}  # fmt: skip
    return named(found) | {name: tl.constexpr(number) for name, number in numbers.items()}


def _with(function: Any, scope: str, nbi: bool, builder: Any, *args: Any) -> None:
    function(builder, scope, nbi, *args)


def named(functions: dict[str, Any]) -> dict[str, Any]:
    """Return functions of the builder as kernels call them."""
    return {name: _named(name, function) for name, function in functions.items()}


def _named(name: str, function: Any) -> Any:
    def call(builder: Any, *args: Any, **kwargs: Any) -> Any:
        return function(builder, *args, **kwargs)

    call.__name__ = call.__qualname__ = name
    return stand_in(call)


# the library's own symbols, as torch's _nvshmem_triton and others call them


def extern(function: Any, kind: Any = None) -> Callable[..., Value]:
    """Return an extern function. Addresses are integers; `kind` is the type of the first one."""

    def call(builder: Any, *handles: Value) -> Value:
        given = [Tile(each, each.dtype) for each in handles]
        if kind is not None:
            pointer = tl.pointer_type(kind)
            given[0] = Tile(Value(handles[0].data.astype(np.uint64), pointer), pointer)
        found = function(builder, *given)
        result = np.zeros(1, np.int32) if found is None else found.handle.data.astype(np.int32)
        return Value(result, tl.int32)

    return call


def _symbols() -> dict[str, Callable[..., Value]]:
    found = {name: extern(function) for name, function in _functions().items()}
    found["signal_wait_until"] = extern(wait_until, tl.uint64)
    found["int_wait_until"] = extern(wait_until, tl.int32)
    return prefixed(found)


def prefixed(functions: dict[str, Any]) -> dict[str, Any]:
    """Return functions by the symbols of the libraries that have them."""
    return {f"{prefix}_{name}": call for name, call in functions.items()
            for prefix in ("nvshmem", "nvshmemx", "rocshmem")}  # fmt: skip


NAMES = device()
EXTERNS |= _symbols()
