"""Cached plans: ops bound to a problem. All ranks make and evict the same ones.

Ranks agree when a plan is made. One exchange compares what they ask for and where their tensors
are. It also says which plans may be evicted: those that no rank's graph holds, in the order in
which rank 0 last used them. So every rank evicts the same ones, and their heaps stay the same.

Before the exchange each rank waits for its streams. No kernel ends before its peers are done with
this rank's memory, so after it nothing that uses a plan of this world runs on any rank. What is
evicted may be handed out again at once.
"""

from __future__ import annotations

import mmap
import operator
import os
import weakref
from _thread import get_ident
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..errors import OutOfHeap, RankMismatch, WaitTimeout, by_rank
from .dispatch import CachedCall

if TYPE_CHECKING:
    from ..world.tensors import Symmetric
    from ..world.waits import Waits
    from ..world.world import World
    from .op import Plan

COUNT, SERIAL, _LENGTH = range(3)  # words of a page, followed by a text
_TEXT = 24
_PAGE = 4096
_MOST_REPEATS = 256


@dataclass(eq=False)
class Staging:
    """Heap memory through which the calls on one stream copy a tensor, one call after the other.

    All plans of the stream share it, since a call is done with it when its kernel has ended.
    """

    buffer: torch.Tensor
    offset: int


@dataclass(eq=False)
class StagedTensor:
    """The part of a staging buffer that has the shape of a call's tensor."""

    staging: Staging
    shape: tuple[int, ...]
    dtype: torch.dtype
    _view: torch.Tensor | None = None
    _buffer: torch.Tensor | None = None

    def view(self) -> torch.Tensor:
        if self._view is None or self._buffer is not self.staging.buffer:  # the buffer has grown
            self._buffer = self.staging.buffer
            nbytes = torch.Size(self.shape).numel() * self.dtype.itemsize
            with torch.inference_mode(False):  # else only calls in that mode could copy to it
                self._view = self._buffer[:nbytes].view(self.dtype).view(self.shape)
        return self._view


class Plans:
    """One rank's cached plans: at most `max_plans`, besides those that graphs hold."""

    def __init__(
        self, world: World, memory: Symmetric, waits: Waits, progress: Progress, max_plans: int
    ) -> None:
        self.heap = memory.heap
        self._memory = memory
        self._waits = waits
        self._expired = waits.word
        self._words = progress.words
        self._progress = progress
        self.max_plans = max_plans
        self.repeats: dict[tuple, Any] = {}  # calls with these very tensors (dispatch.py)
        self.tryouts: dict[tuple, Any] = {}  # of algorithms, in the first calls (online.py)
        self.agreed: tuple | None = None  # the problem and config that ranks have just compared
        self.count = 0  # calls so far
        self._backend, self._order = world._backend, world._backend.order
        self._callers = self._order.callers
        self._world: World = weakref.proxy(world)  # no cycle, which would keep the heap
        self._calls: dict[Hashable, CachedCall] = {}
        self._staging: dict[tuple[int, str], Staging] = {}
        self._retired: list[tuple[Staging, set[int]]] = []  # their addresses are in graphs
        self._pinned: set[int] = set()  # serials of plans that a graph of some rank holds
        self._evictable: list[int] = []  # the others, the least recently used first
        self.made = 0  # plans so far, the same on all ranks

    def __iter__(self) -> Any:
        return iter(self._calls.values())

    def find(self, key: Hashable) -> CachedCall | None:
        return self._calls.get(key)

    def begin(self, call: CachedCall) -> None:
        """Note that this rank makes a call now. Every call comes here."""
        if self._expired.value:
            self.raise_if_expired()
        stream = call.key[-1]
        if self._callers.get(stream) != get_ident():
            self._order.claim(stream)
        self.count = call.used = count = self.count + 1
        words = self._words
        words[COUNT] = count
        words[SERIAL] = call.serial

    def raise_if_expired(self) -> None:
        """Raise WaitTimeout if a wait of this rank expired, each time until the world recovers."""
        if self._waits.word.value:
            self._world._raise_if_expired()
            error = self._waits.error  # it was caught; without a barrier this call would go wrong
            if error is not None:
                raise WaitTimeout(str(error), error.record)

    def name_of(self, serial: int) -> str:
        """Name a plan for a message."""
        found = [call for call in self if call.serial == serial]
        return repr(found[0]) if found else f"a plan that is gone (number {serial})"

    def remember(self, identity: tuple, repeat: Any) -> None:
        if len(self.repeats) >= _MOST_REPEATS:
            self.repeats.clear()
        self.repeats[identity] = repeat

    def plan(
        self, key: Hashable, op: str, asked: str, build: Callable[[], Plan], more: Any = None,
        compare: Callable[[list[Any]], None] = lambda everyone: None,
    ) -> Plan:  # fmt: skip
        """Return the plan for this key, or make one if all ranks ask for the same.

        `compare` gets every rank's `more`, and raises if they do not fit together.
        """
        self._world._streams.mark_captured()
        call = self.find(key)
        if call is None:
            self._world.num_sms = self._world._streams.share()
            compare(self.agree(op, asked, more))
            call = self.make(key, lambda: CachedCall(op, build()))
        self._world._streams.mark_captured(call)
        self.begin(call)
        return call.plan

    # where ranks agree

    def _make_room(self) -> None:
        """Evict plans that leave no room for the ops of a new stream (world/streams.py)."""
        wide = {call.serial for call in self._world._streams.wide([*self])}
        self._evictable.sort(key=lambda serial: serial not in wide)  # those first
        self._evict(len(wide.intersection(self._evictable)))
        self._world._streams.refuse_graphs([call for call in self if call.serial in wide])

    def agree(self, op: str, asked: str, more: Any = None) -> list[Any]:
        """Compare what the ranks ask for; return every rank's `more`. A collective on the host."""
        self.raise_if_expired()
        self._world._refuse_in_capture(
            "this call", "plan made during capture", "Call it once before, with such tensors."
        )
        self._order.claim(self._backend.stream_number)  # before the wait, which frees the streams
        # Then this rank's streams are idle, so nobody uses what all ranks evict.
        self._world.synchronize()
        place = self._progress.place
        mine = [asked, self._idle_serials(), self.made, self.max_plans, more, place]
        everyone = self._world._compare(mine, f"plan of {op}")
        self._refuse_differences(op, [each[0] for each in everyone])
        self._progress.share([each[5] for each in everyone], self._world._compare)
        self._words = self._progress.words
        self._settle(everyone)
        self._make_room()
        while self._evictable and len(self._calls) >= everyone[0][3]:
            self._evict(1)
        return [each[4] for each in everyone]

    def compare(self, op: str, asked: str) -> None:
        """Raise RankMismatch if ranks ask for different things. A collective on the host."""
        self._refuse_differences(op, self._world._compare(asked, f"plan of {op}"))

    def _refuse_differences(self, op: str, asked: list[str]) -> None:
        if len(set(asked)) > 1:
            text = by_rank(asked, self._world._ranks)
            raise RankMismatch(f"{op}: ranks passed different arguments:\n{text}")

    def compare_places(self, op: str, name: str, everyone: list[Any]) -> None:
        """Raise RankMismatch if a tensor does not have the same offset in all heaps."""
        places = [(offset, tuple(strides)) for offset, strides in everyone]
        if len(set(places)) > 1:
            lines = [f"{n:,} bytes into it" + (f", strides {s}" if s else "") for n, s in places]
            raise RankMismatch(
                f"{op}: {name} does not lie at the same place of every rank's heap:\n"
                f"{by_rank(lines, self._world._ranks)}\nPass the same allocation, and the same "
                "part of it, everywhere."
            )

    def make(self, key: Hashable, build: Callable[[], CachedCall]) -> CachedCall:
        """Build a call that all ranks have agreed on. Evict others until there is room."""
        count = 1
        while True:
            try:
                call = self._allocating(build)
                break
            except OutOfHeap:
                if not self._evict(count):
                    raise
                count *= 2
        self.made += 1
        call.serial, call.key = self.made, key
        self._calls[key] = call
        return call

    def _allocating(self, build: Callable[[], CachedCall]) -> CachedCall:
        """Let a plan outlive the scope. If building it fails on every rank, free its memory."""
        # Plans outlive the inference mode that a call was made in, too.
        with self._memory.own_scope() as offsets, torch.inference_mode(False):
            try:
                call = build()
            except (OutOfHeap, RankMismatch, ValueError):
                self._memory.end_scope()
                self._free_unused()
                raise
        call.offsets = offsets
        return call

    def free(self) -> None:
        """Evict all plans that no graph holds. A collective on the host."""
        self._world.synchronize()
        mine = ["", self._idle_serials(), self.made]
        self._settle(self._world._compare(mine, "freeing of plans"))
        self._evict(len(self._calls))

    def clear(self) -> None:
        """Drop all plans, which refer to their world and would keep it, and its heap, alive."""
        self._calls.clear()
        self.repeats.clear()
        self._world._streams.kept.clear()
        self._staging.clear()
        self._retired.clear()

    # memory

    def stage(self, tensor: torch.Tensor, role: str) -> StagedTensor:
        """Return a place on the heap for a tensor of this stream's calls. `role` is in or out."""
        key = (self._world.stream_number, role)
        nbytes = tensor.numel() * tensor.itemsize
        staging = self._staging.get(key)
        if staging is None or staging.buffer.numel() < nbytes:
            staging = self._staging[key] = self._grown(staging, nbytes, f"staging.{role}")
        return StagedTensor(staging, tuple(tensor.shape), tensor.dtype)

    def _grown(self, old: Staging | None, nbytes: int, name: str) -> Staging:
        """Make a larger buffer. The calls that had the old one use the new one from now on."""
        buffer = self._memory.allocate(_step(nbytes), torch.uint8, name, "data", scoped=False)
        offset = self._memory.block_of(buffer).offset
        if old is None:
            return Staging(buffer, offset)
        users = {c.serial for c in self if old in [each.staging for each in c.staged.values()]}
        self._let_go(Staging(old.buffer, old.offset), users)
        old.buffer, old.offset = buffer, offset
        return old

    def _let_go(self, staging: Staging, users: set[int]) -> None:
        holders = users & self._pinned
        if holders:
            self._retired.append((staging, holders))
        else:
            self._memory.free(staging.offset)

    def _evict(self, count: int) -> bool:
        """Evict the least recently used plans. Return False if there was none."""
        serials, self._evictable = set(self._evictable[:count]), self._evictable[count:]
        for call in [call for call in self if call.serial in serials]:
            self._remove(call)
        self._free_unused()
        return bool(serials)

    def _remove(self, call: CachedCall) -> None:
        del self._calls[call.key]
        self.repeats.clear()
        for offset in reversed(call.offsets):
            self._memory.free(offset)

    def _free_unused(self) -> None:
        """Free the staging buffers that no call uses."""
        used = {staged.staging for call in self for staged in call.staged.values()}
        for key, staging in list(self._staging.items()):
            if staging not in used:
                del self._staging[key]
                self._let_go(staging, set())

    def _idle_serials(self) -> bytes:
        """List plans that no graph of this rank holds, the least recently used first.

        They are packed as bytes: hundreds of separate numbers would take most of an exchange's
        time.
        """
        held = self._world._streams.captured_calls()
        calls = sorted(self, key=operator.attrgetter("used"))
        return array("q", [call.serial for call in calls if call not in held]).tobytes()

    def _settle(self, everyone: list[Any]) -> None:
        """Decide which plans may be evicted: those idle on every rank, in rank 0's order."""
        first, *others = [array("q", each[1]) for each in everyone]
        common = set(first).intersection(*others)
        self.made = max(each[2] for each in everyone)
        self._evictable = [serial for serial in first if serial in common]
        self._pinned = {call.serial for call in self} - common
        retired, self._retired = self._retired, []
        for staging, holders in retired:
            self._let_go(staging, holders)


def _step(nbytes: int) -> int:
    """Round up to a quarter of a power of two: that gives few sizes and wastes little."""
    unit = max(1 << max(nbytes.bit_length() - 3, 0), 256)
    return -(-nbytes // unit) * unit


# what a rank is doing, readable by the others without its help: an expired wait's error shows it


class Progress:
    """A page of memory that says what a rank is doing: its latest call, and where its host waits.

    The other ranks have mapped it, so that they can read it while this rank is busy, and after it
    is gone. The word COUNT numbers the latest call, and SERIAL names its plan, which is the same on
    every rank.
    """

    _here: ClassVar[weakref.WeakValueDictionary[int, Progress]] = weakref.WeakValueDictionary()

    def __init__(self) -> None:
        self._page: bytearray | mmap.mmap = bytearray(_PAGE)
        self.words = memoryview(self._page).cast("q")
        self._pages: list[bytearray | mmap.mmap | None] = []
        self._fd = -1
        Progress._here[id(self)] = self

    @property
    def place(self) -> tuple[int, int]:
        """Where this rank's page is: its process, and a number in it."""
        return os.getpid(), id(self)

    def share(self, places: list[Any], exchange: Callable[[Any, str], list[Any]]) -> None:
        """Map the pages of all ranks, once: directly in one process, otherwise through /proc."""
        if self._pages:
            return
        if len({pid for pid, _ in places}) == 1:
            # A rank that has raised since has no page any more.
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
        """Note what else to show of this rank, such as where its host waits."""
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
        """Return what the ranks called last, a line each; nothing before the first op."""
        if not self._pages:
            return ""
        pages = [None if page is None else _read(page) for page in self._pages]
        lines = by_rank([_line(page, name_of) for page in pages], ranks)
        text = f"\nWhat each rank called last:\n{lines}"
        if len({page and page[:2] for page in pages}) > 1:
            text += "\nMake the same calls, in the same order, on every rank."
        return text


def _map(pid: int, fd: int) -> mmap.mmap | None:
    """Map another rank's page, if this process may open it."""
    try:
        theirs = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY)
    except OSError:
        return None
    try:
        return mmap.mmap(theirs, _PAGE, prot=mmap.PROT_READ)
    finally:
        os.close(theirs)


def _read(page: bytearray | mmap.mmap) -> tuple[int, int, str]:
    """Read a rank's latest call, its plan, and its note."""
    words = memoryview(page[:_TEXT]).cast("q")
    text = bytes(page[_TEXT : _TEXT + words[_LENGTH]]).decode(errors="replace")
    return words[COUNT], words[SERIAL], text


def _line(page: tuple[int, int, str] | None, name_of: Callable[[int], str]) -> str:
    if page is None:
        return "not known: its process can't be looked into"
    count, serial, note = page
    text = f"call {count}, {name_of(serial)}" if count else "no op yet"
    return f"{text}; {note}" if note else text
