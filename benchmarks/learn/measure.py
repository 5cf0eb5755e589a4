"""The process that has the GPU: load a binary, compare its result, time it.

A sample is one launch between two events, after a write of 128 MB that leaves nothing of its
inputs in L2. The stream first spins for a moment, so that all launches wait on the device and no
gap of the host is timed.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .check_kernels import relative_error, wipe
from .compile_ahead import Binary, Cell, source_for
from .subject import Args, Task, key_of

MAX_SHARED = 232448  # bytes that a program may have on sm_90
TOLERANCE = {"float32": 5e-3, "float16": 1e-2, "bfloat16": 3e-2, "float8_e4m3fn": 6e-2}
_HOPELESS = 6.0  # times the best of a task so far: one sample is enough
_ROW_NS = 3_000_000  # of the GPU, for one row's samples
_LEAST, _MOST = 5, 16  # samples
_FLUSH_BYTES, _FLUSH_NS = 128 << 20, 45_000
_SPIN_CYCLES = 400_000  # 0.2 ms
_MEMORY = 100 << 30  # for inputs and references, of 139
_FATAL = ("illegal", "misaligned", "launch failure", "device-side assert", "CUDA error")


@dataclass(frozen=True)
class Unit:
    """A binary and what to measure with it."""

    binary: Binary
    cells: list[Cell]


@dataclass(frozen=True)
class Measured:
    """A row's measured part."""

    status: str  # ok, slow, wrong, out_of_resources or error
    samples_ns: list[int] = field(default_factory=list)
    error: str = ""
    relative_error: float | None = None
    registers: int | None = None
    spills: int | None = None
    at: float = 0.0  # unix time
    seconds: float = 0.0  # that the row took, all included


def made_up(unit: Unit) -> list[Measured]:
    """Stand in for a GPU where none is: samples from a hash. For tests of the collector alone."""
    found = []
    for cell in unit.cells:
        number = int(key_of(cell.name, cell.shape, cell.config)[:6], 16) % 90_000
        found.append(Measured("ok", [10_000 + number + n for n in range(5)], at=time.time()))
    return found


class _Inputs:
    """Arguments and reference results by task, as far as memory goes."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._kept: OrderedDict[str, tuple[Args, list[torch.Tensor], int]] = OrderedDict()

    def clear(self) -> None:
        self._kept.clear()

    def of(self, task: Task) -> tuple[Args, list[torch.Tensor]]:
        if task.id not in self._kept:
            before = torch.cuda.memory_allocated()
            torch.manual_seed(int(task.id[:8], 16))
            args = task.make(self._device)
            wanted = task.subject.reference({**args, **task.subject.constants(task.shape)})
            kept = [_smaller(want.detach(), task.dtype).clone() for want in wanted]
            self._kept[task.id] = args, kept, torch.cuda.memory_allocated() - before
            while sum(size for *_, size in self._kept.values()) > _MEMORY and len(self._kept) > 1:
                self._kept.popitem(last=False)
        self._kept.move_to_end(task.id)
        return self._kept[task.id][:2]


def _smaller(want: torch.Tensor, dtype: str) -> torch.Tensor:
    """Keep large references in 16 bits where results have no more: half the memory."""
    return want.bfloat16() if dtype != "float32" and want.numel() > 1 << 20 else want


def on_gpu() -> Callable[[Unit], list[Measured]]:
    """Return the function for a worker, made in its process: CUDA starts with the first call."""
    state: dict[str, Any] = {}

    def measure(unit: Unit) -> list[Measured]:
        if not state:
            state["gpu"] = Gpu("cuda", Timer())
        return [_safely(state["gpu"], unit.binary, cell) for cell in unit.cells]

    return measure


def _safely(gpu: Gpu, binary: Binary, cell: Cell) -> Measured:
    begin = time.time()
    try:
        try:
            found = gpu.measure(binary, cell)
        except torch.OutOfMemoryError:
            gpu.forget_inputs()
            found = gpu.measure(binary, cell)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
        if any(word in text for word in _FATAL):
            os._exit(3)  # the context is lost: the collector tries the cells one by one
        status = "out_of_resources" if "OutOfResources" in text else "error"
        found = Measured(status, error=text)
    return Measured(**{**found.__dict__, "at": begin, "seconds": round(time.time() - begin, 5)})


class Timer:
    """Times launches on the current stream."""

    def __init__(self) -> None:
        self.stream = torch.cuda.current_stream().cuda_stream
        self._waste = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device="cuda")
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * _MOST)]

    def samples(self, launch: Callable[[], None], count: int) -> list[int]:
        """Return the nanoseconds of each launch."""
        torch.cuda._sleep(_SPIN_CYCLES)
        for number in range(count):
            self._waste.zero_()
            self._events[2 * number].record()
            launch()
            self._events[2 * number + 1].record()
        torch.cuda.synchronize()
        pairs = zip(self._events[0 : 2 * count : 2], self._events[1 : 2 * count : 2], strict=True)
        return [round(1e6 * first.elapsed_time(last)) for first, last in pairs]


class Gpu:
    """Binaries that are loaded, inputs that are made, and the best time of each task so far."""

    def __init__(self, device: str, timer: Timer) -> None:
        self._inputs = _Inputs(device)
        self._timer = timer
        self._loaded: dict[str, Any] = {}
        self._best: dict[str, float] = {}

    def measure(self, binary: Binary, cell: Cell) -> Measured:
        task, kernel = cell.task, self.load(binary, cell)
        args, wanted = self._inputs.of(task)
        facts: dict[str, Any] = {"registers": kernel.n_regs, "spills": kernel.n_spills}
        launch = self._launcher(kernel, task, cell, args)
        wipe(task.subject, args)
        launch()
        error = relative_error(task.subject.results(args), wanted)
        facts["relative_error"] = float(f"{error:.3g}") if error == error else None
        if not error <= TOLERANCE[cell.dtype] + task.subject.loses:
            return Measured("wrong", error=f"relative error {error:.3g}", **facts)
        samples = self._timer.samples(launch, 1)
        best = self._best.get(task.id, float("inf"))
        if samples[0] > _HOPELESS * best and not cell.repeat:
            return Measured("slow", samples, **facts)
        each = min(samples[0], 10 * _ROW_NS) + _FLUSH_NS
        samples = self._timer.samples(launch, min(max(_ROW_NS // each, _LEAST), _MOST))
        self._best[task.id] = min(best, statistics.median(samples))
        return Measured("ok", samples, **facts)

    def forget_inputs(self) -> None:
        """Give all memory back: what is needed again is made again."""
        self._inputs.clear()
        torch.cuda.empty_cache()

    def load(self, binary: Binary, cell: Cell) -> Any:
        from triton.compiler.compiler import CompiledKernel

        if binary.hash not in self._loaded:
            source, _ = source_for(cell)
            kernel = CompiledKernel(source, binary.paths, binary.hash)
            kernel._init_handles()
            self._loaded[binary.hash] = kernel
        return self._loaded[binary.hash]

    def _launcher(self, kernel: Any, task: Task, cell: Cell, args: Args) -> Callable[[], None]:
        given = {**args, **task.launch_fields(cell.config), **task.compile_fields(cell.config)}
        values = [given[name] for name in task.subject.parameters]
        run = kernel[task.grid(cell.config)]
        return lambda: run(*values, stream=self._timer.stream)
