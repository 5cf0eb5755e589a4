"""Captures on a GPU, with a pretended CUDA: what is refused, what is reported, what counts.

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
    pool: tuple[int, int] = (0, 0)
    next: list[Graph] = field(default_factory=list)

    def capture_begin(self, pool: tuple[int, int] = (0, 0), *, capture_error_mode: str) -> None:
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
    pointers: tuple[int, ...] = ()

    def footprint(self) -> Footprint | None:
        return Footprint(32 * self.programs, 0, 4) if self.waits else None


def _note(graph: Graph, name: str, device: int, pool: tuple[int, int]) -> None:
    assert (device, pool) == (3, graph.pool)
    graph.log.append(name)


@pytest.fixture
def graph(monkeypatch: pytest.MonkeyPatch) -> Graph:
    made = Graph()
    made.next = [made]  # others are captured only to set torch's state right
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.next.pop() if made.next else Graph())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for name in ("endAllocateToPool", "releasePool"):
        note = partial(_note, made, name)
        monkeypatch.setattr(torch._C, f"_cuda_{name}", note, raising=False)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(_cuda_graph, "use_stream", lambda stream: nullcontext())
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
    def refuse(pool: tuple[int, int], *, capture_error_mode: str) -> None:
        assert inside == ["entered"]
        graph.pool = pool
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
    graph.next = [graph]
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


class Cuda:
    """A CUDA that fails as the real one does, and torch's generator beside it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.capturing: PretendedGraph | None = None
        self.invalid = False
        self.generator_captures = False
        self.alive: list[PretendedGraph] = []
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: PretendedGraph(self))
        monkeypatch.setattr(
            torch.cuda, "is_current_stream_capturing", lambda: self.capturing is not None
        )
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 7))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        for name in ("endAllocateToPool", "releasePool"):
            monkeypatch.setattr(torch._C, f"_cuda_{name}", lambda *_: None, raising=False)

    def randn(self) -> None:
        if self.generator_captures and self.capturing is None:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")


class PretendedGraph:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def capture_begin(self, pool: tuple[int, int] = (0, 0), *, capture_error_mode: str) -> None:
        self.cuda.generator_captures = True
        if self.cuda.capturing is not None:
            raise RuntimeError(BUSY)
        self.cuda.capturing = self

    def capture_end(self) -> None:
        assert self.cuda.capturing is self
        self.cuda.capturing = None
        failed, self.cuda.invalid = self.cuda.invalid, False
        if failed:
            raise RuntimeError(
                "CUDA error: operation failed due to a previous error during capture"
            )
        self.cuda.generator_captures = False
        self.cuda.alive.append(self)

    def reset(self) -> None:
        if self.cuda.capturing is not None:
            self.cuda.invalid = True  # CUDA: not permitted when stream is capturing
        elif self in self.cuda.alive:
            self.cuda.alive.remove(self)

    def __del__(self) -> None:
        self.reset()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


@pytest.mark.parametrize("how", ["bound again", "freed", "collected"])
def test_a_graph_that_dies_in_a_capture_is_destroyed_later(cuda, holder, how):
    graph = _begin(holder)
    graph.end()
    assert len(cuda.alive) == 1
    old, graph = [graph], _begin(holder)
    if how == "freed":
        old[0].free()
    elif how == "collected":
        old.append(old)  # a cycle
        old = []
        gc.collect()
    else:
        old.clear()
    assert len(cuda.alive) == 1, "not yet"
    graph.end()
    assert len(cuda.alive) == 1, "the new one"
    cuda.randn()
    old.clear()
    del graph
    assert cuda.alive == []


def test_a_graph_that_dies_while_torch_captures_waits_too(cuda, holder):
    graph = _begin(holder)
    graph.end()
    theirs = torch.cuda.CUDAGraph()
    theirs.capture_begin(capture_error_mode="global")
    del graph
    theirs.capture_end()
    assert len(cuda.alive) == 2
    _begin(holder).end()
    assert cuda.alive == [theirs]


def test_a_failed_capture_leaves_torch_as_it_was(cuda, holder):
    graph = _begin(holder)
    cuda.invalid = True  # as .item() does
    with pytest.raises(CaptureError, match="refused by the runtime"):
        graph.end()
    cuda.randn()
    assert cuda.capturing is None
    _begin(holder).end()


def test_a_capture_that_cannot_begin_leaves_the_generator(cuda, holder, monkeypatch):
    begin = PretendedGraph.capture_begin

    def fail_once(self: PretendedGraph, *args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(PretendedGraph, "capture_begin", begin)
        cuda.generator_captures = True
        raise RuntimeError(BUSY)

    monkeypatch.setattr(PretendedGraph, "capture_begin", fail_once)
    with pytest.raises(RuntimeError, match="is capturing"):
        _begin(holder)
    cuda.randn()


def test_captures_in_a_loop_with_failures_between(cuda, holder):
    for number in range(20):
        graph = _begin(holder)
        if number % 3 == 1:
            cuda.invalid = True
            graph.abort()
        else:
            graph.end()
        cuda.randn()
        assert len(cuda.alive) <= 1
    del graph
    assert cuda.alive == []
