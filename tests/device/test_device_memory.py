"""A peer's memory from inside a kernel, against torch, bitwise: every verb, dtype, odd sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog.device import memory

Run = Callable[..., list]
WORLDS = [1, 2, 3, 4, 8]
N = 301  # no multiple of anything
BLOCK = 128


@triton.jit
def move(src, dst, peer, far, ctx, n, VERB: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    if VERB == "load":
        tl.store(dst + at, memory.load(src + at, peer, ctx, mask=mask), mask=mask)
    elif VERB == "store":
        memory.store(dst + at, tl.load(src + at, mask=mask), peer, ctx, mask=mask)
    elif VERB == "get":
        memory.get(dst + at, src + at, peer, ctx, mask=mask)
    elif VERB == "put":
        memory.put(dst + at, src + at, peer, ctx, mask=mask)
    elif VERB == "copy":
        memory.copy(dst + at, src + at, peer, far, ctx, mask=mask)
    else:
        base = memory.translate(src, peer, ctx)  # a scalar, outside of any loop
        tl.store(dst + at, tl.load(base + at, mask=mask), mask=mask)


def random_bits(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bytes, seen as `dtype`: every bit must come through, NaNs too."""
    torch.manual_seed(seed)
    data = torch.randint(0, 256, (n * dtype.itemsize,), dtype=torch.uint8)
    return (data & 1).to(torch.bool) if dtype == torch.bool else data.view(dtype)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().view(torch.uint8)


def moved(world: sundog.World, verb: str, dtype: torch.dtype, n: int) -> torch.Tensor:
    """My data goes one rank up, or I fetch from one rank up; `copy` from two up to one up."""
    src, dst = world.empty((n,), dtype, "src"), world.empty((n,), dtype, "dst")
    src.copy_(random_bits(n, dtype, world.rank))
    world.barrier()
    up, far = (world.rank + 1) % world.size, (world.rank + 2) % world.size
    grid = (triton.cdiv(n, BLOCK),)
    move[grid](src, dst, up, far, world.ctx, n, VERB=verb, BLOCK=BLOCK)
    world.barrier()
    return dst.view(torch.uint8).clone()


SOURCES = {"load": 1, "get": 1, "translate": 1, "store": -1, "put": -1, "copy": 1}
DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8,
    torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("verb", SOURCES)
def test_moves(run: Run, verb: str, size: int) -> None:
    results = run(lambda world: moved(world, verb, torch.bfloat16, N), size)
    for rank, dst in enumerate(results):
        source = (rank + SOURCES[verb]) % size
        assert torch.equal(dst.cpu(), bits(random_bits(N, torch.bfloat16, source)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moves_of_every_dtype(run: Run, dtype: torch.dtype) -> None:
    def main(world: sundog.World) -> list[torch.Tensor]:
        return [moved(world, verb, dtype, 77) for verb in SOURCES]

    for rank, moves in enumerate(run(main, 3)):
        for (verb, up), dst in zip(SOURCES.items(), moves, strict=True):
            source = (rank + up) % 3
            assert torch.equal(dst.cpu(), bits(random_bits(77, dtype, source))), verb


@pytest.mark.parametrize("n", [0, 1, 127, 128, 129])
def test_moves_of_any_size(run: Run, n: int) -> None:
    results = run(lambda world: moved(world, "put", torch.int32, n), 2)
    for rank, dst in enumerate(results):
        assert torch.equal(dst.cpu(), bits(random_bits(n, torch.int32, 1 - rank)))


def test_what_the_mask_excludes_stays(run: Run) -> None:
    def main(world: sundog.World) -> torch.Tensor:
        src, dst = world.full((200,), 5.0), world.full((200,), 7.0)
        world.barrier()
        up = (world.rank + 1) % world.size
        move[(2,)](src, dst, up, up, world.ctx, 131, VERB="put", BLOCK=BLOCK)
        world.barrier()
        return dst.clone()

    expected = torch.cat([torch.full((131,), 5.0), torch.full((69,), 7.0)])
    for dst in run(main, 2):
        assert torch.equal(dst.cpu(), expected)


@triton.jit
def masked_load(src, dst, peer, ctx, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(dst + at, memory.load(src + at, peer, ctx, mask=at < n, other=-1.5))


def test_load_other(run: Run) -> None:
    def main(world: sundog.World) -> torch.Tensor:
        src, dst = world.full((5,), 2.0), world.empty((8,))
        world.barrier()
        masked_load[(1,)](src, dst, 1 - world.rank, world.ctx, 5, BLOCK=8)
        world.barrier()
        return dst.clone()

    for dst in run(main, 2):
        assert dst.tolist() == [2.0] * 5 + [-1.5] * 3


# atomics: lanes of a tile, a hot word, and every rank at once


@triton.jit
def atomics(x, value, old, peer, ctx, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = at < n
    operand = tl.load(value + at, mask=mask, other=0)
    before = operand
    if OP == "add":
        before = memory.atomic_add(x + at, operand, peer, ctx, mask=mask)
    elif OP == "and":
        before = memory.atomic_and(x + at, operand, peer, ctx, mask=mask)
    elif OP == "or":
        before = memory.atomic_or(x + at, operand, peer, ctx, mask=mask)
    elif OP == "xor":
        before = memory.atomic_xor(x + at, operand, peer, ctx, mask=mask)
    elif OP == "min":
        before = memory.atomic_min(x + at, operand, peer, ctx, mask=mask)
    elif OP == "max":
        before = memory.atomic_max(x + at, operand, peer, ctx, mask=mask)
    elif OP == "xchg":
        before = memory.atomic_xchg(x + at, operand, peer, ctx, mask=mask)
    tl.store(old + at, before, mask=mask)


EXPECTED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": torch.add,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "min": torch.minimum,
    "max": torch.maximum,
    "xchg": lambda x, value: value,
}
_INTEGERS = [torch.int32, torch.int64]
_FLOATS = [torch.float32, torch.float64]
CASES = [(op, dtype) for op in EXPECTED for dtype in _INTEGERS]
CASES += [(op, dtype) for op in ("add", "min", "max", "xchg") for dtype in _FLOATS]
CASES += [("add", torch.float16)]


def operands(n: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(n, dtype=torch.float64).mul_(8).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(info.min // 4, info.max // 4, (n,), dtype=dtype)


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=lambda v: str(v).replace("torch.", ""))
def test_atomics_on_a_peer(run: Run, op: str, dtype: torch.dtype) -> None:
    n = 53

    def main(world: sundog.World) -> Any:
        x, value, old = (world.empty((n,), dtype) for _ in range(3))
        x.copy_(operands(n, dtype, world.rank))
        value.copy_(operands(n, dtype, 100 + world.rank))
        world.barrier()
        up = (world.rank + 1) % world.size
        atomics[(1,)](x, value, old, up, world.ctx, n, OP=op, BLOCK=64)
        world.barrier()
        return x.clone(), old.clone()

    results = run(main, 3)
    for rank, (x, old) in enumerate(results):
        below, up = (rank - 1) % 3, (rank + 1) % 3
        start, value = operands(n, dtype, rank), operands(n, dtype, 100 + below)
        assert torch.equal(bits(x), bits(EXPECTED[op](start, value)))
        assert torch.equal(bits(old), bits(operands(n, dtype, up)))


@triton.jit
def cas(x, old, peer, ctx, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    # lanes past n compare with a value that is not there, so they change nothing
    expected = tl.where(at < n, at % 2, -1).to(x.dtype.element_ty)
    before = memory.atomic_cas(x + at, expected, (at + 100).to(x.dtype.element_ty), peer, ctx)
    tl.store(old + at, before)


@pytest.mark.parametrize("dtype", _INTEGERS, ids=str)
def test_compare_and_swap_on_a_peer(run: Run, dtype: torch.dtype) -> None:
    """Words hold 0 or 1 at random; even lanes expect 0, odd ones 1."""

    def bits_of(rank: int) -> torch.Tensor:
        torch.manual_seed(rank)
        return torch.randint(0, 2, (64,)).to(dtype)

    def main(world: sundog.World) -> Any:
        x, old = world.empty((64,), dtype), world.empty((64,), dtype)
        x.copy_(bits_of(world.rank))
        world.barrier()
        cas[(1,)](x, old, (world.rank + 1) % world.size, world.ctx, 50, BLOCK=64)
        world.barrier()
        return x.clone(), old.clone()

    lane = torch.arange(64, dtype=dtype)
    for rank, (x, old) in enumerate(run(main, 2)):
        before = bits_of(rank)
        swapped = (before == lane % 2) & (lane < 50)
        assert torch.equal(x.cpu(), torch.where(swapped, lane + 100, before))
        assert torch.equal(old.cpu(), bits_of(1 - rank))


@triton.jit
def hot_word(x, tickets, ctx, TIMES: tl.constexpr):
    first = (tl.load(ctx) * tl.num_programs(0) + tl.program_id(0)) * TIMES
    one = tl.full((), 1, tl.int64)
    for i in range(TIMES):
        tl.store(tickets + first + i, memory.atomic_add(x, one, 0, ctx))


@pytest.mark.parametrize("size", WORLDS)
def test_every_rank_adds_to_one_word(run: Run, size: int) -> None:
    """Each increment returns another number: none is lost, none is seen twice."""
    times, programs = 3, 2

    def main(world: sundog.World) -> Any:
        x = world.zeros((1,), torch.int64)
        tickets = world.full((size * programs * times,), -1, torch.int64)
        world.barrier()
        hot_word[(programs,)](x, tickets, world.ctx, TIMES=times)
        world.barrier()
        return int(x[0]), tickets[tickets >= 0].tolist()

    results = run(main, size)
    total = size * programs * times
    assert [x for x, _ in results] == [total] + [0] * (size - 1)
    assert sorted(t for _, tickets in results for t in tickets) == list(range(total))
    for _, tickets in results:
        for start in range(0, len(tickets), times):  # a program's own come in order
            own = tickets[start : start + times]
            assert own == sorted(own)


@triton.jit
def far_offsets(x, out, peer, ctx, offset):
    tl.store(out, memory.load(x + offset, peer, ctx))


def test_64_bit_offsets(run: Run, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 2^31 elements away from the pointer, in both directions of the heap."""
    if backend not in ("sim", "shm"):
        pytest.skip("takes a heap of 3 GB per rank")
    far = (1 << 31) + 12_345
    monkeypatch.setattr("sundog.world.tensors.poison_tensor", lambda tensor: None)  # 3 GB untouched

    def main(world: sundog.World) -> int:
        with world.scope():
            x = world.empty((far + 1,), torch.int8)
            out = world.zeros((1,), torch.int8)
            x[far] = 40 + world.rank
            world.barrier()
            far_offsets[(1,)](x, out, 1 - world.rank, world.ctx, far)
            world.barrier()
            return int(out[0])

    assert run(main, 2, heap_size=3 << 30) == [41, 40]
