"""The front with DeepEP's names: the same layer by either way, packed rows, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sundog
from sundog import World
from sundog.errors import WaitTimeout
from sundog.fused.deep_ep import Buffer

Run = Callable[..., list[Any]]
BF16 = torch.bfloat16
LOCAL, HIDDEN, TOPK, MOST = 2, 128, 2, 4


def _given(rank: int, size: int, hidden: int = HIDDEN) -> tuple[torch.Tensor, ...]:
    """Tokens, other numbers of them on each rank; no expert twice for a token, some are none."""
    torch.manual_seed(rank)
    tokens = MOST - rank % 2
    x = torch.randint(-4, 5, (tokens, hidden)).to(BF16)
    ids = torch.rand(tokens, LOCAL * size).topk(TOPK).indices
    ids[0, 1] = -1
    return x, ids, torch.randint(1, 9, (tokens, TOPK)).float() / 8


def _dense(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Expert e multiplies by e + 1."""
    parts = torch.where(ids >= 0, weights * (ids + 1), 0.0)
    return (x.float()[:, None] * parts[..., None]).sum(1).to(x.dtype)


def _low_latency(world: World, use_fp8: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x, ids, weights = (each.to(world.device) for each in _given(world.rank, world.size))
    buffer = Buffer(world, low_latency_mode=True)
    rows, count, handle, event, hook = buffer.low_latency_dispatch(
        x, ids, MOST, LOCAL * world.size, use_fp8=use_fp8, return_recv_hook=True
    )
    hook()
    event.current_stream_wait()
    if use_fp8:
        fp8, scales = rows
        rows = (fp8.float().view(*fp8.shape[:2], -1, 128) * scales[..., None]).flatten(2).to(BF16)
    factor = world.rank * LOCAL + torch.arange(LOCAL, device=x.device) + 1
    is_there = torch.arange(rows.shape[1], device=x.device) < count[:, None]
    y = torch.where(is_there[..., None], rows, 0) * factor[:, None, None]  # only what is there
    found, event, hook = buffer.low_latency_combine(y.to(BF16), ids, weights, handle)
    return found.cpu(), count.cpu()


@pytest.mark.parametrize("size", [1, 3])
def test_a_layer_by_low_latency(run: Run, size: int) -> None:
    """Rows of an expert lie side by side: what comes after `count` of them is set to zero."""
    every = [_given(rank, size) for rank in range(size)]
    for rank, (found, count) in enumerate(run(lambda world: _low_latency(world, False), size)):
        assert torch.equal(found, _dense(*every[rank]))
        experts = torch.arange(rank * LOCAL, (rank + 1) * LOCAL)
        wanted = sum((ids[..., None] == experts).sum((0, 1)) for _, ids, _ in every)
        assert count.tolist() == wanted.tolist()


def test_fp8_rows_come_with_their_scales(run: Run) -> None:
    for rank, (found, _) in enumerate(run(lambda world: _low_latency(world, True), 2)):
        wanted = _dense(*_given(rank, 2)).float()
        assert (found.float() - wanted).abs().max() <= wanted.abs().max() / 16  # 3 bits of mantissa


def test_a_rank_without_tokens_sends_no_fp8_rows(run: Run) -> None:
    def main(world: World) -> tuple[list[int], list[int]]:
        x = torch.ones(0 if world.rank else 2, 128, dtype=torch.bfloat16, device=world.device)
        ids = torch.tensor([[0, 3]], device=world.device).repeat(len(x), 1)
        buffer = Buffer(world)
        rows, counts, handle, *_ = buffer.low_latency_dispatch(x, ids, 4, 4)
        y = torch.ones(rows[0].shape, device=world.device)
        weights = torch.ones(ids.shape, device=world.device)
        found = buffer.low_latency_combine(y, ids, weights, handle)[0]
        return counts.tolist(), list(found.shape)

    assert run(main, 2) == [([2, 0], [2, 128]), ([0, 2], [0, 128])]


def _prefill(
    world: World, worst: int, hidden: int
) -> tuple[torch.Tensor, torch.Tensor, list[int], int]:
    """Each rank weighs and adds its experts' outputs; combine adds the ranks'."""
    x, ids, weights = (each.to(world.device) for each in _given(world.rank, world.size, hidden))
    buffer = Buffer(world)
    names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert")
    *layout, inside, _ = buffer.get_dispatch_layout(ids, LOCAL * world.size)
    rows, experts, factors, numbers, handle, _ = buffer.dispatch(
        x, topk_idx=ids, topk_weights=weights, is_token_in_rank=inside, num_worst_tokens=worst,
        max_tokens=MOST, **dict(zip(names, layout, strict=True)),
    )  # fmt: skip
    known = torch.where(experts >= 0, factors * (experts + world.rank * LOCAL + 1), 0.0)
    y = torch.where((experts >= 0).any(1)[:, None], rows.float(), 0.0) * known.sum(1, keepdim=True)
    found, back, _ = buffer.combine(y, handle, factors)
    assert back is not None
    wanted = torch.where(ids >= 0, weights, 0.0)
    return found.cpu(), (back - wanted).abs().max().cpu(), numbers, len(rows)


@pytest.mark.parametrize(("worst", "hidden"), [(0, HIDDEN), (7, 37)])
def test_a_layer_by_dispatch_and_combine(run: Run, worst: int, hidden: int) -> None:
    """A token goes to a rank once; with num_worst_tokens the host reads nothing."""
    every = [_given(rank, 2, hidden) for rank in range(2)]
    for rank, (found, off, numbers, rows) in enumerate(
        run(lambda w: _prefill(w, worst, hidden), 2)
    ):
        assert torch.equal(found.to(BF16), _dense(*every[rank]))
        assert off == 0
        here = [(ids >= 0) & (ids // LOCAL == rank) for _, ids, _ in every]
        sent = sum(int(each.any(1).sum()) for each in here)
        assert rows == (worst or sent)
        experts = [rank * LOCAL + e for e in range(LOCAL)]
        wanted = [sum(int((ids == e).sum()) for _, ids, _ in every) for e in experts]
        assert numbers == ([] if worst else wanted)


def test_the_layout_says_where_tokens_go() -> None:
    ids = torch.tensor([[0, 1], [1, 3], [-1, 2]])

    def main(world: World) -> list[Any]:
        ranks, _, experts, inside, _ = Buffer(world).get_dispatch_layout(ids, 4)
        return [ranks.tolist(), experts.tolist(), inside.tolist()]

    wanted = [[2, 2], [1, 2, 1, 1], [[True, False], [True, True], [False, True]]]
    assert sundog.run(main, 2, "sim") == [wanted] * 2


def test_calls_as_engines_make_them(run: Run) -> None:
    """With configs and events, FP8 rows as a pair, and numbers rounded up."""

    def main(world: World) -> list[Any]:
        buffer = Buffer(world)
        x, ids, weights = (each.to(world.device) for each in _given(world.rank, 2))
        order = {"previous_event": Buffer.capture(), "async_finish": True}
        ranks, rdma, experts, inside, _ = buffer.get_dispatch_layout(
            ids, 2 * LOCAL, allocate_on_comm_stream=True, **order
        )
        scales = torch.rand(len(x), 3, device=world.device)
        rows, _, _, numbers, handle, event = buffer.dispatch(
            (x.to(torch.float8_e4m3fn), scales), handle=None, num_tokens_per_rank=ranks,
            num_tokens_per_rdma_rank=rdma, is_token_in_rank=inside, num_tokens_per_expert=experts,
            topk_idx=ids, topk_weights=weights, expert_alignment=8,
            config=Buffer.get_dispatch_config(2), max_tokens=MOST, **order,
        )  # fmt: skip
        event.current_stream_wait()
        scaled = (rows[0].float() * rows[1].sum(1, keepdim=True)).to(BF16)
        found, *_ = buffer.combine(
            scaled, handle, topk_weights=None, config=Buffer.get_combine_config(2), **order
        )
        wanted = (x.float() * scales.sum(1, keepdim=True)).to(BF16) * inside.sum(1, keepdim=True)
        with pytest.raises(TypeError, match="num_worst"):
            buffer.dispatch(x, topk_idx=ids, topk_weights=weights, num_worst=3)  # type: ignore[call-arg]
        return [numbers, torch.equal(found, wanted)]

    assert run(main, 2) == [[[8, 8], True]] * 2


def test_an_expert_that_does_not_exist_is_named(run: Run) -> None:
    def main(world: World) -> str:
        x = torch.ones(2, 4, device=world.device)
        ids = torch.tensor([[0, 9], [1, 2]], device=world.device)
        buffer = Buffer(world)
        *_, experts, _, _ = buffer.get_dispatch_layout(ids, 4)

        def call() -> None:
            buffer.dispatch(x, topk_idx=ids, topk_weights=ids, num_tokens_per_expert=experts)
            world.synchronize()

        with pytest.raises(WaitTimeout) as caught:
            call()
        world.barrier()
        return str(caught.value)

    for told in run(main, 2):
        assert "moe_dispatch.expert_index[0] is 9, outside 0 to 3: " in told


def test_what_is_refused() -> None:
    def main(world: World) -> list[str]:
        told = []
        x, ids, weights = _given(0, 1)
        buffer = Buffer(world)
        given: dict[str, Any] = {"topk_idx": ids, "topk_weights": weights}
        given["num_tokens_per_expert"] = torch.zeros(LOCAL)
        *_, handle, _ = buffer.dispatch(x, **given)
        *_, sent, _, _ = buffer.low_latency_dispatch(x, ids, MOST, LOCAL, use_fp8=False)
        for call in (
            lambda: Buffer("nccl"),  # type: ignore[arg-type]
            lambda: buffer.combine(x[:1], handle),
            lambda: buffer.low_latency_combine(x, ids[:, :1], weights, sent),
            lambda: buffer.low_latency_dispatch(x[:, :40], ids, MOST, LOCAL),
            lambda: buffer.dispatch(x, **given, handle=handle),
            lambda: buffer.dispatch(x, **{**given, "topk_weights": weights[:, :1]}),
            lambda: buffer.dispatch(x, topk_idx=ids, topk_weights=weights),
            lambda: buffer.get_dispatch_layout(ids, 0),
        ):
            with pytest.raises(
                ValueError, match=r"Buffer|combine|use_fp8|dispatch|0 experts do not"
            ) as caught:
                call()
            told.append(str(caught.value))
        return told

    (told,) = sundog.run(main, 1, "sim")
    assert told[0] == "Buffer: str is not a world; pass sundog.init(group=group)"
    assert told[1] == "combine: x has 1 rows, the dispatch returned 4"
    assert "topk_idx is (4, 1)" in told[2]
    assert told[3] == "use_fp8: hidden 40 is not a multiple of 128"
    assert told[4] == "dispatch: a cached handle is not taken; pass topk_idx again"
