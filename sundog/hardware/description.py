"""The description of a machine for the time models, read from a JSON file and checked.

One file per machine, in this folder or anywhere else. Every figure is an object:

    "launch_s": {"value": 1.5e-06, "source": "fitted: docs/measured/h200-all-reduce-2.json", ...}

Its source begins with one of: measured, published, fitted (to measured times of ops, by `sundog
calibrate`), assumed. Units are in the names: `_s` is seconds, `_rate` is bytes or floating-point
operations per second, `_bytes` is bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

HOW = ("measured", "published", "fitted", "assumed")
_ENDLESS = 1e300  # JSON may have whole numbers that no float holds
KINDS = ("none", "switch", "mesh", "host")
_OPTIONAL = ("pairs", "pair_rates", "peer_s", "process_s")


@dataclass(frozen=True)
class Source:
    """Where a figure comes from."""

    text: str
    date: str


@dataclass(frozen=True)
class Chip:
    """One GPU and its memory."""

    num_sms: int
    launch_s: float  # a kernel in a graph, from the end of the one before to its first access
    share_s: float  # more for each further rank whose kernel starts on the same GPU
    flag_s: float  # a barrier of programs whose flags are in this memory
    load_s: float  # a program's loop: from a load to the next one, without the time of the data
    read_rate: float  # of the memory, by all SMs together
    write_rate: float
    copy_rate: float  # a copy: reads and writes overlap by more than half
    cache_rate: float  # of loads that find their data in the L2 cache
    cache_bytes: float  # what the cache holds
    sm_rate: float  # what one SM stores
    sm_load_rate: float  # and loads
    poll_rate: float  # atomics on 8-byte words by all SMs, in words per second
    matmul_rate: tuple[tuple[float, float], ...]  # bf16: flops of a product, and flops per second
    tile_s: float  # what an output tile of a product costs besides its flops
    peer_s: float = 0.0  # more of a barrier for each rank beyond two
    process_s: float = 0.0  # more of a flag if the ranks that share the GPU are processes


class PairRates(NamedTuple):
    """A GPU's rates, alone, from and to a peer's memory, in bytes per second."""

    gpu: int
    peer: int
    read: float
    write: float
    copy: float  # by a copy engine, from the peer


@dataclass(frozen=True)
class Link:
    """How the GPUs of a node reach each other's memory.

    none: the ranks share one GPU. switch: a switch gives all pairs the full rate. mesh: every pair
    has a wire. host: peers' memory is pinned host memory, across the host's bus.
    """

    kind: str
    rate: float  # of one GPU, per direction, to all peers together
    pair_rate: float  # to one peer, per direction
    load_s: float  # the extra time of a load from a peer's memory
    flag_s: float  # the extra time of a barrier, compared with one GPU; not for host
    multicast_rate: float  # of one GPU, by loads that the switch reduces; 0: it can't
    copy_rate: float  # of one copy engine; 0: unknown
    pairs: tuple[tuple[int, int], ...] | None = None  # the wires of a mesh that lacks some
    pair_rates: tuple[PairRates, ...] | None = None  # where each pair was measured

    def rate_between(self, gpu: int, peer: int, is_read: bool) -> float:
        """Return a pair's bytes per second: as measured, or the rate of all pairs."""
        for each in self.pair_rates or ():
            if (each.gpu, each.peer) == (gpu, peer):
                return each.read if is_read else each.write
        return self.pair_rate

    @property
    def slowest_pair(self) -> float:
        """The slowest pair, for which ranks wait that all do the same."""
        return min((min(p.read, p.write) for p in self.pair_rates or ()), default=self.pair_rate)


@dataclass(frozen=True)
class Network:
    """Between nodes."""

    rate: float  # of one GPU, per direction
    latency_s: float  # one way


@dataclass(frozen=True)
class Hardware:
    """GPUs, links, and where each figure comes from."""

    name: str
    title: str
    nodes: int
    gpus: int  # of a node
    gpu: Chip
    link: Link
    network: Network | None = None
    sources: dict[str, Source] = field(default_factory=dict, compare=False, hash=False)

    @property
    def most_ranks(self) -> int | None:
        """The most ranks that it has room for; None if they share one GPU, limited by its SMs."""
        return None if self.link.kind in ("none", "host") else self.nodes * self.gpus

    def between_processes(self) -> Hardware:
        """Return the machine as processes that share its GPU see it: their flags take longer."""
        if self.link.kind != "none":
            return self
        flag_s = self.gpu.flag_s + self.gpu.process_s
        return self.changed({"gpu.flag_s": flag_s, "gpu.process_s": 0.0})

    def changed(self, changes: dict[str, float]) -> Hardware:
        """Return the machine with other figures, given by name: {"link.rate": 2.2e11}."""
        parts: dict[str, Any] = {"gpu": self.gpu, "link": self.link, "network": self.network}
        for name, value in changes.items():
            part, _, inside = name.partition(".")
            if part not in parts or not hasattr(parts[part], inside):
                raise ValueError(f"{self.name}: there is no figure {name!r} to change")
            parts[part] = dataclasses.replace(parts[part], **{inside: value})
        return dataclasses.replace(self, **parts)


# which ones there are


def known() -> list[str]:
    """List the machines that come with the package."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.json"))


def read(name: str) -> Hardware:
    """Read a machine of the package by its name, or any other by its path."""
    path = Path(name) if name.endswith(".json") else Path(__file__).parent / f"{name}.json"
    if not os.path.isfile(path):
        raise ValueError(
            f"machine {name!r} is not known; there are: {', '.join(known())}. A path that ends "
            "in .json is read as a file, and `sundog calibrate` writes one."
        )
    status = path.stat()
    return _read(path, status.st_mtime_ns, status.st_ino)


@functools.lru_cache(maxsize=64)
def _read(path: Path, mtime: int, inode: int) -> Hardware:
    """Read a file once until it changes, since every new plan asks for its machine."""
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from None
    return parse(data, str(path))


# reading


def parse(data: Any, where: str) -> Hardware:
    """Make a Hardware from a description. A ValueError names a field that is missing or wrong."""
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object with the fields of a machine")
    sources: dict[str, Source] = {}
    head = _fields(data, ("name", "title", "nodes", "gpus", "gpu", "link"), ("network",), where)
    made = Hardware(
        _text(head["name"], "name", where),
        _text(head["title"], "title", where),
        _count(head["nodes"], "nodes", where),
        _count(head["gpus"], "gpus", where),
        Chip(**_figures(Chip, head["gpu"], "gpu", where, sources)),
        Link(**_figures(Link, head["link"], "link", where, sources)),
        _network(head.get("network"), where, sources),
        sources,
    )
    _check_figures(made, where)
    _check_pairs(made, where)
    _check_reach(made, where)
    return made


def _network(data: Any, where: str, sources: dict[str, Source]) -> Network | None:
    return None if data is None else Network(**_figures(Network, data, "network", where, sources))


def plain(made: Hardware) -> dict[str, Any]:
    """Return a machine as the JSON data that `parse` reads."""
    parts: dict[str, Any] = {"gpu": made.gpu, "link": made.link, "network": made.network}
    data: dict[str, Any] = {key: getattr(made, key) for key in ("name", "title", "nodes", "gpus")}
    for part, figures in parts.items():
        if figures is None:
            continue
        data[part] = {}
        for name, value in dataclasses.asdict(figures).items():
            if name == "kind" or (name == "pairs" and value is not None):
                data[part][name] = value
            elif value is not None and (name not in _OPTIONAL or f"{part}.{name}" in made.sources):
                source = made.sources[f"{part}.{name}"]
                data[part][name] = {"value": value, "source": source.text, "date": source.date}
    return data


def _fields(data: Any, needed: tuple, optional: tuple, where: str, part: str = "") -> dict:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: {part}: expected an object")
    prefix = f"{part}." if part else ""
    for name in needed:
        if name not in data:
            raise ValueError(f"{where}: {prefix}{name} is missing")
    for name in data:
        if name not in (*needed, *optional):
            raise ValueError(f"{where}: {prefix}{name} is not a field; remove it")
    return data


def _figures(kind: Any, data: Any, part: str, where: str, sources: dict[str, Source]) -> dict:
    """Return the fields of a part, without their sources."""
    names = [each.name for each in dataclasses.fields(kind)]
    optional = [name for name in names if name in _OPTIONAL]
    given = _fields(
        data, tuple(n for n in names if n not in optional), tuple(optional), where, part
    )
    found: dict[str, Any] = {}
    for name, figure in given.items():
        if name == "kind":
            found[name] = figure
        elif name == "pairs":
            found[name] = _wires(figure, f"{part}.pairs", where)
        else:
            full = f"{part}.{name}"
            found[name] = _value(figure, full, where)
            sources[full] = Source(figure["source"], figure["date"])
    return found


def _wires(value: Any, name: str, where: str) -> tuple[tuple[int, int], ...]:
    is_list = isinstance(value, list) and all(isinstance(each, list) for each in value)
    if not is_list or not all(len(each) == 2 and _are_numbers(each, int) for each in value):
        raise ValueError(f"{where}: {name}: expected a list of [GPU, GPU]")
    return tuple((a, b) for a, b in value)


def _are_numbers(values: Any, kind: Any = int | float) -> bool:
    """Return whether these are finite numbers of this kind."""
    return all(
        isinstance(each, kind) and not isinstance(each, bool) and abs(each) < _ENDLESS
        for each in values
    )


def _value(figure: Any, name: str, where: str) -> Any:
    """Return a figure's number, or its table of numbers."""
    _fields(figure, ("value", "source", "date"), (), where, name)
    source = _text(figure["source"], f"{name}.source", where)
    _text(figure["date"], f"{name}.date", where)
    how, colon, _ = source.partition(":")
    if how not in HOW or not colon:
        raise ValueError(
            f"{where}: {name}.source is {source!r}: it must begin with one of {', '.join(HOW)}, "
            "and a colon"
        )
    value = figure["value"]
    if name.endswith("matmul_rate"):
        return _table(value, name, where)
    if name.endswith("pair_rates"):
        return _pair_table(value, name, where)
    if not _are_numbers([value]):
        raise ValueError(f"{where}: {name} is {value!r}, expected a number")
    return _count(value, name, where) if name == "gpu.num_sms" else value


def _table(value: Any, name: str, where: str) -> tuple[tuple[float, float], ...]:
    """Return sizes in growing order, each with its rate."""
    try:
        rows = tuple((float(size), float(rate)) for size, rate in value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{where}: {name}: expected a list of [flops, flops per second]") from None
    sizes = [size for size, _ in rows]
    is_sound = all(_are_numbers(row) and min(row) > 0 for row in rows)
    if not rows or not is_sound or sizes != sorted(set(sizes)):
        raise ValueError(
            f"{where}: {name}: expected growing sizes above 0, and a positive rate for each"
        )
    return rows


def _pair_table(value: Any, name: str, where: str) -> tuple[PairRates, ...]:
    try:
        rows = tuple(PairRates(a, b, *map(float, rates)) for a, b, *rates in value)
    except (TypeError, ValueError, OverflowError):
        rows = ()
    is_sound = all(_are_numbers(row[:2], int) and _are_numbers(row) for row in rows)
    if not rows or not is_sound or min(min(row[2:]) for row in rows) <= 0:
        raise ValueError(
            f"{where}: {name}: expected a list of [GPU, peer, read, write, copy], rates above 0"
        )
    return rows


def _text(value: Any, name: str, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{where}: {name} is {value!r}, expected text")
    return value


def _count(value: Any, name: str, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{where}: {name} is {value!r}, expected a whole number of at least 1")
    return value


# what contradicts itself

_ROUNDED = 1.01  # published rates are rounded
_MAY_BE_ZERO = (
    "gpu.share_s", "gpu.tile_s", "gpu.peer_s", "gpu.process_s", "link.multicast_rate",
    "link.copy_rate",
)  # fmt: skip


def _check_figures(made: Hardware, where: str) -> None:
    has_link = made.link.kind != "none"
    for part, figures in (("gpu", made.gpu), ("link", made.link), ("network", made.network)):
        if figures is None:
            continue
        for name, value in dataclasses.asdict(figures).items():
            full = f"{part}.{name}"
            least_zero = full in _MAY_BE_ZERO or (part == "link" and not has_link)
            if isinstance(value, int | float) and (value < 0 or (value == 0 and not least_zero)):
                raise ValueError(f"{where}: {full} is {value}, and it must be positive")
    if made.link.kind not in KINDS:
        raise ValueError(
            f"{where}: link.kind is {made.link.kind!r}, expected one of {', '.join(KINDS)}"
        )
    if made.gpu.copy_rate >= 2 * made.gpu.write_rate:
        raise ValueError(
            f"{where}: gpu.copy_rate is {made.gpu.copy_rate:.3g}, twice gpu.write_rate "
            f"{made.gpu.write_rate:.3g} or more: its writes alone would take longer"
        )
    if made.gpu.cache_rate < made.gpu.read_rate:
        raise ValueError(
            f"{where}: gpu.cache_rate is {made.gpu.cache_rate:.3g}, less than gpu.read_rate "
            f"{made.gpu.read_rate:.3g}: a cache is not slower than its memory"
        )
    if made.link.pair_rate > made.link.rate:
        raise ValueError(
            f"{where}: link.pair_rate is {made.link.pair_rate:.3g}, more than link.rate "
            f"{made.link.rate:.3g} of all pairs together"
        )
    wires = made.link.pair_rate * max(made.gpus - 1, 1)
    if made.link.kind == "mesh" and made.link.rate > wires * _ROUNDED:
        raise ValueError(
            f"{where}: link.rate is {made.link.rate:.3g}, more than the {made.gpus - 1} wires of a "
            f"GPU have, {made.link.pair_rate:.3g} each by link.pair_rate"
        )


def _check_pairs(made: Hardware, where: str) -> None:
    """Raise ValueError if a measured pair can't exist, or is faster than all pairs together."""
    found = set()
    for each in made.link.pair_rates or ():
        pair = f"{where}: link.pair_rates: GPU {each.gpu} and peer {each.peer}"
        if each.gpu == each.peer or not {each.gpu, each.peer} <= set(range(made.gpus)):
            raise ValueError(f"{pair} are not a pair of {made.gpus} GPUs")
        if each[:2] in found:
            raise ValueError(f"{pair} are there twice")
        found.add(each[:2])
        if max(each.read, each.write) > made.link.rate:
            raise ValueError(
                f"{pair} have {max(each.read, each.write):.3g}, more than link.rate "
                f"{made.link.rate:.3g} of all pairs together"
            )


def _check_reach(made: Hardware, where: str) -> None:
    """Raise ValueError unless every GPU reaches every other."""
    for name, count in (("gpus", made.gpus), ("nodes", made.nodes)):
        if made.link.kind in ("none", "host") and count > 1:
            raise ValueError(
                f"{where}: {name} is {count} and link.kind {made.link.kind!r}, whose ranks share "
                f"one GPU: {name} 0 and 1 do not reach each other"
            )
    if made.nodes > 1 and made.network is None:
        raise ValueError(
            f"{where}: nodes is {made.nodes} and network is missing: nodes 0 and 1 do not reach "
            "each other"
        )
    if made.link.pairs is not None:
        wires = {frozenset(pair) for pair in made.link.pairs}
        for a, b in made.link.pairs:
            if a == b or not {a, b} <= set(range(made.gpus)):
                raise ValueError(
                    f"{where}: link.pairs: GPUs {a} and {b} are not a pair of {made.gpus} GPUs"
                )
        for a, b in combinations(range(made.gpus), 2):
            if frozenset((a, b)) not in wires:
                raise ValueError(f"{where}: link.pairs: GPUs {a} and {b} do not reach each other")
