"""CUDA for a rank whose device is CPU memory: streams, events, and the answers of torch.cuda.

torch.cuda and cuda-python's driver module are replaced while a rank runs.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace, TracebackType
from typing import Any

import torch
import triton.language as tl

from ..errors import CannotInterpret, SundogError
from . import stream_kernels as kernels
from .devices import INSIDE, answered_with, check_device
from .patches import Patches, current, for_ranks

_TORCH_CUDA = os.path.dirname(os.path.abspath(torch.cuda.__file__)) + os.sep
_NAMES = ("cuda", "cuda.bindings", "cuda.bindings.driver", "cuda.bindings.runtime")


class CudaStream:
    """torch.cuda.Stream: the number of one of the rank's streams."""

    def __init__(self, device: Any = None, priority: int = 0, number: int | None = None) -> None:
        self._rank = _rank()
        self.number = self._rank.new_stream() if number is None else number
        self.device, self.priority = torch.device("cuda", self._rank.world.rank), priority
        self._inside: list[Any] = []

    @property
    def cuda_stream(self) -> int:
        return self.number

    @property
    def stream_id(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CudaStream) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)

    def wait_event(self, event: CudaEvent) -> None:
        if event.point is not None:
            with self._rank.world.stream(self.number):
                self._rank.world.wait_event(event.point)

    def record_event(self, event: CudaEvent | None = None) -> CudaEvent:
        event = event or CudaEvent()
        with self._rank.world.stream(self.number):
            event.point = self._rank.world.record_event()
        return event

    def wait_stream(self, stream: CudaStream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self._rank.world.synchronize()

    def query(self) -> bool:
        self.synchronize()
        return True

    def __enter__(self) -> CudaStream:
        self._inside.append(self._rank.world.stream(self.number))
        self._inside[-1].__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inside.pop().__exit__(kind, error, trace)


class CudaEvent:
    """torch.cuda.Event: a point on a stream of the rank."""

    def __init__(self, enable_timing: bool = False, **more: Any) -> None:
        self.point: Any = None

    def record(self, stream: CudaStream | None = None) -> None:
        (stream or current_stream_of(_rank())).record_event(self)

    def wait(self, stream: CudaStream | None = None) -> None:
        (stream or current_stream_of(_rank())).wait_event(self)

    def synchronize(self) -> None:
        _rank().world.synchronize()

    def query(self) -> bool:
        self.synchronize()
        return True

    def elapsed_time(self, end: CudaEvent) -> float:
        raise CannotInterpret("Event.elapsed_time: the simulator keeps no time; measure on a GPU")


class CudaGraph:
    """torch.cuda.CUDAGraph, which a program may name and derive from, but not make."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise CannotInterpret(
            "torch.cuda.CUDAGraph is not simulated: call the kernels without a graph, or run on a "
            "GPU"
        )


def _rank() -> Any:
    rank = current()
    if rank is None:
        raise SundogError("a stream of a simulated rank is used outside its rank's thread")
    return rank


def current_stream_of(rank: Any, device: Any = None) -> CudaStream:
    return CudaStream(number=rank.world.stream_number)


class _StreamContext:
    """torch.cuda.stream(s); None changes nothing."""

    def __init__(self, rank: Any, stream: CudaStream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._stream is not None:
            self._stream.__exit__(*error)


def _properties(rank: Any, device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="sundog simulator of sm_90", major=9, minor=0,
        multi_processor_count=rank.world.num_sms, total_memory=80 << 30, warp_size=32,
        max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10, shared_memory_per_block_optin=227 << 10,
        shared_memory_per_multiprocessor=228 << 10, L2_cache_size=50 << 20,
        is_integrated=0, is_multi_gpu_board=0, gcnArchName="", uuid="",
    )  # fmt: skip


def _nothing(rank: Any, *args: Any, **kwargs: Any) -> None:
    return None


_FUNCTIONS: dict[str, Any] = {
    "device_count": lambda rank: rank.world.size,
    "current_device": lambda rank: rank.world.rank,
    "_exchange_device": lambda rank, device: rank.world.rank,  # `with torch.cuda.device(...)`
    "_maybe_exchange_device": lambda rank, device: rank.world.rank,
    "set_device": check_device, "init": _nothing, "empty_cache": _nothing, "_sleep": _nothing,
    "set_stream": lambda rank, stream: stream and rank.set_stream(stream.number),
    "reset_peak_memory_stats": _nothing, "manual_seed": _nothing, "manual_seed_all": _nothing,
    "synchronize": lambda rank, device=None: rank.world.synchronize(),
    "current_stream": current_stream_of,
    "default_stream": lambda rank, device=None: CudaStream(number=0),
    "stream": _StreamContext,
    "get_device_properties": _properties,
    "get_device_capability": lambda rank, device=None: (9, 0),
    "get_device_name": lambda rank, device=None: "sundog simulator of sm_90",
    "is_current_stream_capturing": lambda rank: rank.world.is_capturing,
    "mem_get_info": lambda rank, device=None: (64 << 30, 80 << 30),
    "can_device_access_peer": lambda rank, device, peer: True,
    "is_bf16_supported": lambda rank, *args: True,
}  # fmt: skip
_NOTES = ("range_push", "range_pop", "mark", "range_start", "range_end")  # for profilers
_WITHOUT_MEANING = ("caching_allocator_alloc", "caching_allocator_delete", "_compile_kernel")
_ONLY_FOR_PROGRAMS = ("is_available", "is_initialized")  # torch and sundog need the true answer


def _nccl_version(rank: Any) -> tuple[int, int, int]:
    return (2, 0, 0)  # torch puts it into an error's text


def _refused(rank: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the error that names the function of torch.cuda that needs a GPU."""
    frame: Any = sys._getframe(1)
    name = "_lazy_init"
    while frame is not None and frame.f_code.co_filename.startswith(INSIDE):
        if frame.f_code.co_filename.startswith(_TORCH_CUDA):
            name = frame.f_code.co_name
        frame = frame.f_back
    _refused_by_name(name)


def _refused_by_name(name: str, *args: Any, **kwargs: Any) -> Any:
    raise CannotInterpret(f"torch.cuda.{name} is not simulated: run this program on a GPU")


def install(patches: Patches) -> None:
    everywhere = {
        name: for_ranks(call, getattr(torch.cuda, name)) for name, call in _FUNCTIONS.items()
    }
    everywhere |= {
        name: answered_with(lambda rank: True, getattr(torch.cuda, name))
        for name in _ONLY_FOR_PROGRAMS
    }
    everywhere |= {
        "CUDAGraph": constructor(CudaGraph, torch.cuda.CUDAGraph),
        "Stream": constructor(CudaStream, torch.cuda.Stream),
        "Event": constructor(CudaEvent, torch.cuda.Event),
    }
    patches.set_everywhere(torch.cuda, everywhere)
    compiler: Any = sys.modules.get("torch._dynamo.device_interface")
    for name in vars(compiler.CudaInterface).keys() & _FUNCTIONS if compiler else ():
        # torch's compiler keeps the functions of torch.cuda
        patches.set(compiler.CudaInterface, name, staticmethod(getattr(torch.cuda, name)))
    for name in _NOTES:
        patches.set(torch.cuda.nvtx, name, for_ranks(_nothing, getattr(torch.cuda.nvtx, name)))
    patches.set(torch.cuda.nccl, "version", for_ranks(_nccl_version, torch.cuda.nccl.version))
    keep = for_ranks(_nothing, torch.Tensor.record_stream)  # a rank has no allocator
    patches.set(torch.Tensor, "record_stream", keep)
    for name in _WITHOUT_MEANING:
        refused = functools.partial(_refused_by_name, name)
        patches.set(torch.cuda, name, for_ranks(refused, getattr(torch.cuda, name)))
    patches.set(torch.cuda, "_lazy_init", for_ranks(_refused, torch.cuda._lazy_init))


def constructor(ours: Any, theirs: Any) -> Any:
    """Return a class that makes ours in ranks. `isinstance` accepts either."""

    class Meta(type):
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return (theirs if current() is None else ours)(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, (ours, theirs))

    return Meta(theirs.__name__, (), {})


# A stand-in for cuda-python's `cuda.bindings.driver`: the stream operations that programs use, on a
# stream of the simulated rank. After `provide()` it can be imported where cuda-python is not
# installed.


class StreamFlags:
    """CUstreamWaitValue_flags and CUstreamWriteValue_flags."""

    CU_STREAM_WAIT_VALUE_GEQ = 0
    CU_STREAM_WAIT_VALUE_EQ = 1
    CU_STREAM_WAIT_VALUE_AND = 2
    CU_STREAM_WRITE_VALUE_DEFAULT = 0


_WAITS = ("at least", "equal", "and")  # by the numbers above
_COPIED = 4096  # bytes that a program of a copy moves


def _on(stream: Any) -> Any:
    rank = current()
    if rank is None:
        raise SundogError("cuda.bindings.driver is a stand-in here: use it in a simulated rank")
    return rank.world.stream(int(stream))


def _wait_value(kind: Any, stream: Any, address: Any, value: Any, flags: int) -> tuple[int]:
    if flags not in range(len(_WAITS)):
        raise CannotInterpret(
            f"cuStreamWaitValue with flags {flags}: GEQ, EQ and AND are simulated, alone"
        )
    with _on(stream):
        kernels.wait_value[(1,)](int(address), int(value), HOW=_WAITS[flags], KIND=kind)
    return (0,)


def _write_value(kind: Any, stream: Any, address: Any, value: Any, flags: int = 0) -> tuple[int]:
    with _on(stream):
        kernels.write_value[(1,)](int(address), int(value), KIND=kind)
    return (0,)


def _copy(to: Any, source: Any, nbytes: int, stream: Any) -> tuple[int]:
    with _on(stream):
        grid = (max(1, -(-nbytes // _COPIED)),)
        kernels.copy[grid](int(to), int(source), int(nbytes), BLOCK=_COPIED)
    return (0,)


def _copy_of_kind(to: Any, source: Any, nbytes: int, kind: Any, stream: Any) -> tuple[int]:
    return _copy(to, source, nbytes, stream)


DRIVER = {
    "cuStreamWaitValue32": functools.partial(_wait_value, tl.int32),
    "cuStreamWaitValue64": functools.partial(_wait_value, tl.int64),
    "cuStreamWriteValue32": functools.partial(_write_value, tl.int32),
    "cuStreamWriteValue64": functools.partial(_write_value, tl.int64),
    "cuMemcpyAsync": _copy, "cuMemcpyDtoDAsync": _copy,
    "CUstreamWaitValue_flags": StreamFlags, "CUstreamWriteValue_flags": StreamFlags,
    "CUdeviceptr": int, "CUstream": int,
}  # fmt: skip
RUNTIME = {
    "cudaMemcpyAsync": _copy_of_kind,
    "cudaMemcpyKind": SimpleNamespace(cudaMemcpyDefault=4, cudaMemcpyDeviceToDevice=3),
}


def _unknown(module: str) -> Any:
    def look(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise CannotInterpret(f"{module}.{name} is not simulated: run this program on a GPU")

    return look


def provide() -> None:
    """Make the module importable, unless cuda-python is installed."""
    if "cuda" in sys.modules or importlib.util.find_spec("cuda") is not None:
        return
    modules = [ModuleType(name, "A stand-in of sundog's.") for name in _NAMES]
    for module in modules:
        module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
    package, bindings, driver, runtime = modules
    vars(package).update(bindings=bindings, cuda=driver, cudart=runtime)
    vars(bindings).update(driver=driver, runtime=runtime)
    vars(driver).update(DRIVER, __getattr__=_unknown(driver.__name__))
    vars(runtime).update(RUNTIME, __getattr__=_unknown(runtime.__name__))
    sys.modules |= dict(zip(_NAMES, modules, strict=True))
