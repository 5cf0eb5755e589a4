"""Broadcast, gather, scatter, send and receive against torch's meaning, byte for byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import sundog
from sundog import testing
from sundog.backends.sim import Sim
from sundog.collectives import _copy
from sundog.device import chunks
from sundog.errors import RankMismatch, WaitTimeout
from sundog.ops.load import find
from sundog.tools._subject import exercise
from sundog.tools.check.schedules import check

from .gloo import gloo
from .moving import DTYPES, joined, part, same

Run = Callable[..., list]
CASES = [(0, torch.int8), (1, torch.bool), (37, torch.bfloat16), (1500, torch.float32)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_broadcast_gather_and_scatter(run: Run, size: int) -> None:
    """From, and to, a rank in the middle."""
    cases = CASES if size < 8 else CASES[2:3]
    root = size // 2

    def main(world: sundog.World) -> list[list[Any]]:
        found = []
        for numel, dtype in cases:
            x = part(world.rank, numel, dtype).to(world.device)
            whole = part(99, size * numel, dtype).to(world.device)
            out = torch.empty((numel,), dtype=dtype, device=world.device)
            assert world.scatter(whole if world.rank == root else None, root, out) is out
            gathered = world.gather(x, root)
            assert (gathered is None) == (world.rank != root)
            found.append([world.broadcast(x, root), gathered, out])
        return [[each if each is None else each.cpu() for each in row] for row in found]

    for rank, result in enumerate(run(main, size)):
        for (numel, dtype), (sent, gathered, own) in zip(cases, result, strict=True):
            parts = [part(each, numel, dtype) for each in range(size)]
            assert same(sent, parts[root])
            assert same(own, part(99, size * numel, dtype)[rank * numel : (rank + 1) * numel])
            if rank == root:
                assert same(gathered, joined(parts))


def test_what_no_peer_reaches_may_lie_anywhere(run: Run) -> None:
    """On the heap of some ranks and not of others: the same plans, of which each op has one."""

    def main(world: sundog.World) -> list[Any]:
        heap, plain = world.empty((6,)), torch.empty((6,), device=world.device)
        whole, out = world.empty((12,)), world.empty((3,))
        found = []
        for number in range(4):
            x = heap if (world.rank + number) % 2 else plain
            x.copy_(torch.arange(6.0) + 10 * number + 100 * world.rank)
            gathered = world.gather(heap.copy_(x), 1, whole if number % 2 and world.rank else None)
            own = world.scatter(x if world.rank == 0 else None, 0, out)
            found.append([world.broadcast(x, 0), own, x[:0] if gathered is None else gathered])
            found[-1] = [each.tolist() for each in found[-1]]
        for op in ("broadcast", "gather", "scatter"):
            assert len([call for call in world._plans if call.op == op]) == 1
        return found

    first, second = run(main, 2)
    for number in range(4):
        zero, one = ([start + n for n in range(6)] for start in (10 * number, 10 * number + 100))
        assert first[number] == [zero, zero[:3], []]
        assert second[number] == [zero, zero[3:], zero + one]


def test_every_dtype(run: Run) -> None:
    def main(world: sundog.World) -> list[list[torch.Tensor]]:
        found = []
        for dtype in DTYPES:
            x = part(world.rank, 34, dtype).view(2, 17).to(world.device)
            other = torch.empty_like(x)
            world.send(x, 1 - world.rank, async_op=True)
            world.recv(other, 1 - world.rank)
            got = world.gather(x, 0)
            found.append(
                [world.broadcast(x, 1), world.scatter(x, 0), other, x if got is None else got]
            )
        return [[each.cpu() for each in row] for row in found]

    zero, one = run(main, 2)
    for dtype, mine, theirs in zip(DTYPES, zero, one, strict=True):
        first, second = (part(rank, 34, dtype) for rank in range(2))
        assert [each.shape for each in mine] == [(2, 17), (1, 17), (2, 17), (4, 17)]
        assert same(mine[0], second)
        assert same(theirs[0], second)
        assert same(joined([mine[1], theirs[1]]), first)
        assert same(mine[2], second)
        assert same(theirs[2], first)
        assert same(mine[3], joined([first, second]))


def test_gloo_gives_the_same(run: Run) -> None:
    def theirs(group: Any) -> list[Any]:
        x = part(group.rank, 20, torch.int64)
        sent = x.clone()
        dist.broadcast(sent, 2)
        parts = [torch.empty_like(x) for _ in range(3)] if group.rank == 1 else None
        dist.gather(x, parts, 1)
        own = torch.empty(20, dtype=torch.int64)
        whole = list(part(50, 60, torch.int64).chunk(3)) if group.rank == 0 else None
        dist.scatter(own, whole, 0)
        return [sent, torch.cat(parts) if parts else None, own]

    def ours(world: sundog.World) -> list[Any]:
        x = part(world.rank, 20, torch.int64).to(world.device)
        whole = part(50, 60, torch.int64).to(world.device)
        gathered = world.gather(x, 1)
        sent, own = world.broadcast(x, 2), world.scatter(whole, 0)
        return [sent.cpu(), gathered if gathered is None else gathered.cpu(), own.cpu()]

    for mine, torchs in zip(run(ours, 3), gloo(theirs, 3), strict=True):
        for out, want in zip(mine, torchs, strict=True):
            assert (out is None) == (want is None)
            assert out is None or same(out, want)


@pytest.mark.sim_only
@pytest.mark.parametrize("symmetric", [True, False])
def test_broadcast_in_place_is_clean(symmetric: bool) -> None:
    def main(world: sundog.World) -> torch.Tensor:
        x = part(world.rank, 1000, torch.int16)
        x = world.as_symmetric(x) if symmetric else x
        world.barrier()
        for src in (1, 0):
            assert world.broadcast(x, src, out=x) is x
            x.add_(src)
        return x.clone()

    report = testing.check(main, 3, schedules=3)
    want = part(1, 1000, torch.int16).add_(1)
    assert all(same(out, want) for out in report.results)


@pytest.mark.sim_only
@pytest.mark.parametrize("op", ["broadcast", "gather", "scatter"])
def test_the_checker_finds_nothing(op: str) -> None:
    testing.check(exercise(find(op), 2), 2, schedules=2)


def test_a_ring_of_long_messages(run: Run) -> None:
    """More chunks than slots, again and again; everybody sends first, without waiting for it."""
    numel = 5000

    def main(world: sundog.World) -> torch.Tensor:
        x = part(world.rank, numel, torch.float32).to(world.device)
        for _ in range(3):
            out = torch.empty_like(x)
            sent = world.send(x, (world.rank + 1) % 3, async_op=True)
            assert world.recv(out, (world.rank - 1) % 3) is out
            assert sent.wait() is None
            x = out
        return x.cpu()

    results = run(main, 3, heap_size=4 << 20)
    assert all(same(out, part(rank, numel, torch.float32)) for rank, out in enumerate(results))


def test_only_the_two_ranks_take_part(run: Run) -> None:
    """Messages cross, of many sizes, while a third rank does nothing at all."""
    sizes = (1, 0, 3000, 17)

    def main(world: sundog.World) -> list[torch.Tensor]:
        found = []
        for numel in sizes if world.rank < 2 else ():
            x = part(10 * numel + world.rank, numel, torch.int32).to(world.device)
            out = torch.empty_like(x)
            for verb in ("send", "recv")[:: 1 if world.rank else -1]:
                (
                    world.send(x, 1 - world.rank)
                    if verb == "send"
                    else world.recv(out, 1 - world.rank)
                )
            found.append(out.cpu())
        return found

    results = run(main, 3)
    for rank in range(2):
        for numel, out in zip(sizes, results[rank], strict=True):
            assert same(out, part(10 * numel + 1 - rank, numel, torch.int32))


@pytest.mark.sim_only
def test_send_and_receive_are_clean_and_all_is_needed() -> None:
    def main(world: sundog.World) -> torch.Tensor:
        outs = []
        for number in range(2):
            x = part(2 * number + world.rank, 1100, torch.int32)
            out = torch.empty_like(x)
            sent = world.send(x, 1 - world.rank, async_op=True)
            outs.append(world.recv(out, 1 - world.rank))
            sent.wait()
            x.zero_()
        return torch.cat(outs)

    def impatient(world: sundog.World) -> None:
        x = part(world.rank, 50, torch.int32)
        world.send(x, 1 - world.rank, async_op=True)
        x.zero_()  # it may be under way
        world.recv(x, 1 - world.rank)

    report = check(main, 2, schedules=4, heap_size=1 << 20)  # chunks of 2 KB
    assert not report.findings, report
    for rank, out in enumerate(report.results):
        assert same(out, joined([part(2 * n + 1 - rank, 1100, torch.int32) for n in range(2)]))
    assert {f.kind for f in check(impatient, 2, schedules=4).findings} == {"race"}


@pytest.mark.sim_only
def test_a_message_of_another_length_is_named() -> None:
    def main(world: sundog.World) -> str:
        if world.rank == 0:
            world.send(torch.zeros(75), 1)
            world.exchange(None)
            return ""
        with pytest.raises(WaitTimeout) as error:
            world.recv(torch.zeros(100), 0)
        world.exchange(None)
        return str(error.value)

    told = sundog.run(main, 2, "sim", sim=Sim(expire=True))[1]
    assert "waited for send_recv.bytes[1] to reach 400, saw 300; rank 0 owes" in told


BAD: list[tuple[str, tuple[Any, ...], str]] = [
    ("broadcast", (torch.zeros(4), 2), "rank 2 is outside this world of 2 ranks"),
    ("broadcast", (torch.zeros(4), 0, torch.zeros(5)), "out has 5 elements of torch.float32"),
    ("broadcast", (torch.zeros(16), 0, torch.zeros(4, 4).t()), "not contiguous"),
    ("gather", (torch.zeros(4), -1), "rank -1 is outside"),
    ("scatter", (torch.zeros(5), 0), r"x of shape \(5,\) does not split into 2 equal parts"),
    ("scatter", (torch.zeros(4), 0, torch.zeros(3)), "out has 3 elements .* expected 2"),
    ("scatter", (None, 0), "gives no x"),
    ("send", (torch.zeros(4), 5), "rank 5 is outside"),
    ("recv", (torch.zeros(4, 4).t(), 1), "not contiguous|this rank"),
]


def test_bad_input(run: Run) -> None:
    def main(world: sundog.World) -> None:
        x = torch.zeros(4, device=world.device)
        for op, given, text in BAD:
            moved = [v.to(world.device) if torch.is_tensor(v) else v for v in given]
            with pytest.raises(ValueError, match=text):
                getattr(world, op)(*moved)
        with pytest.raises(ValueError, match=f"send: rank {world.rank} is this rank"):
            world.send(x, world.rank)
        with pytest.raises(ValueError, match=f"gather: rank {world.rank} gives an out"):
            world.gather(x, 1 - world.rank, torch.cat([x, x]))
        with pytest.raises(RankMismatch, match="src=0"):
            world.broadcast(x, world.rank)

    run(main, 2)


def test_a_heap_too_small_for_mailboxes_says_so(run: Run) -> None:
    def main(world: sundog.World) -> None:
        with pytest.raises(ValueError, match=r"262,144 bytes, is too small.*at least 524,288"):
            world.send(torch.zeros(4, device=world.device), 1 - world.rank)

    run(main, 2, heap_size=1 << 18)


@triton.jit(do_not_specialize=["n", "part"])
def copy_part(dst, src, n, part, parts, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    _copy.copy((dst,), src, n, tl.program_id(0) + part, parts, 1, BLOCK, ALIGNED)


@triton.jit
def measure_spans(dst, src, out, n, CASES: tl.constexpr):
    """Head, skew and number of chunks for every pair of the first CASES places."""
    for case in range(CASES * CASES):
        head, skew, count = chunks.span(dst + case // CASES, src + case % CASES, n)
        tl.store(out + 3 * case, head)
        tl.store(out + 3 * case + 1, skew)
        tl.store(out + 3 * case + 2, count)


@pytest.mark.parametrize(("dtype", "cases"), [(torch.int32, 36), (torch.int16, 20)])
def test_chunks_begin_with_a_cache_line(run: Run, dtype: torch.dtype, cases: int) -> None:
    """Wherever source and destination are; and what is loaded lies in the source."""
    n, nbytes = 200, dtype.itemsize

    def main(world: sundog.World) -> None:
        dst, src = world.empty((512,), dtype), world.empty((512,), dtype)
        found = torch.zeros(cases * cases, 3, dtype=torch.int64, device=world.device)
        measure_spans[(1,)](dst[1:], src[3:], found, n, CASES=cases)
        for case, (head, skew, count) in enumerate(found.tolist()):
            to = dst[1 + case // cases :].data_ptr()
            at = src[3 + case % cases :].data_ptr()
            assert (to + head * nbytes) % 128 == 0
            assert (at + head * nbytes - skew) % 16 == 0
            assert skew <= head * nbytes < chunks.HEAD.value * 16
            more = 16 if skew else 0
            assert head * nbytes - skew + 16 * count + more <= n * nbytes
            assert n * nbytes - head * nbytes - 16 * count < 32

    run(main, 1)


@triton.jit
def copy_each(dst, src, table, count, BLOCK: tl.constexpr):
    """Copy `count` spans: sizes, places in dst and places in src are rows of the table."""
    for case in range(count):
        n = tl.load(table + case)
        to, at = tl.load(table + count + case), tl.load(table + 2 * count + case)
        _copy.copy((dst + to,), src + at, n, tl.program_id(0), tl.num_programs(0), 1, BLOCK, False)


def copied_as_torch_does(
    world: sundog.World, dtype: torch.dtype, sizes: list[int], block: int = 1024
) -> bool:
    """All sizes in one launch of two programs, at odd places; what lies between is not touched."""
    torch.manual_seed(len(sizes))
    apart = torch.randint(64, 200, (2, len(sizes)))
    n = torch.tensor(sizes)
    places = (apart + n).cumsum(1) - n
    whole = torch.randint(0, 127, (2, int(places.max()) + max(sizes) + 200)).to(dtype)
    dst, src = whole.to(world.device)
    wanted = dst.clone()
    for size, to, at in torch.stack([n, *places], 1).tolist():
        wanted[to : to + size] = src[at : at + size]
    table = torch.cat([n, *places]).to(world.device)
    copy_each[(2,)](dst, src, table, len(sizes), BLOCK=block)
    return torch.equal(dst, wanted)


PRIMES = [8191, 65537, 99991]
kinds = pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])  # as_words


@kinds
def test_odd_sizes_at_odd_places(run: Run, dtype: torch.dtype) -> None:
    sizes = [*range(1, 260, 3), *range(263, 5000, 389), *PRIMES[: 3 if dtype.itemsize == 2 else 1]]
    assert run(lambda world: copied_as_torch_does(world, dtype, sizes), 1) == [True]


@pytest.mark.long
@pytest.mark.parametrize("first", [0, 1250, 2500, 3750])
def test_every_size_to_5000_at_odd_places(run: Run, first: int) -> None:
    sizes = [*range(first + 1, first + 1251)]
    copied = run(lambda world: copied_as_torch_does(world, torch.int16, sizes, block=8192), 1)
    assert copied == [True]


@pytest.mark.sim_only
@pytest.mark.parametrize("shift", [0, 1])
def test_offsets_are_64_bit(run: Run, shift: int) -> None:
    """One program's tiles of more than 2^31 bytes; the rest is never touched, nor in memory."""
    end, block, parts = 1 << 31, 1 << 19, 1024
    n = end + 1024

    def main(world: sundog.World) -> None:
        src = torch.empty(n + 16, dtype=torch.uint8)[:n]
        dst = torch.empty(n + 16, dtype=torch.uint8)[shift : n + shift]
        src[-2000:] = part(0, 2000, torch.uint8)
        dst[-2000:] = 0
        copy_part[(1,)](dst, src, n, 0, parts, BLOCK=block, ALIGNED=shift == 0)
        assert same(dst[end + 144 : -32], src[end + 144 : -32])
        assert not dst[-2000:end].any()

    run(main, 1)


@pytest.mark.compat
@pytest.mark.parametrize("kind", ["i32", "i16", "u8"])
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_words_are_moved_16_bytes_at_a_time(target: str, kind: str) -> None:
    """Loads and stores, whether all is aligned or not, but for the ends."""
    gpu = GPUTarget("cuda", 90, 32) if target == "sm_90" else GPUTarget("hip", "gfx942", 64)
    signature = {"dst": f"*{kind}", "src": f"*{kind}", "n": "i64", "part": "i32", "parts": "i32"}
    signature |= {"BLOCK": "constexpr", "ALIGNED": "constexpr"}
    divisible = {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}
    wide = ("v4.b32", "v2.b64") if target == "sm_90" else ("dwordx4",)
    for aligned in (True, False):
        constants = {"BLOCK": 8192, "ALIGNED": aligned}
        source = ASTSource(copy_part, signature, constexprs=constants, attrs=divisible)
        compiled = triton.compile(source, target=gpu, options={"num_warps": 4})
        text = compiled.asm["ptx" if target == "sm_90" else "amdgcn"]
        for found in (accesses(text, "load"), accesses(text, "store")):
            narrow = [each for each in found if not any(name in each for name in wide)]
            assert len(found) > len(narrow)
            assert len(narrow) <= (0 if aligned else 2)  # the ends, at most 64 lanes of one access


@pytest.mark.compat
def test_the_loop_counts_in_64_bits() -> None:
    """Of a tensor of nearly 2^31 words the counter goes beyond, though their number does not."""
    signature = {"dst": "*u8", "src": "*u8", "n": "i32", "part": "i32", "parts": "i32"}
    signature |= {"BLOCK": "constexpr", "ALIGNED": "constexpr"}
    source = ASTSource(copy_part, signature, constexprs={"BLOCK": 4096, "ALIGNED": True})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    loops = [line for line in compiled.asm["ttir"].splitlines() if "scf.for" in line]
    assert loops
    assert all(": i64" in line for line in loops)


def accesses(text: str, verb: str) -> list[str]:
    """The instructions that load or store global memory."""
    names = {"load": ("ld.global", "global_load_", "buffer_load_")}
    names |= {"store": ("st.global", "global_store_", "buffer_store_")}
    return [line for line in text.splitlines() if any(name in line for name in names[verb])]
