"""The capture on a GPU, with a CUDA that only pretends: what is refused, what is told, what counts.

tests/world/test_capture.py --backend virtual tests CUDA itself, where there is a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sundog.backends import _cuda_graph
from sundog.backends._cuda_graph import CudaRecording
from sundog.errors import CaptureError
from sundog.target import Footprint

BUSY = "CUDA error: operation not permitted when stream is capturing\nand more"


@dataclass
class Graph:
    """Of torch, pretended."""

    log: list[str] = field(default_factory=list)
    broken: bool = False

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        self.log.append(f"begin {capture_error_mode}")
        self.pool = pool

    def capture_end(self) -> None:
        self.log.append("end")
        if self.broken:
            raise RuntimeError(BUSY)

    def replay(self) -> None:
        self.log.append("replay")

    def reset(self) -> None:
        self.log.append("reset")


@dataclass
class Kernel:
    """A launch, pretended."""

    programs: int = 1
    waits: bool = True
    loaded: bool = True
    name: str = "kernel"

    def footprint(self) -> Footprint | None:
        return Footprint(32 * self.programs, 0, 4) if self.waits else None


def _note(graph: Graph, name: str, device: int, pool: tuple[int, int]) -> None:
    assert (device, pool) == (3, graph.pool)
    graph.log.append(name)


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graph:
    made = Graph()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for name in ("endAllocateToPool", "releasePool"):
        note = partial(_note, made, name)
        monkeypatch.setattr(torch._C, f"_cuda_{name}", note, raising=False)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(_cuda_graph, "on", lambda stream: nullcontext())
    return made


@pytest.fixture
def holder() -> Iterator[Any]:
    made = SimpleNamespace(recording=None, put=[])
    yield made
    if made.recording is not None:
        made.recording.abort()


def _begin(holder: Any) -> CudaRecording:
    recording = CudaRecording(holder, "s", holder.put.append)  # type: ignore[arg-type]
    assert holder.recording is recording
    return recording


def test_a_capture_that_cannot_begin_leaves_the_stream(graph, holder, monkeypatch):
    def refuse(pool: tuple[int, int], capture_error_mode: str) -> None:
        assert inside == ["entered"]
        raise RuntimeError(BUSY)

    @contextmanager
    def stream(which: Any) -> Iterator[None]:
        inside.append("entered")
        yield
        inside.append("left")

    inside: list[str] = []
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(graph, "capture_begin", refuse)
    with pytest.raises(RuntimeError, match="is capturing"):
        _begin(holder)
    assert (inside, holder.recording, gc.isenabled()) == (["entered", "left"], None, True)


def test_a_capture_and_its_replays(graph, holder):
    recording = _begin(holder)
    recording.end()
    assert holder.recording is None
    recording.replay()
    assert holder.put == [recording]
    recording.start("now")  # type: ignore[arg-type]
    recording.free()
    assert graph.log == ["begin thread_local", "end", "replay", "reset"]


def test_what_waits_is_counted_by_stream(graph, holder):
    """On one stream the largest counts, on two the sum; what waits for nobody does not count."""
    recording = _begin(holder)
    for kernel, stream in ((Kernel(3), "a"), (Kernel(2), "a"), (Kernel(4), "b")):
        recording.launched(kernel, stream, capturing=True)
    recording.launched(Kernel(99, waits=False), "b", capturing=True)
    assert recording.programs == 7
    assert recording.footprint() == Footprint(128, 0, 4)


@pytest.mark.parametrize(
    ("kernel", "capturing", "reason"),
    [
        (Kernel(loaded=False), True, "kernel loaded during capture"),
        (Kernel(), False, "stream outside the capture"),
    ],
)
def test_what_is_refused_stays_refused(graph, holder, kernel, capturing, reason):
    recording = _begin(holder)
    with pytest.raises(CaptureError) as first:
        recording.launched(kernel, "a", capturing)
    with pytest.raises(CaptureError) as last:
        recording.end()
    assert first.value is last.value
    assert first.value.reason == reason
    assert holder.recording is None
    assert graph.log[1:] == ["end", "reset"]


def test_what_the_runtime_says_is_told_with_the_line(graph, holder):
    recording = _begin(holder)
    error = None
    try:
        raise RuntimeError(BUSY)  # as .item() would
    except RuntimeError as raised:
        error = raised
    told = recording.explain(error)
    assert told is not None
    assert told.reason == "refused by the runtime"
    assert "test_cuda_graph.py" in told.where
    assert "raise RuntimeError(BUSY)  # as .item() would" in told.where
    assert "operation not permitted when stream is capturing" in str(told)
    assert "and more" not in str(told)
    assert recording.explain(RuntimeError("something else")) is None
    assert recording.explain(told) is None


def test_after_an_error_nothing_is_left(graph, holder):
    """Torch does not tell its allocator of a capture that CUDA refused, and a graph that is
    collected later is destroyed at any moment: both are done at once."""
    graph.broken = True
    recording = _begin(holder)
    recording.abort()
    assert holder.recording is None
    assert graph.log[1:] == ["end", "endAllocateToPool", "releasePool", "reset"]
    recording = _begin(holder)
    with pytest.raises(CaptureError, match="refused by the runtime"):
        recording.end()
    assert holder.recording is None


@pytest.mark.parametrize("broken", [False, True])
def test_nothing_is_collected_during_a_capture(graph, holder, broken):
    graph.broken = broken
    recording = _begin(holder)
    assert not gc.isenabled()
    recording.abort()
    assert gc.isenabled()


def test_who_does_not_collect_need_not_afterwards(graph, holder):
    gc.disable()
    try:
        _begin(holder).end()
        assert not gc.isenabled()
    finally:
        gc.enable()
