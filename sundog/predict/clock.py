"""A clock for every program of a simulated kernel, and the resources that programs share.

A simulator reports what each program does, in the order of time: loads, stores, atomics, products.
The clock says when that ends on a described machine. A resource serves one access after the other,
so programs that use it at the same time share its rate.

    loads the loads up to the next store, atomic or product are one round: they wait together
    products    operands are loaded `num_stages` - 1 products ahead, but not before the last wait
    stores      the program goes on when its data are out
    a flag      a read of a word comes after the way of the write that it sees, and that is a wait;
                a relaxed write has a shorter way, and relaxed reads go together

Not charged: arithmetic other than products, integer work, and how programs on one SM slow each
other down. A tile that was read before in the same kernel comes out of the L2 cache, whatever its
size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .parts import TOGETHER, Ranks, dot_rate, memory_seconds, way

BOUNDS = ("latency", "programs", "memory", "link", "compute")


class Awaited(NamedTuple):
    """A program stood still until another one's write arrived."""

    begin: float
    end: float
    cause: Track
    written: float  # when the cause wrote it
    sums: tuple[float, ...]  # of the waiting program at the end, by bound
    cause_sums: tuple[float, ...]  # of the cause when it wrote


class Mark(NamedTuple):
    """The latest write of a word."""

    written: float
    cause: Track
    sums: tuple[float, ...]  # of the cause when it wrote
    is_released: bool


class Slice(NamedTuple):
    begin: float
    end: float
    name: str
    detail: str


@dataclass(eq=False)
class Loading:
    """A load that its program has not waited for yet."""

    owner: int
    nbytes: float
    tile: tuple  # what identifies the load


@dataclass(eq=False)
class Track:
    """One program: its clock, and what it has done."""

    rank: int
    program: int
    kernel: str
    stages: int
    began: float
    now: float
    before: Track | None = None  # whose end let it begin
    loads: list[Loading] = field(default_factory=list)
    stored: float = 0.0  # when its stores arrive
    products: deque[float] = field(default_factory=deque)  # when the latest ones began
    since: float = 0.0  # loads are not issued earlier: the last atomic
    has_tile: bool = False  # a product that is not stored yet
    looks: dict[tuple, float] = field(default_factory=dict)  # what it polls, and since when
    round: float = 0.0  # when the latest of them that go together began
    sums: list[float] = field(default_factory=lambda: [0.0] * len(BOUNDS))
    waits: list[Awaited] = field(default_factory=list)
    spans: list[Slice] = field(default_factory=list)

    def go(self, until: float, bound: str, name: str, detail: str = "") -> None:
        """Advance its clock, and note the bound."""
        if until <= self.now:
            return
        self.sums[BOUNDS.index(bound)] += until - self.now
        last = self.spans[-1] if self.spans else None
        if last is not None and (last.name, last.detail, last.end) == (name, detail, self.now):
            self.spans[-1] = last._replace(end=until)
        else:
            self.spans.append(Slice(self.now, until, name, detail))
        self.now = until


class Server:
    """A resource that serves accesses in turn. Its remaining work shrinks as time passes.

    Accesses may come a little out of order: an earlier one waits for the remaining work, not until
    the time of the later one.
    """

    def __init__(self) -> None:
        self._latest = 0.0
        self._left = 0.0  # seconds of work, at that time

    def take(self, at: float, seconds: float) -> float:
        """Return when it is done with work that came at this time."""
        if at > self._latest:
            self._left = max(self._left - (at - self._latest), 0.0)
            self._latest = at
        self._left += seconds
        return at + self._left


class DeviceMemory(Server):
    """A GPU's memory, where mixed reads and writes take less than one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.read = self.written = 0.0


class Clock:
    """The time of all programs on one machine."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._servers: dict[tuple, Server] = {}
        self._memories = [DeviceMemory() for _ in range(ranks.size if ranks.per_gpu == 1 else 1)]
        self._seen: list[set[tuple]] = [set() for _ in self._memories]
        self._flops = [0.0 for _ in self._memories]
        self._written: dict[int, Mark] = {}

    # kernels

    def launched(self, rank: int, at: float) -> float:
        """Return when a kernel's first programs begin, if they may start at this time."""
        gpu = self.ranks.hardware.gpu
        self._seen[self._gpu(rank)].clear()
        return at + gpu.launch_s + gpu.share_s * (self.ranks.starting_per_gpu - 1)

    def ended(self, track: Track) -> float:
        """End a program, once its loads and stores have ended."""
        self._settle(track)
        track.go(track.stored, "memory", "store")
        return track.now

    # what a program does

    def load(self, track: Track, owner: int, nbytes: float, tile: tuple) -> None:
        """Note a load; whatever uses it waits for it."""
        track.loads.append(Loading(owner, nbytes, tile))

    def store(self, track: Track, owner: int, nbytes: float) -> None:
        self._settle(track)
        gpu = self.ranks.hardware.gpu
        if track.has_tile:
            track.has_tile = False
            track.go(track.now + gpu.tile_s, "compute", "tile")
        done, bound = self._move(track.rank, owner, track.now, 0.0, nbytes)
        track.stored = max(track.stored, done)
        self._wait_for(track, nbytes / gpu.sm_rate, done, bound, "store", owner)
        track.looks.clear()

    def product(self, track: Track, sizes: tuple[int, int, int], bits: int) -> None:
        """Multiply tiles M x K and K x N; `bits` of a factor."""
        m, n, k = sizes
        flops = 2.0 * m * n * k
        at = self._gpu(track.rank)
        rate = dot_rate(self.ranks.hardware.gpu, self._flops[at], (m, n)) * 16 / bits
        self._flops[at] += flops
        self._operands(track)
        track.products.append(track.now)
        while len(track.products) >= max(track.stages, 1):
            track.products.popleft()
        track.go(track.now + flops / rate, "compute", "dot")
        track.has_tile = True
        track.looks.clear()

    def atomic(
        self, track: Track, places: Sequence[tuple[int, int]], kind: str, modified: bool,
        order: str, size: int = 8,
    ) -> None:  # fmt: skip
        """Charge an atomic on these words of `size` bytes, each with the rank that has it.

        `kind` is its operation. One that modified nothing is a read, and waits for what it sees.
        """
        self._settle(track)
        is_released = modified and order in ("release", "acq_rel")
        if is_released:
            track.go(track.stored, "memory", "store")
        track.since = track.now
        track.products.clear()
        if kind == "FADD":
            self._added(track, places, size)
        elif modified and _key(places) not in track.looks:
            self._words(track, places)
            if kind not in ("XCHG", "STORE"):  # the program does not wait for their result
                track.go(track.now + self._reach(track.rank, places), "latency", "atomic")
            track.looks.clear()
        else:
            self._look(track, places, order)
        if modified:
            self.wrote(track, [address for _, address in places], is_released)

    def wrote(self, track: Track, addresses: Iterable[int], is_released: bool = True) -> None:
        """Note a new value of words that others may wait for."""
        mark = Mark(track.now, track, tuple(track.sums), is_released)
        for address in addresses:
            self._written[address] = mark

    def saw(self, track: Track, places: Sequence[tuple[int, int]]) -> None:
        """Note a plain load of a word, which ends after the write that it sees has arrived."""
        if any(address in self._written for _, address in places):
            self._settle(track)
            self._arrive(track, places, track.now)

    # how long that takes

    def _look(self, track: Track, places: Sequence[tuple[int, int]], order: str) -> None:
        """Charge a read of words. Repeated polls count as one read, which ends with the last.

        Relaxed reads do not wait for each other: those of different words are in flight together.
        """
        key = _key(places)
        if key in track.looks:
            track.round = track.now
        else:
            if order != "relaxed":
                track.looks.clear()
            if not track.looks:
                track.round = track.now
            self._words(track, places)
        begin = track.looks.setdefault(key, track.round)
        track.go(begin + self._reach(track.rank, places), "latency", "poll")
        self._arrive(track, places, begin)

    def _arrive(self, track: Track, places: Sequence[tuple[int, int]], begin: float) -> None:
        """Wait until the latest of the writes has arrived."""
        until, latest = 0.0, None
        for _, address in places:
            mark = self._written.get(address)
            if mark is not None and mark.cause is not track:
                arrives = mark.written + self._way(mark, track.rank, len(places))
                if arrives > until:
                    until, latest = arrives, mark
        if latest is None or until <= track.now:
            return
        written, cause, cause_sums, _ = latest
        track.go(until, "latency", "wait", f"rank {cause.rank} program {cause.program}")
        if track.waits and track.waits[-1].begin == begin:
            track.waits.pop()  # the same wait, which went on
        track.waits.append(Awaited(begin, until, cause, written, tuple(track.sums), cause_sums))

    def _settle(self, track: Track) -> None:
        """Wait for the loads in flight: one round."""
        if not track.loads:
            return
        gpu, issued, nbytes, done, bound = self.ranks.hardware.gpu, track.now, 0.0, 0.0, "memory"
        for load in track.loads:
            nbytes += load.nbytes
            there, why = self._move(track.rank, load.owner, issued, load.nbytes, 0.0, load.tile)
            if there > done:
                done, bound = there, why
        places = [(load.owner, 0) for load in track.loads]
        own = self._reach(track.rank, places) + nbytes / gpu.sm_load_rate
        far = next((load.owner for load in track.loads if load.owner != track.rank), track.rank)
        track.loads.clear()
        self._wait_for(track, own, done, bound, "load", far)
        track.looks.clear()

    def _operands(self, track: Track) -> None:
        """Wait for a product's operands, which were requested some products earlier."""
        ahead = len(track.products) >= track.stages - 1 and track.stages > 1
        issued = track.products[0] if ahead else track.began
        issued = max(issued, track.since) if track.stages > 1 else track.now
        done, bound = 0.0, "memory"
        for load in track.loads:
            there, why = self._move(
                track.rank, load.owner, issued, load.nbytes, 0.0, load.tile, is_operand=True
            )
            there += self._reach(track.rank, [(load.owner, 0)])
            if there > done:
                done, bound = there, why
        track.loads.clear()
        track.go(done, bound, "load")

    def _wait_for(
        self, track: Track, own: float, done: float, bound: str, name: str, owner: int
    ) -> None:
        """Delay an access by the program's own pace and by the shared resources."""
        shared = max(done - track.now, 0.0)
        taken = (own**TOGETHER + shared**TOGETHER) ** (1 / TOGETHER)
        detail = "" if owner == track.rank else f"rank {owner}"
        track.go(track.now + taken, bound if shared > own else "programs", name, detail)

    def _move(
        self, rank: int, owner: int, at: float, read: float, written: float, tile: tuple = (),
        is_operand: bool = False,
    ) -> tuple[float, str]:  # fmt: skip
        """Take bytes through all resources on their path. Return the end, and what set it."""
        gpu, seen = self.ranks.hardware.gpu, self._seen[self._gpu(owner)]
        if tile and tile in seen:
            seconds = 0.0 if is_operand else read / gpu.cache_rate
            done = self._server("cache", self._gpu(owner)).take(at, seconds) if seconds else at
        else:
            seen.add(tile)
            done = self._through_memory(self._gpu(owner), at, read, written)
        bound = "memory"
        if rank != owner and self.ranks.is_linked:
            there = self._through_link(rank, owner, at, read + written, bool(read))
            done, bound = (there, "link") if there > done else (done, bound)
        return done, bound

    def _through_memory(self, gpu: int, at: float, read: float, written: float) -> float:
        memory, chip = self._memories[gpu], self.ranks.hardware.gpu
        before = memory_seconds(chip, memory.read, memory.written)
        memory.read += read
        memory.written += written
        return memory.take(at, memory_seconds(chip, memory.read, memory.written) - before)

    def _through_link(
        self, rank: int, owner: int, at: float, nbytes: float, is_read: bool
    ) -> float:
        """Charge bytes that a rank reads from another one's memory, or writes there."""
        hardware = self.ranks.hardware
        source, target = (owner, rank) if is_read else (rank, owner)
        if hardware.network is not None and source // hardware.gpus != target // hardware.gpus:
            rate = pair_rate = hardware.network.rate
        else:
            rate = hardware.link.rate
            here, there = rank % hardware.gpus, owner % hardware.gpus
            pair_rate = hardware.link.rate_between(here, there, is_read)
        return max(
            self._server("out", source).take(at, nbytes / rate),
            self._server("in", target).take(at, nbytes / rate),
            self._server("pair", source, target).take(at, nbytes / pair_rate),
        )

    def _added(self, track: Track, places: Sequence[tuple[int, int]], size: int) -> None:
        """Charge a tile of atomic additions: its words are read and written where they are."""
        owner, nbytes, gpu = places[0][0], float(size * len(places)), self.ranks.hardware.gpu
        done, bound = self._move(track.rank, owner, track.now, 0.0, nbytes)
        done = max(done, self._through_memory(self._gpu(owner), track.now, nbytes, 0.0))
        track.stored = max(track.stored, done)
        self._wait_for(track, 2 * nbytes / gpu.sm_rate, done, bound, "atomic", owner)

    def _words(self, track: Track, places: Sequence[tuple[int, int]]) -> None:
        """Charge words of 8 bytes at their memory: a few are nothing, a tile is data."""
        if len(places) <= self.ranks.size:
            return
        owner = places[0][0]
        seconds = len(places) / self.ranks.hardware.gpu.poll_rate
        done = self._server("words", self._gpu(owner)).take(track.now, seconds)
        if owner != track.rank and self.ranks.is_linked:
            nbytes = 8.0 * len(places)
            done = max(done, self._through_link(track.rank, owner, track.now, nbytes, False))
        track.go(done, "programs", "words")

    def _reach(self, rank: int, places: Sequence[tuple[int, int]]) -> float:
        """Return the time from a request to its answer, without the time of its bytes."""
        hardware = self.ranks.hardware
        far = self.ranks.is_linked and any(owner != rank for owner, _ in places)
        return hardware.gpu.load_s + (hardware.link.load_s if far else 0.0)

    def _way(self, mark: Mark, target: int, words: int) -> float:
        hardware, source = self.ranks.hardware, mark.cause.rank
        is_linked = source != target and self.ranks.is_linked
        is_far = is_linked and source // hardware.gpus != target // hardware.gpus
        peers = words - 1 if words <= self.ranks.size else 1  # a barrier's, or words of one peer
        return way(hardware, is_linked, is_far, mark.is_released, peers)

    def _gpu(self, rank: int) -> int:
        return rank if self.ranks.per_gpu == 1 else 0

    def _server(self, *name: str | int) -> Server:
        return self._servers.setdefault(name, Server())


def _key(places: Sequence[tuple[int, int]]) -> tuple:
    return places[0], places[-1], len(places)
