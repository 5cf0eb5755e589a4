"""An atomic read returns any value that coherence allows, and no other."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import sundog
from sundog.checker.clocks import Actor, Clocks
from sundog.checker.words import Choices, Message, Word, Words
from sundog.device import memory
from sundog.tools.check.schedules import Report, check_once, tokens

HEAP = 256 << 10


@triton.jit
def message(words, out, rank, ctx, WRITE: tl.constexpr, READ: tl.constexpr):
    """Rank 0 writes x and then y; rank 1 reads y and then x."""
    if rank == 0:
        memory.atomic_xchg(words, 1, 0, ctx, sem="relaxed")
        memory.atomic_xchg(words + 1, 1, 0, ctx, sem=WRITE)
    else:
        first = memory.atomic_add(words + 1, 0, 0, ctx, sem=READ)
        tl.store(out, first)
        tl.store(out + 1, memory.atomic_add(words, 0, 0, ctx, sem="relaxed"))


@triton.jit
def store_buffering(words, out, rank, ctx, WRITE: tl.constexpr, READ: tl.constexpr):
    """Each rank writes its word and then reads the other's."""
    memory.atomic_xchg(words + rank, 1, 0, ctx, sem=WRITE)
    tl.store(out, memory.atomic_add(words + 1 - rank, 0, 0, ctx, sem=READ))


@triton.jit
def one_word(words, out, rank, ctx, WRITE: tl.constexpr, READ: tl.constexpr):
    """Rank 0 writes 1 and then 2 to x; rank 1 reads x twice."""
    if rank == 0:
        memory.atomic_xchg(words, 1, 0, ctx, sem=WRITE)
        memory.atomic_xchg(words, 2, 0, ctx, sem=WRITE)
    else:
        tl.store(out, memory.atomic_add(words, 0, 0, ctx, sem=READ))
        tl.store(out + 1, memory.atomic_add(words, 0, 0, ctx, sem=READ))


@triton.jit
def third_party(words, out, rank, ctx, WRITE: tl.constexpr, READ: tl.constexpr):
    """Rank 0 writes x; rank 1 waits for it and writes y; rank 2 waits for y and reads x."""
    if rank == 0:
        memory.atomic_xchg(words, 1, 0, ctx, sem="relaxed")
    elif rank == 1:
        while memory.atomic_add(words, 0, 0, ctx, sem="relaxed") < 1:
            pass
        memory.atomic_xchg(words + 1, 1, 0, ctx, sem=WRITE)
    else:
        while memory.atomic_add(words + 1, 0, 0, ctx, sem=READ) < 1:
            pass
        tl.store(out + 1, memory.atomic_add(words, 0, 0, ctx, sem="relaxed"))


def run(kernel: Any, sems: tuple[str, str], world: sundog.World) -> tuple[int, ...]:
    words, out = world.signals((2,), "words"), torch.zeros(2, dtype=torch.int64)
    world.barrier()
    kernel[(1,)](words, out, world.rank, world.ctx, *sems)
    return tuple(out.tolist())


def outcomes(kernel: Any, sems: tuple[str, str], world_size: int = 2) -> set[tuple]:
    """Return what the last rank saw; of store buffering, what each rank saw."""
    found = set()
    for token in tokens(48, 0, Report(steps=10)):
        report = check_once(partial(run, kernel, sems), world_size, token, 0, HEAP)
        assert not report.findings, report
        first = [result[0] for result in report.results]
        found.add(tuple(first) if kernel is store_buffering else report.results[-1])
    return found


RELAXED, ORDERED, FULL = ("relaxed", "relaxed"), ("release", "acquire"), ("acq_rel", "acq_rel")
ALL = {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize(
    ("kernel", "sems", "expected"),
    [
        (message, RELAXED, ALL),
        (message, ("release", "relaxed"), ALL),
        (message, ("relaxed", "acquire"), ALL),
        (message, ORDERED, ALL - {(1, 0)}),
        (store_buffering, RELAXED, ALL),
        (store_buffering, ORDERED, ALL),
        (store_buffering, FULL, ALL - {(0, 0)}),
        (one_word, RELAXED, {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)}),
        (one_word, ORDERED, {(0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2)}),
    ],
)
def test_two_ranks_see_what_the_model_allows(
    kernel: Any, sems: tuple[str, str], expected: set[tuple]
) -> None:
    assert outcomes(kernel, sems) == expected


@pytest.mark.parametrize(("sems", "expected"), [(RELAXED, {(0, 0), (0, 1)}), (ORDERED, {(0, 1)})])
def test_a_read_before_a_release_is_known_to_who_acquires(
    sems: tuple[str, str], expected: set[tuple]
) -> None:
    """Rank 1 does not write x: rank 2 must see what rank 1 has read."""
    assert outcomes(third_party, sems, 3) == expected


def test_a_poll_that_is_repeated_reads_on() -> None:
    """It may find an old value once at each place: finding it again is what a late poll does."""
    clocks = Clocks()
    poller = Actor(0, (0, 0, 0), "k", 0, 0, *(clocks.component() for _ in range(3)), {}, {}, {})
    other = clocks.component()
    word = Word(4, [64], [Message(0, b"old"), Message(1, b"new", (other, 1))])
    here, elsewhere = ((1, 1),), ((1, 2),)
    assert [m.value for m in word.readable(poller, clocks, here)] == [b"new", b"old"]
    word.note_read(poller, poller.stamp(False, False), word.messages[0], here)
    assert [m.value for m in word.readable(poller, clocks, here)] == [b"new"]
    assert [m.value for m in word.readable(poller, clocks, elsewhere)] == [b"new", b"old"]
    assert [m.value for m in word.readable(poller, clocks)] == [b"new", b"old"]


def test_a_place_that_showed_older_values_often_shows_few() -> None:
    """Each costs another turn of a loop. Other places, and a run's first reads, lose nothing."""
    choices = Choices(random.Random(0).randrange)

    def reads_older(place: tuple) -> bool:
        choices.begin()
        older = any(choices.each(1, 2, 1, place))
        if older:
            choices.read_older(place)
        return older

    first = [reads_older(("here",)) for _ in range(32)]
    later = [reads_older(("here",)) for _ in range(400)]
    elsewhere = [reads_older(("elsewhere",)) for _ in range(24)]
    assert 8 < sum(first) <= 20
    assert 8 < sum(elsewhere) <= 18
    assert 0 < sum(later) < 60


def _tile_of_words() -> Words:
    words = Words()
    words.add(Word(4, [64, 68, 72, 76], [Message(0, b"aaaabbbbccccdddd")]))
    return words


def test_the_words_of_a_tile_are_one_until_a_part_is_touched() -> None:
    words = _tile_of_words()
    assert len(words.each([64, 68, 72, 76])) == 1
    parts = words.each([68, 72])
    assert [word.newest.value for _, word in parts if word is not None] == [b"bbbbcccc"]
    assert [(lane, word.newest.value) for lane, word in words.each([64, 68, 72, 76]) if word] == [
        (0, b"aaaa"),
        (1, b"bbbbcccc"),
        (3, b"dddd"),
    ]


def test_words_that_are_touched_in_another_order_are_split() -> None:
    words = _tile_of_words()
    parts = words.each([72, 76, 64, 80])
    assert [(lane, word and word.newest.value) for lane, word in parts] == [
        (0, b"ccccdddd"),
        (2, b"aaaa"),
        (3, None),
    ]


def test_what_is_left_of_a_tile_keeps_its_history() -> None:
    words = _tile_of_words()
    words.drop(words.near(66, 73))
    found = [words.get(address) for address in (64, 68, 72, 76)]
    assert [word and word.newest.value for word in found] == [b"aaaa", None, None, b"dddd"]
    assert words.near(0, 1 << 20) == [64, 76]
