"""What `virtual` and `symm` share: launches in two steps, and the contexts' addresses.

At every launch Triton binds and specialises all arguments and compares all globals, which takes
most of the host's time for a small collective. A launch depends only on what is in the key of
`Direct`, so from the second time on it goes straight to the compiled kernel.
"""

from __future__ import annotations

import ctypes
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.compiler import is_dynamo_compiling
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

from .. import target
from ..device import context
from ..machine.host_ops import waits
from ..machine.launcher import Installed
from ..target import Footprint
from ..world.backend import Backend
from ..world.heap import Allocation
from ._gang import Prepared

Known = tuple[JITFunction, tuple[int, ...], tuple, dict, Any]  # the last: the compiled kernel
# Where the running rank's launches are noted, if requested. None in the list: not in `Direct`.
launched: ContextVar[list[Known | None] | None] = ContextVar("launched", default=None)

_PLAIN = frozenset((int, str, bool, float, type(None), torch.dtype))
_MOST = 1024  # kinds of launches that are kept, since a program may make new ones forever


class Direct:
    """Compiled kernels, by everything that they were compiled for."""

    def __init__(self) -> None:
        # The kernel is kept alive, so that no other one gets its id.
        self._known: dict[tuple, tuple[JITFunction, Any]] = {}

    def again(self, kernel: JITFunction, grid: Any, args: tuple, kwargs: dict, stream: int) -> Any:
        """Start it and return the compiled kernel, or return None if no such launch was noted."""
        compiled = self.find(kernel, grid, args, kwargs)
        if compiled is not None:
            compiled[(*grid, 1, 1)[:3]](*in_order(kernel, args, kwargs), stream=stream)
        return compiled

    def find(self, kernel: JITFunction, grid: Any, args: tuple, kwargs: dict) -> Any:
        """Return the compiled kernel of such a launch, or None, without starting it."""
        _, compiled = self._known.get(_key(kernel, grid, args, kwargs), (None, None))
        notes = launched.get()
        if notes is not None:
            notes.append(None if compiled is None else (kernel, grid, args, kwargs, compiled))
        return compiled

    def note(
        self, kernel: JITFunction, grid: Any, args: tuple, kwargs: dict, compiled: Any
    ) -> None:
        """Note the kernel that Triton compiled for such a launch. It may not be loaded yet."""
        key = _key(kernel, grid, args, kwargs)
        if key and hasattr(compiled, "packed_metadata"):
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = kernel, compiled


def _key(kernel: JITFunction, grid: Any, args: tuple, kwargs: dict) -> tuple:
    """Return the key of a launch, or () where it depends on more. Live kernels differ by id."""
    if type(grid) is not tuple or kernel.pre_run_hooks or torch.version.hip:
        return ()  # AMD's code depends on the size of a tensor's storage too
    words: list[Any] = [id(kernel), grid, *kwargs]
    for value in (*args, *kwargs.values()):
        kind = type(value)
        if kind is torch.Tensor:
            words += value.dtype, value.data_ptr() % 16
        elif kind in _PLAIN:
            words += kind, value
        else:
            return ()
    return tuple(words)


def in_order(kernel: JITFunction, args: tuple, kwargs: dict) -> tuple:
    """Return all arguments in the order in which a compiled kernel takes them."""
    return (*args, *[kwargs.get(p.name, p.default) for p in kernel.params[len(args) :]])


_BY_HOST = ("copy_", "zero_")


class SynchronizeFirst(TorchFunctionMode):
    """Lets the other ranks' hosts run before torch makes the host wait for the GPU.

    With `in_host_memory`, also before a copy or a memset there, for which CUDA makes the host wait.
    `after` runs after every call of torch.
    """

    def __init__(
        self,
        synchronize: Callable[[], None],
        in_host_memory: bool = False,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._synchronize = synchronize
        self._in_host_memory = in_host_memory
        self._after = after

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if is_dynamo_compiling():  # a graph does not wait, and has no locks
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if waits(name, args, kwargs or {}) or (self._in_host_memory and name in _BY_HOST):
            self._synchronize()
        result = func(*args, **(kwargs or {}))
        self._after()
        return result


class use_stream:
    """Like torch.cuda.stream, without its 16 us overhead."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream.stream_id, stream.device_index, stream.device_type

    def __enter__(self) -> None:
        self._before = torch._C._cuda_getCurrentStream(self._stream[1])
        torch._C._cuda_setStream(*self._stream)

    def __exit__(self, *error: object) -> None:
        torch._C._cuda_setStream(*self._before)


class Gpu:
    """One GPU, as `Gang` sees it."""

    def __init__(self, device: torch.device) -> None:
        self.target = target.of(device)
        self._index = device.index
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._direct = Direct()
        self._shown: tuple[torch.cuda.Stream, torch.cuda.Event] | None = None
        self.sharing: dict[int, tuple[int, ...]] = {}  # by address of a context: its world's ranks
        # Attributes, not methods: every launch asks them.
        self.is_capturing: Callable[[], bool] = torch.cuda.is_current_stream_capturing
        self.current_handle: Callable[[], int] = partial(
            torch._C._cuda_getCurrentRawStream, device.index
        )

    def partners(self, prepared: Prepared) -> Collection[int]:
        """Return the ranks of the worlds whose contexts a launch is given.

        Return nothing while all worlds have the same ranks, since it does not matter then.
        """
        if len(set(self.sharing.values())) < 2:
            return ()
        found = [self.sharing[each] for each in prepared.pointers if each in self.sharing]
        return {rank for ranks in found for rank in ranks}

    def current_stream(self) -> torch.cuda.Stream:
        """Return the same object for a stream each time: torch takes 10 us to make a new one."""
        handle = self.current_handle()
        if handle not in self._streams:
            self._streams[handle] = torch.cuda.current_stream()
        return self._streams[handle]

    def event(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def show(self, stream: torch.cuda.Stream) -> None:
        """Let the default stream wait for what is on this one; no stream waits for that one.

        It may run after every call of torch, so it makes no new event or stream object.
        """
        if self._shown is None:
            self._shown = torch.cuda.default_stream(self._index), torch.cuda.Event()
        default, event = self._shown
        event.record(stream)
        default.wait_event(event)

    def prepare(self, kernel: JITFunction, grid: Any, args: tuple, kwargs: dict) -> GpuLaunch:
        with torch._C.DisableTorchFunction():  # reading addresses need not wait
            known = self._direct.find(kernel, grid, args, kwargs)
            launch = GpuLaunch(kernel, grid, args, kwargs, known)
            if known is None:
                self._direct.note(kernel, grid, args, kwargs, launch.compiled)
        return launch


class GpuLaunch:
    """A call of a kernel: compiled at once if necessary, loaded and started by its methods."""

    def __init__(
        self, kernel: JITFunction, grid: Any, args: tuple, kwargs: dict, compiled: Any = None
    ) -> None:
        if compiled is None:
            compiled = Installed.original(kernel, *args, grid=grid, warmup=True, **kwargs)
        self.compiled = compiled
        self._grid = grid_of(kernel, grid, args, kwargs)
        arguments = in_order(kernel, args, kwargs)
        self._arguments: tuple | None = arguments
        self.name = kernel.__name__
        self.programs = math.prod(self._grid) * getattr(self.compiled.metadata, "num_ctas", 1)
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        self.pointers = [each.data_ptr() for each in tensors]

    @property
    def loaded(self) -> bool:
        return self.compiled.module is not None

    def load(self) -> None:
        self.compiled._init_handles()

    def footprint(self) -> Footprint | None:
        return footprint_of(self.compiled)

    def start(self, stream: torch.cuda.Stream) -> Any:
        """Start the compiled kernel. Triton's kernel[grid] would inspect all arguments again."""
        arguments, self._arguments = self._arguments, None  # not kept alive any longer
        assert arguments is not None
        if self.programs > 0:
            run = self.compiled[(*self._grid, 1, 1)[:3]]
            scratch = needs_scratch(self.compiled)
            with (
                torch._C.DisableTorchFunction(),
                use_stream(stream) if scratch else nullcontext(),
            ):
                run(*arguments, stream=stream.cuda_stream)
        return self.compiled


# By compiled kernel, since looking for waits in its IR takes longer than a launch.
_footprints: WeakKeyDictionary[Any, Footprint | None] = WeakKeyDictionary()


def footprint_of(compiled: Any) -> Footprint | None:
    """Return what a program takes, once it is loaded; None if the kernel waits for nobody."""
    try:
        return _footprints[compiled]
    except KeyError:
        known = compiled.metadata
        waits = may_wait(first_ir(compiled.asm))
        found = Footprint(compiled.n_regs, known.shared, known.num_warps) if waits else None
        return _footprints.setdefault(compiled, found)


def needs_scratch(compiled: Any) -> bool:
    """Return whether Triton allocates memory, on the current stream, for every launch."""
    known = compiled.metadata  # AMD's lacks some of it
    return bool(
        getattr(known, "global_scratch_size", 0) or getattr(known, "profile_scratch_size", 0)
    )


def first_ir(asm: Mapping[str, str]) -> str:
    """Return the front end's IR. A Gluon kernel has its layouts, so it begins as TTGIR."""
    return asm["ttir"] if "ttir" in asm else asm["ttgir"]


def may_wait(ir: str) -> bool:
    """Return whether a program may wait for another, which takes a loop around an atomic."""
    return "tt.atomic_poll" in ir or ("scf.while" in ir and "tt.atomic" in ir)


def grid_of(kernel: JITFunction, grid: Any, args: tuple, kwargs: dict) -> tuple[int, ...]:
    """Return the grid of a launch, which may be a function of its arguments."""
    if not callable(grid):
        return tuple(grid)
    own = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
    bound = inspect.getcallargs(kernel.fn, *args, **own)
    return tuple(grid({**kwargs, **bound}))


def pinned_words(count: int) -> torch.Tensor:
    """Make zeroed int64 words in host memory, at an address that kernels can also use."""
    return torch.zeros(count, dtype=torch.int64).pin_memory()


_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


def peers_have_atomics(index: int) -> bool:
    """Ask the driver whether this GPU's atomics reach every other GPU that this process sees.

    Only NVLink and xGMI carry them. Return True if the driver can't tell: ROCm's links between GPUs
    do.
    """
    if torch.version.hip is not None:
        return True
    driver = ctypes.CDLL("libcuda.so.1")
    answer = ctypes.c_int(1)
    for other in range(torch.cuda.device_count()):
        place = ctypes.byref(answer)
        known = other == index or driver.cuDeviceGetP2PAttribute(
            place, _NATIVE_ATOMICS, _device(driver, index), _device(driver, other)
        )
        if known == 0 and answer.value == 0:  # 0: the call succeeded
            return False
    return True


def _device(driver: ctypes.CDLL, index: int) -> int:
    found = ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(found), index)
    return found.value


class OnGpu(Backend):
    """What `virtual` and `symm` share: events are those of torch's current stream."""

    def record_event(self) -> torch.cuda.Event:
        return torch.cuda.current_stream().record_event()

    def wait_event(self, event: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(event)


class Contexts:
    """Where the contexts of a heap are, so that the host can end the waits of a running kernel."""

    def __init__(self, segment: torch.Tensor) -> None:
        self._segment = segment
        self._starts: dict[int, None] = {}
        self._zero = pinned_words(1)

    def allocated(self, base: int, allocation: Allocation) -> None:
        if allocation.is_context:
            self._starts[base + allocation.offset - self._segment.data_ptr()] = None

    def freed(self, base: int, allocation: Allocation) -> None:
        self._starts.pop(base + allocation.offset - self._segment.data_ptr(), None)

    def end_waits(self, stream: torch.cuda.Stream) -> None:
        """Set the bounds to 0 by the copy engine, which needs no SM: kernels may hold them all."""
        with torch._C.DisableTorchFunction(), torch.cuda.stream(stream):
            for start in self._starts:
                at = start + 8 * context.POLLS.value
                word = self._segment[at : at + 8].view(torch.int64)
                word.copy_(self._zero, non_blocking=True)
