"""Triton-distributed's all-gather GEMM: its host code copies and signals, its kernels wait.

Copies are made on a side stream, with cuStreamWriteValue32 after each and, in the ring, with
cuStreamWaitValue32 before it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
import triton

from .case import Case, Repair, Substitution
from .triton_distributed_start import begin, equal, ints

_FILE = "python/triton_dist/kernels/nvidia/allgather_gemm.py"
_TILE = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 16, "BLOCK_SIZE_K": 16, "GROUP_SIZE_M": 1}


def _inputs(module: Any, rank: int, size: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    ctx = module.create_ag_gemm_context(
        16 * size, 16 * size, 32, torch.bfloat16, rank, size, num_local_ranks=size
    )
    b = ints(100 + rank, 16, 32).bfloat16().T  # their kernels read it by columns
    return ctx, ints(rank, 16, 32).bfloat16(), b


def _check(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    parts = [torch.empty_like(a) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, a)
    equal(found, (torch.cat(parts).float() @ b.float()).bfloat16())


def persistent(method: str) -> None:
    """Call their function: it copies, signals and multiplies."""
    module, rank, size = begin("allgather_gemm")
    ctx, a, b = _inputs(module, rank, size)
    ctx.all_gather_method = getattr(module.AllGatherMethod, method)
    config = triton.Config({**_TILE, "EPILOGUE_SUBTILE": False})
    for _ in range(2):
        found = module.ag_gemm(a, b, ctx, config)
        torch.cuda.synchronize()
        _check(found, a, b)


def non_persistent() -> None:
    """Do what their function does below sm_90."""
    module, rank, size = begin("allgather_gemm")
    ctx, a, b = _inputs(module, rank, size)
    module.local_copy_and_barrier_all(
        rank, rank, size, a, ctx.symm_workspace, ctx.symm_comm_buf, ctx.symm_barrier, 16, 32,
        ctx.phase,
    )  # fmt: skip
    stream = ctx.ag_intranode_stream
    stream.wait_stream(torch.cuda.current_stream())
    module.cp_engine_producer_all_gather_intra_node(
        rank, size, a, ctx.symm_workspaces, ctx.symm_barriers, stream
    )
    found = torch.empty(16 * size, 16, dtype=torch.bfloat16, device="cuda")
    module.kernel_consumer_gemm_non_persistent[(size,)](
        ctx.symm_workspace, b, found, 16 * size, 16, 32, *ctx.symm_workspace.stride(), *b.stride(),
        *found.stride(), rank, size, ctx.symm_barrier, **_TILE,
    )  # fmt: skip
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    _check(found, a, b)


_PROXY = Repair(
    "no proxy fence",
    "The copy engine writes the data while the kernel runs, and the kernel reads it by TMA: the "
    "wait orders ordinary accesses (its PTX is a loop of ld.acquire), and the async proxy needs a "
    "fence after it.",
    (
        Substitution(
            _FILE,
            279,
            "a_desc = dl.consume_token(a_desc, token)",
            'tl.inline_asm_elementwise("fence.proxy.async.global; bar.sync 0; mov.b32 '
            '$0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1); '
            "a_desc = dl.consume_token(a_desc, token)",
        ),
    ),
)

_REACH = Repair(
    "scope does not reach",
    "In the ring another GPU writes the flag, and the kernel waits for it at scope gpu: that "
    "orders nothing between GPUs. (With full_mesh_pull the rank's own stream writes the flag.)",
    (Substitution(_FILE, 278, '"gpu", "acquire"', '"sys", "acquire"'),),
)


def _case(kernel: str, program: Any, **how: Any) -> Case:
    return Case(kernel, _FILE, program, world=2, schedules=4, **how)


COPIES = [
    _case("kernel_consumer_gemm_persistent, copies by full_mesh_pull",
          functools.partial(persistent, "All2All_IntraNode"), repairs=(_PROXY,)),
    _case("kernel_consumer_gemm_persistent, copies by ring_push_1d",
          functools.partial(persistent, "Ring1D_IntraNode"), kernels=0,
          repairs=(_REACH, _PROXY)),
    _case("kernel_consumer_gemm_non_persistent, copies by full_mesh_pull", non_persistent),
]  # fmt: skip
