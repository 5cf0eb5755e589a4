"""The allocator against a simple model: a list of intervals."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from greenlet import greenlet
from hypothesis import given, settings
from hypothesis import strategies as st

import sundog
from sundog.callsite import relative
from sundog.errors import HeapDivergence, OutOfHeap
from sundog.world import heap
from sundog.world.heap import ALIGNMENT, Heap

CAPACITY = 1 << 20

# A step is a size to allocate, or (as -1 - k) "free the k-th live allocation".
sizes = st.one_of(
    st.integers(0, 4096),
    st.integers(0, CAPACITY // 3),
    st.sampled_from([0, 1, 255, 256, 257, 4096, 65536, CAPACITY]),
)
steps = st.lists(st.one_of(sizes, st.integers(-40, -1)), max_size=120)


def play(heap: Heap, program: list[int]) -> list[int | None]:
    """Make the calls; the offset that each allocation got, None where the heap was full."""
    live: list[int] = []
    offsets: list[int | None] = []
    for step in program:
        if step >= 0:
            try:
                live.append(heap.alloc(step).offset)
                offsets.append(live[-1])
            except OutOfHeap:
                offsets.append(None)
        elif live:
            heap.free(live.pop(-step % len(live)))
    return offsets


def free_in_model(heap: Heap) -> list[tuple[int, int]]:
    """The free intervals, from the live allocations alone."""
    gaps, at = [], 0
    for block in sorted(heap.live.values(), key=lambda b: b.offset):
        assert at <= block.offset, "two allocations overlap"
        if at < block.offset:
            gaps.append((at, block.offset))
        at = block.offset + block.size
    assert at <= heap.capacity, "an allocation reaches past the end"
    return [*gaps, (at, heap.capacity)] if at < heap.capacity else gaps


@settings(max_examples=200, deadline=None)
@given(steps, st.sampled_from([0, ALIGNMENT]))
def test_heap_matches_the_model(program: list[int], guard: int) -> None:
    heap = Heap(CAPACITY, guard)
    live: list[int] = []
    for step in program:
        gaps = free_in_model(heap)
        if step >= 0:
            need = max(step, 1) + guard
            fits = any(hi - lo >= need for lo, hi in gaps)
            try:
                block = heap.alloc(step)
            except OutOfHeap:
                assert not fits, "refused although a gap is large enough"
                continue
            assert fits
            assert block.offset % ALIGNMENT == 0
            assert block.size >= need
            assert any(lo <= block.offset and block.offset + block.size <= hi for lo, hi in gaps)
            live.append(block.offset)
        elif live:
            heap.free(live.pop(-step % len(live)))
        gaps = free_in_model(heap)
        # No leak, and neighbours are merged: the heap's free blocks are the model's gaps.
        assert sorted((s, s + n) for s, n in heap._by_start.items()) == gaps
        assert heap.free_bytes == sum(hi - lo for lo, hi in gaps)
        assert heap.largest_free == max((hi - lo for lo, hi in gaps), default=0)
    for offset in live:
        heap.free(offset)
    assert heap._by_start == {0: CAPACITY}, "not one block again after all frees"


@settings(max_examples=50, deadline=None)
@given(steps)
def test_equal_calls_give_equal_offsets(program: list[int]) -> None:
    one, two = Heap(CAPACITY), Heap(CAPACITY)
    assert play(one, program) == play(two, program)
    assert one.digest == two.digest
    assert one.num_calls == two.num_calls


def test_the_best_fit_with_the_lowest_offset_is_taken() -> None:
    heap = Heap(CAPACITY)
    blocks = [heap.alloc(256 * (1 + i % 3)).offset for i in range(30)]
    holes = [offset for i, offset in enumerate(blocks) if i % 2]
    for offset in [*holes[::2], *holes[1::2]]:
        heap.free(offset)
    for units in (1, 2, 3):
        fitting = [b for i, b in enumerate(blocks) if i % 2 and i % 3 == units - 1]
        assert [heap.alloc(256 * units).offset for _ in fitting] == fitting


def test_different_calls_give_different_digests() -> None:
    digests = set()
    for program in ([100], [101], [100, 100], [100, -1], []):
        heap = Heap(CAPACITY)
        play(heap, program)
        digests.add(heap.digest)
    assert len(digests) == 5


def test_capacity_is_aligned() -> None:
    assert Heap(1000).capacity == 768


def test_largest_possible_allocation() -> None:
    heap = Heap(CAPACITY)
    assert heap.alloc(CAPACITY).offset == 0
    with pytest.raises(OutOfHeap):
        heap.alloc(0)


def count_lines(function: Callable[[], object]) -> int:
    """Lines of heap.py that a call runs; not what a garbage collection in between does."""
    lines = 0

    def trace(frame: FrameType, event: str, arg: object) -> object:
        nonlocal lines
        lines += event == "line" and frame.f_code.co_filename.endswith("heap.py")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("units", [1, 40, 41])
def test_steps_do_not_grow_with_the_number_of_blocks(units: int) -> None:
    """A full heap with holes of 40 units and one of 41, which are of one size class."""

    def steps_with(holes: int) -> tuple[int, int]:
        heap = Heap(1 << 30)
        blocks = [heap.alloc(40 * ALIGNMENT).offset for _ in range(2 * holes)]
        blocks += [heap.alloc(41 * ALIGNMENT).offset]
        heap.alloc(heap.largest_free)
        for offset in blocks[::2]:
            heap.free(offset)
        heap.agree()  # as at a barrier: logging is a step
        taken: list[int] = []
        alloc = count_lines(lambda: taken.append(heap.alloc(units * ALIGNMENT).offset))
        free = count_lines(lambda: heap.free(taken[0]))
        return alloc, free

    assert steps_with(4000) == steps_with(8)


def test_running_out_names_sizes_and_lines() -> None:
    heap = Heap(1 << 16)
    heap.alloc(40_000, "weights")
    line = sys._getframe().f_lineno - 1
    heap.alloc(1_000, "bias")
    small = heap.alloc(2_000, "scratch")
    heap.alloc(3_000)
    heap.free(small.offset)
    free, largest = heap.free_bytes, heap.largest_free
    assert free > largest
    with pytest.raises(OutOfHeap) as error:
        heap.alloc(50_001, "cache")
    text = str(error.value)
    for part in ("50,001", "cache", f"{free:,}", f"{largest:,}", "65,536"):
        assert part in text
    assert f"test_heap.py:{line}" in text
    at = [text.index(part) for part in ("40,000", "3,000", "1,000 bytes")]
    assert at == sorted(at), "the largest comes first"
    assert "scratch" not in text
    assert "heap_size" in text
    enough = int(text.rpartition("about ")[2].partition(" ")[0].replace(",", ""))
    for capacity in (enough - ALIGNMENT, enough):
        other = Heap(capacity)
        for nbytes in (40_000, 1_000, 2_000, 3_000):
            other.alloc(nbytes)
        if capacity == enough:
            other.alloc(50_001)
        else:
            with pytest.raises(OutOfHeap):
                other.alloc(50_001)


@pytest.mark.parametrize("shape", [(1 << 30,), (1 << 40, 1 << 40)], ids=str)
def test_a_world_says_so_too(run: Callable[..., list], shape: tuple[int, ...]) -> None:
    def main(world: sundog.World) -> str:
        world.empty((1000,), name="kept")
        try:
            world.empty(shape, name="huge")
        except OutOfHeap as error:
            return str(error)
        return ""

    for text in run(main, 2):
        assert f"{4 * math.prod(shape):,}" in text
        assert "kept" in text
        assert "test_heap.py" in text


@pytest.mark.parametrize("divergent", [0, 2])
def test_divergence_is_reported_on_every_rank(run: Callable[..., list], divergent: int) -> None:
    """The first call that differs, with its line and size on each rank."""

    def main(world: sundog.World) -> tuple[str, int]:
        world.empty((8,), name="same")
        world.barrier()
        world.empty((16,), name="also_same")
        if world.rank == divergent:
            world.empty((7,), name="alone")
        world.empty((9,), name="after")
        try:
            world.barrier()
        except HeapDivergence as error:
            return str(error), sys._getframe().f_lineno
        return "", 0

    for text, line in run(main, 3):
        assert "number 2 since the last barrier" in text
        for rank in range(3):
            own = text.split(f"rank {rank}: ")[1].splitlines()[0]
            assert ("alone" if rank == divergent else "after") in own
            assert ("28 bytes" if rank == divergent else "36 bytes") in own
            assert f"test_heap.py:{line - (5 if rank == divergent else 4)}" in own


def test_missing_call_is_reported(run: Callable[..., list]) -> None:
    def main(world: sundog.World) -> str:
        x = world.empty((8,), name="x")
        if world.rank == 0:
            world.free(x)
        try:
            world.barrier()
        except HeapDivergence as error:
            return str(error)
        return ""

    for text in run(main, 2):
        assert "rank 0: free of 32 bytes (x)" in text
        assert "rank 1: no further call" in text


def test_a_program_without_barriers_is_not_logged_for_ever(
    run: Callable[..., list], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heap, "_LOGGED", 100)

    def main(world: sundog.World) -> tuple[int, str]:
        world.barrier()
        for _ in range(50 + world.rank):
            with world.scope():
                world.empty(3, name="again")
        with pytest.raises(HeapDivergence) as error:
            world.barrier()
        return len(world._heap.log), str(error.value)

    for length, text in run(main, 2, heap_size=1 << 20):
        assert length == 100
        assert "after the first 100 since the last barrier" in text


def test_a_place_where_nothing_is_the_users() -> None:
    """As in `sundog bench`: of the op, not of the loop that runs all ranks."""
    folder = Path(sundog.__file__).parent
    scope: dict[str, Any] = {}
    for name, lines in (
        (
            "fused/made_up.py",
            "from sundog.callsite import caller\ndef plan():\n    return caller()\n",
        ),
        ("sim/made_up.py", "def loop(fn):\n    return fn()\n"),
    ):
        exec(compile(lines, str(folder / name), "exec"), scope)
    assert greenlet(scope["loop"]).switch(scope["plan"]).endswith("fused/made_up.py:3")
    assert scope["loop"](scope["plan"]).startswith(relative(__file__))
