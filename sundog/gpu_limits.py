"""The table of what one program may use on each target, for `valid`, `default` and `space`.

These follow the target that you name, which need not be this machine's:

    with gpu_limits.aim("gfx942"):
        config = module.default(problem, num_sms=304)

The figures are from CUDA's table of technical specifications and AMD's instruction set manuals.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    arch: str
    shared: int  # bytes of shared memory
    registers: int  # per thread, of 32 bits
    warp_size: int
    threads: int = 1024
    has_tma: bool = False
    vector: int = 16  # bytes of the widest access of a thread

    @property
    def is_amd(self) -> bool:
        return self.arch.startswith("gfx")

    @property
    def fp8(self) -> torch.dtype:
        """Return the FP8 of four exponent bits that it multiplies: on MI300 that is e4m3fnuz."""
        return torch.float8_e4m3fnuz if self.arch.startswith("gfx94") else torch.float8_e4m3fn

    def refuse_warps(self, num_warps: int) -> str | None:
        """Return why a program can't have this many warps, or None."""
        threads = num_warps * self.warp_size
        if threads <= self.threads:
            return None
        return (
            f"{num_warps} warps of {self.warp_size} are {threads} threads, and a program of "
            f"{self.arch} has at most {self.threads}"
        )


LIMITS = {
    each.arch: each
    for each in (
        Limits("sm_80", 163 << 10, 255, 32),
        Limits("sm_86", 99 << 10, 255, 32),
        Limits("sm_89", 99 << 10, 255, 32),
        Limits("sm_90", 227 << 10, 255, 32, has_tma=True),
        Limits("sm_100", 227 << 10, 255, 32, has_tma=True, vector=32),
        Limits("sm_120", 99 << 10, 255, 32, has_tma=True),
        Limits("gfx90a", 64 << 10, 512, 64),
        Limits("gfx942", 64 << 10, 512, 64),
        Limits("gfx950", 160 << 10, 512, 64),
        Limits("gfx1100", 64 << 10, 256, 32),
    )
}
_USUAL = "gfx942" if torch.version.hip else "sm_90"  # before CUDA was started, or without CUDA
_aimed: list[str] = []  # not a context variable: a simulated rank is a greenlet, which has its own


@contextmanager
def aim(arch: str) -> Iterator[Limits]:
    """Let `here` return the limits of a target inside the block, in all threads."""
    _aimed.append(arch)
    try:
        yield here()
    finally:
        _aimed.pop()


def here() -> Limits:
    """Return the limits of the target that `aim` set, else of this machine's GPU."""
    arch = _aimed[-1] if _aimed else _machine()
    if arch in LIMITS:
        return LIMITS[arch]
    # A target that is not in the table gets its maker's smallest limits.
    alike = [each for each in LIMITS.values() if each.is_amd == arch.startswith("gfx")]
    return replace(min(alike, key=lambda each: each.shared), arch=arch)


def _machine() -> str:
    """Name the GPU's architecture without starting CUDA, after which a process can't be forked."""
    if not torch.cuda.is_initialized():
        return _USUAL
    from .target import of

    return of(torch.device("cuda")).arch
