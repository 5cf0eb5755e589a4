"""Tensors whose memory is not what their shape says are refused, with what to pass instead."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import sundog

pytestmark = [
    pytest.mark.sim_only,
    pytest.mark.filterwarnings("ignore"),  # torch warns of some of these layouts
]


class Distributed(torch.Tensor):
    """As a DTensor, which needs a process group: it has `to_local`."""

    def to_local(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def _complex() -> torch.Tensor:
    return torch.arange(4, dtype=torch.float32) + 1j


def _fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4)


MAKERS: dict[str, Callable[[], torch.Tensor | None]] = {
    "a DTensor; pass x.to_local()": lambda: torch.ones(4).as_subclass(Distributed),
    "instance of AsyncCollectiveTensor, which wraps a tensor and has no memory": lambda: (
        AsyncCollectiveTensor(torch.ones(4))  # what functional collectives return
    ),
    "not dense (torch.sparse_coo); pass x.to_dense()": lambda: torch.eye(4).to_sparse(),
    "not dense (torch.sparse_csr); pass x.to_dense()": lambda: torch.eye(4).to_sparse_csr(),
    "a nested tensor; pass x.values()": lambda: torch.nested.nested_tensor(
        [torch.ones(2), torch.ones(3)]
    ),
    "conjugated when it is read; pass x.resolve_conj()": lambda: _complex().conj(),
    "negated when it is read; pass x.resolve_neg()": lambda: torch._neg_view(torch.ones(4)),
    "on the meta device, without data": lambda: torch.ones(4, device="meta"),
    "a fake tensor, without data": lambda: _fake(),  # the simulator read address 0 and crashed
    "a NoneType, expected a tensor": lambda: None,
    "not dense (torch._mkldnn); pass x.to_dense()": lambda: torch.eye(4).to_mkldnn(),
    "a functional tensor, without data": lambda: torch._to_functional_tensor(torch.ones(4)),
    "a tensor of zeros without memory; pass x.clone()": lambda: torch._efficientzerotensor(4),
    "of torch.int4, which torch can't copy": lambda: torch.empty(4, dtype=torch.int4),
}


@pytest.mark.parametrize("op", ["all_gather", "all_reduce", "all_to_all"])
@pytest.mark.parametrize("text", MAKERS)
def test_the_error_says_what_to_pass(op: str, text: str) -> None:
    def main(world: sundog.World) -> list[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x, found = MAKERS[text](), []
        for more in ({}, {"out": torch.zeros(4)}):
            with pytest.raises(ValueError, match=f"^{op}: x is") as caught:
                getattr(world, op)(x, **more)
            found.append(str(caught.value))
        return found

    (found,) = sundog.run(main, 1, "sim")
    for each in found:
        assert text in each


def test_a_negated_view_is_not_taken_for_its_tensor() -> None:
    """Its address, shape, strides and dtype are the same, so a repeated call must look further."""

    def main(world: sundog.World) -> None:
        x, out = torch.ones(4), torch.zeros(4 * world.size)
        for _ in range(3):
            world.all_gather(x, out)
        with pytest.raises(ValueError, match="resolve_neg"):
            world.all_gather(torch._neg_view(x), out)
        assert out.tolist() == [1.0] * 8

    sundog.run(main, 2, "sim")


def test_a_conjugated_view_is_not_taken_for_its_tensor() -> None:
    def main(world: sundog.World) -> None:
        x, out = torch.ones(4, dtype=torch.complex64), torch.zeros(8, dtype=torch.complex64)
        for _ in range(3):
            world.all_gather(x, out)
        with pytest.raises(ValueError, match="resolve_conj"):
            world.all_gather(x.conj(), out)
        assert out.tolist() == [1.0] * 8

    sundog.run(main, 2, "sim")


def test_the_matrices_of_a_fused_op() -> None:
    def main(world: sundog.World) -> None:
        a, b = torch.ones(16, 16), torch.ones(16, 16)
        with pytest.raises(ValueError, match=r"all_gather_matmul: b is not dense .*b\.to_dense"):
            world.all_gather_matmul(a, b.to_sparse())

    sundog.run(main, 1, "sim")
