"""FP8 products with scales: against torch in float64, in every scaling, and what is refused.

On the simulator: the kernels have not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sundog import World
from sundog.fused import _scaled
from sundog.ops.load import find

pytestmark = pytest.mark.sim_only

Run = Callable[..., list[Any]]
E4M3 = torch.float8_e4m3fn
OPS = ("scaled_all_gather_matmul", "scaled_matmul_reduce_scatter", "scaled_matmul_all_reduce")


def call(world: World, op: str, problem: Any, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The op as a user calls it."""
    more = {"shard": problem.shard} if "gather" in op else {}
    made: torch.Tensor = getattr(world, op)(*given, out_dtype=problem.out_dtype, **more)
    return made


@pytest.mark.parametrize("case", [0, 1, 2])
@pytest.mark.parametrize("op", OPS)
def test_a_call_gives_the_reference_bit_by_bit(run: Run, op: str, case: int) -> None:
    """Whole numbers and scales that are powers of two: nothing is rounded before the end."""
    module = find(op)

    def main(world: World) -> bool:
        problem = module.cases(world.size)[case]
        given = module.inputs(world, problem, 1)
        everyone = [list(each) for each in zip(*world.exchange(given), strict=True)]
        want = module.reference(problem, world.rank, *everyone)
        found = call(world, op, problem, given)
        return found.dtype == want.dtype and torch.equal(found.float(), want.float())

    assert run(main, 2) == [True, True]


@pytest.mark.parametrize("op", OPS[1:])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16])
def test_a_sum_in_a_wider_type(run: Run, op: str, out_dtype: torch.dtype) -> None:
    def main(world: World) -> list[float]:
        a, b = torch.full((4, 32), 8.0).to(E4M3), torch.full((8, 32), 2.0).to(E4M3).T
        found = getattr(world, op)(a, b, torch.ones(1), torch.ones(1), out_dtype=out_dtype)
        assert found.dtype == out_dtype
        return sorted(set(found.flatten().tolist()))

    assert run(main, 2) == [[1024.0]] * 2


@pytest.mark.parametrize("shard", ["k", "m"])
def test_one_row_with_scales_of_blocks(run: Run, shard: str) -> None:
    """As one token has. Their shapes resemble those of a tensor's scales, and of rows'."""
    size, n = 2, 2

    def main(world: World) -> bool:
        k = 128 * size if shard == "k" else 128
        whole = torch.ones(1 if shard == "k" else size, k).to(E4M3)
        b = torch.ones(n, k).to(E4M3).T
        of_a = torch.arange(1.0, whole.shape[0] * k // 128 + 1).view(-1, k // 128)
        of_b = torch.arange(3.0, 3 + k // 128).view(-1, 1)
        dim = 1 if shard == "k" else 0
        mine = [each.chunk(size, dim)[world.rank].contiguous() for each in (whole, of_a)]
        found = world.scaled_all_gather_matmul(mine[0], b, mine[1], of_b, shard=shard)
        return torch.equal(found.double(), _scaled.product(whole, b, of_a, of_b, "block"))

    assert run(main, size) == [True, True]


def test_scales_of_rows_as_torch_wants_them(run: Run) -> None:
    def main(world: World) -> bool:
        a, b = torch.ones(4, 32).to(E4M3), torch.ones(8, 32).to(E4M3).T
        of_a, of_b = torch.arange(1.0, 5), torch.arange(1.0, 9)
        found = [
            world.scaled_all_gather_matmul(a, b, x, y, shard="m")
            for x, y in ((of_a, of_b), (of_a[:, None], of_b[None, :]))
        ]
        return torch.equal(*found)

    assert run(main, 2) == [True, True]


def test_fp8_output_has_its_largest_number_in_the_place_of_more(run: Run) -> None:
    def main(world: World) -> list[float]:
        a = torch.full((2, 64), 8.0, device=world.device).to(E4M3)
        b = torch.full((16, 64), 1.0, device=world.device).to(E4M3).T
        scales = [torch.tensor([each], device=world.device) for each in (1.0, -1.0)]
        out = world.scaled_all_gather_matmul(a, b, *scales, shard="m", out_dtype=E4M3)
        return [out.float().min().item(), out.float().max().item()]

    assert run(main, 2) == [[-448.0, -448.0]] * 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"a_scale": None}, "torch.float8_e4m3fn takes two scales"),
        ({"a_scale": torch.ones(3)}, r"scales are \(3,\) of torch.float32 and"),
        ({"a_scale": torch.ones(1).double()}, "of torch.float64 and"),
        ({"b": torch.ones(64, 16)}, "b .64, 16. of torch.float32; expected"),
        ({"out_dtype": torch.int32}, "expected .4, 16. of torch.int32, which is bfloat16"),
    ],
    ids=str,
)
def test_bad_input_is_named(run: Run, change: dict[str, Any], sentence: str) -> None:
    def main(world: World) -> None:
        given: dict[str, Any] = {
            "a": torch.ones(4, 64).to(E4M3),
            "b": torch.ones(16, 64).to(E4M3).T,
            "a_scale": torch.ones(1),
            "b_scale": torch.ones(1),
            **change,
        }
        with pytest.raises(ValueError, match=sentence):
            world.scaled_matmul_all_reduce(**given)

    run(main, 2)


def test_blocks_of_a_rank_that_end_inside_a_block_are_refused(run: Run) -> None:
    def main(world: World) -> None:
        a, b = torch.ones(4, 64).to(E4M3), torch.ones(16, 128).to(E4M3).T
        scales = torch.ones(4, 1), torch.ones(1, 1)
        with pytest.raises(ValueError, match="64 columns of a rank's A are not a multiple of 128"):
            world.scaled_all_gather_matmul(a, b, *scales, algo="barrier")

    run(main, 2)


def test_scales_of_blocks_by_hand() -> None:
    """Two blocks along K, two along N: each product has the scales of its blocks."""
    a, b = torch.ones(1, 256), torch.ones(256, 130)
    a_scale, b_scale = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    found = _scaled.product(a, b, a_scale, b_scale, "block")
    assert found[0, [0, 127, 128, 129]].tolist() == [128 * 11, 128 * 11, 128 * 17, 128 * 17]


def test_what_is_no_tensor_is_named(run: Run) -> None:
    def main(world: World) -> None:
        b = torch.ones(32, 16, device=world.device).to(torch.float8_e4m3fn)
        one = torch.ones(1, device=world.device)
        for name in (
            "scaled_all_gather_matmul", "scaled_matmul_reduce_scatter", "scaled_matmul_all_reduce"
        ):  # fmt: skip
            for wrong in ([1], None):
                with pytest.raises(ValueError, match=f"{name}: a is a {type(wrong).__name__}"):
                    getattr(world, name)(wrong, b, one, one)

    run(main, 1)
