"""The GPU's limits, measured in the same run as what is compared with them.

The formula: min(read, written) bytes move at the rate of a copy, and the rest is read or written at
the rate of a kernel that only does that. Floating-point work goes at the rate of a large matrix
product. Memory and arithmetic overlap, so the larger of the two times is the limit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import triton
import triton.language as tl

from ...hardware.description import PairRates
from ...ops.op import Cost
from ...world.world import World

_BYTES = 1 << 30
_SAMPLES = 15
_GEMM = 8192
_LINK_BYTES = 256 << 20
_PAIR_BYTES = 64 << 20  # more than a cache holds
_WARM_COPIES = 150  # in a process's first second the link was seen a fifth slower


@dataclass(frozen=True)
class Rates:
    """Bytes and operations per second of one GPU."""

    copy: float  # bytes read plus bytes written
    fill: float
    read: float
    gemm: float  # bfloat16
    link: float = 0.0  # from host memory, where peers are across a link

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def seconds(cost: Cost, ranks: int, rates: Rates) -> float:
    """Compute the least time for `ranks` ranks that share one GPU. `cost` is that of one rank."""
    both = min(cost.read_bytes, cost.written_bytes)
    memory = 2 * both / rates.copy
    memory += (cost.read_bytes - both) / rates.read + (cost.written_bytes - both) / rates.fill
    return ranks * max(memory, cost.flops / rates.gemm)


def measure_rates(device: torch.device) -> Rates:
    """Measure with large operands outside the L2 cache; the median of several."""
    a = torch.empty(_BYTES, dtype=torch.uint8, device=device).random_()
    b = torch.empty_like(a)
    sink = torch.zeros(1, dtype=torch.int32, device=device)
    words = a.view(torch.int32)
    programs = 8 * torch.cuda.get_device_properties(device).multi_processor_count
    left, right = (torch.randn(_GEMM, _GEMM, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(left)
    return Rates(
        copy=2 * _BYTES / time_of(lambda: b.copy_(a)),
        fill=_BYTES / time_of(b.zero_),
        read=_BYTES / time_of(lambda: _read[(programs,)](words, sink, words.numel(), BLOCK=4096)),
        gemm=2 * _GEMM**3 / time_of(lambda: torch.matmul(left, right, out=product)),
    )


def link_rate(device: torch.device) -> float:
    """Measure bytes per second from pinned host memory by the copy engine, in one copy."""
    host = torch.empty(_LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    here = torch.empty(_LINK_BYTES, dtype=torch.uint8, device=device)
    for _ in range(_WARM_COPIES):
        here.copy_(host, non_blocking=True)
    return _LINK_BYTES / time_of(lambda: here.copy_(host, non_blocking=True))


def measure_pairs(
    world: World, nbytes: int = _PAIR_BYTES, timer: Callable[..., float] | None = None
) -> list[PairRates]:
    """Let each rank read, write and copy each peer's memory while all others are idle."""
    shared = world.empty(nbytes // 4, torch.int32, "pairs")
    mine, found = torch.empty_like(shared), []
    shared.zero_()
    for rank in range(world.size):
        world.barrier()
        world.synchronize()
        if rank == world.rank:
            peers = [peer for peer in range(world.size) if peer != rank]
            found = [_pair(world, mine, world.peer(shared, p), p, timer or time_of) for p in peers]
        world.exchange(rank, "end of a rank's turn")
    world.free(shared)
    everyone = world.exchange(found, "rates of pairs")
    return [PairRates(*row) for rows in everyone for row in rows]


def _pair(
    world: World, mine: torch.Tensor, there: torch.Tensor, peer: int, timer: Callable[..., float]
) -> list[float]:
    grid, sink = (8 * world.num_sms,), torch.zeros(1, dtype=torch.int32, device=mine.device)
    works = (
        lambda: _read[grid](there, sink, there.numel(), BLOCK=4096),
        lambda: _write[grid](there, there.numel(), BLOCK=4096),
        lambda: mine.copy_(there),
    )
    return [world.rank, peer, *(there.nbytes / timer(work) for work in works)]


def time_of(work: Callable[[], object]) -> float:
    """Return the median seconds of one call, which is large and alone, so that events suffice."""
    work()
    torch.cuda.synchronize()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(_SAMPLES)]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) * 1e-3 for begin, end in events)
    return times[_SAMPLES // 2]


@triton.jit
def _read(x, sink, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    total = tl.zeros((BLOCK,), tl.int32)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        total ^= tl.load(x + at, mask=at < n, other=0)
    if tl.sum(total, 0) == 0x7654321:  # hardly ever, but the compiler can't know
        tl.store(sink, 1)


@triton.jit
def _write(x, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(x + at, at, mask=at < n)
