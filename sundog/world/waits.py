"""The host's side of a kernel's context: the table that waits read, and what they leave in it.

Also what a rank is doing, where the others can read it without its help: when a wait expires, the
error shows what every rank called last.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch

from ..device import context
from ..errors import WaitRecord, WaitTimeout, by_rank

__all__ = ["COUNT", "SERIAL", "Progress", "Waits", "table"]


def table(rank: int, deltas: list[tuple[int, int]], polls: int) -> list[int]:
    """The words of a context, but for where its record is. `deltas`: of data and of flags."""
    first = context.DELTAS.value
    assert (first + 1, 2) == (context.FLAG_DELTAS.value, context.PER_PEER.value)
    words = [0] * first + [word for pair in deltas for word in pair]
    words[first - 2 : first] = [context.NOBODY] * 2
    words[context.RANK.value] = rank
    words[context.SIZE.value] = len(deltas)
    words[context.POLLS.value] = polls
    return words


class Waits:
    """One rank's waits: whether one expired, and how to go on afterwards."""

    def __init__(self, ctx: torch.Tensor, record: torch.Tensor | None) -> None:
        here = context.RECORD_HERE.value
        own = ctx[here : here + context.RECORD_WORDS.value]
        self._ctx = ctx
        self._record = own if record is None else record
        # Every call looks at this word, which is in host memory: by ctypes that takes 30 ns.
        self.word = ctypes.c_int64.from_address(self._record.data_ptr())
        self.error: WaitTimeout | None = None  # that was raised, until the world recovers

    @property
    def distance(self) -> int:
        """From the context to the record, in words."""
        return (self._record.data_ptr() - self._ctx.data_ptr()) // 8

    def raise_if_expired(
        self,
        member: int,
        ranks: Sequence[int],
        name_of: Callable[[int], str],
        doing: Callable[[], str],
    ) -> None:
        """Raise WaitTimeout, once, if a wait of this rank has expired. Reads no device memory.

        Kernels know ranks as members of their group; the error names them as the world does.
        """
        if self.word.value == 0 or self.error is not None:
            return
        with torch._C.DisableTorchFunction():  # host memory: there is nothing to wait for
            _, program, address, expected, seen, owing = self._record.tolist()
        rank, peer = ranks[member], ranks[owing] if 0 <= owing < len(ranks) else owing
        record = WaitRecord(rank, program, name_of(address), expected, seen, peer)
        self.error = WaitTimeout(
            f"rank {rank}, program {program}: waited for {record.flag} to reach {expected}, "
            f"saw {seen}; rank {peer} owes the signal. Further waits on this rank return "
            "immediately until every rank calls world.barrier(), which resets the flags."
            f"{doing()}",
            record,
        )
        raise self.error

    def set_back(self, polls: int) -> None:
        """Bound waits by that many polls again; none has expired."""
        self._ctx[context.POLLS.value] = polls
        self._ctx[context.TAKEN.value] = 0
        self._record.zero_()
        self.error = None


COUNT, SERIAL, _LENGTH = range(3)  # words of a page; a text follows
_TEXT = 24
_PAGE = 4096


class Progress:
    """A page of memory that says what a rank is doing: its latest call, and where its host waits.

    The others have mapped it, so that they can read it while this rank is busy, and when it is
    gone. Of its `words`, COUNT numbers the latest call, and SERIAL names its plan, which is the
    same one on every rank.
    """

    _here: ClassVar[WeakValueDictionary[int, Progress]] = WeakValueDictionary()

    def __init__(self) -> None:
        self._page: bytearray | mmap.mmap = bytearray(_PAGE)
        self.words = memoryview(self._page).cast("q")
        self._pages: list[bytearray | mmap.mmap | None] = []
        self._fd = -1
        Progress._here[id(self)] = self

    @property
    def place(self) -> tuple[int, int]:
        """Where this rank's page is: its process, and a number there."""
        return os.getpid(), id(self)

    def share(self, places: list[Any], exchange: Callable[[Any, str], list[Any]]) -> None:
        """Map the pages of all ranks, once: as they are if it is one process, or through /proc."""
        if self._pages:
            return
        if len({pid for pid, _ in places}) == 1:
            # A rank that raised since it came here has none any more.
            here = [Progress._here.get(number) for _, number in places]
            self._pages = [None if each is None else each._page for each in here]
            return
        self._fd = os.memfd_create("sundog-progress")
        os.ftruncate(self._fd, _PAGE)
        self.words.release()
        self._page = mmap.mmap(self._fd, _PAGE)
        self.words = memoryview(self._page).cast("q")
        fds = exchange(self._fd, "plan of the first op")
        self._pages = [_map(pid, fd) for (pid, _), fd in zip(places, fds, strict=True)]

    def note(self, text: str) -> None:
        """Say what else there is to know of this rank, where its host waits for example."""
        data = text.encode()[: _PAGE - _TEXT]
        self.words[_LENGTH] = 0
        self._page[_TEXT : _TEXT + len(data)] = data
        self.words[_LENGTH] = len(data)

    def close(self) -> None:
        if self._pages:
            self.note("it has closed its world")
        self.words.release()
        self.words = memoryview(bytearray(_PAGE)).cast("q")
        self._page, self._pages = bytearray(_PAGE), []
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def shown(self, name_of: Callable[[int], str], ranks: Sequence[int]) -> str:
        """What the ranks called last, a line each; nothing before the first op."""
        if not self._pages:
            return ""
        pages = [None if page is None else _read(page) for page in self._pages]
        lines = by_rank([_line(page, name_of) for page in pages], ranks)
        text = f"\nWhat each rank called last:\n{lines}"
        if len({page and page[:2] for page in pages}) > 1:
            text += "\nMake the same calls, in the same order, on every rank."
        return text


def _map(pid: int, fd: int) -> mmap.mmap | None:
    """Another rank's page, if this process may open it."""
    try:
        theirs = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
    except OSError:
        return None
    try:
        return mmap.mmap(theirs, _PAGE, prot=mmap.PROT_READ)
    finally:
        os.close(theirs)


def _read(page: bytearray | mmap.mmap) -> tuple[int, int, str]:
    """A rank's latest call, its plan, and its note."""
    words = memoryview(page[:_TEXT]).cast("q")
    text = bytes(page[_TEXT : _TEXT + words[_LENGTH]]).decode(errors="replace")
    return words[COUNT], words[SERIAL], text


def _line(page: tuple[int, int, str] | None, name_of: Callable[[int], str]) -> str:
    if page is None:
        return "not known: its process can't be looked into"
    count, serial, note = page
    text = f"call {count}, {name_of(serial)}" if count else "no op yet"
    return f"{text}; {note}" if note else text
