"""All-gather and all-reduce with a byte an element on the wire: their error, and their bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sundog import World
from sundog.collectives import _quantized, quantized_all_gather, quantized_all_reduce
from sundog.collectives._quantized import Config

Run = Callable[..., list[Any]]
WIRES = ["int8", "fp8"]


def tensor_of(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Elements of many sizes: groups differ by powers of two."""
    torch.manual_seed(rank)
    return (torch.randn(numel) * 2.0 ** (torch.arange(numel) // 128 - 4)).to(dtype)


def bound(x: torch.Tensor, wire: str) -> torch.Tensor:
    """How far an element may be off: what _quantized.py says, and a rounding of float32."""
    groups = torch.nn.functional.pad(x, (0, -len(x) % 128)).view(-1, 128)
    largest = groups.abs().amax(1, keepdim=True).expand_as(groups).flatten()[: len(x)]
    if wire == "int8":
        return largest / 254 + 1e-6 * largest
    return torch.maximum(x.abs() / 16, largest / 448 / 2**10) + 1e-6 * largest


# What a result's own dtype rounds.
ROUNDINGS = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", ROUNDINGS, ids=str)
def test_gathered_elements_are_off_by_no_more_than_stated(
    run: Run, wire: str, dtype: torch.dtype
) -> None:
    def main(world: World) -> bool:
        mine = tensor_of(world.rank, 700, dtype).to(world.device)
        found = world.quantized_all_gather(mine, wire=wire).cpu().view(world.size, -1)
        for rank, row in enumerate(found):
            exact = tensor_of(rank, 700, dtype).float()
            most = bound(exact, wire) + exact.abs() * ROUNDINGS[dtype]
            if not ((row.float() - exact).abs() <= most).all():
                return False
        return not torch.equal(found[0], tensor_of(0, 700, dtype))

    assert run(main, 2) == [True, True]


@pytest.mark.parametrize("wire", WIRES)
def test_sums_are_off_by_no_more_than_stated(run: Run, wire: str) -> None:
    """Each rank's rounding and that of the sum. All ranks have the same bits."""

    def main(world: World) -> torch.Tensor:
        mine = tensor_of(world.rank, 1000).to(world.device)
        return world.quantized_all_reduce(mine, wire=wire).cpu()

    found = run(main, 3)
    parts = [tensor_of(rank, 1000) for rank in range(3)]
    exact = torch.stack(parts).sum(0)
    each = torch.stack([bound(part, wire) for part in parts]).sum(0)
    assert ((found[0] - exact).abs() <= each + bound(exact.abs() + each, wire)).all()
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("module", [quantized_all_gather, quantized_all_reduce])
@pytest.mark.parametrize("wire", [torch.int8, torch.float8_e4m3fn])
def test_bits_do_not_depend_on_the_config(run: Run, module: Any, wire: torch.dtype) -> None:
    """Two calls with other data for each config, nothing between them: what peers still read is
    not overwritten."""
    name, numel = module.OP, 700

    def main(world: World) -> bool:
        good = True
        for config in (Config(1, 3, 1), Config(2, 2, 1), Config(4, 1, 4)):
            parts = [
                [tensor_of(5 * turn + rank, numel, torch.bfloat16) for rank in range(world.size)]
                for turn in range(3)
            ]
            given = [each[world.rank].to(world.device) for each in parts]
            op = getattr(world, name)
            found = [op(x, wire=wire, config=config) for x in given]
            problem = module.Problem(numel, torch.bfloat16, world.size, wire=wire)
            for out, each in zip(found, parts, strict=True):
                good = good and torch.equal(out.cpu(), module.reference(problem, 0, each))
        return good

    assert run(main, 2) == [True, True]


@pytest.mark.parametrize("wire", WIRES)
def test_only_groups_with_a_nan_or_infinity_are_not_finite(run: Run, wire: str) -> None:
    def main(world: World) -> list[list[bool]]:
        x = torch.ones(4 * 128, device=world.device)
        x[128 + 3], x[256 + 5], x[384:] = float("nan"), float("inf"), 0.0
        gathered = world.quantized_all_gather(x, wire=wire).view(world.size, 4, 128)
        added = world.quantized_all_reduce(x, out=x, wire=wire).view(1, 4, 128)
        found = torch.cat([gathered, added]).cpu()
        assert (found[:, 3] == 0).all()
        assert torch.equal(found[:, 0, 0], torch.tensor([1.0, 1.0, 2.0]))
        return [[bool(group.isfinite().any()) for group in row] for row in found]

    assert run(main, 2) == [[[True, False, False, True]] * 3] * 2


def test_bad_input_is_named(run: Run) -> None:
    def main(world: World) -> None:
        x = torch.ones(8, device=world.device)
        with pytest.raises(ValueError, match=r"wire 'int4': expected 'int8', 'fp8'"):
            world.quantized_all_gather(x, wire="int4")
        with pytest.raises(ValueError, match=r"torch.int32: expected one of bfloat16"):
            world.quantized_all_reduce(x.int())
        with pytest.raises(ValueError, match="op 'max': expected sum or avg"):
            world.quantized_all_reduce(x, "max")
        assert world.quantized_all_gather(x[:0]).numel() == 0

    run(main, 2)


def test_bytes_and_scales_of_a_group() -> None:
    """By hand: the largest becomes the limit; a tie goes to the even number."""
    x = torch.zeros(130)
    x[:3], x[128] = torch.tensor([127.0, -2.5, 3.5]), 5.0
    bits, scales = _quantized.take(x, torch.int8)
    assert bits[0, :3].tolist() == [127, -2, 4]
    assert bits[1, 0].item() == 127
    assert scales.tolist() == [1.0, torch.tensor(5.0).div(127).item()]
