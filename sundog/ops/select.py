"""Choose an algorithm and a config: from measurements on this kind of GPU, else by the time model
(sundog/predict) if the machine is described, else by rule.

A measurement counts only where ranks have the same number of SMs: 8 ranks that share a GPU, with 16
each, say nothing about 8 GPUs. Between two measured sizes time grows linearly: latency plus bytes
over bandwidth.

The package has one file per target (sundog/targets/nvidia-h200.json). The user's own file in
SUNDOG_CACHE, which has a folder for each version of torch and Triton, overrides it. A file is a
list of measurements, and of nothing else:

    {"op": "all_gather.push", "problem": {"numel": 65536, "dtype": "bfloat16", "size": 8},
     "config": {"block": 2048, ...}, "seconds": 8.3e-06, "date": "2026-11-15", "run": "...",
     "num_sms": 16}
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
import triton

from .. import knobs
from ..hardware.description import Hardware
from ..predict.expected import expected_times, hardware_for
from ..predict.parts import Ranks, Time, launch
from ..target import SIMULATOR
from .load import algorithms
from .op import BY_REQUEST

_COPY_S, _COPY_RATE = 3e-6, 2e12  # of a copy on a machine without a description
_FLOPS_PER_BYTE = 175  # of an H200: 700 TFLOP/s, 4 TB/s
_NEAR = 1.1  # times the best: the model cannot tell which of these is faster
_RANKS = ("src", "dst")  # fields of a problem that do not change its time
# They hardly change the time: a maximum takes as long as a sum, a product with a bias or a norm in
# FP8 as long as one without.
_ALIKE = (
    "op", "has_bias", "activation", "out_dtype", "eps", "gemma", "quant", "is_static", "both", "fp8"
)  # fmt: skip


class Place(NamedTuple):
    """Where an op is to run."""

    target: str
    num_sms: int  # of each rank


@dataclass(frozen=True)
class Choice:
    """An algorithm and its config. `explain` says why it was chosen.

    `near` has it and those that the model rates within 10 % of it; empty if it was measured.
    """

    algo: str
    config: Any
    explain: Callable[[], str]
    near: tuple[str, ...] = ()

    @property
    def why(self) -> str:
        return self.explain()


def choose(
    op: str, problem: Any, target: str, num_sms: int, config: Any = None, backend: str = "",
    ordinary: Mapping[str, int] = MappingProxyType({}), owns_gpu: bool = False,
) -> Choice:  # fmt: skip
    """Choose the algorithm that should be fastest here, among those that give the same bits.

    With a `config`, choose among those that take it. AUTO_ON of an algorithm lists the backends on
    which it may be chosen, where it was measured; `backend` is the one here. OWN_GPU asks for ranks
    that have a GPU each, as `owns_gpu` says. `ordinary` has the bytes of the tensors that are not
    on the heap: copying one that peers must reach counts.
    """
    modules = _offered(op, backend if config is None else "", owns_gpu)
    tried = _Tried(op, problem, Place(target, num_sms), modules, config)
    hardware = None
    if target != SIMULATOR:  # which has no times to describe
        hardware = hardware_for(target, getattr(problem, "size", 1), num_sms, backend)
    copies = {a: _copy_seconds(m, problem, ordinary, hardware) for a, m in modules.items()}
    known = tried.measured()
    if known and ordinary and hardware is not None:
        known |= _scaled(tried, known, hardware)
    if known:
        return _fastest(tried, {a: t + copies[a] for a, t in known.items()}, copies)
    expected = {} if hardware is None else tried.expected(hardware)
    if hardware is not None and expected:
        return _by_model(tried, hardware, expected, copies)
    algo = tried.usual()
    return Choice(algo, tried.configs[algo], lambda: _by_rule(tried, algo))


def _offered(op: str, backend: str, owns_gpu: bool) -> dict[str, ModuleType]:
    """Return the algorithms that may be chosen, on a backend if one is named."""
    found = {}
    for algo, module in algorithms(op).items():
        alone = getattr(module, "OWN_GPU", False) and not owns_gpu
        elsewhere = backend and backend not in getattr(module, "AUTO_ON", (backend,))
        if f"{op}.{algo}" not in BY_REQUEST and not alone and not elsewhere:
            found[algo] = module
    return found


def _scaled(tried: _Tried, known: dict[str, float], hardware: Hardware) -> dict[str, float]:
    """Rate algorithms not measured here by the model, scaled by its error for the others."""
    expected = tried.expected(hardware)
    ratios = [known[algo] / expected[algo].seconds for algo in known if algo in expected]
    worst = max(ratios, default=1.0)
    return {a: t.seconds * worst for a, t in expected.items() if a not in known}


def _copy_seconds(
    module: ModuleType, problem: Any, ordinary: Mapping[str, int], hardware: Hardware | None
) -> float:
    """Return the seconds that it takes all ranks to copy ordinary tensors that peers must reach."""
    copied = [nbytes for name, nbytes in ordinary.items() if name in module.SYMMETRIC]
    if hardware is None:
        return sum(_COPY_S + 2 * nbytes / _COPY_RATE for nbytes in copied)
    ranks = Ranks.on(hardware, getattr(problem, "size", 1))
    rate = hardware.gpu.copy_rate / ranks.per_gpu
    return sum(launch(ranks).seconds + 2 * nbytes / rate for nbytes in copied)


def _with_copy(algo: str, copies: dict[str, float]) -> str:
    return f", {1e6 * copies[algo]:.1f} of it copies" if copies[algo] else ""


def _fastest(tried: _Tried, known: dict[str, float], copies: dict[str, float]) -> Choice:
    algo = min(known, key=lambda each: known[each])
    expected = ", ".join(
        f"{a} {1e6 * t:.1f} us{_with_copy(a, copies)}"
        for a, t in sorted(known.items(), key=lambda each: each[1])
    )
    text = f"{tried.op}: {algo}, expected on {tried.here.target}: {expected}"
    return Choice(algo, tried.configs[algo], lambda: text)


def _by_model(
    tried: _Tried, hardware: Hardware, times: dict[str, Time], copies: dict[str, float]
) -> Choice:
    whole = {algo: time.seconds + copies[algo] for algo, time in times.items()}
    order = sorted(whole, key=lambda each: whole[each])
    expected = ", ".join(
        f"{a} {1e6 * whole[a]:.1f} us ({times[a].bound}{_with_copy(a, copies)})" for a in order
    )
    target, num_sms = tried.here
    text = (
        f"{tried.op}: {order[0]}: no measurements for {target} with {num_sms} SMs a rank; the "
        f"model of {hardware.name} expects: {expected}"
    )
    near = tuple(algo for algo in order if whole[algo] <= _NEAR * whole[order[0]])
    return Choice(order[0], tried.configs[order[0]], lambda: text, near)


def _by_rule(tried: _Tried, algo: str) -> str:
    usable = tried.usable()
    default = "the default" if algo == usable[0] else "the default for this size"
    return (
        f"{tried.op}: {algo}: no measurements for {tried.here.target}; {default} "
        f"(candidates: {', '.join(usable)})"
    )


class _Tried:
    """An op's algorithms, each with the config that it would have here, found when asked for."""

    def __init__(
        self, op: str, problem: Any, here: Place, modules: dict[str, ModuleType], config: Any
    ) -> None:
        self.op, self.problem, self.here = op, problem, here
        self.configs: dict[str, Any] = {}
        self._modules, self._config = modules, config
        self._reasons: dict[str, str | None] = {}

    def _takes(self, algo: str) -> bool:
        """Return whether the algorithm takes the problem."""
        if algo not in self._reasons:
            module = self._modules[algo]
            self.configs[algo] = self._config or config_for(
                f"{self.op}.{algo}", module, self.problem, *self.here
            )
            self._reasons[algo] = _refusal(module, self.problem, self.configs[algo])
        return self._reasons[algo] is None

    def usable(self) -> list[str]:
        """Return all algorithms that take the problem. Raise ValueError if none does."""
        found = [algo for algo in self._modules if self._takes(algo)]
        if not found:
            reasons = "; ".join(f"{algo}: {reason}" for algo, reason in self._reasons.items())
            with_config = f" with {self._config}" if self._config else ""
            raise ValueError(
                f"{self.op}: no algorithm takes {self.problem}{with_config}: {reasons}"
            )
        return found

    def measured(self) -> dict[str, float]:
        """Estimate seconds from measurements of algorithms that take the problem, if any."""
        if not any(f"{self.op}." in entry.op for entry in entries(self.here.target)):
            return {}
        times = {
            algo: _estimate(f"{self.op}.{algo}", self._modules[algo], self.problem, self.here)
            for algo in self.usable()
        }
        return {algo: seconds for algo, seconds in times.items() if seconds is not None}

    def expected(self, hardware: Hardware) -> dict[str, Time]:
        """Return the model's times of the algorithms that take the problem."""
        configs = {algo: self.configs[algo] for algo in self.usable()}
        return expected_times(self.op, self.problem, configs, hardware, self.here.num_sms)

    def usual(self) -> str:
        """Choose without measurements: the first algorithm for problems as large as this."""
        for algo, module in self._modules.items():
            limit = getattr(module, "USUAL", math.inf)
            if self._takes(algo) and module.cost(self.problem).written_bytes <= limit:
                return algo
        return self.usable()[0]


def _refusal(module: ModuleType, problem: Any, config: Any) -> str | None:
    if not isinstance(config, module.Config):
        return f"its config is a {module.Config.__module__}.{module.Config.__name__}"
    reason: str | None = module.valid(problem, config)
    return reason


def config_for(op: str, module: ModuleType, problem: Any, target: str, num_sms: int) -> Any:
    """Return the config measured for this problem, or for the nearest one, or the rule's."""
    found = _comparable(op, module, problem, Place(target, num_sms))
    near = sorted(found, key=lambda each: sum(each[0]))
    for _, _, entry in near:
        config = _made(module.Config, entry.config)
        if config is not None and module.valid(problem, config) is None:
            return config
    return module.default(problem, num_sms)


def _comparable(
    op: str, module: ModuleType, problem: Any, here: Place
) -> list[tuple[tuple[float, float], int, Entry]]:
    """Return entries that differ only in sizes, dtype and operator: distance, work, entry."""
    found = []
    for other, work, entry in _measured(_versions(here.target), op, module):
        if entry.num_sms in (0, here.num_sms):
            distance = _distance(problem, other)
            if distance is not None:
                found.append((distance, work, entry))
    return found


@functools.lru_cache(maxsize=256)
def _measured(
    versions: tuple[Version | None, ...], op: str, module: ModuleType
) -> list[tuple[Any, int, Entry]]:
    """Return an algorithm's entries: problem, work, entry. Every plan asks; files rarely change."""
    found = []
    for entry in _overlaid(versions):
        if entry.op == op:
            problem = _made(module.Problem, {k: _parsed(v) for k, v in entry.problem.items()})
            if problem is not None:
                found.append((problem, _work(module, problem), entry))
    return found


def _made(kind: Any, fields: dict[str, Any]) -> Any:
    """Make a Problem or a Config, or None if it was measured with another version's fields."""
    try:
        return kind(**fields)
    except TypeError:
        return None


def _distance(a: Any, b: Any) -> tuple[float, float] | None:
    """Measure how far dtypes, operators and sizes are apart; None for another kind of problem."""
    kinds = sizes = 0.0
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if field.name in _RANKS:
            continue
        if field.name in _ALIKE:
            kinds += (x != y) * 0.001
        elif isinstance(x, torch.dtype) and isinstance(y, torch.dtype):
            kinds += abs(math.log2(x.itemsize / y.itemsize)) + (x != y) * 0.01
        elif field.name == "size" or type(x) is not int or type(y) is not int:
            if x != y:
                return None
        else:
            sizes += abs(math.log2((x + 1) / (y + 1)))
    return kinds, sizes


def _estimate(op: str, module: ModuleType, problem: Any, here: Place) -> float | None:
    """Interpolate between the measured sizes of the nearest measured dtype and operator."""
    found = _comparable(op, module, problem, here)
    if not found:
        return None
    kind = min(distance[0] for distance, _, _ in found)
    points = sorted((work, e.seconds) for distance, work, e in found if distance[0] == kind)
    work = _work(module, problem)
    below = [p for p in points if p[0] <= work]
    above = [p for p in points if p[0] >= work]
    if not below:
        return points[0][1]  # latency
    if not above:
        return points[-1][1] * work / max(points[-1][0], 1)
    (w0, t0), (w1, t1) = below[-1], above[0]
    return t0 if w0 == w1 else t0 + (t1 - t0) * (work - w0) / (w1 - w0)


def _work(module: ModuleType, problem: Any) -> int:
    """Count bytes, with flops as the bytes that an H200 moves in their time."""
    cost = module.cost(problem)
    return int(cost.hbm_bytes + cost.flops // _FLOPS_PER_BYTE)


def _parsed(value: Any) -> Any:
    kind = getattr(torch, value, None) if isinstance(value, str) else None
    return kind if isinstance(kind, torch.dtype) else value


# the store


@dataclass(frozen=True)
class Entry:
    """One measurement of one algorithm."""

    op: str  # all_gather.push
    problem: dict[str, Any]
    config: dict[str, Any]
    seconds: float
    date: str
    run: str  # where it came from
    num_sms: int = 0  # of each rank; 0: unknown, and counts for any


class Version(NamedTuple):
    """A file's version: what was read from it holds until this changes."""

    path: str
    mtime: int
    inode: int


def entries(target: str) -> tuple[Entry, ...]:
    """Read what was measured on a target: the package's entries, then the user's, which win."""
    return _overlaid(_versions(target))


def _versions(target: str) -> tuple[Version | None, ...]:
    return _version(package_file(target)), _version(user_file(target))


@functools.lru_cache(maxsize=16)
def _overlaid(versions: tuple[Version | None, ...]) -> tuple[Entry, ...]:
    found = {key_of(entry): entry for each in versions if each for entry in _read(*each)}
    return tuple(found.values())


def stored(entry: Entry, target: str) -> float:
    """Return the seconds that were measured for this config and problem; 0 if there are none."""
    known = [each for each in entries(target) if key_of(each) == key_of(entry)]
    return sum(each.seconds for each in known if each.config == entry.config)


def write_entries(path: Path, new: list[Entry]) -> None:
    """Add entries to a target's file. They replace those of the same op, problem and SMs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _alone(path.parent):
        old = read_entries(path)
        kept = {key_of(entry): entry for entry in (*old, *new)}
        lines = ",\n".join(json.dumps(dataclasses.asdict(e)) for e in kept.values())
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(f"[\n{lines}\n]\n")
        beside.replace(path)  # a reader sees the old file or the new one


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lock out other processes that add entries, since each would drop what the other adds."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def key_of(entry: Entry) -> tuple[str, str, int]:
    """Return what an entry is for: of two with the same key, the later one counts."""
    return entry.op, json.dumps(entry.problem, sort_keys=True), entry.num_sms


@functools.cache
def package_file(target: str) -> Path:
    return Path(__file__).parent.parent / "targets" / f"{target}.json"


def user_file(target: str) -> Path:
    return _file_in(os.path.expanduser(knobs.cache.get()), target)


@functools.cache
def _file_in(cache: str, target: str) -> Path:
    versions = f"torch-{torch.__version__}-triton-{triton.__version__}"
    return Path(cache) / versions / f"{target}.json"


def read_entries(path: Path | str) -> tuple[Entry, ...]:
    version = _version(path)
    return _read(*version) if version else ()


def _version(path: Path | str) -> Version | None:
    try:
        status = os.stat(path)
    except OSError:  # also if its folder may not be read, such as another user's home
        return None
    # The inode too: two files that replace each other within a tick of the clock have the same
    # time.
    return Version(str(path), status.st_mtime_ns, status.st_ino)


@functools.lru_cache(maxsize=16)
def _read(path: str, mtime: int, inode: int) -> tuple[Entry, ...]:
    try:
        return tuple(Entry(**each) for each in json.loads(Path(path).read_text()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not a list of measurements ({error}); remove it") from None
