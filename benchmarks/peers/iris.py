"""ROCm/iris, July 2025: its unit tests' kernels and its examples, on sundog's stand-in for Iris."""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from sundog.compat import iris as stand_in

from .case import Case, Repair, Substitution, alone, start

PACKAGE = "examples"
_F32, _I32 = torch.float32, torch.int32


def _begin(path: str) -> tuple[Any, Any, int, int]:
    stand_in.provide()
    for name in ("examples", "examples.common", "examples.common.utils"):
        module = sys.modules.setdefault(name, ModuleType(name))
        module.read_realtime = None  # type: ignore[attr-defined]  # for timestamps, which are off
    module = alone(path)
    start()
    heap = stand_in.iris(1 << 20)
    return module, heap, heap.get_rank(), heap.get_num_ranks()


def _close(found: torch.Tensor, wanted: Any) -> None:
    torch.testing.assert_close(found, torch.as_tensor(wanted).to(found).expand(found.shape))


def unit(name: str, *args: Any) -> None:
    """Run the body of one of its unit tests."""
    module, *_ = _begin(f"tests/unittests/test_{name}.py")
    (test,) = (each for each in vars(module) if each.startswith("test_"))
    getattr(module, test)(*args)


def load() -> None:
    module, heap, rank, size = _begin("examples/00_load/load_bench.py")
    source, out = heap.arange(64, dtype=_F32), heap.zeros(64, dtype=_F32)
    source += rank
    heap.barrier()
    peer = (rank + 1) % size
    module.load_kernel[(2,)](source, out, 64, rank, peer, 32, heap.get_heap_bases())
    heap.barrier()
    _close(out, torch.arange(64) + peer)


def store() -> None:
    module, heap, rank, size = _begin("examples/01_store/store_bench.py")
    out = heap.zeros(64, dtype=_F32)
    heap.barrier()
    module.store_kernel[(2,)](out, 64, rank, (rank + 1) % size, 32, heap.get_heap_bases())
    heap.barrier()
    _close(out, torch.arange(64))


def all_load() -> None:
    module, heap, rank, size = _begin("examples/02_all_load/all_load_bench.py")
    source, out = heap.zeros(64, dtype=_F32), heap.zeros(64, dtype=_F32)
    source += rank + 1
    heap.barrier()
    module.all_read_kernel[(2,)](source, out, rank, 64, size, 32, heap.get_heap_bases())
    heap.barrier()
    _close(out, float(sum(range(1, size + 1))))


def all_store() -> None:
    module, heap, rank, size = _begin("examples/03_all_store/all_store_bench.py")
    out = heap.zeros(64 * size, dtype=_F32)
    heap.barrier()
    module.all_store_kernel[(2,)](out, rank, 64, size, 32, heap.get_heap_bases())
    heap.barrier()
    _close(out[:64], torch.arange(64))  # the other rank stored to the first part
    _close(out[64:], 0.0)


def _atomic(name: str) -> None:
    number = {"atomic_add": "04", "atomic_xchg": "05"}[name]
    module, heap, rank, size = _begin(f"examples/{number}_{name}/{name}_bench.py")
    source, out = heap.zeros(64, dtype=_I32), heap.zeros(64, dtype=_I32)
    heap.barrier()
    kernel = getattr(module, f"{name}_kernel")
    kernel[(2,)](source, out, 64, rank, (rank + 1) % size, 32, heap.get_heap_bases())
    heap.barrier()
    _close(source, 1)  # one rank added 1, or exchanged for 1
    _close(out, 0)  # what was there before, or nothing


def message(file: str) -> None:
    module, heap, rank, _ = _begin(f"examples/06_message_passing/{file}.py")
    n, block = 64, 32
    source, target = heap.zeros(n, dtype=_F32), heap.zeros(n, dtype=_F32)
    flags = heap.zeros((n // block,), dtype=_I32)
    source.copy_(torch.arange(n))
    heap.barrier()
    bases = heap.get_heap_bases()
    if rank == 0:
        module.producer_kernel[(2,)](source, target, flags, n, 0, 1, block, bases)
    else:
        module.consumer_kernel[(2,)](target, flags, n, 1, block, bases)
    heap.barrier()
    if rank == 1:
        _close(target, 2 * torch.arange(n))


def gemm(folder: str, file: str, kernel: str) -> None:
    module, heap, rank, size = _begin(f"examples/{folder}/{file}.py")
    m = n = k = 32
    scatter = "scatter" in kernel
    a = torch.randint(-3, 4, (m, k)).float()
    b = torch.randint(-3, 4, (k, n)).float()
    local = heap.zeros(m, n, dtype=_F32)
    whole = heap.zeros(m, n * size if scatter else n, dtype=_F32)
    done = heap.zeros(4, dtype=_I32)
    heap.barrier()
    getattr(module, kernel)[(1,)](
        a, b, local, whole, a, local, local, done, m, n, k, *a.stride(), *b.stride(),
        *local.stride(), *whole.stride(), 0, BLOCK_SIZE_M=32, BLOCK_SIZE_N=32, BLOCK_SIZE_K=32,
        GROUP_SIZE_M=1, NUM_SMS=1, STREAMK_TILES=0, NUM_XCDS=1, BIAS=False, EVEN_K=True,
        heap_bases=heap.get_heap_bases(), cur_rank=rank, world_size=size,
    )  # fmt: skip
    heap.barrier()
    parts = [torch.empty(m, n) for _ in range(size)]
    dist.all_gather(parts, a @ b)
    _close(whole, torch.cat(parts, 1) if scatter else sum(parts))


_PART = functools.partial
_ASSUMED = (
    "The kernel tells the compiler that pid_m > 0 and pid_n > 0, and both are 0 for the first "
    "tile: what the compiler makes of that is undefined."
)


_EARLY = (
    "The test fills its tensors and starts the kernel with no barrier between: a rank reads or "
    "changes a peer's tensor before the peer has filled it."
)
_ALL_WRITE = (
    "All ranks store to the same words of every rank. They store the same values, and that is a "
    "race too. The repair lets each rank store to the next one only."
)
_FLAG = (
    "The producer stores the flag to its own memory, and the consumer polls its own: it waits "
    "forever. Plain stores and loads of a flag order nothing either."
)
_SCOPE = (
    "The atomics have the default scope, gpu, and add to words of other GPUs: they are not atomic "
    "to those of the words' owner."
)
_TILE = (
    "One thread makes the release, and no CTA barrier stands between it and the tile that all "
    "threads store: it does not publish what the other warps stored."
)
_ATOMICS = "examples/08_gemm_atomics_all_reduce/gemm_atomics_all_reduce.py"
_SYS = (
    Substitution(_ATOMICS, 239, "mask=sub_mask)", 'mask=sub_mask, scope="sys")'),
    Substitution(_ATOMICS, 247, "mask=sub_mask,", 'mask=sub_mask, scope="sys",'),
)
_UNITS = {
    "load": 62, "store": 61, "get": 66, "put": 60, "atomic_add": 75, "atomic_cas": 59,
    "atomic_xchg": 58,
}  # fmt: skip


def _early(name: str) -> tuple[Repair, ...]:
    path = f"tests/unittests/test_{name}.py"
    line = "grid = lambda meta: (1,)"
    change = Substitution(path, _UNITS[name], line, f"shmem.barrier(); {line}")
    found = [Repair("no order", _EARLY, (change,))]
    if name in ("store", "put"):
        own, at = ("destination_rank", 29) if name == "store" else ("cur_rank", 28)
        following = f"({own} + 1) % num_ranks"
        once = Substitution(path, at, "range(num_ranks)", f"range({following}, {following} + 1)")
        found.append(Repair("no order", _ALL_WRITE, (once,)))
    return tuple(found)


def _flag(file: str, signal: int, *polls: int, reset: int) -> tuple[Repair, ...]:
    path, word = f"examples/06_message_passing/{file}.py", "flag + pid"
    far = "producer_rank, consumer_rank, heap_bases_ptr"
    order = 'scope="sys"'
    changes = [
        Substitution(path, signal, f"tl.store({word}, 1)",
                     f'tl.debug_barrier(); iris.atomic_xchg({word}, 1, {far}, sem="release", '
                     f"{order})"),
        *(Substitution(path, line, f"tl.load({word})",
                       f'tl.atomic_add({word}, 0, sem="acquire", {order})') for line in polls),
        Substitution(path, reset, f"tl.store({word}, 0)",
                     f'tl.atomic_xchg({word}, 0, sem="relaxed", {order})'),
    ]  # fmt: skip
    return (Repair("plain access to a flag", _FLAG, tuple(changes)),)


def _assumed(path: str, line: int, *more: Repair) -> tuple[Repair, ...]:
    changes = [
        Substitution(f"examples/{path}.py", line + n, f"pid_{axis} > 0", f"pid_{axis} >= 0")
        for n, axis in enumerate("mn")
    ]
    return (Repair("wrong assumption", _ASSUMED, tuple(changes)), *more)


def _unit(name: str, *args: Any, **how: Any) -> Case:
    path = f"tests/unittests/test_{name}.py"
    return Case(f"{name}_kernel (unit test)", path, _PART(unit, name, *args), world=2,
                repairs=_early(name), **how)  # fmt: skip


def _example(kernel: str, path: str, program: Any, **how: Any) -> Case:
    return Case(kernel, f"examples/{path}.py", program, world=2, **how)


CASES = [
    _unit("load", _F32, 32), _unit("store", _F32, 32), _unit("get", _F32, 32),
    _unit("put", _F32, 32), _unit("atomic_add", _I32, "acq_rel", "sys", 32),
    _unit("atomic_cas", _I32, "acq_rel", "sys"), _unit("atomic_xchg", _I32, "acq_rel", "sys"),
    _example("load_kernel", "00_load/load_bench", load),
    _example("store_kernel", "01_store/store_bench", store),
    _example("all_read_kernel", "02_all_load/all_load_bench", all_load),
    _example("all_store_kernel", "03_all_store/all_store_bench", all_store),
    _example("atomic_add_kernel", "04_atomic_add/atomic_add_bench", _PART(_atomic, "atomic_add")),
    _example("atomic_xchg_kernel", "05_atomic_xchg/atomic_xchg_bench",
             _PART(_atomic, "atomic_xchg")),
    _example("producer_kernel, consumer_kernel", "06_message_passing/message_passing_load_store",
             _PART(message, "message_passing_load_store"), kernels=2,
             repairs=_flag("message_passing_load_store", 49, 68, 70, reset=90)),
    _example("producer_kernel, consumer_kernel", "06_message_passing/message_passing_put",
             _PART(message, "message_passing_put"), kernels=2,
             repairs=_flag("message_passing_put", 40, 59, 61, reset=78)),
    _example("persistent_gemm_all_scatter", "07_gemm_all_scatter/gemm_all_scatter",
             _PART(gemm, "07_gemm_all_scatter", "gemm_all_scatter",
                   "persistent_gemm_all_scatter"),
             repairs=_assumed("07_gemm_all_scatter/gemm_all_scatter", 174)),
    _example("persistent_gemm_all_reduce", "08_gemm_atomics_all_reduce/gemm_atomics_all_reduce",
             _PART(gemm, "08_gemm_atomics_all_reduce", "gemm_atomics_all_reduce",
                   "persistent_gemm_all_reduce"),
             repairs=_assumed("08_gemm_atomics_all_reduce/gemm_atomics_all_reduce", 171,
                              Repair("scope does not reach", _SCOPE, _SYS))),
    _example("persistent_gemm_all_reduce", "09_gemm_one_shot_all_reduce/gemm_one_shot_all_reduce",
             _PART(gemm, "09_gemm_one_shot_all_reduce", "gemm_one_shot_all_reduce",
                   "persistent_gemm_all_reduce"),
             repairs=_assumed("09_gemm_one_shot_all_reduce/gemm_one_shot_all_reduce", 171,
                              Repair("no CTA barrier before the release", _TILE, (Substitution(
                                  "examples/09_gemm_one_shot_all_reduce/gemm_one_shot_all_reduce.py",
                                  205, "tl.store(C_, c, c_mask)",
                                  "tl.store(C_, c, c_mask); tl.debug_barrier()"),)))),
]  # fmt: skip
