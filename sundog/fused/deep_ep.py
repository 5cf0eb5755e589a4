"""DeepEP's Buffer, with its names, arguments and results, on our dispatch and combine.

    buffer = Buffer(world)
    recv_x, recv_count, handle, event, hook = buffer.low_latency_dispatch(
        x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, use_fp8=True)
    out, event, hook = buffer.low_latency_combine(y, topk_idx, topk_weights, handle)

The ops keep a block of slots for each source rank. DeepEP's callers expect the rows of an expert,
or of all its peers, side by side: `_Packing` moves them, by torch's kernels and without the host.
Everything is in order on the current stream, so events and hooks have nothing left to do. A row
comes from the source ranks in their order, and sums are in the order of experts or ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton

from .moe_combine import moe_combine
from .moe_dispatch import Handle, joined, moe_dispatch, parted

if TYPE_CHECKING:
    from ..world.world import World

_Tensor = torch.Tensor
_GROUP = 128  # columns that share a scale
_LIMIT = 448.0  # the largest number of float8_e4m3fn
_LEAST = 1e-4  # for a group's largest element, so that groups of zeros have a scale


class EventOverlap:
    """The event that DeepEP's calls return. Work is in stream order, so waiting does nothing."""

    def current_stream_wait(self) -> None:
        """Do nothing: what follows on the stream comes after the call."""


class _Packing(NamedTuple):
    """Where rows are: with a block of slots for each source, and packed side by side."""

    packed: torch.Tensor  # [experts, rows]: from which slot the row at a place comes
    slots: torch.Tensor  # [experts, ranks * slots]: at which place the row of a slot is

    @classmethod
    def of(cls, counts: torch.Tensor, slots: int) -> _Packing:
        """Make it from counts [experts, ranks]. Places and slots without a row name another row."""
        ends = counts.long().cumsum(1)
        begins = ends - counts
        rows = torch.arange(counts.shape[1] * slots, device=counts.device)
        place = rows.expand(counts.shape[0], -1).contiguous()
        source = torch.searchsorted(ends, place, right=True).clamp_(max=counts.shape[1] - 1)
        slot = (place - begins.gather(1, source)).clamp_(0, slots - 1)
        inside = (begins[:, :, None] + rows[:slots]).flatten(1).clamp_(max=len(rows) - 1)
        return cls(source * slots + slot, inside)

    def pack(self, rows: torch.Tensor) -> torch.Tensor:
        return _taken(rows, self.packed)

    def unpack(self, rows: torch.Tensor) -> torch.Tensor:
        return _taken(rows, self.slots)


def _taken(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Put rows [experts, n, columns] in another order, by their bytes."""
    plain = rows.contiguous().view(torch.uint8)
    found = plain.gather(1, index[..., None].expand(-1, -1, plain.shape[-1]))
    return found.view(rows.dtype)


@dataclass(frozen=True)
class Sent:
    """What a combine needs from its dispatch."""

    handle: Handle
    packing: _Packing
    rows: int  # that the dispatch returned


class Buffer:
    """Expert parallelism for callers of DeepEP, on a world.

    What DeepEP sizes and orders by hand is accepted but not used: plans take what they need from
    the world's heap, and everything is in order on the current stream.
    """

    def __init__(
        self, group: World, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0,
        low_latency_mode: bool = False, num_qps_per_rank: int = 1,
    ) -> None:  # fmt: skip
        if not hasattr(group, "moe_dispatch"):
            raise ValueError(
                f"Buffer: {type(group).__name__} is not a world; pass sundog.init(group=group)"
            )
        self.world, self.rank, self.group_size = group, group.rank, group.size

    # what callers ask before they begin

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> None:
        """Return None, which `dispatch` and `combine` take as `config`: configs are the plans'."""

    get_combine_config = get_dispatch_config

    @staticmethod
    def get_low_latency_rdma_size_hint(*sizes: int) -> int:
        """Return 0: there is no buffer besides the world's heap."""
        return 0

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap()

    # decode: every token to each of its experts

    def low_latency_dispatch(
        self, x: torch.Tensor, topk_idx: torch.Tensor, num_max_dispatch_tokens_per_rank: int,
        num_experts: int, use_fp8: bool = True, async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, torch.Tensor, Sent, EventOverlap, Callable[[], None]]:  # fmt: skip
        """Return rows [local experts, ranks * most, hidden]: an expert's first `count` are there.

        With `use_fp8` rows are a pair, of float8_e4m3fn and of float32 scales for 128 columns each.
        Returns rows, counts [local experts], handle, event and hook.
        """
        most = num_max_dispatch_tokens_per_rank
        rows, scales = _quantised(x) if use_fp8 else (x, None)
        weights = torch.ones(topk_idx.shape, device=x.device)  # only those of combine count
        found, counts, handle = moe_dispatch(
            self.world, rows, topk_idx, weights, experts=num_experts, max_tokens=most,
            capacity=most, scales=scales,
        )  # fmt: skip
        packing = _Packing.of(counts, most)
        packed = tuple(packing.pack(each) for each in (found if use_fp8 else (found,)))
        sent = Sent(handle, packing, packed[0].shape[1])
        count = counts.sum(1, dtype=torch.int32)
        return packed if use_fp8 else packed[0], count, sent, EventOverlap(), _nothing

    def low_latency_combine(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor, handle: Sent,
        zero_copy: bool = False, async_finish: bool = False, return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None]]:  # fmt: skip
        """Return the weighted sum of each token's rows, [tokens, hidden]: in float32, by expert."""
        if topk_idx.shape != handle.handle.ids.shape or topk_weights.shape != topk_idx.shape:
            raise ValueError(
                f"low_latency_combine: topk_idx is {tuple(topk_idx.shape)} and topk_weights "
                f"{tuple(topk_weights.shape)}, and those of the dispatch were "
                f"{tuple(handle.handle.ids.shape)}"
            )
        weighted = handle.handle._replace(weights=topk_weights.float().contiguous())
        found = moe_combine(self.world, handle.packing.unpack(x), weighted, out=out)
        return found, EventOverlap(), _nothing

    # prefill: every token once to each rank that has one of its experts

    def get_dispatch_layout(
        self, topk_idx: torch.Tensor, num_experts: int, previous_event: EventOverlap | None = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]:  # fmt: skip
        """Return tokens for each rank, None, tokens for each expert, and which token goes where."""
        known = torch.where((topk_idx >= 0) & (topk_idx < num_experts), topk_idx, -1)
        ranks = self._ranks_of(known, num_experts)
        experts = torch.bincount(known.flatten() + 1, minlength=num_experts + 1)[1:]
        is_sent = torch.zeros(len(topk_idx), self.group_size + 1, device=topk_idx.device)
        is_sent.scatter_(1, (ranks + 1).long(), 1.0)
        inside = is_sent[:, 1:].bool()
        return inside.sum(0, dtype=torch.int32), None, experts.int(), inside, EventOverlap()

    def dispatch(
        self, x: _Tensor | tuple[_Tensor, _Tensor], handle: None = None,
        num_tokens_per_rank: _Tensor | None = None, num_tokens_per_rdma_rank: _Tensor | None = None,
        is_token_in_rank: _Tensor | None = None, num_tokens_per_expert: _Tensor | None = None,
        topk_idx: _Tensor | None = None, topk_weights: _Tensor | None = None,
        expert_alignment: int = 1, num_worst_tokens: int = 0, config: None = None,
        previous_event: EventOverlap | None = None, async_finish: bool = False,
        allocate_on_comm_stream: bool = False, *, max_tokens: int = 0,
    ) -> tuple[Any, _Tensor, _Tensor, list[int], Sent, EventOverlap]:  # fmt: skip
        """Return rows for this rank [n, hidden], their local experts (-1: another rank's), weights.

        x may be a pair, of FP8 rows and of scales; then so are the rows. The host waits for n, as
        in DeepEP, unless `num_worst_tokens` says how many rows to return. Then the list of tokens
        by expert, whose numbers are multiples of `expert_alignment`, is empty, and rows that are
        not there have experts -1. `max_tokens` is the most that any rank has, the same on all ranks
        (default: this rank's number, if all have as many).
        """
        parts = x if isinstance(x, tuple) else (x,)
        if handle is not None:
            raise ValueError("dispatch: a cached handle is not taken; pass topk_idx again")
        ids, factors, experts = _routes(parts, topk_idx, topk_weights, num_tokens_per_expert)
        ranks, most = self._ranks_of(ids, experts), max_tokens or len(ids)
        found, counts, made = moe_dispatch(
            self.world, joined(*parts, ids, factors), ranks, torch.ones_like(factors),
            experts=self.group_size, max_tokens=most, capacity=most, named=experts,
        )  # fmt: skip
        packing = _Packing.of(counts, most)
        number = num_worst_tokens or int(counts.sum())
        packed = packing.pack(found)[0, :number]
        *rows, named, weights = parted(packed, *parts, ids, factors)
        local = experts // self.group_size
        named = named - self.rank * local
        is_there = torch.arange(len(packed), device=ids.device)[:, None] < counts.sum()
        is_mine = is_there & (named >= 0) & (named < local)
        named = torch.where(is_mine, named, -1)
        weights = torch.where(is_mine, weights, 0.0)
        numbers = [] if num_worst_tokens else _numbers(named, local, expert_alignment)
        sent = Sent(made, packing, number)
        received = tuple(rows) if isinstance(x, tuple) else rows[0]
        return received, named, weights, numbers, sent, EventOverlap()

    def _ranks_of(self, ids: _Tensor, experts: int) -> _Tensor:
        """Return the ranks of a token's experts, each once, with -1 in place of a repetition.

        What is no expert stays, so that moe_dispatch names it.
        """
        if experts < 1 or experts % self.group_size:
            raise ValueError(f"{experts} experts do not divide among {self.group_size} ranks")
        local = experts // self.group_size
        ranks = torch.where((ids >= 0) & (ids < experts), ids // local, ids)
        ordered = ranks.to(torch.int32).sort(1).values
        is_new = torch.ones_like(ordered, dtype=torch.bool)
        is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        return torch.where(is_new, ordered, -1).contiguous()

    def combine(
        self, x: torch.Tensor, handle: Sent, topk_weights: torch.Tensor | None = None, *,
        config: None = None, previous_event: EventOverlap | None = None,
        async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:  # fmt: skip
        """Sum each token's rows over the ranks that had it, and `topk_weights` too."""
        if len(x) != handle.rows:
            raise ValueError(f"combine: x has {len(x)} rows, the dispatch returned {handle.rows}")
        weights = None if topk_weights is None else self._sum(topk_weights, handle)
        return self._sum(x, handle), weights, EventOverlap()

    def _sum(self, rows: torch.Tensor, sent: Sent) -> torch.Tensor:
        missing = sent.packing.packed.shape[1] - len(rows)
        whole = torch.nn.functional.pad(rows, (0, 0, 0, max(missing, 0)))
        return moe_combine(self.world, sent.packing.unpack(whole[None]), sent.handle)


def _nothing() -> None:
    """Do nothing: the data is there when the stream needs it."""


def _quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows in FP8 and a scale for each 128 columns."""
    if x.shape[1] % _GROUP:
        raise ValueError(f"use_fp8: hidden {x.shape[1]} is not a multiple of {_GROUP}")
    grouped = x.float().unflatten(1, (x.shape[1] // _GROUP, _GROUP))  # a rank may have no rows
    scales = grouped.abs().amax(-1).clamp(min=_LEAST) / _LIMIT
    rows = (grouped / scales[..., None]).clamp(-_LIMIT, _LIMIT).to(torch.float8_e4m3fn)
    return rows.view(x.shape), scales


def _routes(
    parts: tuple[_Tensor, ...], ids: _Tensor | None, weights: _Tensor | None,
    experts: _Tensor | None,
) -> tuple[_Tensor, _Tensor, int]:  # fmt: skip
    """Return experts and weights of all tokens, in the dtypes that travel; and how many experts."""
    if ids is None or weights is None or experts is None:
        raise ValueError("dispatch: pass topk_idx, topk_weights and num_tokens_per_expert")
    shapes = [tuple(each.shape) for each in (*parts, ids, weights)]
    if any(len(s) != 2 or s[0] != shapes[0][0] for s in shapes) or ids.shape != weights.shape:
        raise ValueError(
            f"dispatch: x, topk_idx and topk_weights have shapes {shapes}; expected [tokens, "
            "hidden], for FP8 also scales [tokens, groups], then twice [tokens, k]"
        )
    return ids.to(torch.int32), weights.float(), experts.numel()


def _numbers(experts: torch.Tensor, local: int, multiple: int) -> list[int]:
    """Count each local expert's rows, on the host, rounded up."""
    counts = [int((experts == expert).sum()) for expert in range(local)]
    return [triton.cdiv(count, multiple) * multiple for count in counts]
