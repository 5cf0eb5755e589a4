"""all_reduce_rms_norm on a GPU: a row's bits, whatever else is computed with it; 8 virtual ranks.

The simulator has the same tests for small rows (tests/fused/test_all_reduce_rms_norm.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sundog
from sundog.ops.load import algorithms, find
from sundog.tools._subject import expected_here

OP = "all_reduce_rms_norm"
MOST = 8192
COUNTS = (1, 2, 3, 8, 31, 32, 33, 257, 1024, 4095, MOST)
FP8: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"has_bias": True, "gemma": True},
    "token": {"quant": "token"},
    "group": {"quant": "group", "both": True},
    "tensor": {"quant": "tensor", "is_static": True},
}


def _rows(world: sundog.World, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(world.rank)
    x = world.empty((MOST, hidden), torch.bfloat16, "x").normal_()
    torch.manual_seed(99)
    residual = torch.randn(MOST, hidden, device=world.device).bfloat16()
    return x, residual, torch.randn(hidden, device=world.device).bfloat16()


@pytest.mark.gpu("virtual")
@pytest.mark.parametrize("hidden", [2880, 4096, 7168])
def test_a_row_depends_on_that_row_alone(hidden: int) -> None:
    """1 to 8,192 tokens, every algorithm that takes them, and rows one at a time."""

    def main(world: sundog.World) -> list[str]:
        x, residual, weight = _rows(world, hidden)
        whole = [each.clone() for each in world.all_reduce_rms_norm(x, residual, weight)]
        wrong = []
        for count in COUNTS:
            for algo, module in algorithms(OP).items():
                problem = module.Problem(count, hidden, torch.bfloat16, world.size)
                if module.valid(problem, module.default(problem, world.num_sms)) is not None:
                    continue
                found = world.all_reduce_rms_norm(x[:count], residual[:count], weight, algo=algo)
                if not all(torch.equal(a, b[:count]) for a, b in zip(found, whole, strict=True)):
                    wrong.append(f"{algo}, {count} tokens")
        for row in (0, 257, 4111, MOST - 1):  # each is a new place, which ranks compare
            one = slice(row, row + 1)
            for algo in algorithms(OP):
                found = world.all_reduce_rms_norm(x[one], residual[one], weight, algo=algo)
                if not all(torch.equal(a, b[one]) for a, b in zip(found, whole, strict=True)):
                    wrong.append(f"{algo}, row {row}")
        return wrong

    assert sundog.run(main, 8, "virtual", heap_size=1 << 30) == [[]] * 8


@pytest.mark.gpu("virtual")
@pytest.mark.parametrize("name", FP8)
def test_the_bits_are_those_of_the_reference(name: str) -> None:
    """Which the simulator has too: odd and usual sizes, every algorithm."""

    def main(world: sundog.World) -> list[str]:
        wrong = []
        for tokens, hidden in ((5, 301), (3, 2880), (2, 7168)):
            for algo, module in algorithms(OP).items():
                more = FP8[name]
                problem = module.Problem(tokens, hidden, torch.bfloat16, world.size, **more)
                with world.scope():
                    given = module.inputs(world, problem, 0, exact=False)
                    wanted = expected_here(world, module, problem, given)
                    out = world.empty(wanted.shape, torch.uint8, "out")
                    plan = module.plan(world, problem, module.default(problem, world.num_sms))
                    plan(*given, out)
                    if not torch.equal(out, wanted):
                        wrong.append(f"{algo}: {problem}")
                    world.barrier()
        return wrong

    assert sundog.run(main, 4, "virtual") == [[]] * 4


@pytest.mark.gpu("virtual")
def test_many_replays_of_a_graph_have_the_same_bits() -> None:
    def main(world: sundog.World) -> bool:
        x, residual, weight = _rows(world, 4096)
        x, residual = x[:64], residual[:64]
        first, _ = world.all_reduce_rms_norm(x, residual, weight)
        with world.capture() as graph:
            normed, _ = world.all_reduce_rms_norm(x, residual, weight)
        same = True
        for _ in range(1000):
            normed.zero_()
            graph.replay()
            same = same and torch.equal(normed, first)
        graph.free()
        return same

    assert sundog.run(main, 8, "virtual", heap_size=1 << 30) == [True] * 8


def test_every_algorithm_takes_a_few_rows() -> None:
    """So that the tests above compare all algorithms and not one."""
    for algo in algorithms(OP):
        module = find(f"{OP}.{algo}")
        problem = module.Problem(8, 7168, torch.bfloat16, 8)
        assert module.valid(problem, module.default(problem, 16)) is None, algo
