"""MoE dispatch: send every token to the ranks of its experts, without a round trip to the host.

A rank has experts / size experts, the first rank the first ones. For each of this rank's experts
and each source rank, `out` has `capacity` slots for the tokens of that rank for that expert, in
their order there, and their number. So no rank need know what the others send, sizes stay on the
device, and a captured graph takes new routing at every replay.

This file says what the op is. Its algorithms are in the files moe_dispatch_*.py beside it:
`low_latency` for the few tokens of decode, `push` for the many of prefill. moe_combine is the way
back.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton

from ..collectives import _copy, _reduce
from ..collectives._copy import WIDE
from ..ops.dispatch import CallOptions, call, packed
from ..ops.op import Cost
from ._call import check_tensors

if TYPE_CHECKING:
    from ..world.world import World

OP = "moe_dispatch"
_LONGEST = 16384  # bytes of a part of a token
_SHORTEST = 1024
_MOST = 31  # of topk: a kernel has a bit for each


@dataclass(frozen=True)
class Problem:
    max_tokens: int  # of a rank; it may have fewer
    hidden: int
    dtype: torch.dtype
    size: int  # ranks
    experts: int = 8  # of all ranks
    topk: int = 2
    capacity: int = 0  # tokens of one rank that an expert has room for; 0: all
    zeroed: bool = False  # slots that no token fills are zero
    named: int = 0  # experts that an error counts, where those here are a caller's ranks

    @property
    def local(self) -> int:
        return self.experts // self.size

    @property
    def slots(self) -> int:
        """Return the number of slots of an expert for the tokens of one rank."""
        return self.capacity or self.max_tokens * self.topk

    @property
    def row(self) -> int:
        return self.hidden * self.dtype.itemsize

    @property
    def counts_bytes(self) -> int:
        """Return the bytes of the counts by expert and source, after which tokens begin."""
        return int(triton.cdiv(4 * self.experts, WIDE.value)) * WIDE.value

    @property
    def out_bytes(self) -> int:
        return self.counts_bytes + self.experts * self.slots * self.row


@dataclass(frozen=True)
class Config:
    programs: int = 16
    parts: int = 1  # of a token: each is moved by another program
    num_warps: int = 8


class Handle(NamedTuple):
    """What moe_combine needs from a dispatch: where each of this rank's tokens went."""

    problem: Problem
    ids: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor


def unfit(problem: Problem) -> str | None:
    if problem.experts < 1 or problem.experts % problem.size:
        return f"{problem.experts} experts do not divide among {problem.size} ranks"
    if problem.topk < 1 or problem.hidden < 1:
        return f"topk {problem.topk} and hidden {problem.hidden} must be at least 1"
    if problem.max_tokens < 0 or problem.capacity < 0:
        return f"max_tokens {problem.max_tokens} and capacity {problem.capacity} must be 0 or more"
    if problem.topk > _MOST:
        return f"topk {problem.topk}, and a token goes to at most {_MOST} experts"
    return None


def valid(problem: Problem, config: Config) -> str | None:
    if config.parts < 1:
        return f"parts {config.parts}: a token has at least one"
    part = triton.next_power_of_2(triton.cdiv(problem.row, config.parts))
    if part > _LONGEST:
        return f"a part of {part} bytes, and it has at most {_LONGEST}; ask for more parts"
    flat = _copy.Config(WIDE.value, config.programs, config.num_warps)
    return unfit(problem) or _copy.wrong_config(flat)


def space(problem: Problem) -> list[Config]:
    least = triton.cdiv(problem.row, _LONGEST)
    return [
        Config(programs, least * parts, warps)
        for programs in (4, 8, 16, 32, 64, 96, 128)
        for parts in (1, 2, 4, 8)
        for warps in (2, 4, 8, 16)
        if parts == 1 or problem.row >= least * parts * _SHORTEST
    ]


def default(problem: Problem, num_sms: int) -> Config:
    """Give each program a token at a time, or, with few tokens, a part of one.

    There are no more programs than SMs, since all wait at once: more of them on each SM took 0.92
    of the time on an H200 that 8 ranks share, but then no SM has room for the kernel that a late
    rank runs first. A thread has 64 bytes of a part, or 16 if it is so short that one warp would
    have it.
    """
    parts = triton.cdiv(max(problem.row, 1), _LONGEST)
    while problem.max_tokens * parts < num_sms and problem.row >= 2 * parts * _SHORTEST:
        parts *= 2
    items = max(problem.max_tokens * parts, 1)
    part = triton.next_power_of_2(triton.cdiv(problem.row, parts))
    least = min(part // _reduce.warp_bytes(), 2)
    return Config(min(items, num_sms), parts, max(min(part // 2048, 8), least, 1))


def cost(problem: Problem) -> Cost:
    """Count as if every rank had its most tokens, and every expert equally many."""
    moved = problem.max_tokens * problem.topk * problem.row
    away = moved * (problem.size - 1) // problem.size
    return Cost(0, problem.max_tokens * problem.row, moved, away)


def cases(size: int) -> list[Problem]:
    """Return small problems: more experts than tokens, odd sizes, room for all tokens."""
    return [
        Problem(5, 64, torch.bfloat16, size, 2 * size, 2, zeroed=True),
        Problem(3, 37, torch.float16, size, size, 3, zeroed=True),
        Problem(4, 48, torch.uint8, size, 4 * size, 1, zeroed=True),
    ]


def random_ids(world: World, problem: Problem, seed: int) -> torch.Tensor:
    """Return random experts of all tokens: some twice for one token, and some -1, for none."""
    generator = torch.Generator().manual_seed(seed * 1000 + world.rank)
    shape = (problem.max_tokens, problem.topk)
    ids = torch.randint(-1, problem.experts, shape, generator=generator, dtype=torch.int32)
    return ids.to(world.device)


def inputs(
    world: World, problem: Problem, seed: int, exact: bool = True
) -> tuple[torch.Tensor, ...]:
    """Make tokens, their experts, and room for their slots."""
    x = _copy.random_tensor(world, problem.max_tokens * problem.hidden, problem.dtype, seed, exact)
    ids = random_ids(world, problem, seed)
    return x.view(problem.max_tokens, problem.hidden), ids, torch.zeros_like(ids)


def slots_of(ids: torch.Tensor) -> torch.Tensor:
    """Count, for each entry, the earlier ones with the same expert, as the kernel does."""
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
    """Return bytes: counts by expert and source rank, then tokens; empty slots are zero."""
    out = x[rank].new_zeros(problem.out_bytes, dtype=torch.uint8)
    if out.is_meta:  # only its shape is wanted
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
    """Find counts, and bytes in slots that hold a token, that differ from `expected`."""
    (counts, tokens), (wanted, rows) = split(problem, out), split(problem, expected)
    is_used = torch.arange(problem.slots, device=out.device) < wanted[..., None]
    shape = (problem.local, problem.size * problem.slots, problem.row)
    differs = tokens.view(torch.uint8).view(shape) != rows.view(torch.uint8).view(shape)
    differs &= is_used.view(problem.local, -1, 1)
    return int((counts != wanted).sum().item() + differs.sum().item())


def split(problem: Problem, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View counts [local experts, ranks] and tokens [local experts, ranks * slots, hidden]."""
    counts = out[: 4 * problem.experts].view(torch.int32).view(problem.local, problem.size)
    shape = (problem.local, problem.size * problem.slots, problem.hidden)
    return counts, out[problem.counts_bytes :].view(problem.dtype).view(shape)


# the call


def moe_dispatch(
    world: World, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, *,
    experts: int, max_tokens: int = 0, capacity: int = 0, scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None, algo: str = "auto", config: Any = None,
    explain: bool = False, named: int = 0,
) -> tuple[Any, torch.Tensor, Handle]:  # fmt: skip
    """Send each token of x [tokens, hidden] to the ranks of its experts.

    Returns tokens [local experts, ranks * slots, hidden], counts [local experts, ranks] (source
    rank r's tokens of an expert are its slots from r * slots on) and the handle for moe_combine.
    topk_ids [tokens, k] are experts, -1 for none; topk_weights are as many float32. A rank may have
    up to `max_tokens` tokens, and up to `capacity` of them for one expert (default: all). More
    leave a record, and the next call raises it with rank, expert and count.

    With `scales` [tokens, groups], float32, x is FP8, and tokens are a pair: FP8 rows and scales.
    With `named`, the error about an expert that does not exist says that there are as many.
    """
    check_tensors(world, OP, x=x, topk_ids=topk_ids, topk_weights=topk_weights, out=out)
    if scales is not None:
        check_tensors(world, OP, scales=scales)
    problem = problem_of(world, x, topk_ids, topk_weights, experts, max_tokens, capacity)
    problem = dataclasses.replace(problem, named=named)
    x, ids = packed(world, OP, x, explain), packed(world, OP, topk_ids, explain, "topk_ids")
    given, problem = with_scales(problem, x, scales)
    refused = unfit(problem)
    if refused is not None:
        raise ValueError(f"{OP}: {refused}")
    nbytes = problem.out_bytes
    if out is None:
        out = torch.empty(nbytes, dtype=torch.uint8, device=x.device)
    if out.nbytes != nbytes or not out.is_contiguous():
        raise ValueError(f"{OP}: out has {out.nbytes} bytes, expected {nbytes}, contiguous")
    slots = torch.empty(ids.shape, dtype=torch.int32, device=ids.device)
    received = out.view(-1).view(torch.uint8)
    tensors = {"x": given, "ids": ids, "slots": slots, "out": received}
    call(world, OP, problem, tensors, CallOptions(algo, config, False, explain), is_flat=False)
    counts, tokens = split(problem, received)
    found = tokens if scales is None else parted(tokens, x, scales)
    return found, counts, Handle(problem, ids, slots, topk_weights.float().contiguous())


def problem_of(
    world: World, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: int,
    max_tokens: int, capacity: int,
) -> Problem:  # fmt: skip
    if x.dim() != 2 or ids.dim() != 2 or ids.shape[0] != x.shape[0] or ids.shape != weights.shape:
        raise ValueError(
            f"{OP}: x is {tuple(x.shape)}, topk_ids {tuple(ids.shape)} and topk_weights "
            f"{tuple(weights.shape)}; expected [tokens, hidden], [tokens, k] and [tokens, k]"
        )
    if ids.dtype not in (torch.int64, torch.int32):  # weights passed here would be cut to 0
        raise ValueError(f"{OP}: topk_ids are {ids.dtype}, expected torch.int64 or torch.int32")
    for name, number in {
        "experts": experts,
        "max_tokens": max_tokens,
        "capacity": capacity,
    }.items():
        if not hasattr(number, "__index__"):
            raise ValueError(f"{OP}: {name} {number!r} is not a whole number")
    most = max_tokens or x.shape[0]
    if x.shape[0] > most:
        raise ValueError(f"{OP}: x has {x.shape[0]} tokens, and max_tokens is {most}")
    return Problem(most, x.shape[1], x.dtype, world.size, experts, ids.shape[1], capacity)


def with_scales(
    problem: Problem, x: torch.Tensor, scales: torch.Tensor | None
) -> tuple[torch.Tensor, Problem]:
    """Join rows of x and of its scales into rows of bytes, so that they arrive together."""
    if scales is None:
        return x, problem
    if scales.dim() != 2 or scales.shape[0] != x.shape[0] or scales.dtype != torch.float32:
        raise ValueError(
            f"{OP}: scales are {tuple(scales.shape)} of {scales.dtype}, expected "
            f"[{x.shape[0]}, groups] of torch.float32"
        )
    rows = joined(x, scales)
    return rows, dataclasses.replace(problem, hidden=rows.shape[1], dtype=torch.uint8)


def joined(*parts: torch.Tensor) -> torch.Tensor:
    """Join matrices by their rows, as bytes, so that they arrive together.

    Each begins at a multiple of 16 bytes: that is where views of any dtype, and wide loads, may.
    """
    rows: list[torch.Tensor] = []
    for part in map(_as_bytes, parts):
        rows += [part, part.new_zeros(len(part), -part.shape[1] % WIDE.value)]
    return torch.cat(rows, 1)


def parted(rows: torch.Tensor, *like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """View what was joined in rows [..., bytes]: matrices with the columns and dtypes of `like`."""
    found, begin = [], 0
    for each in like:
        end = begin + each.shape[1] * each.itemsize
        found.append(rows[..., begin:end].view(each.dtype))
        begin = triton.cdiv(end, WIDE.value) * WIDE.value
    return tuple(found)


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """View a matrix as bytes. To torch, at most one element is contiguous at any strides."""
    return rows.contiguous().as_strided(rows.shape, (rows.shape[1], 1)).view(torch.uint8)
