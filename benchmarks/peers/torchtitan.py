"""pytorch/torchtitan: the peer copies of `minimal_async_ep`, ordered by barriers on the stream."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from .case import Case, alone, device, group, start

PACKAGE = "torchtitan/distributed/minimal_async_ep/kernels.py"
_EXPERTS, _LOCAL, _WIDTH, _TOKENS = 4, 2, 48, 6


def _meet(*shape: int, dtype: torch.dtype) -> tuple[Any, list[torch.Tensor], torch.Tensor]:
    x = symm_mem.empty(*shape, dtype=dtype, device=device()).zero_()
    handle: Any = symm_mem.rendezvous(x, group())
    peers = [handle.get_buffer(r, shape, dtype) for r in range(handle.world_size)]
    table = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device())
    handle.barrier()
    return handle, peers, table


def _counts(rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    chosen = torch.randint(0, _EXPERTS, (_TOKENS,), generator=generator)
    return torch.bincount(chosen, minlength=_EXPERTS).to(torch.int64)


def counts() -> None:
    module = alone(PACKAGE)
    rank, size = start(), dist.get_world_size()
    handle, peers, table = _meet(size, _EXPERTS, dtype=torch.int64)
    for _ in range(2):
        module.copy_full_counts_to_peers_kernel(
            _counts(rank), peers, rank=rank, ep_size=size, num_experts=_EXPERTS, dst_ptrs=table
        )
        handle.barrier()
        found = handle.get_buffer(rank, (size, _EXPERTS), torch.int64).clone()
        handle.barrier()  # nobody writes the next counts before these are read
        assert torch.equal(found, torch.stack([_counts(r) for r in range(size)]))


def _rows(block_m: int) -> None:
    """Dispatch rows to the experts' ranks and combine them again: both metadata kernels."""
    module = alone(PACKAGE)
    rank, size = start(), dist.get_world_size()
    every = torch.stack([_counts(r) for r in range(size)])  # [source rank, expert]
    capacity = _TOKENS * size
    handle, peers, table = _meet(capacity, _WIDTH, dtype=torch.float32)
    back, homes, home_table = _meet(_TOKENS, _WIDTH, dtype=torch.float32)
    x = torch.randn(_TOKENS, _WIDTH)
    starts = every.cumsum(1) - every  # rows of each rank are sorted by expert
    by_expert = every.view(size, size, _LOCAL)  # [source, owner, local expert]
    order = by_expert.permute(1, 2, 0).reshape(size, -1)  # [owner, (local expert, source)]
    placed = (order.cumsum(1) - order).view(size, _LOCAL, size)
    offsets = placed[:, :, rank].reshape(-1).contiguous()
    ranks, rows = module.fill_dispatch_metadata_kernel(
        every[rank].contiguous(),
        offsets,
        starts[rank].contiguous(),
        num_routed_tokens=_TOKENS,
        num_local_experts=_LOCAL,
        max_tokens_per_segment=_TOKENS,
    )
    module.copy_rows_to_peers_kernel(
        x, peers, ranks, rows, ep_size=size, num_rows=_TOKENS, num_cols=_WIDTH, dst_ptrs=table,
        block_m=block_m,
    )  # fmt: skip
    handle.barrier()
    segments, begins = order[rank].contiguous(), (order.cumsum(1) - order)[rank].contiguous()
    ranks, rows, valid = module.fill_combine_metadata_kernel(
        segments, begins, starts.contiguous(), ep_rank=rank, ep_size=size,
        num_local_experts=_LOCAL, receive_capacity=capacity, max_tokens_per_segment=_TOKENS,
    )  # fmt: skip
    received = handle.get_buffer(rank, (capacity, _WIDTH), torch.float32)
    module.copy_rows_to_peers_kernel(
        received, homes, ranks, rows, ep_size=size, num_rows=capacity, num_cols=_WIDTH,
        dst_ptrs=home_table, num_valid_rows=valid, block_m=block_m,
    )  # fmt: skip
    back.barrier()
    torch.testing.assert_close(homes[rank], x, rtol=0, atol=0)


def rows() -> None:
    _rows(1)


def blocks() -> None:
    _rows(4)


CASES = [
    Case("_copy_full_counts_to_peer_ptrs_kernel", PACKAGE, counts, world=2),
    Case("_fill_dispatch_metadata_kernel, _copy_rows_to_peer_ptrs_kernel and "
         "_fill_combine_metadata_kernel", PACKAGE, rows, world=2, kernels=3),
    Case("_copy_rows_to_peer_ptrs_kernel, four rows a program", PACKAGE, blocks, world=2,
         kernels=0),
]  # fmt: skip
