"""Capture on a GPU: one CUDA graph for one rank, and the room that its kernels need on the GPU.

The runtime decides what can't be captured; its error is reported with the line that caused it.

CUDA refuses to destroy a graph during a capture, and the capture fails. In

    for shape in shapes:
        with world.capture() as graph:
            ...

the previous graph dies when the name is bound again, which is after the next capture has begun. So
a graph that dies during a capture is kept until the capture has ended.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch

from ..callsite import raised_at
from ..errors import CaptureError
from ..target import Footprint
from ..world.capture import LOAD, RUNTIME, STREAM, refusal
from ._gang import Prepared
from ._gpu import use_stream

_under_way: list[CudaRecording] = []  # captures of this process that have begun and not ended
_dead: list[torch.cuda.CUDAGraph] = []  # graphs that died meanwhile


def _let_go(graph: torch.cuda.CUDAGraph) -> None:
    """Destroy a graph, now or when no capture is under way."""
    _dead.append(graph)
    _destroy_dead()


def _destroy_dead() -> None:
    if not _under_way and not torch.cuda.is_current_stream_capturing():  # by torch.cuda.graph
        while _dead:
            _dead.pop().reset()


class CudaRecording:
    """A capture, then a graph. To `Gang` it is a launch like any other."""

    name = "a graph"
    loaded = True

    def __init__(
        self, holder: Any, stream: torch.cuda.Stream, put: Callable[[CudaRecording], Any]
    ) -> None:
        """Begin. `holder.recording` is this object until the end; `put` starts the graph."""
        self._holder, self._put = holder, put
        self.programs = 0  # programs that wait for others at the same time
        self.pointers: set[int] = set()
        self._most: dict[Any, int] = {}  # of any kernel, by stream
        self._footprint: Footprint | None = None
        self._refused: CaptureError | None = None
        self.stream = stream
        self._graph = torch.cuda.CUDAGraph()
        self._pool = torch.cuda.graph_pool_handle()
        self._inside = torch.cuda.stream(stream)
        self._destroy = weakref.finalize(self, _let_go, self._graph)
        self._destroy.atexit = False  # CUDA ends with the process
        self._inside.__enter__()
        # thread_local: a call that can't be captured fails here, and does not disturb other
        # threads.
        try:
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except BaseException:
            self._restore_torch()
            self._inside.__exit__(None, None, None)
            raise
        _under_way.append(self)
        # Others' graphs, in cycles, must not be collected in the middle of this capture.
        self._collects = gc.isenabled()
        gc.disable()
        holder.recording = self

    # during the capture

    def refuse(self, call: str, reason: str, instead: str) -> CaptureError:
        error = refusal(call, reason, instead)
        self._refused = self._refused or error
        return error

    def launched(self, prepared: Prepared, stream: Any, capturing: bool) -> None:
        """Check a kernel before it is added to the graph, and count its programs."""
        if not capturing:
            raise self.refuse(
                f"launch of {prepared.name}",
                STREAM,
                "Let its stream wait for an event that was recorded in this capture.",
            )
        if not prepared.loaded:
            raise self.refuse(
                f"launch of {prepared.name}",
                LOAD,
                "Call it once with such arguments before the capture, so that it is compiled.",
            )
        self.pointers.update(prepared.pointers)
        footprint = prepared.footprint()
        if footprint is not None:
            old = self._footprint or Footprint(0, 0, 1)
            self._footprint = old | footprint
            self._most[stream] = max(self._most.get(stream, 0), prepared.programs)
            self.programs = sum(self._most.values())

    def explain(self, error: RuntimeError) -> CaptureError | None:
        """Turn a CUDA error that the capture caused into a CaptureError with its line."""
        if isinstance(error, CaptureError) or "captur" not in str(error).lower():
            return None
        first = str(error).splitlines()[0]
        return refusal("this call", RUNTIME, f"It said: {first}", raised_at(error))

    def end(self) -> None:
        try:
            self._leave(failed=self._refused is not None)
        except RuntimeError as error:
            if self._refused is None:
                raise self.explain(error) or error from error
        if self._refused is not None:
            self.free()
            raise self._refused

    def abort(self) -> None:
        with suppress(RuntimeError):  # the first error is the one to report
            self._leave(failed=True)
        self.free()

    def _leave(self, failed: bool) -> None:
        self._holder.recording = None
        try:
            with warnings.catch_warnings():
                if failed:  # torch warns of an empty graph, which is expected then
                    warnings.simplefilter("ignore", UserWarning)
                self._graph.capture_end()
        except RuntimeError:
            self._restore_torch()
            raise
        finally:
            _under_way.remove(self)
            self._inside.__exit__(None, None, None)
            if self._collects:
                gc.enable()
            _destroy_dead()

    def _restore_torch(self) -> None:
        """Undo what torch does at the start of a capture, which it does not if CUDA can't end it.

        Torch's allocator would serve the capture forever. Its generator would stay in capture mode,
        so that the next torch.randn raises; an empty capture that succeeds resets it.
        """
        device = torch.cuda.current_device()
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)
        with suppress(RuntimeError), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that it is empty
            empty = torch.cuda.CUDAGraph()
            empty.capture_begin(capture_error_mode="thread_local")
            empty.capture_end()
            empty.reset()

    # afterwards

    def replay(self) -> None:
        self._put(self)

    def free(self) -> None:
        del self._graph  # so that it dies in `_let_go`, not with this object
        self._destroy()

    # a launch, as `Gang` sees it

    def load(self) -> None:
        """Do nothing: its kernels were loaded before the capture."""

    def footprint(self) -> Footprint | None:
        return self._footprint

    def start(self, stream: torch.cuda.Stream | None = None) -> None:
        """Launch the graph on a stream, by default the current one."""
        with use_stream(stream) if stream is not None else nullcontext():
            self._graph.replay()
