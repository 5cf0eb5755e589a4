"""sundog.device.gluon: the verbs of `memory` and `signal` in Gluon kernels, bitwise."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

import sundog
from sundog.device import context, memory, signal
from sundog.device import gluon as device

pytestmark = pytest.mark.compat

Run = Callable[..., list]
WORLDS = [1, 2, 3, 4, 8]
N, BLOCK = 301, 128  # no multiple of anything
THREADS = 64 if torch.version.hip else 32


def public(module: ModuleType) -> dict[str, JITFunction]:
    """Return a module's own functions for kernels."""
    found = {name: f for name, f in vars(module).items() if isinstance(f, JITFunction)}
    return {n: f for n, f in found.items() if n[0] != "_" and f.__module__ == module.__name__}


def test_names_and_arguments_are_those_of_triton() -> None:
    twins = {name: f for module in (signal, memory) for name, f in public(module).items()}
    assert twins.keys() - {"moved", "refuse", "set_words"} == set(device.__all__)
    for name in device.__all__:
        twin = twins[name]
        own = inspect.signature(getattr(device, name).fn)
        assert list(own.parameters) == list(inspect.signature(twin.fn).parameters), name


@gluon.jit
def move(src, dst, peer, far, ctx, n, VERB: gl.constexpr, BLOCK: gl.constexpr, T: gl.constexpr):
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, gl.BlockedLayout([2], [T], [4], [0]))
    mask = at < n
    if VERB == "load":
        gl.store(dst + at, device.load(src + at, peer, ctx, mask=mask), mask=mask)
    elif VERB == "store":
        device.store(dst + at, gl.load(src + at, mask=mask), peer, ctx, mask=mask)
    elif VERB == "get":
        device.get(dst + at, src + at, peer, ctx, mask=mask)
    elif VERB == "put":
        device.put(dst + at, src + at, peer, ctx, mask=mask)
    elif VERB == "copy":
        device.copy(dst + at, src + at, peer, far, ctx, mask=mask)
    else:
        base = device.translate(src, peer, ctx)  # a scalar, outside of any loop
        gl.store(dst + at, gl.load(base + at, mask=mask), mask=mask)


def random_bits(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8).view(dtype)


SOURCES = {"load": 1, "get": 1, "translate": 1, "store": -1, "put": -1, "copy": 2}


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.uint8], ids=str)
def test_moves(run: Run, size: int, dtype: torch.dtype) -> None:
    def main(world: sundog.World) -> list[torch.Tensor]:
        src = world.empty((N,), dtype, "src").copy_(random_bits(N, dtype, world.rank))
        dsts = [world.empty((N,), dtype, verb) for verb in SOURCES]
        world.barrier()
        up, far = (world.rank + 1) % size, (world.rank + 3) % size
        for verb, dst in zip(SOURCES, dsts, strict=True):
            grid = (triton.cdiv(N, BLOCK),)
            move[grid](src, dst, up, far, world.ctx, N, VERB=verb, BLOCK=BLOCK, T=THREADS)
        world.barrier()
        return [dst.cpu() for dst in dsts]

    for rank, moves in enumerate(run(main, size)):
        for (verb, up), dst in zip(SOURCES.items(), moves, strict=True):
            wanted = random_bits(N, dtype, (rank + up) % size)
            assert torch.equal(dst.view(torch.uint8), wanted.view(torch.uint8)), verb


@gluon.jit
def atomics(x, value, old, peer, ctx, n, OP: gl.constexpr, T: gl.constexpr):
    at = gl.arange(0, 64, gl.BlockedLayout([1], [T], [4], [0]))
    mask = at < n
    operand = gl.load(value + at, mask=mask, other=0)
    before = operand
    if OP == "add":
        before = device.atomic_add(x + at, operand, peer, ctx, mask=mask)
    elif OP == "and":
        before = device.atomic_and(x + at, operand, peer, ctx, mask=mask)
    elif OP == "or":
        before = device.atomic_or(x + at, operand, peer, ctx, mask=mask)
    elif OP == "xor":
        before = device.atomic_xor(x + at, operand, peer, ctx, mask=mask)
    elif OP == "min":
        before = device.atomic_min(x + at, operand, peer, ctx, mask=mask)
    elif OP == "max":
        before = device.atomic_max(x + at, operand, peer, ctx, mask=mask)
    elif OP == "xchg":
        before = device.atomic_xchg(x + at, operand, peer, ctx, mask=mask)
    else:  # lanes past n, and one in three, expect what is not there
        there = gl.load(old + at, mask=mask, other=0)
        expected = gl.where(mask & (at % 3 > 0), there, -1)
        before = device.atomic_cas(x + at, expected.to(x.dtype.element_ty), operand, peer, ctx)
    gl.store(old + at, before, mask=mask)


EXPECTED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add, "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor,
    "min": torch.minimum, "max": torch.maximum, "xchg": lambda x, value: value,
    "cas": lambda x, value: torch.where(torch.arange(x.numel()) % 3 > 0, value, x),
}  # fmt: skip


def numbers(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randint(0, torch.iinfo(dtype).max // 4, (n,), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("op", EXPECTED)
def test_atomics_on_a_peer(run: Run, op: str, dtype: torch.dtype) -> None:
    n = 53

    def main(world: sundog.World) -> Any:
        up = (world.rank + 1) % world.size
        x, value, old = (world.zeros((64,), dtype) for _ in range(3))
        x[:n] = numbers(n, dtype, world.rank)
        value[:n] = numbers(n, dtype, 100 + world.rank)
        old[:n] = numbers(n, dtype, up)
        world.barrier()
        atomics[(1,)](x, value, old, up, world.ctx, n, OP=op, T=THREADS)
        world.barrier()
        return x[:n].cpu(), old[:n].cpu()

    for rank, (x, old) in enumerate(run(main, 3)):
        start, value = numbers(n, dtype, rank), numbers(n, dtype, 100 + (rank - 1) % 3)
        assert torch.equal(x, EXPECTED[op](start, value))
        assert torch.equal(old, numbers(n, dtype, (rank + 1) % 3))


@gluon.jit
def rounds(
    x, inbox, out, ready, done, flags, counter, ctx, n,
    ROUNDS: gl.constexpr, LANES: gl.constexpr, T: gl.constexpr,
):  # fmt: skip
    """Row i of x to the next rank through one inbox, and to the sum of all ranks' first words."""
    at = gl.arange(0, 64, gl.BlockedLayout([1], [T], [4], [0]))
    mask = at < n
    program, rank, size = gl.program_id(0), gl.load(ctx + context.RANK), gl.load(ctx + context.SIZE)
    up, down = (rank + 1) % size, (rank + size - 1) % size
    inbox, ready, done = inbox + program * n, ready + program, done + program
    for i in range(ROUNDS):
        row = (i * gl.num_programs(0) + program) * n
        device.wait(done, up, i, ctx)  # the next rank has read what it got last time
        device.put_signal(inbox + at, x + row + at, ready, up, i + 1, ctx, mask=mask)
        device.wait(ready, down, i + 1, ctx)  # the last rank's row before my load
        gl.store(out + row + at, gl.load(inbox + at, mask=mask), mask=mask)
        device.signal(done, down, i + 1, ctx)  # my load before the inbox is written again
    device.barrier_programs(counter, ctx)  # all programs' rows of `out` before the sum below
    if program == 0:
        device.barrier_ranks(flags, 1, ctx, LANES)  # all ranks' rows before the sum
        total = gl.zeros([64], gl.int64, gl.BlockedLayout([1], [T], [4], [0]))
        for row in range(ROUNDS * gl.num_programs(0)):
            total += device.load(out + row * n + at, up, ctx, mask=mask, other=0)
        gl.store(out + ROUNDS * gl.num_programs(0) * n + at, total, mask=mask)
        device.signal_all(flags + size, 1, ctx, LANES)  # nobody's rows are read any more
        device.wait_all(flags + size, 1, ctx, LANES)  # by anybody


@pytest.mark.parametrize("size", WORLDS)
def test_signals_and_barriers(run: Run, size: int) -> None:
    n, count, programs = 37, 3, 2

    def data(rank: int) -> torch.Tensor:
        torch.manual_seed(rank)
        return torch.randint(-(2**40), 2**40, (count * programs, n))

    def main(world: sundog.World) -> torch.Tensor:
        x = world.empty((count * programs, n), torch.int64, "x").copy_(data(world.rank))
        inbox = world.empty((programs, n), torch.int64, "inbox")
        out = world.empty((count * programs + 1, n), torch.int64, "out")
        ready, done = world.signals(programs, "ready"), world.signals(programs, "done")
        flags, counter = world.signals((2, size), "flags"), world.signals(1, "counter")
        world.barrier()
        rounds[(programs,)](
            x, inbox, out, ready, done, flags, counter, world.ctx, n,
            ROUNDS=count, LANES=triton.next_power_of_2(size), T=THREADS,
        )  # fmt: skip
        world.barrier()
        return out.cpu()

    for rank, out in enumerate(run(main, size)):
        assert torch.equal(out[:-1], data((rank - 1) % size))
        assert torch.equal(out[-1], data(rank).sum(0))
