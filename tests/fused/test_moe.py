"""MoE dispatch and combine: against torch, with every kind of routing, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import sundog
from sundog import World
from sundog.errors import WaitTimeout
from sundog.fused import moe_dispatch_low_latency, moe_dispatch_push
from sundog.fused.moe_combine import moe_combine
from sundog.fused.moe_dispatch import moe_dispatch

Run = Callable[..., list[Any]]
BF16 = torch.bfloat16


def routing(rank: int, tokens: int, experts: int, topk: int) -> tuple[torch.Tensor, ...]:
    """Tokens, experts and weights of a rank; some experts twice for a token, some are none."""
    torch.manual_seed(rank)
    x = torch.randint(-4, 5, (tokens, 40)).to(BF16)
    ids = torch.randint(-1, experts, (tokens, topk))
    return x, ids, torch.randint(1, 9, (tokens, topk)).float() / 8


def through_experts(tokens: torch.Tensor, first: int) -> torch.Tensor:
    """Expert e multiplies by e + 1; slots without a token hold anything."""
    factor = torch.arange(first, first + tokens.shape[0], device=tokens.device) + 1
    return (tokens * factor[:, None, None]).to(tokens.dtype)


def dense(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same layer on one rank."""
    out = torch.zeros(x.shape)
    for k in range(ids.shape[1]):
        expert = ids[:, k]
        part = (x.float() * (expert[:, None] + 1)).to(x.dtype).float()
        out += torch.where(expert[:, None] >= 0, weights[:, k, None] * part, 0)
    return out.to(x.dtype)


def layer(
    world: World, given: tuple[torch.Tensor, ...], experts: int, most: int, algo: str = "auto"
) -> Any:
    x, ids, weights = (each.to(world.device) for each in given)
    tokens, counts, handle = moe_dispatch(
        world, x, ids, weights, experts=experts, max_tokens=most, algo=algo
    )
    y = through_experts(torch.nan_to_num(tokens), world.rank * experts // world.size)
    return moe_combine(world, y, handle), counts


@pytest.mark.parametrize("algo", ["push", "low_latency"])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_a_layer_equals_a_dense_one(run: Run, size: int, algo: str) -> None:
    """Ranks have other numbers of tokens; the last one has none."""
    experts, counts = 2 * size, [3 - r % 2 if r < size - 1 or size == 1 else 0 for r in range(size)]

    def main(world: World) -> bool:
        given = routing(world.rank, counts[world.rank], experts, 2)
        found, _ = layer(world, given, experts, 3, algo)
        return torch.equal(found.cpu(), dense(*given))

    assert run(main, size) == [True] * size


def test_strided_inputs_go_through_a_copy_that_explain_names(
    run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    def main(world: World) -> bool:
        given = routing(world.rank, 3, 4, 2)
        x, ids, weights = (torch.stack([e, e], -1).to(world.device)[..., 1] for e in given)
        tokens, _, handle = moe_dispatch(world, x, ids, weights, experts=4, explain=True)
        y = through_experts(torch.nan_to_num(tokens), 2 * world.rank)
        strided = torch.stack([y, y], -1)[..., 0]
        return torch.equal(moe_combine(world, strided, handle, explain=True).cpu(), dense(*given))

    assert run(main, 2) == [True, True]
    text = capfd.readouterr().out
    for said in ("moe_dispatch: x of", "moe_dispatch: topk_ids of", "moe_combine: y of"):
        assert re.search(f"{said}.*goes through a copy", text), text


def test_all_tokens_to_one_rank_and_to_one_expert(run: Run) -> None:
    def main(world: World) -> tuple[bool, list[int]]:
        x, _, weights = routing(world.rank, 4, 4, 2)
        ids = torch.full((4, 2), 3)  # each token twice: two slots
        found, counts = layer(world, (x, ids, weights), 4, 4)
        return torch.equal(found.cpu(), dense(x, ids, weights)), counts.tolist()

    assert run(main, 2) == [(True, [[0, 0], [0, 0]]), (True, [[0, 0], [8, 8]])]


def test_the_sum_is_in_the_order_of_the_experts(run: Run) -> None:
    """2^24 + 1 is 2^24 in float32, so the order shows. Expert 1 comes twice: in its order there."""
    large = float(2**24)
    cases = [  # experts, weights, sum
        ([3, 0, 2], [1.0, large, -large], 1.0),
        ([0, 2, 3], [1.0, large, -large], 0.0),
        ([1, 0, 1], [large, 1.0, -large], 0.0),
        ([1, 3, 1], [large, 1.0, -large], 1.0),
        ([2, -1, 0], [1.0, 5.0, 2.0], 3.0),
    ]

    def main(world: World) -> list[float]:
        x = torch.ones(len(cases), 8, device=world.device)
        ids = torch.tensor([case[0] for case in cases], device=world.device)
        weights = torch.tensor([case[1] for case in cases], device=world.device)
        tokens, _, handle = moe_dispatch(world, x, ids, weights, experts=4)
        return moe_combine(world, tokens.clone(), handle)[:, 7].tolist()

    assert run(main, 2) == [[case[2] for case in cases]] * 2


def test_many_programs_and_parts_send_what_one_does(run: Run) -> None:
    """Tokens in parts, more than programs take at once; more entries than are looked at at once."""

    def main(world: World) -> list[bool]:
        torch.manual_seed(world.rank)
        x, ids = torch.randn(20, 40).to(BF16), torch.randint(-1, 6, (20, 2))
        given = [each.to(world.device) for each in (x, ids, torch.ones(20, 2))]
        found = []
        for module in (moe_dispatch_push, moe_dispatch_low_latency):
            for config in (module.Config(1, 1, 4), module.Config(3, 5, 4)):
                rows, counts, handle = moe_dispatch(
                    world,
                    *given,
                    experts=6,
                    algo=module.__name__.rpartition("h_")[2],
                    config=config,
                )
                sent = torch.arange(rows.shape[1] // 2, device=world.device) < counts[..., None]
                rows = torch.where(sent.view(3, -1, 1), rows, 0)
                found.append(
                    [rows.cpu(), counts.cpu(), torch.where(ids < 0, 0, handle.slots.cpu())]
                )
        return [all(map(torch.equal, found[0], each)) for each in found[1:]]

    assert run(main, 2) == [[True] * 3] * 2


@pytest.mark.parametrize("hidden", [256, 131])
def test_fp8_tokens_arrive_with_their_scales(run: Run, hidden: int) -> None:
    def main(world: World) -> bool:
        torch.manual_seed(world.rank)
        x = torch.randn(3, hidden).to(torch.float8_e4m3fn).to(world.device)
        scales = torch.rand(3, 2, device=world.device)
        ids = torch.tensor([[1], [0], [1]], device=world.device)
        weights = torch.ones(3, 1, device=world.device)
        (tokens, factors), counts, _ = moe_dispatch(
            world, x, ids, weights, experts=2, scales=scales
        )
        everyone = world.exchange([x.view(torch.uint8).cpu(), scales.cpu()])
        good = counts.tolist() == [[2, 2]] if world.rank else counts.tolist() == [[1, 1]]
        for source, (bits, wide) in enumerate(everyone):
            for slot, token in enumerate((0, 2) if world.rank else (1,)):
                at = source * 3 + slot
                good = good and torch.equal(tokens[0, at].view(torch.uint8).cpu(), bits[token])
                good = good and torch.equal(factors[0, at].cpu(), wide[token])
        return bool(good)

    assert run(main, 2) == [True, True]


def test_a_graph_takes_new_routing_at_every_replay(run: Run) -> None:
    def main(world: World) -> bool:
        given = [routing(10 * turn + world.rank, 4, 4, 2) for turn in range(3)]
        x, ids, weights = (each.to(world.device).clone() for each in given[0])

        def call() -> torch.Tensor:
            tokens, _, handle = moe_dispatch(world, x, ids, weights, experts=4)
            return moe_combine(world, tokens.clone(), handle)

        call()
        with world.capture() as graph:
            out = call()
        good = True
        for turn in (1, 2, 0):
            for mine, new in zip((x, ids, weights), given[turn], strict=True):
                mine.copy_(new)
            graph.replay()
            rows, experts, factors = given[turn]
            used = torch.where(experts >= 0, factors, 0).sum(1, keepdim=True)
            good = good and torch.equal(out.cpu(), (rows.float() * used).to(BF16))
        graph.free()
        return good

    assert run(main, 2) == [True, True]


@pytest.mark.parametrize("algo", ["push", "low_latency"])
@pytest.mark.parametrize(
    ("ids", "sentence"),
    [
        ([[3], [3], [3]], r"rank 0, .*tokens_of_expert\[3\] is 3, outside 0 to 2"),
        ([[0], [7], [1]], r"rank 0, .*expert_index\[0\] is 7, outside 0 to 3"),
    ],
)
def test_what_does_not_fit_is_raised_and_the_world_goes_on(
    run: Run, ids: list[list[int]], sentence: str, algo: str
) -> None:
    """Rank 0 alone has too many tokens of an expert, or one that is none, and it alone raises.

    The expert's rank gets what it has room for, and counts that.
    """
    sent = [ids.count([expert]) for expert in range(4)]

    def main(world: World) -> bool:
        x = torch.ones(3, 16, device=world.device)
        weights = torch.ones(3, 1, device=world.device)
        mine = torch.tensor(ids if world.rank == 0 else [[0], [1], [2]], device=world.device)
        with pytest.raises(WaitTimeout, match=sentence) if world.rank == 0 else nullcontext():
            _, found, _ = moe_dispatch(world, x, mine, weights, experts=4, capacity=2, algo=algo)
            world.synchronize()
        world.barrier()
        assert world.rank == 0 or found[:, 0].tolist() == [min(n, 2) for n in sent[2:]]
        some = torch.tensor([[2], [1], [0]], device=world.device)
        _, counts, _ = moe_dispatch(world, x, some, weights, experts=4, capacity=2, algo=algo)
        return bool(counts.tolist() == ([[1, 1], [1, 1]] if world.rank == 0 else [[1, 1], [0, 0]]))

    assert run(main, 2) == [True, True]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"topk_weights": torch.ones(3, 2)}, r"topk_weights \(3, 2\); expected"),
        ({"topk_ids": torch.ones(3, 1)}, "topk_ids are torch.float32, expected torch.int64"),
        ({"max_tokens": 2}, "x has 3 tokens, and max_tokens is 2"),
        ({"experts": 5}, "5 experts do not divide among 2 ranks"),
        ({"scales": torch.ones(2, 1)}, r"scales are \(2, 1\) of torch.float32, expected \[3"),
    ],
    ids=str,
)
def test_bad_input_is_named_before_anything_is_sent(
    run: Run, change: dict[str, Any], sentence: str
) -> None:
    def main(world: World) -> None:
        given: dict[str, Any] = {
            "x": torch.ones(3, 16),
            "topk_ids": torch.zeros(3, 1, dtype=torch.int64),
            "topk_weights": torch.ones(3, 1),
            "experts": 4,
            **change,
        }
        moved = {
            k: v.to(world.device) if isinstance(v, torch.Tensor) else v for k, v in given.items()
        }
        with pytest.raises(ValueError, match=sentence):
            moe_dispatch(world, **moved)

    run(main, 2)


def test_ranks_with_other_maxima_are_named(run: Run) -> None:
    def main(world: World) -> None:
        x, ids, weights = routing(0, 2, 4, 1)
        given = (each.to(world.device) for each in (x, ids, weights))
        moe_dispatch(world, *given, experts=4, max_tokens=2 + world.rank)

    with pytest.raises(sundog.errors.RankMismatch, match="max_tokens=3"):
        run(main, 2)
