"""The parts of a kernel's time: bytes over a shared resource, flags, waves, tiles of a product.

A time model of an op composes these, and has no other arithmetic about machines. Each part says
what bounds it:

    latency     starting, flags, barriers: more of the machine would not help
    programs    a program's own loads and stores: more programs, or larger tiles, would help
    memory      the memory or the L2 cache of a GPU
    link        the wires between GPUs, or between nodes
    compute     multiplying

Work that goes on at the same time slows other work down. Times add almost like squares if they are
the same programs' (`together`), and hardly add if they are different programs' (`beside`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..hardware.description import Chip, Hardware

TOGETHER = 2.5  # exponents of the sum
BESIDE = 6.0
_ITEM = 2  # bytes of an operand to which the rates of products apply


class Part(NamedTuple):
    """Some of an op's time."""

    name: str
    bound: str
    seconds: float


@dataclass(frozen=True)
class Time:
    """How long an op should take, and the parts of that."""

    seconds: float
    parts: tuple[Part, ...]

    @property
    def bound(self) -> str:
        """What bounds most of it."""
        sums: dict[str, float] = {}
        for part in self.parts:
            sums[part.bound] = sums.get(part.bound, 0.0) + part.seconds
        return max(sums, key=lambda each: sums[each])


class Traffic(NamedTuple):
    """The bytes that one rank's kernel moves, of which `there` are in peers' memory.

    `reread` bytes are read from the cache, since another program reads them at about the same time.
    """

    read: float
    written: float
    reread: float = 0.0
    read_there: float = 0.0
    written_there: float = 0.0


class Round(NamedTuple):
    """What a program does in one round: it waits for its loads `trips` times."""

    read: float
    written: float
    trips: float = 1.0
    is_there: bool = False  # some of the loads are of peers' memory


@dataclass(frozen=True)
class Ranks:
    """Where an op runs: the number of ranks, the machine, and each rank's SMs."""

    hardware: Hardware
    size: int
    num_sms: int
    late_s: float = 0.0  # by which one rank is late

    @staticmethod
    def on(hardware: Hardware, size: int, num_sms: int = 0, late_s: float = 0.0) -> Ranks:
        """Give each rank all SMs that it can have, unless `num_sms` says otherwise."""
        most = hardware.most_ranks
        if most is not None and size > most:
            raise ValueError(f"{hardware.name} has {most} GPUs, and {size} ranks are too many")
        share = hardware.gpu.num_sms // (size if hardware.link.kind == "none" else 1)
        if share < 1:
            raise ValueError(
                f"{size} ranks on {hardware.name}, whose GPU has {hardware.gpu.num_sms} SMs"
            )
        return Ranks(hardware, size, num_sms or share, late_s)

    @property
    def per_gpu(self) -> int:
        """The number of ranks whose kernels use one GPU's memory at the same time."""
        return self.size if self.hardware.link.kind == "none" else 1

    @property
    def starting_per_gpu(self) -> int:
        """The number of ranks whose kernels start on one GPU: with peers in a host's memory all."""
        return self.size if self.hardware.link.kind in ("none", "host") else 1

    @property
    def is_linked(self) -> bool:
        """Whether peers' memory is across a link."""
        return self.size > 1 and self.hardware.link.kind != "none"

    @property
    def off_node(self) -> float:
        """The share of a rank's peers that are on other nodes."""
        here = min(self.size, self.hardware.gpus)
        return (self.size - here) / max(self.size - 1, 1) if self.hardware.nodes > 1 else 0.0


# latencies


def launch(ranks: Ranks) -> Part:
    """Charge a kernel's start. Kernels of ranks that share a GPU start one after the other."""
    gpu = ranks.hardware.gpu
    return Part("launch", "latency", gpu.launch_s + gpu.share_s * (ranks.starting_per_gpu - 1))


def way(
    hardware: Hardware, is_linked: bool, is_far: bool, is_released: bool = True, peers: int = 1
) -> float:
    """Return the time from a signal to the end of a wait for it, or for those of several peers.

    One that is not released has no fence, which waits until earlier stores have arrived.
    """
    seconds = hardware.gpu.flag_s + max(peers - 1, 0) * hardware.gpu.peer_s
    if is_linked and hardware.link.kind != "host":  # there flags are in the GPU's own memory
        seconds += hardware.link.flag_s
    if is_far and hardware.network is not None:
        seconds += hardware.network.latency_s
    return seconds if is_released else _NO_FENCE * seconds


_NO_FENCE = 0.5  # of a flag's way is left without the fence: seen on one GPU


def barrier(
    ranks: Ranks, times: float = 1.0, name: str = "barrier", is_released: bool = True
) -> Part:
    """Charge a barrier of all ranks. The first of a kernel also waits for a late rank."""
    seconds = times * _way(ranks, is_released, ranks.size - 1)
    return Part(name, "latency", seconds if ranks.size > 1 else 0.0)


def flags(ranks: Ranks, times: float) -> Part:
    """Charge waits for one peer's flag each."""
    return Part("flags", "latency", times * _way(ranks) if ranks.size > 1 else 0.0)


def _way(ranks: Ranks, is_released: bool = True, peers: int = 1) -> float:
    return way(ranks.hardware, ranks.is_linked, ranks.off_node > 0, is_released, peers)


def words(ranks: Ranks, count: float, trips: int = 1) -> list[Part]:
    """Charge a kernel's start, and words of 8 bytes that carry their own flags, of which a rank
    sends `count` and polls as many.

    What is sent is loaded first, and goes there and on, `trips` ways in all. There is no barrier:
    ranks that share a GPU send and poll while others start. The words are atomics where they are
    polled, and only those that are sent cross a link.
    """
    gpu, link = ranks.hardware.gpu, ranks.hardware.link
    ways = trips * _way(ranks, is_released=False) if ranks.size > 1 else 0.0
    seconds = ranks.per_gpu * 2 * count / gpu.poll_rate
    if ranks.is_linked:
        seconds = math.hypot(seconds, 8 * count / link.rate)
    others = Part("other ranks' start", "latency", launch(ranks).seconds - gpu.launch_s)
    return [
        Part("launch", "latency", gpu.launch_s),
        Part("words' way", "latency", gpu.load_s + ways),
        together("words", [others, Part("words", "programs", seconds)]),
    ]


# bytes


def resources(ranks: Ranks, traffic: Traffic) -> list[Part]:
    """Return how long each shared resource is busy with all ranks' traffic."""
    gpu, count = ranks.hardware.gpu, ranks.per_gpu
    moved = count * memory_seconds(gpu, traffic.read, traffic.written)
    found = [Part("memory", "memory", moved)]
    if traffic.reread:
        found.append(Part("cache", "memory", count * traffic.reread / gpu.cache_rate))
    there = traffic.read_there + traffic.written_there
    if ranks.is_linked and there:
        found.append(Part("link", "link", _link_seconds(ranks, there)))
    return found


def memory_seconds(gpu: Chip, read: float, written: float) -> float:
    """Interpolate measured rates: reads alone, writes alone, as many of both (which is faster)."""
    both = 2 / gpu.copy_rate
    mostly_read = read / gpu.read_rate + written * (both - 1 / gpu.read_rate)
    mostly_written = read * (both - 1 / gpu.write_rate) + written / gpu.write_rate
    return max(mostly_read, mostly_written)


def _link_seconds(ranks: Ranks, nbytes: float) -> float:
    """Charge the link. As much comes as goes, since every rank does the same at the same time."""
    link, far = ranks.hardware.link, ranks.off_node
    near = nbytes * (1 - far)
    peers = max((ranks.size - 1) * (1 - far), 1.0)
    busiest = max(near / link.rate, near / peers / link.slowest_pair)
    if far and ranks.hardware.network is not None:
        busiest = max(busiest, nbytes * far / ranks.hardware.network.rate)
    return busiest


def waves(count: float, workers: float) -> int:
    """Count the rounds in which `workers` do `count` things."""
    return math.ceil(max(count, 1) / max(workers, 1))


def copied(ranks: Ranks, name: str, traffic: Traffic, tile: Round, rounds: float) -> Part:
    """Charge programs that go over data, `rounds` tiles each, sharing memory and links with others.

    The first loads only wait. From then on, also for further trips of the same round, programs wait
    while others use the resources.
    """
    gpu = ranks.hardware.gpu
    wait = gpu.load_s + (ranks.hardware.link.load_s if tile.is_there and ranks.is_linked else 0.0)
    first = min(tile.trips, 1.0) * wait if rounds else 0.0
    moved = tile.read / gpu.sm_load_rate + tile.written / gpu.sm_rate
    own = rounds * (tile.trips * wait + moved) - first
    part = together(name, [Part(name, "programs", own), *resources(ranks, traffic)])
    return part._replace(seconds=first + part.seconds)


# products


def product(
    ranks: Ranks, sizes: tuple[int, int, int], tile: tuple[int, int], programs: int
) -> Part:
    """Charge a product M x N x K, a program per tile, and its operands. `sizes`: of a rank."""
    gpu, (m, n, k), (tile_m, tile_n) = ranks.hardware.gpu, sizes, tile
    flops = 2.0 * m * n * k
    rate = dot_rate(gpu, ranks.per_gpu * flops, tile)
    rounds = waves(math.ceil(m / tile_m) * math.ceil(n / tile_n), programs)
    seconds = rounds * (2.0 * tile_m * tile_n * k / rate + gpu.tile_s)
    operands = Traffic(_ITEM * k * (m + n), _ITEM * m * n)
    return together("product", [Part("product", "compute", seconds), *resources(ranks, operands)])


def dot_rate(gpu: Chip, flops: float, tile: tuple[int, int]) -> float:
    """Return the flops per second of one SM in a product of this many, by tiles of this size."""
    tile_m, tile_n = tile
    speed = 1 / (1 + _THIN * (tile_m + tile_n) / (tile_m * tile_n)) * (1 + _THIN * _THINNEST)
    return _at(gpu.matmul_rate, flops) / gpu.num_sms * speed


_THIN = 25.0  # of a tile's loads per flop: how much slower a smaller tile multiplies, fitted
_THINNEST = (128 + 256) / (128 * 256)  # of the tile for which the rates are


def _at(table: Sequence[tuple[float, float]], size: float) -> float:
    """Return a rate between the sizes of a table, on a logarithmic scale."""
    if size <= table[0][0]:
        return table[0][1]
    for (s0, r0), (s1, r1) in itertools.pairwise(table):
        if size <= s1:
            return r0 + (r1 - r0) * math.log(size / s0) / math.log(s1 / s0)
    return table[-1][1]


# composition


def together(name: str, parts: Sequence[Part], exponent: float = TOGETHER) -> Part:
    """Join parts that go on at the same time: more than the longest, less than their sum."""
    longest = max(parts, key=lambda part: part.seconds)
    if longest.seconds <= 0:
        return Part(name, longest.bound, 0.0)
    ratio: float = sum((part.seconds / longest.seconds) ** exponent for part in parts)
    return Part(name, longest.bound, longest.seconds * ratio ** (1 / exponent))


def beside(name: str, parts: Sequence[Part]) -> Part:
    """Join parts of different programs: hardly more than the longest."""
    return together(name, parts, BESIDE)


def total(parts: Sequence[Part], late_s: float = 0.0) -> Time:
    """Add one part after the other. Those before the first wait for peers have ended when a late
    rank comes, so its whole delay is added."""
    if late_s:
        parts = [*parts, Part("late rank", "latency", late_s)]
    return Time(sum(part.seconds for part in parts), tuple(p for p in parts if p.seconds > 0))
