"""Stand-ins for Triton-distributed's device language: `dl.*`, `language_extra`, `libshmem_device`.

`provide()` makes them importable under their names, with the host functions that allocate symmetric
tensors. A program's threads run as one here, so a value per thread (`tid`) is an array (see
ptx_lanes). What is not listed is refused by its name.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as _symm_mem
import triton
import triton.language as tl

from ..errors import CannotInterpret, SundogError
from . import cuda, shmem, shmem_teams
from .errands import deliver
from .patches import current
from .shmem import asm, stand_in, tensor

symm_mem: Any = _symm_mem


# dl.*


@stand_in
def wait(
    builder: Any, barrierPtrs: Any, numBarriers: Any, scope: Any, semantic: Any, waitValue: Any = 1
) -> Any:
    """Wait until each of these words has the value. All threads continue together."""
    deliver(builder)
    order = f"{_text(semantic)}.{_text(scope)}"
    for n in range(int(shmem.plain(numBarriers))):
        shmem.poll(tensor(barrierPtrs) + n, "eq", waitValue, order)
    builder.create_barrier()  # what was acquired reaches all threads
    return tensor(0, tl.int32)


def _text(value: Any) -> str:
    return str(tl.core._unwrap_if_constexpr(value))


@stand_in
def consume_token(builder: Any, value: Any, token: Any) -> Any:
    return value


@stand_in
def notify(
    builder: Any, ptr: Any, rank: Any, signal: Any = 1, sig_op: Any = "set",
    comm_scope: Any = "inter_node",
) -> None:  # fmt: skip
    """Signal a peer: thread 0 releases what all threads did before."""
    builder.create_barrier()
    op = "red.release.sys.global.add.u64" if _text(sig_op) == "add" else "st.release.sys.global.b64"
    remote = shmem.translated(builder, ptr, rank)
    text = f"{{.reg .pred %p; .reg .u32 %t; mov.u32 %t, %tid.x; setp.eq.u32 %p, %t, 0; @%p {op} [$1], $2; mov.u32 $0, 0;}}"  # noqa: E501
    asm(text, "=r,l,l", [remote, tensor(signal, tl.int64)])


class _Threads:
    """`with simt_exec_region() as (thread_idx, block_size)`."""

    def __enter__(self) -> tuple[Any, Any]:
        return tid(0), ntid(0)

    def __exit__(self, *error: object) -> None:
        pass


@stand_in
def simt_exec_region(builder: Any) -> _Threads:
    return _Threads()


# language_extra


@stand_in
def tid(builder: Any, axis: Any) -> Any:
    letter = "xyz"[int(shmem.plain(axis))]
    return asm(f"mov.u32 $0, %tid.{letter};", "=r", [])


@stand_in
def ntid(builder: Any, axis: Any) -> Any:
    return asm(f"mov.u32 $0, %ntid.{'xyz'[int(shmem.plain(axis))]};", "=r", [])


@stand_in
def syncthreads(builder: Any) -> None:
    builder.create_barrier()


def _word(pointer: Any) -> tuple[Any, int, str, Any]:
    pointer = tensor(pointer)
    element = pointer.dtype.element_ty
    bits = element.primitive_bitwidth
    return pointer, bits, {64: "l", 32: "r", 16: "h"}.get(bits, "r"), element


@stand_in
def ld(builder: Any, ptr: Any, scope: Any = "gpu", semantic: Any = "relaxed") -> Any:
    pointer, bits, letter, element = _word(ptr)
    kind = getattr(tl, f"int{bits}")
    order = f".{_text(semantic)}.{_text(scope)}" if _text(semantic) else ""
    found = asm(f"ld{order}.global.b{bits} $0, [$1];", f"={letter},l", [pointer], kind)
    return found if element == kind else tl.cast(found, element, bitcast=True)


@stand_in
def ld_acquire(builder: Any, ptr: Any, scope: Any = "gpu") -> Any:
    return ld(ptr, scope, "acquire")


@stand_in
def st(builder: Any, ptr: Any, val: Any, scope: Any = "gpu", semantic: Any = "relaxed") -> None:
    pointer, bits, letter, element = _word(ptr)
    value = tensor(val)
    kind = getattr(tl, f"int{bits}")
    if value.dtype != kind:
        value = tl.cast(tl.cast(value, element), kind, bitcast=True)
    order = f".{_text(semantic)}.{_text(scope)}" if _text(semantic) else ""
    text = f"st{order}.global.b{bits} [$1], $2; mov.u32 $0, 0;"
    asm(text, f"=r,l,{letter}", [pointer, value])


@stand_in
def atomic_add(
    builder: Any, ptr: Any, value: Any, scope: Any = "gpu", semantic: Any = "relaxed"
) -> Any:
    pointer, bits, letter, element = _word(ptr)
    sign = "s" if element.is_int_signed() and bits == 32 else "u"
    text = f"atom.{_text(semantic)}.{_text(scope)}.global.add.{sign}{bits} $0, [$1], $2;"
    return asm(text, f"={letter},l,{letter}", [pointer, tensor(value, element)], element)


@stand_in
def atomic_cas(
    builder: Any, ptr: Any, value: Any, target_value: Any, scope: Any = "gpu",
    semantic: Any = "relaxed",
) -> Any:  # fmt: skip
    pointer, bits, letter, element = _word(ptr)
    text = f"atom.{_text(semantic)}.{_text(scope)}.global.cas.b{bits} $0, [$1], $2, $3;"
    args = [pointer, tensor(value, element), tensor(target_value, element)]
    return asm(text, f"={letter},l,{letter},{letter}", args, element)


@stand_in
def red_release(builder: Any, barrier_ptr: Any, value: Any, scope: Any = "gpu") -> None:
    pointer, bits, letter, element = _word(barrier_ptr)
    text = f"red.release.{_text(scope)}.global.add.u{bits} [$1], $2; mov.u32 $0, 0;"
    asm(text, f"=r,l,{letter}", [pointer, tensor(value, element)])


@stand_in
def membar(builder: Any, scope: Any = "cta") -> None:
    asm(f"membar.{_text(scope)}; mov.u32 $0, 0;", "=r", [])


@stand_in
def fence(builder: Any, semantic: Any = "sc", scope: Any = "gpu") -> None:
    asm(f"fence.{_text(semantic)}.{_text(scope)}; mov.u32 $0, 0;", "=r", [])


@stand_in
def arrive_inc(builder: Any, barrier_ptr: Any, thread_idx: Any, value: Any, scope: Any) -> None:
    """Let thread 0 add to a word, after what all threads did."""
    builder.create_barrier()
    pointer, bits, letter, element = _word(barrier_ptr)
    add = f"red.release.{_text(scope)}.global.add.u{bits} [$1], $3"
    text = f"{{.reg .pred %p; setp.eq.s32 %p, $2, 0; @%p {add}; mov.u32 $0, 0;}}"
    asm(text, f"=r,l,r,{letter}", [pointer, tensor(thread_idx), tensor(value, element)])


@stand_in
def wait_eq(builder: Any, barrier_ptr: Any, thread_idx: Any, value: Any, scope: Any) -> None:
    wait(barrier_ptr, 1, scope, "acquire", value)


@stand_in
def num_warps(builder: Any) -> Any:
    return tensor(builder.machine.program.launch.num_warps, tl.int32)


@stand_in
def threads_per_warp(builder: Any) -> Any:
    return tensor(32, tl.int32)


# on the host


def create_tensor(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    initialise()
    size = (shape,) if isinstance(shape, int) else tuple(shape)
    x = symm_mem.empty(*size, dtype=dtype, device="cuda")
    symm_mem.rendezvous(x, dist.group.WORLD)
    return x


def create_tensors(shape: Any, dtype: torch.dtype, rank: int, local_size: int) -> list[Any]:
    x = create_tensor(shape, dtype)
    handle: Any = symm_mem.rendezvous(x, dist.group.WORLD)
    return [handle.get_buffer(r, x.shape, dtype) for r in range(handle.world_size)]


def initialise(*args: Any) -> None:
    rank = current()
    if rank is None:
        raise SundogError("sundog's stand-in for NVSHMEM works in simulated ranks: use --torch")
    shmem.initialise(rank)


def barrier_all(stream: Any = None) -> None:
    dist.barrier()


_SHMEM = shmem.NAMES | shmem_teams.NAMES
_LANGUAGE = {
    "wait": wait, "consume_token": consume_token, "notify": notify,
    "symm_at": shmem.NAMES["remote_ptr"], "rank": shmem.NAMES["my_pe"],
    "num_ranks": shmem.NAMES["n_pes"], "simt_exec_region": simt_exec_region,
}  # fmt: skip
_EXTRA = {
    "tid": tid, "ntid": ntid, "__syncthreads": syncthreads, "ld": ld, "ld_acquire": ld_acquire,
    "st": st, "atomic_add": atomic_add, "atomic_cas": atomic_cas, "red_release": red_release,
    "membar": membar, "fence": fence, "__fence": fence, "arrive_inc": arrive_inc,
    "wait_eq": wait_eq, "num_warps": num_warps, "threads_per_warp": threads_per_warp,
}  # fmt: skip
_HOST = {
    "nvshmem_create_tensor": create_tensor, "nvshmem_create_tensors": create_tensors,
    "nvshmem_free_tensor_sync": lambda tensor: None, "CUDA_CHECK": lambda error: None,
    "nvshmem_barrier_all_on_stream": barrier_all, "NVSHMEM_SIGNAL_DTYPE": torch.int64,
    "init_nvshmem_by_torch_process_group": initialise, "has_tma": lambda: False,
    "supports_p2p_native_atomic": lambda: True, "has_fullmesh_nvlink": lambda: True,
    "is_nvshmem_multimem_supported": lambda: True, "requires": lambda condition: lambda f: f,
    "launch_cooperative_grid_options": dict, "is_cuda": lambda: True, "is_hip": lambda: False,
    "get_device_property": lambda device=0: torch.cuda.get_device_properties(device),
    "support_launch_cooperative_grid": lambda: False, "cuda": SimpleNamespace(**cuda.DRIVER),
    "cudart": SimpleNamespace(**cuda.RUNTIME), "torch_stream_max_priority": lambda: 0,
    "get_device_max_shared_memory_size": lambda device: 227 << 10,
}  # fmt: skip


def _jit(*args: Any, **kwargs: Any) -> Any:
    return triton.jit(*args, **kwargs)


def _unknown(module: str) -> Any:
    """Give every name that is not simulated a value that raises an error when a kernel calls it."""

    def look(name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)

        def refused(*args: Any, **kwargs: Any) -> Any:
            raise CannotInterpret(f"{module}.{name} is not simulated: run this program on a GPU")

        refused.__triton_builtin__ = True  # type: ignore[attr-defined]
        return refused

    return look


def modules() -> dict[str, ModuleType]:
    """Return the modules by name, each with the names that it provides."""
    extra = {"language_extra": _EXTRA, "libshmem_device": _SHMEM}
    given: dict[str, dict[str, Any]] = {
        "triton_dist": {"jit": _jit},
        "triton_dist.language": _LANGUAGE,
        "triton_dist.language.extra": {},
        "triton_dist.language.extra.cuda": {},
        "triton_dist.language.extra.cuda.libnvshmem_device": _SHMEM,
        "triton_dist.utils": _HOST,
        "triton_dist.tools": {"aot_compile_spaces": lambda spaces: lambda function: function},
        "nvshmem": {}, "nvshmem.bindings": {}, "nvshmem.bindings.nvshmem": {}, "nvshmem.core": {},
    }  # fmt: skip
    for name, values in extra.items():
        given[f"triton_dist.language.extra.{name}"] = values
        given[f"triton_dist.language.extra.cuda.{name}"] = values
    found = {}
    for name, values in given.items():
        found[name] = module = ModuleType(name, "A stand-in of sundog's.")
        vars(module).update(values, __path__=[], __getattr__=_unknown(name))
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(found[parent], last, module)
    return found


def provide() -> None:
    """Make the stand-ins importable in this process."""
    sys.modules |= modules()
