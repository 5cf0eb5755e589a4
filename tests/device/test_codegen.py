"""What the compilers make of the device primitives, for GPUs that are not here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import sundog
from sundog.device import memory, signal

pytestmark = pytest.mark.compat

TARGETS = {
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
on_every_target = pytest.mark.parametrize("target", TARGETS)


def assembly(kernel: Any, target: str, types: dict[str, str], constants: dict[str, Any]) -> str:
    """The kernel's PTX or AMD assembly; pointers and sizes are multiples of 16."""
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    order = {name: signature[name] for name in kernel.arg_names}
    even = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(order) if name in types}
    source = ASTSource(kernel, signature=order, constexprs=constants, attrs=even)
    compiled = triton.compile(source, target=TARGETS[target])
    return compiled.asm["ptx" if target == "sm_90" else "amdgcn"]


@triton.jit
def move(src, dst, peer, ctx, n, VERB: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    if VERB == "store":
        memory.store(dst + at, tl.load(src + at, mask=mask), peer, ctx, mask=mask)
    elif VERB == "load":
        tl.store(dst + at, memory.load(src + at, peer, ctx, mask=mask), mask=mask)
    elif VERB == "put":
        memory.put(dst + at, src + at, peer, ctx, mask=mask)
    elif VERB == "get":
        memory.get(dst + at, src + at, peer, ctx, mask=mask)
    elif VERB == "copy":
        memory.copy(dst + at, src + at, peer, peer + 1, ctx, mask=mask)
    else:
        base = memory.translate(dst, peer, ctx)
        tl.store(base + at, tl.load(src + at, mask=mask), mask=mask)


def widths(text: str, target: str) -> tuple[set[str], set[str]]:
    """How wide the tile's loads and stores of global memory are."""
    if target == "sm_90":
        loads = re.findall(r"ld\.global[\w.]*?\.(v\d\.b32|b\d+)", text)
        stores = re.findall(r"st\.global[\w.]*?\.(v\d\.b32|b\d+)", text)
        return set(loads) - {"b64"}, set(stores)  # b64: the word of the context
    loads = re.findall(r"(?:global|buffer)_load_(\w+)", text)
    stores = re.findall(r"(?:global|buffer)_store_(\w+)", text)
    return set(loads) - {"dwordx2"}, set(stores)


@on_every_target
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "i32", "i8", "fp8e4nv"])
@pytest.mark.parametrize("verb", ["store", "load", "put", "get", "copy", "translate"])
def test_16_byte_accesses_survive_translation(target: str, verb: str, dtype: str) -> None:
    types = {"src": f"*{dtype}", "dst": f"*{dtype}", "peer": "i32", "ctx": "*i64", "n": "i32"}
    text = assembly(move, target, types, {"VERB": verb, "BLOCK": 4096})
    wide = "v4.b32" if target == "sm_90" else "dwordx4"
    assert widths(text, target) == ({wide}, {wide})


@triton.jit
def produce(src, dst, flag, peer, epoch, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    memory.store(dst + at, tl.load(src + at), peer, ctx)
    signal.signal(flag, peer, epoch, ctx)


@triton.jit
def consume(src, dst, flag, peer, epoch, ctx, BLOCK: tl.constexpr):
    signal.wait(flag, peer, epoch, ctx)
    at = tl.arange(0, BLOCK)
    tl.store(dst + at, tl.load(src + at))


@triton.jit
def meet(src, dst, flags, epoch, ctx, BLOCK: tl.constexpr, LANES: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(dst + at, tl.load(src + at))
    signal.barrier_ranks(flags, epoch, ctx, LANES)
    tl.store(src + at, tl.load(dst + at))


@triton.jit
def meet_programs(src, dst, counter, ctx, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(dst + at, tl.load(src + at))
    signal.barrier_programs(counter, ctx)
    tl.store(src + at, tl.load(dst + at))


WORDS = {"flag": "*i64", "peer": "i32", "epoch": "i64", "ctx": "*i64"}
TILES = {"src": "*fp32", "dst": "*fp32"}


def offsets(pattern: str, text: str) -> list[int]:
    return [found.start() for found in re.finditer(pattern, text, re.M)]


# A release at system scope on AMD writes the caches back first, an acquire invalidates after it.
STORE = {
    "sm_90": r"^.*\bst\.global.*v4",
    "amd": r"^\s*global_store_dwordx4|^\s*buffer_store_dwordx4",
}
LOAD = {"sm_90": r"^.*\bld\.global.*v4", "amd": r"^\s*global_load_dwordx4|^\s*buffer_load_dwordx4"}
BARRIER = {"sm_90": r"\bbar\.sync|\bbarrier\.sync", "amd": r"\bs_barrier"}
RELEASE = {"sm_90": r"\batom\.global\.sys\.release", "amd": r"buffer_wbl2 .*sc1"}
# Triton reads a flag (adds 0 to it) with a load.
ACQUIRE = {"sm_90": r"\b(?:atom|ld)\.global\.sys\.acquire", "amd": r"buffer_inv .*sc1"}


def kind(target: str) -> str:
    return "sm_90" if target == "sm_90" else "amd"


@on_every_target
def test_signal_is_a_cta_barrier_and_a_system_release(target: str) -> None:
    text = assembly(produce, target, {**TILES, **WORDS}, {"BLOCK": 4096})
    which = kind(target)
    last_store = offsets(STORE[which], text)[-1]
    (release,) = offsets(RELEASE[which], text)[-1:]
    barriers = [at for at in offsets(BARRIER[which], text) if last_store < at < release]
    assert barriers, "no CTA barrier between the tile's stores and the release"


@on_every_target
def test_wait_is_a_system_acquire_before_the_loads(target: str) -> None:
    text = assembly(consume, target, {**TILES, **WORDS}, {"BLOCK": 4096})
    which = kind(target)
    acquires, loads = offsets(ACQUIRE[which], text), offsets(LOAD[which], text)
    assert acquires
    assert max(acquires) < min(loads)
    barriers = [at for at in offsets(BARRIER[which], text) if max(acquires) < at < min(loads)]
    assert barriers, "the acquire is one thread's; the others need a barrier after it"


@on_every_target
def test_barrier_of_ranks_is_one_atomic_per_side(target: str) -> None:
    """Every lane signals its peer at once: one exchange, not a loop over the peers."""
    types = {**TILES, "flags": "*i64", "epoch": "i64", "ctx": "*i64"}
    text = assembly(meet, target, types, {"BLOCK": 4096, "LANES": 8})
    exchange = r"\batom\.global\.sys\.release\.exch" if target == "sm_90" else r"atomic_swap_x2"
    which = kind(target)
    released = offsets(exchange, text)[0]
    last_store = max(at for at in offsets(STORE[which], text) if at < released)
    assert [at for at in offsets(BARRIER[which], text) if last_store < at < released]
    acquired = offsets(ACQUIRE[which], text)
    loads = [at for at in offsets(LOAD[which], text) if at > released]
    last_acquire = max(at for at in acquired if at < min(loads))
    assert [at for at in offsets(BARRIER[which], text) if last_acquire < at < min(loads)]
    if target == "sm_90":  # the other two are of a wait that ran out: its record, and POLLS
        assert len(offsets(exchange, text)) == 3


@on_every_target
def test_barrier_of_programs_publishes_and_learns(target: str) -> None:
    types = {**TILES, "counter": "*i64", "ctx": "*i64"}
    text = assembly(meet_programs, target, types, {"BLOCK": 4096})
    which = kind(target)
    arrive = (
        r"\batom\.global\.gpu\.(?:acq_rel|release)"
        if target == "sm_90"
        else r"global_atomic_add_x2"
    )
    arrived = offsets(arrive, text)[0]
    last_store = max(at for at in offsets(STORE[which], text) if at < arrived)
    assert [at for at in offsets(BARRIER[which], text) if last_store < at < arrived]


@triton.jit
def everything(x, y, flags, counter, ctx, n, LANES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = at < n
    value = memory.load(x + at, 0, ctx, mask=mask, other=0)
    value += memory.atomic_add(x + at, value, 1, ctx, mask=mask)
    value += memory.atomic_and(x + at, value, 1, ctx, mask=mask)
    value += memory.atomic_or(x + at, value, 1, ctx, mask=mask)
    value += memory.atomic_xor(x + at, value, 1, ctx, mask=mask)
    value += memory.atomic_min(x + at, value, 1, ctx, mask=mask)
    value += memory.atomic_max(x + at, value, 1, ctx, mask=mask)
    value += memory.atomic_xchg(x + at, value, 1, ctx, mask=mask)
    value += memory.atomic_cas(x + at, value, value + 1, 1, ctx)
    memory.store(y + at, value, 1, ctx, mask=mask)
    signal.put_signal(y + at, x + at, flags, 1, 1, ctx, mask=mask)
    signal.wait(flags, 1, 1, ctx)
    signal.barrier_ranks(flags, 2, ctx, LANES)
    signal.barrier_programs(counter, ctx)


@on_every_target
@pytest.mark.parametrize("dtype", ["i32", "i64"])
def test_every_primitive_compiles(target: str, dtype: str) -> None:
    types = {"x": f"*{dtype}", "y": f"*{dtype}", "flags": "*i64", "counter": "*i64", "ctx": "*i64"}
    text = assembly(everything, target, {**types, "n": "i32"}, {"LANES": 8, "BLOCK": 64})
    scope = r"\.sys\." if target == "sm_90" else r"\bsc1\b"
    assert offsets(scope, text)


def test_the_same_kernel_is_simulated_and_compiled(run: Callable[..., list]) -> None:
    """Simulate, compile for two vendors, simulate again: one object, one process."""

    def main(world: sundog.World) -> list[int]:
        src, dst = world.full((64,), world.rank), world.zeros((64,))
        flag = world.signals(1, "flag")
        world.barrier()
        produce[(1,)](src, dst, flag, 1 - world.rank, 1, world.ctx, BLOCK=64)
        world.barrier()
        return dst.unique().tolist()

    assert run(main, 2) == [[1], [0]]
    first = [assembly(produce, t, {**TILES, **WORDS}, {"BLOCK": 64}) for t in ("sm_90", "gfx942")]
    assert run(main, 2) == [[1], [0]]
    again = [assembly(produce, t, {**TILES, **WORDS}, {"BLOCK": 64}) for t in ("sm_90", "gfx942")]
    assert first == again
