"""The methods that serving engines call, by name and by result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import pytest
import torch
from torch import Tensor

import sundog
from sundog.torch.communicator import WorldCommunicator

Run = Callable[..., list]


@runtime_checkable
class DeviceCommunicator(Protocol):
    """Of vLLM's DeviceCommunicatorBase (22 August 2026): what a tensor-parallel model calls."""

    def all_reduce(self, input_: Tensor) -> Tensor: ...
    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor: ...
    def all_gatherv(self, input_: Any, dim: int = 0, sizes: Any = None) -> Any: ...
    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor: ...
    def reduce_scatterv(self, input_: Tensor, dim: int = -1, sizes: Any = None) -> Tensor: ...
    def gather(self, input_: Tensor, dst: int = 0, dim: int = -1) -> Tensor | None: ...
    def send(self, tensor: Tensor, dst: int | None = None) -> None: ...
    def recv(self, size: torch.Size, dtype: torch.dtype, src: int | None = None) -> Tensor: ...
    def broadcast(self, tensor: Tensor, src: int = 0) -> Tensor: ...
    def dispatch(
        self,
        hidden_states: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
    ) -> tuple[Any, ...]: ...
    def dispatch_router_logits(
        self,
        hidden_states: Tensor,
        router_logits: Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[Tensor] | None = None,
    ) -> tuple[Any, ...]: ...
    def combine(self, hidden_states: Tensor, is_sequence_parallel: bool = False) -> Tensor: ...
    def destroy(self) -> None: ...


@runtime_checkable
class CustomAllreduce(Protocol):
    """Of vLLM's CustomAllreduce and SGLang's ca_comm."""

    disabled: bool

    def should_custom_ar(self, inp: Tensor) -> bool: ...
    def custom_all_reduce(self, input: Tensor) -> Tensor | None: ...
    def fused_allreduce_rmsnorm(
        self, input_: Tensor, residual_inp_: Tensor, weight_: Tensor, eps: float
    ) -> tuple[Tensor, Tensor] | None: ...
    def capture(self) -> AbstractContextManager[None]: ...
    def register_graph_buffers(self) -> None: ...
    def close(self) -> None: ...


def test_every_method_gives_what_the_engine_expects(run: Run) -> None:
    def main(world: sundog.World) -> None:
        comm = WorldCommunicator(world, max_bytes=1 << 10)
        assert isinstance(comm, DeviceCommunicator)
        assert isinstance(comm, CustomAllreduce)
        rank, device = world.rank, world.device
        every = [torch.arange(8.0, device=device).view(2, 4) + r for r in range(2)]
        x = every[rank]
        assert torch.equal(comm.all_reduce(x), every[0] + every[1])
        for dim in (0, 1, -1):
            assert torch.equal(comm.all_gather(x, dim), torch.cat(every, dim))
            assert torch.equal(comm.reduce_scatter(x, dim), sum(every).chunk(2, dim)[rank])
        sizes = [1, 2]
        uneven = comm.all_gatherv(x[: sizes[rank]], 0, sizes)
        assert torch.equal(uneven, torch.cat([every[0][:1], every[1]]))
        whole = torch.cat([x, x])[:3]
        expected = (torch.cat([every[0]] * 2) + torch.cat([every[1]] * 2))[:3].split(sizes)[rank]
        assert torch.equal(comm.reduce_scatterv(whole, 0, sizes), expected)
        gathered = comm.gather(x, 1)
        assert (gathered is None) == (rank == 0)
        assert rank == 0 or torch.equal(gathered, torch.cat(every, -1))
        if rank == 0:
            comm.send(x)
        else:
            assert torch.equal(comm.recv(x.shape, x.dtype), every[0])
        assert torch.equal(comm.broadcast(x.clone(), 1), every[1])
        with comm.capture():
            assert torch.equal(comm.custom_all_reduce(x), sum(every))
        weight, residual = torch.arange(4.0, device=device), torch.ones(2, 4, device=device)
        normed, added = comm.fused_allreduce_rmsnorm(x, residual, weight, 1e-6)
        assert torch.equal(added, sum(every) + 1)
        expected = torch.nn.functional.rms_norm(added, (4,), weight, 1e-6)
        torch.testing.assert_close(normed, expected)
        comm.register_graph_buffers()
        with pytest.raises(ValueError, match="expected dim 0, 2 sizes and 2 rows"):
            comm.all_gatherv(x, 1, [2, 2])

    run(main, 2)


@pytest.mark.parametrize("sizes", [None, [2, 1, 0]], ids=["equal", "unequal"])
def test_a_layer_of_experts_equals_one_rank(run: Run, sizes: list[int] | None) -> None:
    """Expert e multiplies by e + 1, and is on rank e; of whole numbers, so to the bit."""

    def main(world: sundog.World) -> None:
        comm = WorldCommunicator(world)
        comm.token_sizes = sizes
        counts = sizes or [2, 2, 2]
        torch.manual_seed(0)
        every = torch.randint(-3, 4, (sum(counts), 4)).float().to(world.device)
        ids = torch.randint(0, 3, (sum(counts), 2), device="cpu").to(world.device)
        weights = torch.randint(1, 3, (sum(counts), 2)).float().to(world.device)
        mine = [each.split(counts)[world.rank] for each in (every, weights, ids)]
        more = [mine[0][:, :1] + 1]
        x, given, experts, extra = comm.dispatch(*mine, extra_tensors=more)
        assert torch.equal(x, every)
        assert torch.equal(extra[0], every[:, :1] + 1)
        rows, logits = comm.dispatch_router_logits(mine[0], mine[1])
        assert torch.equal(rows, every)
        assert torch.equal(logits, weights)
        share = (given * (experts == world.rank)).sum(1, keepdim=True) * (world.rank + 1)
        expected = (weights * (ids + 1)).sum(1, keepdim=True) * every
        assert torch.equal(comm.combine(share * x), expected.split(counts)[world.rank])

    run(main, 3)


def test_what_is_left_to_the_engine(run: Run) -> None:
    def main(world: sundog.World) -> None:
        comm = WorldCommunicator(world, max_bytes=64)
        assert comm.should_custom_ar(torch.ones(16, device=world.device))
        assert not comm.should_custom_ar(torch.ones(17, device=world.device))
        assert not comm.should_custom_ar(torch.ones(4, 4, device=world.device).t()[:2])
        complex_one = torch.ones(1, dtype=torch.complex64, device=world.device)
        assert not comm.should_custom_ar(complex_one)
        assert comm.custom_all_reduce(complex_one) is None
        whole = torch.ones(2, 4, dtype=torch.int32, device=world.device)
        assert comm.fused_allreduce_rmsnorm(whole, whole, whole[0], 1e-6) is None
        large = torch.ones(5, 4, device=world.device)
        assert comm.fused_allreduce_rmsnorm(large, large, large[0], 1e-6) is None

    run(main, 2)
    run(lambda world: _alone(world), 1)


def _alone(world: sundog.World) -> None:
    assert WorldCommunicator(world).disabled
