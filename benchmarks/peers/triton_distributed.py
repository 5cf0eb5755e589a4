"""ByteDance-Seed/Triton-distributed, NVIDIA's kernels: stand-ins for its device language are ours.

Puts with `nbi` complete late on purpose. Its all-gather GEMM is in `triton_distributed_copies`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from sundog.compat import triton_dist

from .case import Case, Repair, Substitution
from .triton_distributed_copies import COPIES
from .triton_distributed_start import begin, equal, ints, load, symmetric

PACKAGE = "python/triton_dist/kernels"
_NV = f"{PACKAGE}/nvidia"
_I64, _F32 = torch.int64, torch.float32


# p2p.py


def p2p_put() -> None:
    module, rank, size = begin("p2p")
    data, flags = symmetric(64), symmetric(4, dtype=_I64)
    x = ints(rank, 64)
    peer = (rank + 1) % size
    module.p2p_put_kernel[(2,)](x, data, peer, 256, flags, 3)
    module.p2p_wait_signal[(1,)](flags, rank, 3, 2)
    equal(data, ints((rank - 1) % size, 64))


def p2p_get(kernel: str) -> None:
    module, rank, _size = begin("p2p")
    data, flags = symmetric(64), symmetric(4, dtype=_I64)
    x = ints(7, 64)
    out = torch.zeros(64)
    if rank == 0:
        data.copy_(x)
        module.p2p_set_signal[(1,)](flags, 1, 5)
    else:
        module.p2p_wait_signal[(1,)](flags, 1, 5)
        if kernel == "p2p_copy_kernel":
            module.p2p_copy_kernel[(2,)](data, 0, 256)
            equal(data, x)
        else:
            module.p2p_copy_remote_to_local_kernel[(2,)](
                data, 0, out, 256, NUM_SMS=2, BLOCK_SIZE=128
            )
            equal(out, x)


# low_latency_allgather.py and allgather.py


def _gathered(rank: int, size: int, run: Any, once: bool = False) -> None:
    data, flags = symmetric(size, 32), symmetric(size, dtype=_I64)
    for call in range(1 if once else 2):
        data[rank].copy_(ints(10 * call + rank, 32))
        dist.barrier()  # every rank's part is there, and the last call's are read
        run(data, flags, call + 1)
        torch.cuda.synchronize()
        equal(data, torch.stack([ints(10 * call + r, 32) for r in range(size)]))
        dist.barrier()


def pull() -> None:
    module, rank, size = begin("low_latency_allgather")
    _gathered(rank, size, lambda data, flags, target: module._forward_pull_kernel[(size,)](
        data, 128, flags, size, rank, target))  # fmt: skip


def push_2d(nodes: int) -> None:
    module, rank, size = begin("low_latency_allgather")
    _gathered(rank, size, lambda data, flags, target: module._forward_push_2d_kernel[(size,)](
        data, 128, flags, nodes, size, rank, target))  # fmt: skip


def push_numa() -> None:
    module, rank, size = begin("low_latency_allgather")
    _gathered(
        rank,
        size,
        lambda data, flags, target: module._forward_push_numa_2d_kernel[(size,)](
            data, 128, flags, n_numa_nodes=2, world_size=size, rank=rank, signal_target=target
        ),
    )


def put_blocks() -> None:
    module, rank, size = begin("allgather")

    def run(data: Any, flags: Any, target: int) -> None:
        flags[rank] = target
        module.nvshmem_device_producer_all_gather_2d_put_block_kernel[(size // 2 - 1 + 1,)](
            data, flags, 32, 4, target, rank, size // 2, size,
            DISPATCH_BLOCK_NUM=size // 2 - 1, SEND_BLOCK_NUM=1,
        )  # fmt: skip
        p2p = load("p2p")
        p2p.p2p_wait_signal[(1,)](flags, rank, target, size)

    _gathered(rank, size, run, once=True)


def put_blocks_p2p() -> None:
    module, rank, size = begin("allgather")

    def run(data: Any, flags: Any, target: int) -> None:
        module.nvshmem_device_producer_p2p_put_block_kernel[(2,)](
            data, flags, 32, 4, target, rank, 1, size
        )
        flags[rank] = target
        load("p2p").p2p_wait_signal[(1,)](flags, rank, target, size)

    _gathered(rank, size, run, once=True)


# all to all


def all_to_all_2d() -> None:
    module, rank, size = begin("all_to_all_single_2d")
    width, rows = 8, 4
    out = symmetric(size, rows, width)
    splits = torch.full((size,), 2, dtype=torch.int32)
    x = ints(rank, 2 * size, width)
    module.all_to_all_single_2d_kernel[(2,)](
        x, out, splits, splits, rank, WORLD_SIZE=size, MAX_M=rows, HIDDEN_DIM=width, ELEMENT_SIZE=4
    )
    dist.barrier()
    for r in range(size):
        equal(out[r, :2], ints(r, 2 * size, width)[2 * rank : 2 * rank + 2])


def all_to_all(scaled: bool) -> None:
    module, rank, size = begin("low_latency_all_to_all")
    width, rows, experts = 8, 8, 2
    data, signal = symmetric(2, size, rows, width), symmetric(2 * size, dtype=_I64)
    scale, splits = symmetric(2, size, rows), symmetric(2, size * experts, dtype=torch.int32)
    mine = symmetric(size * experts, dtype=torch.int32)
    sums = torch.arange(0, size * experts + 1, dtype=torch.int32)
    for call in (1, 2):
        x = ints(rank + call, size * experts, width)
        module.all_to_all_kernel[(size,)](
            x, data, mine, splits, signal, sums, x[:, 0].contiguous(), scale, rank, call,
            WITH_SCALE=scaled, WORLD_SIZE=size, HIDDEN=width, MAX_M=rows, EXPERTS_PER_RANK=experts,
            NUM_TOT_EXPERTS=size * experts, ELEMENT_SIZE=4,
        )  # fmt: skip
        for r in range(size):
            part = ints(r + call, size * experts, width)[experts * rank : experts * (rank + 1)]
            equal(data[call % 2, r, :experts], part)


# all-reduce and reduce-scatter


def _total(size: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.stack([ints(seed + r, n) for r in range(size)]).sum(0)


def one_shot() -> None:
    module, rank, size = begin("allreduce")
    n = 64
    buffer, signal = symmetric(size * n), symmetric(2 * size, dtype=_I64)
    out, counter = torch.empty(n), torch.zeros(1, dtype=torch.int32)
    for call in range(2):
        module.allreduce_one_shot_push_intra_node_kernel[(2,)](
            ints(9 * call + rank, n), out, signal, buffer, counter, rank, world_size=size,
            n_elements=n, BLOCK_SIZE=32, use_cooperative=False,
        )  # fmt: skip
        equal(out, _total(size, n, 9 * call))


def two_shot() -> None:
    module, rank, size = begin("allreduce")
    n = 64
    buffer, signal = symmetric(2 * n), symmetric(2 * size, dtype=_I64)
    out, counter = torch.empty(n), torch.zeros(1, dtype=torch.int32)
    module.allreduce_two_shot_push_intra_node_kernel[(size,)](
        ints(rank, n), buffer, signal, counter, out, rank, world_size=size, n_elements=n,
        BLOCK_SIZE=16, use_cooperative=False,
    )  # fmt: skip
    equal(out, _total(size, n))


def double_tree() -> None:
    module, rank, size = begin("allreduce")
    n, chunk = 64, 32
    data, signal = symmetric(n), symmetric(2 * size, dtype=_I64)
    data.copy_(ints(rank, n))
    out = torch.empty(n)
    dist.barrier()
    tree = module.get_tree_parent_and_children(size, rank)
    module.allreduce_double_tree_intra_node_kernel[(n // chunk,)](
        data, signal, out, *tree, n, rank, size, CHUNK_SIZE=chunk, BLOCK_SIZE=16
    )
    dist.barrier()
    equal(out, _total(size, n))


def ring() -> None:
    module, rank, size = begin("reduce_scatter")
    n = 32
    data, flags = symmetric(size, n), symmetric(size, dtype=torch.int32)
    data.copy_(ints(rank, size, n))
    reduced, arrived = symmetric(size, n), symmetric(size, dtype=_I64)
    flags.fill_(1)
    dist.barrier()
    counter, out = torch.zeros(size, dtype=torch.int32), torch.empty(n)
    module.reduce_scatter_ring_push_1d_intra_node_kernel[(2,)](
        rank, size, data, flags, reduced, arrived, counter, out, n, BLOCK_SIZE=32,
        use_cooperative=False,
    )  # fmt: skip
    equal(out, sum(ints(r, size, n)[rank] for r in range(size)))


def inter_node() -> None:
    module, rank, size = begin("reduce_scatter")
    rows, width = 2, 8
    out = symmetric(size, rows * width)
    x = ints(rank, size, rows * width)
    for offset in range(size - 1):
        module.kernel_inter_node_p2p_for_same_local_rank[(1,)](offset, 1, rows, width, x, out)
    dist.barrier()
    for r in range(size):
        if r != rank:
            equal(out[r], ints(r, size, rows * width)[rank])


# barriers


def _meet(name: str, launch: Any) -> None:
    """Write, meet, read a peer's memory, meet, and write again."""
    module, rank, size = begin(name)
    data = symmetric(16)
    handle: Any = triton_dist.symm_mem.rendezvous(data, dist.group.WORLD)
    words = symmetric(4 * size + 4, dtype=torch.int32)
    theirs = handle.get_buffer((rank + 1) % size, (16,), _F32)
    for call in range(2):
        data.fill_(10 * call + rank)
        launch(module, rank, size, words, 4 * call + 1)
        equal(theirs, torch.full((16,), 10.0 * call + (rank + 1) % size))
        launch(module, rank, size, words, 4 * call + 3)


def cas_barrier() -> None:
    _meet(
        "common_ops",
        lambda m, rank, size, words, value: m.barrier_all_intra_node_atomic_cas_block[(1,)](
            rank, rank, size, words
        ),
    )


def store_barrier() -> None:
    _meet(
        "common_ops",
        lambda m, rank, size, words, value: m.barrier_all_intra_node_non_atomic_block[(1,)](
            rank, rank, size, words, value
        ),
    )


def grid_barrier() -> None:
    _meet(
        "common_ops",
        lambda m, rank, size, words, value: m.barrier_all_intra_node_non_atomic[(2,)](
            rank, rank, size, words, value, use_cooperative=False
        ),
    )


def gemm_barrier() -> None:
    _meet(
        "all_to_all_single_gemm",
        lambda m, rank, size, words, value: m.barrier_all_intra_node_kernel[(2,)](
            rank, rank, size, words[3 * size + 1 :], words, value, use_cooperative=False
        ),
    )


def _copied(name: str, grid: int) -> None:
    module, rank, size = begin("allgather_gemm")
    rows, width = 4, 16
    whole, sync = symmetric(size * rows, width), symmetric(3 * size, dtype=torch.int32)
    barrier = symmetric(size, dtype=torch.int32)
    x = ints(rank, rows, width)
    getattr(module, name)[(grid,)](
        rank, rank, size, x, whole, barrier, sync, rows, width, width, 1, width, 1, 1,
        BLOCK_SIZE_M=4, BLOCK_SIZE_N=16, use_cooperative=False,
    )  # fmt: skip
    assert barrier.tolist() == [int(r == rank) for r in range(size)]
    if name.startswith("copy"):
        equal(whole[rows * rank : rows * (rank + 1)], x)


def reset() -> None:
    module, rank, size = begin("allgather_group_gemm")
    out, flags = symmetric(64), symmetric(size, dtype=torch.int32)
    counter = torch.zeros(1, dtype=torch.int32)
    module._copy_and_reset_and_barrier_all_kernel[(2,)](
        ints(rank, 64), out, 64, flags, rank, NUM_RANKS=size, grid_barrier_ptr=counter,
        BLOCK_SIZE=32, use_cooperative=False,
    )  # fmt: skip
    equal(out, ints(rank, 64))


def _consumed(name: str) -> None:
    module, rank, size = begin("gemm_allreduce")
    rows, width = 4, 32
    data, out = symmetric(rows, width), symmetric(rows, width)
    flags = symmetric(8, dtype=torch.int32)
    data.copy_(ints(rank, rows, width))
    flags.fill_(1)
    result = torch.empty(rows, width)
    dist.barrier()
    getattr(module, name)[(1,)](
        data, out, result, flags, rows, N=width, BLOCK_SIZE_M=4, BLOCK_SIZE_N=32,
        BLOCK_SIZE_COMM=32, NUM_COMM_SMS=1,
    )  # fmt: skip
    dist.barrier()
    wanted = sum(ints(r, rows, width) for r in range(size))
    equal(result if "ring" not in name else out, wanted)


def _case(kernel: str, file: str, program: Any, **how: Any) -> Case:
    return Case(
        kernel, f"{_NV}/{file}.py", program, **{"world": 2, "schedules": 4, "num_sms": 16, **how}
    )


def _fence(line: int) -> Substitution:
    call = "libshmem_device.signal_op("
    return Substitution(f"{_NV}/allreduce.py", line, call, f"libshmem_device.fence(); {call}")


_SIGNALS = Repair(
    "relaxed release",
    "signal_op is a relaxed atomic: OpenSHMEM orders no earlier store before it without a fence, "
    "and the tile that the signal announces was stored by ordinary stores.",
    (_fence(297), _fence(324), _fence(329)),
)
_COUNTED = Repair(
    "no CTA barrier before the release",
    "All threads store the tile and thread 0 counts its program in, with no CTA barrier between: "
    "the release covers thread 0's part only. And the last program must acquire what the others "
    "released before it signals the peer.",
    (
        Substitution(f"{_NV}/reduce_scatter.py", 330, "# set flag", "__syncthreads()  # set flag"),
        Substitution(f"{_NV}/reduce_scatter.py", 332, 'semantic="release"', 'semantic="acq_rel"'),
    ),
)
_SPLITS = Repair(
    "no CTA barrier before the tile is read back",
    "Some threads store the splits, and the put reads them by all threads of the block.",
    (
        Substitution(
            f"{_NV}/low_latency_all_to_all.py",
            74,
            "cumsum_eds - cumsum_sts)",
            "cumsum_eds - cumsum_sts); tl.debug_barrier()",
        ),
    ),
)
_SCALED = Repair(
    "no order",
    "A put with signal orders its own data before the signal, not that of earlier puts: a rank "
    "that waits for the signal of the scales may read tokens and splits that have not arrived.",
    (
        Substitution(
            f"{_NV}/low_latency_all_to_all.py",
            94,
            "MAX_M + dst_off",
            "MAX_M + dst_off; libshmem_device.fence()",
        ),
    ),
)
_LL, _PART = "low_latency_allgather", functools.partial
CASES = [
    _case("p2p_put_kernel, p2p_wait_signal", "p2p", p2p_put, kernels=2),
    _case("p2p_copy_kernel, p2p_set_signal", "p2p", _PART(p2p_get, "p2p_copy_kernel"), kernels=2),
    _case("p2p_copy_remote_to_local_kernel", "p2p", _PART(p2p_get, "remote")),
    _case("_forward_pull_kernel", _LL, pull),
    _case("_forward_push_2d_kernel", _LL, _PART(push_2d, 2), world=4),
    _case("_forward_push_numa_2d_kernel", _LL, push_numa, world=4),
    _case("nvshmem_device_producer_all_gather_2d_put_block_kernel", "allgather", put_blocks,
          world=4),
    _case("nvshmem_device_producer_p2p_put_block_kernel", "allgather", put_blocks_p2p),
    _case("all_to_all_single_2d_kernel", "all_to_all_single_2d", all_to_all_2d),
    _case("all_to_all_kernel", "low_latency_all_to_all", _PART(all_to_all, False),
          repairs=(_SPLITS,)),
    _case("all_to_all_kernel, WITH_SCALE", "low_latency_all_to_all", _PART(all_to_all, True),
          kernels=0, repairs=(_SPLITS, _SCALED)),
    _case("allreduce_one_shot_push_intra_node_kernel", "allreduce", one_shot),
    _case("allreduce_two_shot_push_intra_node_kernel", "allreduce", two_shot),
    _case("allreduce_double_tree_intra_node_kernel", "allreduce", double_tree,
          repairs=(_SIGNALS,)),
    _case("reduce_scatter_ring_push_1d_intra_node_kernel", "reduce_scatter", ring,
          repairs=(_COUNTED,)),
    _case("kernel_inter_node_p2p_for_same_local_rank", "reduce_scatter", inter_node),
    _case("barrier_all_intra_node_atomic_cas_block", "common_ops", cas_barrier),
    _case("barrier_all_intra_node_non_atomic_block", "common_ops", store_barrier),
    _case("barrier_all_intra_node_non_atomic", "common_ops", grid_barrier),
    _case("barrier_all_intra_node_kernel", "all_to_all_single_gemm", gemm_barrier),
    _case("copy_and_barrier_all_intra_node_kernel", "allgather_gemm",
          _PART(_copied, "copy_and_barrier_all_intra_node_kernel", 1)),
    _case("barrier_all_intra_node_kernel", "allgather_gemm",
          _PART(_copied, "barrier_all_intra_node_kernel", 1)),
    _case("_copy_and_reset_and_barrier_all_kernel", "allgather_group_gemm", reset),
    _case("consumer_all_reduce_load_store_kernel", "gemm_allreduce",
          _PART(_consumed, "consumer_all_reduce_load_store_kernel")),
    _case("consumer_ring_all_reduce_load_store_kernel", "gemm_allreduce",
          _PART(_consumed, "consumer_ring_all_reduce_load_store_kernel")),
    *COPIES,
]  # fmt: skip
