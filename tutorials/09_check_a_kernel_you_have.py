"""# 9. Check a kernel you already have

You have a kernel for torch symmetric memory, with a signal pad and some inline PTX, and a script
that `torchrun` starts on several GPUs. This tutorial checks it on a laptop, unchanged.

You learn

- how a program written for `torchrun` runs as ranks of the simulator;
- what a report on such a kernel says, and how to read it;
- how to repair the kernel and see that it is clean.

Nothing here needs a GPU. Run it with

```
python tutorials/09_check_a_kernel_you_have.py
```
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import triton
import triton.language as tl

import sundog
from sundog.compat.rank import as_rank
from sundog.testing import check

# %%
# ## The kernel
#
# It sums a tensor over all ranks. Every rank copies its tensor to its symmetric buffer, all ranks
# meet, and every rank reads all buffers. They meet on the *signal pad*: words that symmetric memory
# keeps beside each buffer. One thread per peer sets the peer's word by a compare-and-swap and takes
# its own. `%tid` says which thread it is.


@triton.jit
def thread():
    return tl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x;", "=r", [], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def swap_until(words, OLD: tl.constexpr, NEW: tl.constexpr, SEM: tl.constexpr):
    tl.inline_asm_elementwise(
        f"""
        {{
            .reg .b32 %seen;
            .reg .pred %other;
            again:
                atom.global.{SEM}.sys.cas.b32 %seen, [$1], {OLD}, {NEW};
                setp.ne.b32 %other, %seen, {OLD};
                @%other bra again;
            mov.b32 $0, %seen;
        }}
        """,
        "=r,l",
        [words],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def meet(pads, rank: tl.constexpr, size: tl.constexpr, SEND: tl.constexpr):
    peers = tl.arange(0, triton.next_power_of_2(size))
    table = pads.to(tl.pointer_type(tl.uint64))
    theirs = tl.load(table + peers, mask=peers < size).to(tl.pointer_type(tl.uint32)) + rank
    mine = tl.load(table + rank).to(tl.pointer_type(tl.uint32)) + peers
    if thread() < size:
        swap_until(theirs, 0, 1, SEND)  # tells each peer that this rank's buffer is full
        swap_until(mine, 1, 0, "acquire")  # what the peers wrote comes before what follows
    tl.debug_barrier()  # single threads have acquired: now all threads know


@triton.jit
def sum_kernel(
    table, pads, x, out, rank: tl.constexpr, size: tl.constexpr, BLOCK: tl.constexpr,
    SEND: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    buffers = table.to(tl.pointer_type(tl.uint64))
    mine = tl.load(buffers + rank).to(tl.pointer_type(tl.float32))
    tl.store(mine + at, tl.load(x + at))
    tl.debug_barrier()  # orders the tile of all threads before the signals of single threads
    meet(pads, rank, size, SEND)
    total = tl.zeros([BLOCK], tl.float32)
    for peer in range(size):
        total += tl.load(tl.load(buffers + peer).to(tl.pointer_type(tl.float32)) + at)
    tl.store(out + at, total)


# %%
# ## The program
#
# It is what `torchrun` would start. It knows nothing of sundog: it initialises NCCL, allocates
# symmetric memory on `cuda`, meets the others and launches. The kernel has a bug, which `SEND`
# chooses: the signal is *relaxed*.


def program(send: str = "relaxed") -> list[float]:
    dist.init_process_group("nccl")
    rank, n = dist.get_rank(), 64
    torch.cuda.set_device(rank)
    buffer = symm_mem.empty(n, dtype=torch.float32, device="cuda")
    handle = symm_mem.rendezvous(buffer, dist.group.WORLD)
    x, out = torch.full((n,), float(rank + 1), device="cuda"), torch.empty(n, device="cuda")
    sum_kernel[(1,)](
        handle.buffer_ptrs_dev, handle.signal_pad_ptrs_dev, x, out,
        rank=rank, size=handle.world_size, BLOCK=n, SEND=send,
    )  # fmt: skip
    return out.tolist()


def repaired() -> list[float]:
    return program("release")


def main(world: sundog.World) -> list[float]:
    """Run the repaired program as a rank on the CPU: what `torch=True` and `--torch` do."""
    return as_rank(repaired)(world)


# %%
# ## Run it
#
# With `torch=True` a rank of the simulator answers for torch.distributed, symmetric memory and
# torch.cuda: device `cuda` is the rank's CPU memory, and `nccl` is the simulated group. The result
# is right, as it nearly always is on a GPU too.


def run_it() -> None:
    assert sundog.run(program, 2, "sim", torch=True) == [[3.0] * 64] * 2


# %%
# ## Check it
#
# On the command line:
#
# ```
# sundog check tutorials/09_check_a_kernel_you_have.py:program --torch --world 2
# ```
#
# The exit status is 1, and `--json FILE` writes the findings for CI. From Python it is one call.


def report_of_the_bug() -> str:
    try:
        check(as_rank(program), world_size=2, schedules=4)
    except AssertionError as report:
        return str(report)
    raise SystemExit("the checker missed the bug")


# %%
# The report is at the end of this page. It names the store of the tile and the load of a peer, and
# then the signal between them: the line of the PTX instruction in *your* file, with the calls that
# led to it, the idiom (which instruction signals, which one waits) and the smallest repair. The
# rule is `relaxed release`: the compare-and-swap that signals publishes nothing, so the peer may
# see the word before the tile.
#
# ## Repair it
#
# One word: the send must be a `release`. `repaired` passes it, and the check is clean.

if __name__ == "__main__":
    run_it()
    report = report_of_the_bug()
    print(report)
    assert "relaxed release" in report
    assert "cas" in report
    print("\nRepaired:", check(as_rank(repaired), world_size=2, schedules=4))
    assert sundog.run(main, 4, "sim") == [[10.0] * 64] * 4
    print("4 ranks: the repaired program for torchrun gives torch's sum")

# %%
# ## What else works
#
# Kernels that use SHMEM device libraries, Triton-distributed's `dl.*` or Iris run too, with the
# stand-ins of `sundog.compat`. [Other people's kernels](../peers.md) shows what was found in ten
# public repositories. What is not simulated is refused, with the instruction or call and its line.
