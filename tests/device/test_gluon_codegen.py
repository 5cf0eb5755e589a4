"""What the compilers make of Gluon kernels: 16-byte accesses, order, nothing read twice."""

from __future__ import annotations

import re
from typing import Any

import pytest
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from sundog.backends._gpu import first_ir, may_wait
from sundog.collectives import all_gather_gluon
from sundog.device import gluon as device

from .test_codegen import (
    ACQUIRE,
    BARRIER,
    LOAD,
    RELEASE,
    STORE,
    TARGETS,
    kind,
    offsets,
    on_every_target,
    widths,
)
from .test_gluon_device import rounds

pytestmark = pytest.mark.compat

TILES = {"src": "*fp32", "dst": "*fp32"}
WORDS = {"flag": "*i64", "peer": "i32", "epoch": "i64", "ctx": "*i64"}


def compiled(*args: Any) -> str:
    """The kernel's PTX or AMD assembly."""
    asm = all_stages(*args)
    return asm["ptx"] if "ptx" in asm else asm["amdgcn"]


def all_stages(
    kernel: Any,
    target: str,
    types: dict[str, str],
    constants: dict[str, Any],
    odd: tuple[str, ...] = (),
) -> dict[str, str]:
    """Arguments that are not `odd` are multiples of 16."""
    signature = {**types, **dict.fromkeys(constants, "constexpr")}
    order = {name: signature[name] for name in kernel.arg_names}
    even = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(order)
        if name in types and name not in odd
    }
    source = GluonASTSource(kernel, order, constants, even)
    return triton.compile(source, target=TARGETS[target]).asm


@gluon.jit
def wide(src, dst, peer, ctx, n, VERB: gl.constexpr, T: gl.constexpr):
    BYTES: gl.constexpr = src.dtype.element_ty.primitive_bitwidth // 8
    at = gl.program_id(0) * 4096 + gl.arange(
        0, 4096, gl.BlockedLayout([16 // BYTES], [T], [4], [0])
    )
    mask = at < n
    if VERB == "store":
        device.store(dst + at, gl.load(src + at, mask=mask), peer, ctx, mask=mask)
    elif VERB == "load":
        gl.store(dst + at, device.load(src + at, peer, ctx, mask=mask), mask=mask)
    elif VERB == "put":
        device.put(dst + at, src + at, peer, ctx, mask=mask)
    elif VERB == "get":
        device.get(dst + at, src + at, peer, ctx, mask=mask)
    else:
        device.copy(dst + at, src + at, peer, peer + 1, ctx, mask=mask)


@on_every_target
@pytest.mark.parametrize(
    ("verb", "dtype"),
    [("store", "bf16"), ("load", "fp32"), ("put", "fp32"), ("get", "bf16"), ("copy", "bf16")],
)
def test_16_byte_accesses_survive_translation(target: str, verb: str, dtype: str) -> None:
    types = {"src": f"*{dtype}", "dst": f"*{dtype}", "peer": "i32", "ctx": "*i64", "n": "i32"}
    text = compiled(wide, target, types, {"VERB": verb, "T": TARGETS[target].warp_size})
    access = "v4.b32" if target == "sm_90" else "dwordx4"
    assert widths(text, target) == ({access}, {access})


@gluon.jit
def produce(src, dst, flag, peer, epoch, ctx, T: gl.constexpr):
    at = gl.arange(0, 4096, gl.BlockedLayout([4], [T], [4], [0]))
    device.store(dst + at, gl.load(src + at), peer, ctx)
    device.signal(flag, peer, epoch, ctx)


@gluon.jit
def consume(src, dst, flag, peer, epoch, ctx, T: gl.constexpr):
    device.wait(flag, peer, epoch, ctx)
    at = gl.arange(0, 4096, gl.BlockedLayout([4], [T], [4], [0]))
    gl.store(dst + at, gl.load(src + at))


@gluon.jit
def meet(src, dst, flag, peer, epoch, ctx, T: gl.constexpr):
    at = gl.arange(0, 4096, gl.BlockedLayout([4], [T], [4], [0]))
    gl.store(dst + at, gl.load(src + at))
    device.barrier_ranks(flag, epoch, ctx, 8)
    gl.store(src + at, gl.load(dst + at))


def between(target: str, text: str, first: int, last: int) -> list[int]:
    return [at for at in offsets(BARRIER[kind(target)], text) if first < at < last]


@on_every_target
def test_signals_and_waits_order_all_threads(target: str) -> None:
    constants, which = {"T": TARGETS[target].warp_size}, kind(target)
    text = compiled(produce, target, {**TILES, **WORDS}, constants)
    stored, released = offsets(STORE[which], text)[-1], offsets(RELEASE[which], text)[-1]
    assert between(target, text, stored, released), "no CTA barrier before the release"
    text = compiled(consume, target, {**TILES, **WORDS}, constants)
    acquired, loaded = max(offsets(ACQUIRE[which], text)), min(offsets(LOAD[which], text))
    assert between(target, text, acquired, loaded), "no CTA barrier after the acquire"


@on_every_target
def test_barrier_of_ranks_is_one_atomic_per_side(target: str) -> None:
    """As in Triton: every lane signals its peer at once, not one after the other."""
    which = kind(target)
    text = compiled(meet, target, {**TILES, **WORDS}, {"T": TARGETS[target].warp_size})
    exchange = r"\batom\.global\.sys\.release\.exch" if target == "sm_90" else r"atomic_swap_x2"
    released = offsets(exchange, text)[0]
    stored = max(at for at in offsets(STORE[which], text) if at < released)
    assert between(target, text, stored, released)
    loaded = min(at for at in offsets(LOAD[which], text) if at > released)
    acquired = max(at for at in offsets(ACQUIRE[which], text) if at < loaded)
    assert between(target, text, acquired, loaded)
    if target == "sm_90":  # the other two are of a wait that ran out: its record, and POLLS
        assert len(offsets(exchange, text)) == 3


@on_every_target
def test_a_gpu_backend_sees_which_kernels_wait(target: str) -> None:
    constants = {"T": TARGETS[target].warp_size}
    for kernel, waits in ((produce, False), (consume, True), (meet, True)):
        asm = all_stages(kernel, target, {**TILES, **WORDS}, constants)
        assert may_wait(first_ir(asm)) == waits


@gluon.jit
def everything(x, y, ctx, n, T: gl.constexpr):
    at = gl.arange(0, 64, gl.BlockedLayout([1], [T], [4], [0]))
    mask = at < n
    value = device.load(x + at, 0, ctx, mask=mask, other=0)
    value += device.atomic_add(x + at, value, 1, ctx, mask=mask)
    value += device.atomic_and(x + at, value, 1, ctx, mask=mask)
    value += device.atomic_or(x + at, value, 1, ctx, mask=mask)
    value += device.atomic_xor(x + at, value, 1, ctx, mask=mask)
    value += device.atomic_min(x + at, value, 1, ctx, mask=mask)
    value += device.atomic_max(x + at, value, 1, ctx, mask=mask)
    value += device.atomic_xchg(x + at, value, 1, ctx, mask=mask)
    value += device.atomic_cas(x + at, value, value + 1, 1, ctx)
    gl.store(device.translate(y, 1, ctx) + at, value, mask=mask)


@on_every_target
def test_every_primitive_compiles(target: str) -> None:
    threads = {"T": TARGETS[target].warp_size}
    types = {"x": "*i32", "y": "*i32", "ctx": "*i64", "n": "i32"}
    text = compiled(everything, target, types, threads)
    scoped = r"\batom\.\S*\bsys\b" if target == "sm_90" else r"_(?:atomic|cmpswap)\w* .*\bsc1\b"
    assert len(offsets(scoped, text)) >= 8, "an atomic on a peer that is not of the system's scope"
    types = dict.fromkeys(("x", "inbox", "out", "ready", "done", "flags", "counter", "ctx"), "*i64")
    compiled(rounds, target, {**types, "n": "i32"}, {"ROUNDS": 3, "LANES": 8, **threads})


def gathering(target: str, dtype: str, aligned: bool) -> str:
    pointers = {"x": f"*{dtype}", "out": f"*{dtype}"}
    flags = dict.fromkeys(("ready", "arrived", "epochs", "ctx"), "*i64")
    constants = {"SIZE": 8, "BLOCK_M": 4, "BLOCK_N": 4096, "VECTOR": 16 * aligned, "TRACE": 0}
    odd = ("n",) if aligned else ("n", "x", "out")
    kernel = all_gather_gluon._gluon_kernel
    return compiled(kernel, target, {**pointers, **flags, "n": "i32"}, constants, odd)


def loop_over_tiles(target: str, text: str) -> str:
    """From the label that the jump after the last wide store goes back to, to that jump."""
    first, last = offsets(LOAD[kind(target)], text)[0], offsets(STORE[kind(target)], text)[-1]
    found = []
    for jump in re.finditer(r"\b(?:bra|bra\.uni|s_c?branch\w*)\s+(\$?[.\w]+)", text):
        label = re.search(rf"^{re.escape(jump[1])}:", text, re.M)
        if label is not None and label.start() < first and jump.start() > last:
            found.append(text[label.start() : jump.end()])
    return min(found, key=len)


@on_every_target
@pytest.mark.parametrize("dtype", ["i16", "i32"])
def test_the_loop_of_all_gather_only_moves_16_bytes_at_a_time(target: str, dtype: str) -> None:
    """16 KB over 4 warps: a tile is loaded once, stored 8 times; no address is read again."""
    per_tile = 16384 // (16 * 4 * TARGETS[target].warp_size)
    loop = loop_over_tiles(target, gathering(target, dtype, aligned=True))
    if target == "sm_90":
        loads = re.findall(r"\bld\.global\S*", loop)
        stores = re.findall(r"\bst\.global\S*", loop)
        assert set(loads) == {"ld.global.v4.b32"}
        assert set(stores) == {"st.global.v4.b32"}
    else:
        loads = re.findall(r"\b(?:global|buffer|flat|s)_load_\w+", loop)
        stores = re.findall(r"\b(?:global|buffer|flat)_store_\w+", loop)
        assert set(loads) <= {"global_load_dwordx4", "buffer_load_dwordx4"}
        assert set(stores) <= {"global_store_dwordx4", "buffer_store_dwordx4"}
    assert (len(loads), len(stores)) == (per_tile, 8 * per_tile)


@on_every_target
@pytest.mark.parametrize("dtype", ["i8"])
def test_all_gather_stores_16_bytes_where_sizes_are_odd(target: str, dtype: str) -> None:
    """A tile is half as large: each of its chunks lies in two of the source."""
    text = gathering(target, dtype, aligned=False)
    per_tile = 8192 // (16 * 4 * TARGETS[target].warp_size)
    wide = r"\bst\.global\S*\.v2\.b64" if target == "sm_90" else STORE[kind(target)]
    assert len(offsets(wide, text)) == 8 * per_tile
