"""Capture on a GPU: one CUDA graph for one rank, and what its kernels need to run side by side.

The runtime says what can't be captured; its error is told with the line that caused it.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch

from ..callsite import raised_at
from ..errors import CaptureError
from ..target import Footprint
from ..world.capture import LOAD, RUNTIME, STREAM, refusal
from ._gang import Prepared
from ._gpu import on

__all__ = ["CudaRecording"]


class CudaRecording:
    """A capture, then a graph. To `Gang` it is a launch like any other."""

    name = "a graph"
    loaded = True

    def __init__(
        self, holder: Any, stream: torch.cuda.Stream, put: Callable[[CudaRecording], Any]
    ) -> None:
        """`holder.recording` is this while it lasts; `put` starts it on the current stream."""
        self._holder, self._put = holder, put
        self.programs = 0  # that wait for others, at one time
        self._most: dict[Any, int] = {}  # of any kernel, by stream
        self._footprint: Footprint | None = None
        self._refused: CaptureError | None = None
        self.stream = stream
        self._graph = torch.cuda.CUDAGraph()
        self._pool = torch.cuda.graph_pool_handle()
        self._inside = torch.cuda.stream(stream)
        self._inside.__enter__()
        # thread_local: a call that can't be captured fails, and other threads may do what they do.
        try:
            self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        except BaseException:
            self._inside.__exit__(None, None, None)
            raise
        # A graph of before that is collected now would be destroyed in the middle of this capture.
        self._collects = gc.isenabled()
        gc.disable()
        holder.recording = self

    # during the capture

    def refuse(self, call: str, reason: str, instead: str) -> CaptureError:
        error = refusal(call, reason, instead)
        self._refused = self._refused or error
        return error

    def launched(self, prepared: Prepared, stream: Any, capturing: bool) -> None:
        """Before a kernel is added to the graph."""
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
        footprint = prepared.footprint()
        if footprint is not None:
            old = self._footprint or Footprint(0, 0, 1)
            self._footprint = old | footprint
            self._most[stream] = max(self._most.get(stream, 0), prepared.programs)
            self.programs = sum(self._most.values())

    def explain(self, error: RuntimeError) -> CaptureError | None:
        """A CUDA error that the capture caused, as ours."""
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
            self._graph.reset()  # not whenever it is collected
            raise self._refused

    def abort(self) -> None:
        with suppress(RuntimeError):  # which the first error has told
            self._leave(failed=True)
        self._graph.reset()

    def _leave(self, failed: bool) -> None:
        self._holder.recording = None
        try:
            with warnings.catch_warnings():
                if failed:  # an empty graph is then no wonder
                    warnings.simplefilter("ignore", UserWarning)
                self._graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):  # torch's allocator would serve the capture for ever
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
                torch._C._cuda_releasePool(torch.cuda.current_device(), self._pool)
            raise
        finally:
            self._inside.__exit__(None, None, None)
            if self._collects:
                gc.enable()

    # afterwards

    def replay(self) -> None:
        self._put(self)

    def free(self) -> None:
        self._graph.reset()

    # a launch, as `Gang` sees it

    def load(self) -> None:
        """Its kernels were loaded before the capture."""

    def footprint(self) -> Footprint | None:
        return self._footprint

    def start(self, stream: torch.cuda.Stream | None = None) -> None:
        """By default on the current one."""
        with on(stream) if stream is not None else nullcontext():
            self._graph.replay()
