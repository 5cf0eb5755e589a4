"""Every environment variable that sundog reads, typed, with its default. The docs list them."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

BACKENDS = ("sim", "shm", "virtual", "symm")


@dataclass(frozen=True)
class Knob(Generic[T]):
    """One variable. Read when it is used, so a test may set it with monkeypatch."""

    name: str
    default: T
    parse: Callable[[str], T]
    meaning: str

    def get(self) -> T:
        text = os.environ.get(self.name)
        if text is None or text == "":
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"{self.name}={text!r}: {error}. {self.meaning}.") from None


def parse_bytes(text: str) -> int:
    """'512', '64K', '1G': a size in bytes."""
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
    unit = units.get(text[-1:].upper(), 1)
    digits = text[:-1] if unit > 1 else text
    if not digits.isdecimal():
        raise ValueError("expected a whole number of bytes, or one followed by K, M, G or T")
    return int(digits) * unit


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"expected {', '.join(words[:-1])} or {words[-1]}")
        return text

    return parse


def _parse_seconds(text: str) -> float:
    with suppress(ValueError):  # "abc", of which Python says less
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise ValueError("expected more than 0 seconds")


def _parse_whole(text: str) -> int:
    if not text.removeprefix("-").isdecimal():
        raise ValueError("expected a whole number")
    return int(text)


def _parse_count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("expected a whole number, at least 1")
    return int(text)


def _parse_switch(text: str) -> int:
    if text not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return int(text)


backend = Knob(
    "SUNDOG_BACKEND", "", _one_of(*BACKENDS), "Backend of `run` and `init` if none is named"
)
heap_size = Knob(
    "SUNDOG_HEAP_SIZE", 0, parse_bytes, "Symmetric heap per rank; 0 means 64M on a CPU, 4G on a GPU"
)
timeout = Knob(
    "SUNDOG_TIMEOUT", 60.0, _parse_seconds, "Seconds until a wait, in a kernel or not, gives up"
)
seed = Knob("SUNDOG_SEED", 0, _parse_whole, "Seed of the simulator's schedule")
num_sms = Knob(
    "SUNDOG_SIM_SMS", 16, _parse_count, "SMs of the simulated GPU: programs resident per rank"
)
allow_pickle = Knob(
    "SUNDOG_ALLOW_PICKLE",
    0,
    _parse_switch,
    "1: world.exchange and broadcast_object may use pickle (docs/security.md)",
)
max_plans = Knob(
    "SUNDOG_MAX_PLANS", 256, _parse_count, "Plans of ops that a world keeps, besides captured ones"
)
signals = Knob(
    "SUNDOG_SIGNALS",
    "",
    _one_of("atomic", "store"),
    "How ranks signal: atomic, store; else as links allow",
)
undefined_lanes = Knob(
    "SUNDOG_UNDEFINED_LANES",
    "poison",
    _one_of("poison", "zeros"),
    "What a masked load without `other` leaves on the simulator: poison; zeros, as compilers do",
)
cache = Knob("SUNDOG_CACHE", "~/.cache/sundog", str, "Folder of what was tuned here")

KNOBS: tuple[Knob, ...] = (
    backend, heap_size, timeout, seed, num_sms, allow_pickle, max_plans, signals, undefined_lanes,
    cache,
)  # fmt: skip


def check() -> None:
    """Raise ValueError for a variable that can't be read, even if nothing here would use it."""
    for knob in KNOBS:
        knob.get()
