"""Graphs replay what a rank launched inside `with world.capture() as graph:`.

    plan(x)                              # once before: this loads kernels and makes plans
    with world.capture() as graph:       # nothing runs here
        out = plan(x)
    x.copy_(...)                         # new data in the same tensors
    graph.replay()                       # all of it runs; the host does not wait

On a GPU this is a CUDA graph. The simulator records launches and torch operations with their
arguments, and refuses what a GPU would refuse during capture. docs/capture.md has more.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from ..callsite import caller_frame, relative
from ..errors import CaptureError, SundogError

if TYPE_CHECKING:
    from ..ops.dispatch import CachedCall
    from ..ops.op import Plan

# Why something can't be in a graph.
READ = "host synchronisation"
COPY = "copy between CPU and device"
ALLOCATION = "allocation of symmetric memory"
BARRIER = "host barrier"
COLLECTIVE = "collective on the host"
PLAN = "plan made during capture"
LOAD = "kernel loaded during capture"
NESTED = "graph inside a graph"
STREAM = "stream outside the capture"
RUNTIME = "refused by the runtime"


class BackendRecording(Protocol):
    """A backend's part of a capture."""

    def refuse(self, call: str, reason: str, instead: str) -> CaptureError:
        """Return the error to raise. The capture has failed, even if the error is caught."""

    def explain(self, error: RuntimeError) -> CaptureError | None:
        """Return what an error of the runtime means, if the capture caused it."""

    def end(self) -> None:
        """End the recording; raise CaptureError if something was refused."""

    def abort(self) -> None:
        """Do the same after an error, so that the backend is as it was before the capture."""

    def replay(self) -> None:
        """Put the whole recording on the current stream."""

    def free(self) -> None:
        """Release what it holds."""


class Graph:
    """One rank's recorded work. It keeps the plans that it uses alive."""

    def __init__(
        self, replay: Callable[[Graph, Callable[[], None]], None], recording: BackendRecording
    ) -> None:
        self._replay = replay
        self._recording: BackendRecording | None = recording
        self._open = True
        self.plans: list[Plan] = []  # that were called directly
        self.calls: set[CachedCall] = set()  # of ops: their plans are not evicted
        self.streams: set[int] = set()  # on which the calls have their plans

    def replay(self) -> None:
        """Launch the recorded work again on the current stream, with the captured memory.

        As with the ops themselves, every rank replays its own graph, in the same order.
        """
        if self._recording is None or self._open:
            why = "its capture has not ended" if self._open else "it was freed, or never captured"
            raise SundogError(f"graph.replay(): {why}")
        self._replay(self, self._recording.replay)

    def free(self) -> None:
        """Release the plans and tensors that it holds. It can't be replayed any more."""
        recording, self._recording = self._recording, None
        self._let_go()
        if recording is not None and not self._open:
            recording.free()

    def _let_go(self) -> None:
        self.plans.clear()
        self.calls.clear()

    def refuse(self, call: str, reason: str, instead: str) -> CaptureError:
        assert self._recording is not None
        return self._recording.refuse(call, reason, instead)

    def end(self) -> None:
        assert self._recording is not None
        try:
            self._recording.end()
        except BaseException:
            self._recording = None
            self._let_go()
            raise
        finally:
            self._open = False

    def abort(self, error: BaseException) -> CaptureError | None:
        """End the capture with this error, and say what it means if the capture caused it."""
        recording, self._recording = self._recording, None
        assert recording is not None
        self._open = False
        self._let_go()  # it will never use them
        recording.abort()
        return recording.explain(error) if isinstance(error, RuntimeError) else None


def refusal(call: str, reason: str, instead: str, at: Any = None) -> CaptureError:
    """Return the error to raise at this file and line (default: the nearest outside sundog)."""
    path, line = (at or caller_frame())[:2]
    where = f"{relative(path)}:{line}"
    text = linecache.getline(path, line).strip()
    shown = f"{where}: {text}" if text else where
    return CaptureError(
        f"{call} during capture ({shown}): {reason}. {instead}", call, shown, reason
    )
