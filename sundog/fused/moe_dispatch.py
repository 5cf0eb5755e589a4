"""MoE dispatch: every token goes to the ranks of its experts, without a round trip to the host.

A rank has experts / size experts, the first rank the first ones. `out` has, for each of this rank's
experts and each source rank, `capacity` slots: the tokens of that rank for that expert, in the
order in which it has them, and how many they are. So nobody need know what the others send, sizes
stay on the device, and a captured graph takes new routing at every replay.

One kernel numbers this rank's tokens of each expert; the next stores each token to its slot at the
expert's rank, between two barriers of the programs with one number. moe_combine is the way back.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..collectives import _copy
from ..collectives._copy import WIDE
from ..device import context, memory, signal, trace
from ..ops.dispatch import CallOptions, call
from ..ops.op import Cost, Plan, agree, barrier_flags
from ._call import check_tensors

if TYPE_CHECKING:
    from ..world.world import World

__all__ = [
    "OP", "SYMMETRIC", "Config", "Handle", "Problem", "cases", "cost", "default", "inputs",
    "moe_dispatch", "plan", "random_ids", "reference", "slots_of", "space", "split", "unfit",
    "valid", "wrong",
]  # fmt: skip

OP = "moe_dispatch"
SYMMETRIC = ("out",)
_IDS = 1024  # that a program looks at at once
_LONGEST = 16384  # bytes of a token that a program moves at once


@dataclass(frozen=True)
class Problem:
    max_tokens: int  # of a rank; it may have fewer
    hidden: int
    dtype: torch.dtype
    size: int  # ranks
    experts: int = 8  # of all ranks
    topk: int = 2
    capacity: int = 0  # tokens of one rank that an expert has room for; 0: all that it may have
    zeroed: bool = False  # slots that no token fills are zero

    @property
    def local(self) -> int:
        return self.experts // self.size

    @property
    def slots(self) -> int:
        """Of an expert, for the tokens of one rank."""
        return self.capacity or self.max_tokens * self.topk

    @property
    def row(self) -> int:
        return self.hidden * self.dtype.itemsize

    @property
    def counts_bytes(self) -> int:
        """Counts by expert and source, up to where tokens begin."""
        return int(triton.cdiv(4 * self.experts, WIDE.value)) * WIDE.value

    @property
    def out_bytes(self) -> int:
        return self.counts_bytes + self.experts * self.slots * self.row


@dataclass(frozen=True)
class Config:
    programs: int = 16
    num_warps: int = 4


class Handle(NamedTuple):
    """What moe_combine needs of a dispatch: where each of this rank's tokens went."""

    problem: Problem
    ids: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor


def unfit(problem: Problem) -> str | None:
    if problem.experts < 1 or problem.experts % problem.size:
        return f"{problem.experts} experts do not divide among {problem.size} ranks"
    if problem.topk < 1 or problem.hidden < 1:
        return f"topk {problem.topk} and hidden {problem.hidden} must be at least 1"
    return None


def valid(problem: Problem, config: Config) -> str | None:
    flat = _copy.Config(WIDE.value, config.programs, config.num_warps)
    return unfit(problem) or _copy.wrong_config(flat)


def space(problem: Problem) -> list[Config]:
    return [Config(n, warps) for n in (4, 8, 16, 32, 64, 96, 128) for warps in (2, 4, 8)]


def default(problem: Problem, num_sms: int) -> Config:
    """A token at a time for each program; no more programs than SMs, as all wait at once."""
    most = max(problem.max_tokens * problem.topk, 1)
    return Config(min(most, num_sms), 4 if problem.row >= 4096 else 2)


def cost(problem: Problem) -> Cost:
    """If all ranks have all their tokens, and each expert as many as any other."""
    moved = problem.max_tokens * problem.topk * problem.row
    away = moved * (problem.size - 1) // problem.size
    return Cost(0, problem.max_tokens * problem.row, moved, away)


def cases(size: int) -> list[Problem]:
    """Small problems: more experts than tokens, rows of odd sizes, room for all of them."""
    return [
        Problem(5, 64, torch.bfloat16, size, 2 * size, 2, zeroed=True),
        Problem(3, 37, torch.float16, size, size, 3, zeroed=True),
        Problem(4, 48, torch.uint8, size, 4 * size, 1, zeroed=True),
    ]


def random_ids(world: World, problem: Problem, seed: int) -> torch.Tensor:
    """Experts of all tokens, some twice for one token, and some -1, which is no expert."""
    generator = torch.Generator().manual_seed(seed * 1000 + world.rank)
    shape = (problem.max_tokens, problem.topk)
    ids = torch.randint(-1, problem.experts, shape, generator=generator, dtype=torch.int32)
    return ids.to(world.device)


def inputs(
    world: World, problem: Problem, seed: int, exact: bool = True
) -> tuple[torch.Tensor, ...]:
    """Tokens, their experts, and room for where they go."""
    x = _copy.random_tensor(world, problem.max_tokens * problem.hidden, problem.dtype, seed, exact)
    ids = random_ids(world, problem, seed)
    return x.view(problem.max_tokens, problem.hidden), ids, torch.zeros_like(ids)


def slots_of(ids: torch.Tensor) -> torch.Tensor:
    """How many of the entries before each one have the same expert: what the kernel finds."""
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    by_expert = flat[order]
    numbers = torch.arange(flat.numel(), device=ids.device)
    slots = torch.empty_like(numbers)
    slots[order] = numbers - torch.searchsorted(by_expert, by_expert)
    return slots.to(torch.int32).view(ids.shape)


def reference(
    problem: Problem, rank: int, x: list[torch.Tensor], ids: list[torch.Tensor], *_: Any
) -> torch.Tensor:
    """Bytes: counts by expert and source rank, then the tokens; slots without a token are zero."""
    out = x[rank].new_zeros(problem.out_bytes, dtype=torch.uint8)
    if out.is_meta:  # only its shape is asked for
        return out
    counts, tokens = split(problem, out)
    rooms = tokens.view(problem.local, problem.size, problem.slots, problem.hidden)
    for source, (rows, experts) in enumerate(zip(x, ids, strict=True)):
        slots = slots_of(experts)
        is_mine = (experts // problem.local == rank) & (slots < problem.slots)
        token, k = is_mine.nonzero(as_tuple=True)
        expert = experts[token, k].long() % problem.local
        rooms[expert, source, slots[token, k].long()] = rows[token]
        counts[:, source] = torch.bincount(expert, minlength=problem.local)
    return out


def wrong(problem: Problem, out: torch.Tensor, expected: torch.Tensor) -> int:
    """Counts, and bytes in slots that hold a token, that are not those of `expected`."""
    (counts, tokens), (wanted, rows) = split(problem, out), split(problem, expected)
    is_used = torch.arange(problem.slots, device=out.device) < wanted[..., None]
    shape = (problem.local, problem.size * problem.slots, problem.row)
    differs = tokens.view(torch.uint8).view(shape) != rows.view(torch.uint8).view(shape)
    differs &= is_used.view(problem.local, -1, 1)
    return int((counts != wanted).sum().item() + differs.sum().item())


def split(problem: Problem, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts [local experts, ranks] and tokens [local experts, ranks * slots, hidden] in `out`."""
    counts = out[: 4 * problem.experts].view(torch.int32).view(problem.local, problem.size)
    shape = (problem.local, problem.size * problem.slots, problem.hidden)
    return counts, out[problem.counts_bytes :].view(problem.dtype).view(shape)


# the kernels


@triton.jit
def _number_kernel(ids, slots, counts, pairs, BLOCK: tl.constexpr):
    """A program for each expert numbers its entries."""
    expert = tl.program_id(0)
    before = tl.full((), 0, tl.int32)
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        chosen = tl.load(ids + at, mask=at < pairs, other=-1)
        mine = (chosen == expert).to(tl.int32)
        tl.store(slots + at, before + tl.cumsum(mine, 0) - mine, mask=mine > 0)
        before += tl.sum(mine, 0)
    tl.store(counts + expert, before)


@triton.jit
def _send_kernel(
    x, ids, slots, counts, out, flags, ctx, pairs, n,
    SHAPE: tl.constexpr, ALIGNED: tl.constexpr, TRACE: tl.constexpr,
):  # fmt: skip
    """`n`: words of a token. SHAPE: ranks, experts, top-k, slots, bytes of counts and of a tile."""
    SIZE: tl.constexpr = SHAPE[0]
    LOCAL: tl.constexpr = SHAPE[1] // SHAPE[0]
    BLOCK: tl.constexpr = SHAPE[5]
    nbytes: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    program, programs = tl.program_id(0), tl.num_programs(0)
    rank = tl.load(ctx + context.RANK)
    epoch = tl.load(flags.epochs + program) + 1
    # My out is free: what read it last came before this kernel on the stream. The peers' programs
    # with this number store to it only after this barrier.
    signal.barrier_ranks(flags.ready + program * SIZE, epoch, ctx, SIZE, TRACE)
    trace.begin(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    for pair in range(program, pairs, programs):
        expert = tl.load(ids + pair).to(tl.int64)
        is_expert = (expert >= 0) & (expert < SHAPE[1])
        slot = tl.load(slots + pair, mask=is_expert, other=SHAPE[3])  # written for experts only
        if slot < SHAPE[3]:
            place = ((expert % LOCAL) * SIZE + rank) * SHAPE[3] + slot
            dst = memory.translate(out + SHAPE[4] // nbytes + place * n, expert // LOCAL, ctx)
            src = x + (pair // SHAPE[2]).to(tl.int64) * n
            _copy.copy((dst,), src, n, program * 0, 1, 1, BLOCK, ALIGNED)
        elif (expert < -1) | (expert >= SHAPE[1]):
            signal.refuse(flags.unknown, expert, SHAPE[1] - 1, ctx)
    for expert in range(program, SHAPE[1], programs):
        count = tl.load(counts + expert)
        there = out.to(tl.pointer_type(tl.int32)) + (expert % LOCAL) * SIZE + rank
        memory.store(there, tl.minimum(count, SHAPE[3]), expert // LOCAL, ctx)
        if count > SHAPE[3]:
            signal.refuse(flags.limits + expert, count, SHAPE[3], ctx)
    trace.end(trace.FETCH, program, 0, trace.ALL, ctx, TRACE)
    # My tokens and counts before the flags; all peers' before whatever follows this kernel here.
    signal.barrier_ranks(flags.arrived + program * SIZE, epoch, ctx, SIZE, TRACE)
    tl.store(flags.epochs + program, epoch)  # read by the next call on the stream


class _Flags(NamedTuple):
    ready: torch.Tensor  # by program and rank: its out is free
    arrived: torch.Tensor  # by program and rank: its tokens are here
    epochs: torch.Tensor  # by program: how often it has run
    limits: torch.Tensor  # by expert: its tokens. Only the names of these two are used, in errors
    unknown: torch.Tensor


def plan(world: World, problem: Problem, config: Config) -> Plan:
    """Allocate flags. The plan takes any x, ids and slots, and a symmetric out of bytes."""
    agree(world, OP, problem, config, valid(problem, config))
    counts = torch.empty(problem.experts, dtype=torch.int32, device=world.device)
    names = (problem.experts, f"{OP}.tokens_of_expert"), (1, f"{OP}.expert_index")
    limits, unknown = (world.signals(*each) for each in names)
    ready, arrived, epochs = barrier_flags(world, OP, config.programs, "ready", "arrived")
    made = _Flags(ready, arrived, epochs, limits, unknown)
    block = min(max(triton.next_power_of_2(problem.row), WIDE.value), _LONGEST)
    routed = (problem.size, problem.experts, problem.topk, problem.slots)
    shape = (*routed, problem.counts_bytes, block)

    def launch(x: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor, out: torch.Tensor) -> Any:
        if problem.zeroed:
            out.zero_()  # before this rank says that it is free
        _number_kernel[(problem.experts,)](ids, slots, counts, ids.numel(), BLOCK=_IDS, num_warps=4)
        (source, target), aligned = _copy.as_words(problem.row, x.view(-1), out)
        _send_kernel[(config.programs,)](
            source, ids, slots, counts, target, made, world.ctx, ids.numel(),
            problem.row // source.itemsize, SHAPE=shape, ALIGNED=aligned,
            TRACE=world.kernel_mode, num_warps=config.num_warps,
        )  # fmt: skip
        return out

    return Plan(world, problem, config, tuple(made), launch)


# the call


def moe_dispatch(
    world: World, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *,
    experts: int, max_tokens: int = 0, capacity: int = 0, scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None, algo: str = "auto", config: Any = None,
    explain: bool = False,
) -> tuple[Any, torch.Tensor, Handle]:  # fmt: skip
    """Send each token of x [tokens, hidden] to the ranks of its experts.

    Returns tokens [local experts, ranks * slots, hidden], counts [local experts, ranks] (source
    rank r's tokens of an expert are its slots from r * slots on) and the handle for moe_combine.
    topk_ids [tokens, k]: experts, -1 for none; topk_weights: as many float32. Ranks may have up to
    `max_tokens` tokens each, and up to `capacity` of one rank for one expert (default: all that it
    may have); more leave a record, and the next call raises it with rank, expert and count.

    With `scales` [tokens, groups], float32, x is FP8 and tokens is a pair, of x's and of scales.
    """
    check_tensors(world, OP, x=x, topk_ids=topk_ids, topk_weights=topk_weights, out=out)
    problem = _problem(world, x, topk_ids, topk_weights, experts, max_tokens, capacity)
    given, problem = _with_scales(problem, x, scales)
    refused = unfit(problem)
    if refused is not None:
        raise ValueError(f"{OP}: {refused}")
    nbytes = problem.out_bytes
    if out is None:
        out = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
    if out.nbytes != nbytes or not out.is_contiguous():
        raise ValueError(f"{OP}: out has {out.nbytes} bytes, expected {nbytes}, contiguous")
    ids = topk_ids.contiguous()
    slots = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    packed = out.view(-1).view(torch.uint8)
    tensors = {"x": given, "ids": ids, "slots": slots, "out": packed}
    call(world, OP, problem, tensors, CallOptions(algo, config, False, explain), is_flat=False)
    counts, tokens = split(problem, packed)
    found = tokens if scales is None else _without_scales(tokens, x)
    return found, counts, Handle(problem, ids, slots, topk_weights.float().contiguous())


def _problem(
    world: World, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: int,
    max_tokens: int, capacity: int,
) -> Problem:  # fmt: skip
    if x.dim() != 2 or ids.dim() != 2 or ids.shape[0] != x.shape[0] or ids.shape != weights.shape:
        raise ValueError(
            f"{OP}: x is {tuple(x.shape)}, topk_ids {tuple(ids.shape)} and topk_weights "
            f"{tuple(weights.shape)}; expected [tokens, hidden], [tokens, k] and [tokens, k]"
        )
    most = max_tokens or x.shape[0]
    if x.shape[0] > most:
        raise ValueError(f"{OP}: x has {x.shape[0]} tokens, and max_tokens is {most}")
    return Problem(most, x.shape[1], x.dtype, world.size, experts, ids.shape[1], capacity)


def _with_scales(
    problem: Problem, x: torch.Tensor, scales: torch.Tensor | None
) -> tuple[torch.Tensor, Problem]:
    """Rows of x and of its scales as one row of bytes, so that they arrive together."""
    if scales is None:
        return x.contiguous(), problem
    if scales.dim() != 2 or scales.shape[0] != x.shape[0] or scales.dtype != torch.float32:
        raise ValueError(
            f"{OP}: scales are {tuple(scales.shape)} of {scales.dtype}, expected "
            f"[{x.shape[0]}, groups] of torch.float32"
        )
    rows = [scales.contiguous().view(torch.uint8), x.contiguous().view(torch.uint8)]
    joined = torch.cat([each.view(x.shape[0], -1) for each in rows], 1)
    return joined, dataclasses.replace(problem, hidden=joined.shape[1], dtype=torch.uint8)


def _without_scales(rows: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    first = rows.shape[-1] - x.shape[1] * x.itemsize
    return rows[..., first:].view(x.dtype), rows[..., :first].view(torch.float32)
