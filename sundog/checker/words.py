"""Words that atomics touch: their modification order, and which of its values a read may return.

Every atomic that writes appends a message to its word. A read may return any message that coherence
allows: not one older than another that happens before the read, whether the reader knows of the
write itself or of somebody's read of it. A read-modify-write that changes the value reads the
newest, since nothing comes between the two in the modification order. One that leaves the value as
it is, such as a poll that adds 0, may read an older message: it stands right after that message,
and the next writer read the same value from it. A release must not stand there: the next
writer may have acquired without it.

The words of a tile that atomics have touched only together have one history, so they are one
`Word` with several addresses, whose values lie side by side. An access that touches a part of it
splits it into that part and what lies before and after it. If the lanes of one read see different
messages, all count as having seen the newest of them: later reads have fewer values to choose
from, and never one that coherence forbids.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from .clocks import Actor, Clock, Clocks, Stamp
from .findings import AccessEvent

VOLATILE = "VOLATILE"  # a volatile load: relaxed, at system scope
VOLATILE_TILE = "volatile load of a tile"
VOLATILES = ("volatile load", VOLATILE_TILE)
READS = ("LOAD", VOLATILE)
COPIED = "host copy of flags"  # by the copy engine: a release, in stream order
STORES = ("atomic STORE", COPIED)  # they read nothing: no release sequence goes through them

_KEPT = 8  # messages of a word: how old a value may be
_WIDE = 8  # lanes of a tile
_TRIED = 16  # atomics of one place that read older values in a run: few programs have more
_PAGE = 10  # bits of an address within a page: words are found by their pages
_page_of = _PAGE.__rrshift__  # an address's: it has no frame of its own, and is asked for each lane
_MOST_STALE = 4  # reads of a program in a row that miss the newest message: a poll sees it in time

Published = Mapping[
    tuple[str, Any], Clock
]  # by scope and who used it; never changed, only replaced


class Message(NamedTuple):
    """A value of a word, who wrote it, and what an acquire that reads it learns."""

    number: int  # in the modification order
    value: bytes
    stamp: Stamp | None = None  # None: it was there before the first atomic
    event: AccessEvent | None = None
    published: Published = MappingProxyType({})
    releases: int = 0  # in its chain of read-modify-writes


@dataclass(eq=False)
class Word:
    """The newest messages of one address, or of a tile's, and who has read which of them."""

    size: int
    addresses: list[int]
    messages: list[Message]
    signals: dict[Actor, Any] = field(default_factory=dict)  # signals.Signal: the latest of each
    seen: dict[int, int] = field(default_factory=dict)  # by component: the newest message it met
    reads: list[tuple[Stamp, int]] = field(default_factory=list)  # that others may learn of
    stale: dict[Actor, int] = field(default_factory=dict)  # reads in a row that missed the newest
    polled: dict[tuple, int] = field(default_factory=dict)  # the message that each poll found last

    @property
    def newest(self) -> Message:
        return self.messages[-1]

    def value(self, message: Message, lane: int) -> bytes:
        """Return what a message has for one address."""
        return message.value[lane * self.size : (lane + 1) * self.size]

    def part(self, first: int, last: int) -> Word:
        """Return a word of the addresses from `first`, before `last`, with this history."""
        at, lanes = self.addresses[first:last], slice(first * self.size, last * self.size)
        messages = [m._replace(value=m.value[lanes]) for m in self.messages]
        signals = {actor: s._replace(addresses=at) for actor, s in self.signals.items()}
        return Word(
            self.size, at, messages, signals, dict(self.seen), list(self.reads), dict(self.stale),
            dict(self.polled),
        )  # fmt: skip

    def append(self, message: Message) -> None:
        self.messages.append(message)
        if message.stamp is not None:
            self.seen[message.stamp[0]] = message.number
        if len(self.messages) > _KEPT:
            del self.messages[0]
            oldest = self.messages[0].number
            self.reads = [read for read in self.reads if read[1] > oldest]

    def note_read(self, actor: Actor, stamp: Stamp, message: Message, site: tuple | None) -> None:
        """Note that the stamped access, a poll if it has a site, has read this message."""
        if site is not None:
            self.polled[actor, site] = message.number
        if self.seen.get(stamp[0], -1) < message.number:
            self.seen[stamp[0]] = message.number
            if message.number > self.messages[0].number:
                self.reads.append((stamp, message.number))
        if message is self.messages[-1]:
            self.stale.pop(actor, None)
        else:
            self.stale[actor] = self.stale.get(actor, 0) + 1

    def readable(self, actor: Actor, clocks: Clocks, site: tuple | None = None) -> list[Message]:
        """Return what coherence lets the actor read, newest first.

        A poll that finds the message that it found last has only waited longer: another schedule
        shows the same. So it is offered the messages after that one.
        """
        newest = self.messages[-1]
        own = max(self.seen.get(actor.zero, -1), self.seen.get(actor.warps, -1))
        if own == newest.number or self.stale.get(actor, 0) >= _MOST_STALE:
            return [newest]
        known = [own, *(number for stamp, number in self.reads if clocks.knows(actor, stamp))]
        oldest = max(known)
        polled = self.polled.get((actor, site), -1) if site is not None else -1
        found: list[Message] = []
        for message in reversed(self.messages):
            if message.number < oldest or (message.number <= polled and found):
                break
            found.append(message)
            if message.stamp is None or clocks.knows(actor, message.stamp):
                break
        return found


class Words:
    """The words of all memory, by address."""

    def __init__(self) -> None:
        self._words: dict[int, Word] = {}
        self._pages: dict[int, dict[int, None]] = {}

    def __len__(self) -> int:
        return len(self._words)

    def get(self, address: int) -> Word | None:
        return self._words.get(address)

    def among(self, addresses: list[int]) -> list[int]:
        """Return those of these addresses that belong to a known word."""
        return [*filter(self._words.__contains__, addresses)]

    def size_at(self, address: int) -> int:
        """Return the bytes of the word there, which must be known."""
        return self._words[address].size

    def each(self, addresses: list[int]) -> list[tuple[int, Word | None]]:
        """Return the words that an access touches, each with its first lane; None: not known.

        Nothing if none is known. A word that the access touches only in part, or in another order,
        is split.
        """
        found: list[tuple[int, Word | None]] = []
        if self._words.keys().isdisjoint(addresses):
            return found
        lane, get = 0, self._words.get
        while lane < len(addresses):
            word = get(addresses[lane])
            if word is not None and len(word.addresses) > 1:
                word = self._cut(word, addresses, lane)
            found.append((lane, word))
            lane += 1 if word is None else len(word.addresses)
        return found

    def _cut(self, word: Word, addresses: list[int], lane: int) -> Word:
        """Return the part of a word that begins at this lane of an access and is touched by it."""
        whole = word.addresses
        if addresses[lane : lane + len(whole)] == whole:
            return word
        first = whole.index(addresses[lane])
        pairs = zip(whole[first:], addresses[lane:], strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._split(word, (0, first, first + same, len(whole)))
        return self._words[addresses[lane]]

    def add(self, word: Word) -> None:
        addresses = word.addresses
        self._words.update(dict.fromkeys(addresses, word))
        for page, here in itertools.groupby(addresses, _page_of):
            self._pages.setdefault(page, {}).update(dict.fromkeys(here))

    def near(self, start: int, end: int) -> list[int]:
        """Return the addresses of words from `start`, up to but not including `end`."""
        pages = range(start >> _PAGE, ((end - 1) >> _PAGE) + 1)
        if len(pages) > len(self._pages):
            return [address for address in self._words if start <= address < end]
        found = (self._pages.get(page, ()) for page in pages)
        return [address for page in found for address in page if start <= address < end]

    def drop(self, addresses: list[int]) -> None:
        """Forget these. What is left of a tile's word is split."""
        touched = dict.fromkeys(map(self._words.pop, addresses))
        for address in addresses:
            del self._pages[address >> _PAGE][address]
        for word in touched:
            kept = [address in self._words for address in word.addresses]
            if any(kept):
                ends = [n for n in range(1, len(kept)) if kept[n] != kept[n - 1]]
                self._split(word, (0, *ends, len(kept)))

    def _split(self, word: Word, ends: tuple[int, ...]) -> None:
        """Put parts of a word in its place, but for those that are forgotten."""
        for first, last in itertools.pairwise(ends):
            if first < last and word.addresses[first] in self._words:
                part = word.part(first, last)
                self._words.update(dict.fromkeys(part.addresses, part))


class Choices:
    """Which of the values that coherence allows an atomic reads.

    A poll that finds an older value takes another turn, which was the largest part of what checking
    cost. So a place that has shown many times what that does shows it seldom from then on.
    """

    def __init__(self, pick: Callable[[int], int]) -> None:
        """`pick` gets the number of values that an atomic may read, and chooses one; 0: newest."""
        self._pick = pick
        self._is_new: bool | None = None  # whether all lanes of the current atomic read the newest
        self._older: dict[tuple, int] = {}  # by place of code: atomics that read older values

    def begin(self) -> None:
        """Begin another atomic."""
        self._is_new = None

    def each(self, count: int, values: int, lanes: int, place: tuple) -> list[int]:
        """Choose for `count` of an atomic's lanes which of this many values each reads.

        It is first drawn whether all lanes read the newest, if they are many: if each chose for
        itself alone, they would hardly ever.
        """
        if self._is_new is None:
            draws = 3 if self._older.get(place, 0) >= _TRIED else int(lanes > _WIDE)
            self._is_new = any(self._pick(2) == 0 for _ in range(draws))
        return [0 if self._is_new else self._pick(values) for _ in range(count)]

    def read_older(self, place: tuple) -> None:
        """Note that the current atomic, at this place, reads an older value."""
        self._older[place] = self._older.get(place, 0) + 1


def is_poll(op: str, operand: bytes) -> bool:
    """Return whether an atomic leaves every value as it is."""
    return op in READS or (op in ("ADD", "FADD", "OR", "XOR") and not any(operand))


def leaves_unchanged(op: str, operand: bytes, value: bytes) -> bool:
    """Return whether an atomic writes this value back, or nothing, when it reads it."""
    if op == "CAS":
        expected, new = operand[: len(value)], operand[len(value) :]
        return value != expected or value == new
    if op == "XCHG":
        return value == operand
    if op in ("MAX", "MIN", "AND", "UMAX", "UMIN"):
        kind = "u" if op.startswith("U") else "i"
        other, old = (np.frombuffer(each, f"{kind}{len(value)}")[0] for each in (operand, value))
        kept = {"MAX": max(old, other), "MIN": min(old, other), "AND": old & other}
        return bool(kept[op.removeprefix("U")] == old)
    return is_poll(op, operand)
