"""meta-pytorch/torchcomms: the kernels of `prims/triton`, over NVLink and over InfiniBand.

Those over InfiniBand call a device library (`torchcomms.triton.fb`) that is not public: the adapter
has its functions as their callers describe them, on a table of addresses in place of a window.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.utils._triton as with_triton
import triton
import triton.language as tl

from .case import Case, Repair, Substitution, checkout, device, group, start

PACKAGE = "comms/prims/triton/collectives"
_NVL = f"{PACKAGE}/nvl"
_BLOCKS, _TILE, _DEPTH = 2, (2, 16), 2


def _load() -> Any:
    if "nvl" not in sys.modules:
        package = ModuleType("nvl")
        package.__path__ = [os.path.join(checkout(), _NVL)]
        sys.modules["nvl"] = package
    return importlib.import_module("nvl.sendrecv")


def exchange(mode: int) -> None:
    """Send to the peer, receive from it, or both (mode 0); twice, so that slots are used again."""
    module = _load()
    rank = start()
    peer, n = 1 - rank, 400
    stride = 2 * _TILE[0] * _TILE[1]
    staging = stride * 4 * _DEPTH
    buffer: Any = symm_mem.empty(staging, dtype=torch.float32, device=device())
    handle: Any = symm_mem.rendezvous(buffer, group())
    remote, local = (handle.get_buffer(r, (staging,), torch.float32) for r in (peer, rank))
    signals = [handle.get_signal_pad(r).view(torch.int64) for r in (peer, rank)]
    steps = [torch.zeros(4, dtype=torch.int64) for _ in range(2)]
    dist.barrier()
    given = [torch.arange(n).float() + 1000 * rank + k for k in range(2)]
    found = [torch.zeros(n) for _ in given]
    for x, out in zip(given, found, strict=True):
        own = mode if mode == 0 else 1 + (rank != mode - 1)
        grid = (2 * _BLOCKS,) if own == 0 else (_BLOCKS,)
        module.triton_nvl_sendrecv_kernel[grid](
            x, out, remote, local, *signals, *steps, rank, peer, n, n, TILE_ROWS=_TILE[0],
            TILE_COLS=_TILE[1], BLOCK_STRIDE_ELEMS=stride, PIPELINE_DEPTH=_DEPTH,
            MAX_BLOCKS_PER_DIR=4, NUM_SEND_BLOCKS=_BLOCKS, MAX_TILES_PER_BLOCK_PER_SLOT=2,
            MODE=own,
        )  # fmt: skip
    for k, out in enumerate(found):
        if mode == 0 or rank != mode - 1:
            torch.testing.assert_close(out, torch.arange(n).float() + 1000 * peer + k)


# torchcomms.triton.fb; a window is a table: the peer's buffer and signals, own signals and counters


@triton.jit
def _word(win, place: tl.constexpr, index):
    return tl.load(win + place).to(tl.pointer_type(tl.int64)) + index


@triton.jit
def put_block(win, to, send_buf, start, peer, nbytes, signal, counter):
    tl.debug_barrier()  # the put reads what all threads of the block have stored
    source = tl.load(send_buf).to(tl.pointer_type(tl.int8)) + start
    target = tl.load(win).to(tl.pointer_type(tl.int8)) + to
    at = tl.arange(0, 256)
    for begin in range(0, nbytes, 256):
        mask = begin + at < nbytes
        tl.store(target + begin + at, tl.load(source + begin + at, mask=mask), mask=mask)
    tl.debug_barrier()  # orders the data before both releases
    tl.atomic_add(_word(win, 1, signal), 1, sem="release", scope="sys")  # the peer waits for it
    tl.atomic_add(_word(win, 3, counter), 1, sem="release", scope="sys")  # the source is free


@triton.jit
def signal_block(win, peer, signal, value):
    tl.debug_barrier()  # the release publishes what all threads of the block have done
    tl.atomic_add(_word(win, 1, signal), value, sem="release", scope="sys")


@triton.jit
def wait_signal_from(win, peer, signal, value):
    # what the peer did before it signalled comes before what follows
    while tl.atomic_add(_word(win, 2, signal), 0, sem="acquire", scope="sys") < value:
        pass
    tl.debug_barrier()


@triton.jit
def wait_counter(win, counter, value):
    # the put has read its source: it may be written again
    while tl.atomic_add(_word(win, 3, counter), 0, sem="acquire", scope="sys") < value:
        pass
    tl.debug_barrier()


@triton.jit
def fence(win):
    tl.debug_barrier()


def _load_ib(name: str) -> Any:
    library = ModuleType("torchcomms.triton.fb")
    vars(library).update(
        put_block=put_block, signal_block=signal_block, wait_signal_from=wait_signal_from,
        wait_counter=wait_counter, fence=fence, wait_signal_from_block=wait_signal_from,
        wait_counter_block=wait_counter, requires_torchcomms=lambda kernel: kernel,
    )  # fmt: skip
    package = ModuleType("ib")
    package.__path__ = [os.path.join(checkout(), _IB)]
    for stand_in in (library, package):
        sys.modules.setdefault(stand_in.__name__, stand_in)
    vars(with_triton)["has_triton"] = lambda: True  # the files ask whether there is a GPU
    return importlib.import_module(f"ib.{name}")


def _shared(numel: int, dtype: torch.dtype) -> Any:
    buffer = symm_mem.empty(numel, dtype=dtype, device=device()).zero_()
    return buffer, symm_mem.rendezvous(buffer, group())


def over_network(file: str, kernel: str) -> None:
    """Send to the peer and receive from it, twice, in sections that wrap around the slots."""
    module = _load_ib(file)
    rank = start()
    peer, n, section, depth, blocks = 1 - rank, 96, 16, 2, 2
    whole = "fireforget" in kernel
    slots = n if whole else section * depth
    (staging, own), (received, theirs) = (_shared(slots, torch.float32) for _ in range(2))
    (_, signals), (_, counters) = (_shared(16, torch.int64) for _ in range(2))
    win = torch.tensor([theirs.buffer_ptrs[peer], signals.buffer_ptrs[peer],
                        signals.buffer_ptrs[rank], counters.buffer_ptrs[rank]])  # fmt: skip
    send_buf, iteration = torch.tensor([own.buffer_ptrs[rank]]), torch.zeros(1, dtype=torch.int64)
    dist.barrier()
    for turn in range(2):
        x, out = torch.arange(n).float() + 1000 * rank + turn, torch.zeros(n)
        given: list[Any] = [win, send_buf]
        if kernel.startswith("sendrecv"):
            coordination = [torch.zeros(depth, dtype=torch.int32) for _ in range(2)]
            given += [x, out, staging, received]
            given += coordination if "cooperative" in kernel else []
            given += [iteration, n, section, 4, depth, blocks]
            given += [blocks] if "cooperative" in kernel else []
        else:
            staging.copy_(x[:slots])
            given += [staging, iteration, n, section, 4]
            given += [] if whole else [depth]
            given += [blocks] if "multiblock" in kernel else []
        grid = (2 * blocks,) if kernel.startswith("sendrecv") or "multiblock" in kernel else (2,)
        getattr(module, kernel)[grid](*given, peer_rank=peer, BLOCK_SIZE=16)
        wanted = torch.arange(n).float() + 1000 * peer + turn
        found = out if kernel.startswith("sendrecv") else received
        dist.barrier()
        torch.testing.assert_close(found, wanted[: found.numel()])
        iteration.fill_(turn + 1)
        dist.barrier()


_IB = "comms/prims/triton/collectives/ib"
_FILE = f"{_NVL}/sendrecv.py"
_CREDIT = Repair(
    "no order",
    "The receiver returns a slot by a relaxed store, and the sender polls it by a volatile load: "
    "neither orders the receiver's loads before the sender's next stores. Their documentation says "
    "that a CTA barrier is enough; the PTX model gives no order there.",
    (
        Substitution(_FILE, 285, "remote_store_i64_relaxed(", "fence_and_remote_store_i64("),
        Substitution(_FILE, 188, "wait_ge_volatile(", "wait_ge("),
    ),
)
CASES = [
    Case(f"triton_nvl_sendrecv_kernel, {name}", _FILE,
         functools.partial(exchange, mode), world=2, schedules=4, num_sms=16,
         repairs=(_CREDIT,), kernels=int(mode == 0))
    for mode, name in enumerate(("both ways", "rank 0 sends", "rank 1 sends"))
]  # fmt: skip
_LATE = Repair(
    "no order",
    "Send block 0 counts the iteration up when it has drained, while other blocks may not have "
    "read the old count: they would wait for signals of the next call. The file's description "
    "leaves the count to a kernel of its own, as the repair does.",
    (Substitution(f"{_IB}/sendrecv.py", 192, "if pid == 0:", "if pid < 0:"),),
)
_COUNT = Repair(
    "no CTA barrier before the release",
    "The fence between the tile and the counter is commented out: one thread counts, and does not "
    "publish what the other warps stored. The receiving side has the fence.",
    (Substitution(f"{_IB}/sendrecv_cooperative_kernel.py", 143, "# fence(win)", "fence(win)"),),
)
_REPAIRS = {"sendrecv_kernel": (_LATE,), "sendrecv_cooperative_kernel": (_COUNT,)}
CASES += [
    Case(kernel, f"{_IB}/{file}.py", functools.partial(over_network, file, kernel), world=2,
         schedules=4, num_sms=16, repairs=_REPAIRS.get(kernel, ()))
    for file, kernel in (
        ("put_bw_kernel", "put_bw_fireforget_kernel"), ("put_bw_kernel", "put_bw_pipelined_kernel"),
        ("put_bw_kernel", "put_bw_multiblock_kernel"), ("sendrecv", "sendrecv_kernel"),
        ("sendrecv_cooperative_kernel", "sendrecv_cooperative_kernel"),
    )
]  # fmt: skip
