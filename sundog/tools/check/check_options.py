"""What `sundog check` was asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckOptions:
    target: str
    world: int
    schedules: int
    seed: int
    schedule: str = ""
    sms: int = 0
    mutate: bool = False
    strict: bool = False
    torch: bool = False  # the target is a program for torchrun and CUDA
    exhaustive: bool = False
    seconds: float = 300.0  # for an exhaustive check
    corpus: str = ""
    json: str = ""
    html: str = ""
