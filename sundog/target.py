"""What is known of a GPU: its resources, and how many programs it holds at once.

It comes from torch, for CUDA and ROCm alike. What torch does not report is assumed on the safe
side: one program too few is slower, one too many hangs.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch

SIMULATOR = "the simulator"  # stands for a target where there is no GPU
GPU_HEAP = 4 << 30  # bytes of a rank's heap on a GPU, by default

# CUDA's table of technical specifications: resident blocks per SM. Torch does not report it.
_BLOCKS_PER_SM = {(8, 0): 32, (8, 6): 16, (8, 7): 16, (8, 9): 24, (9, 0): 32, (10, 0): 32}
_FEWEST_BLOCKS = 16
_REGISTERS = 65536  # per SM, of every CUDA GPU since sm_50; some torch versions don't report it
_REGISTERS_AT_ONCE = 256  # a warp gets registers in units of this many
_QUARTERS = 4
_SHARED_AT_ONCE = 128
_SHARED_RESERVED = 1024  # that the system takes from every program, since sm_80


@dataclass(frozen=True)
class Footprint:
    """What one program takes of an SM."""

    registers: int  # per thread
    shared: int  # bytes
    warps: int

    def __or__(self, other: Footprint) -> Footprint:
        """Return a footprint that takes at least as much as either."""
        return Footprint(
            max(self.registers, other.registers),
            max(self.shared, other.shared),
            max(self.warps, other.warps),
        )

    def __str__(self) -> str:
        return (
            f"{self.warps} warps, {self.registers} registers a thread and {self.shared:,} bytes of "
            "shared memory"
        )


@dataclass(frozen=True)
class Target:
    """A kind of GPU."""

    name: str
    arch: str  # sm_90, gfx942
    num_sms: int
    warp_size: int
    registers: int  # per SM, of 32 bits; 0 if unknown
    shared: int  # bytes per SM
    warps: int  # per SM
    programs: int  # per SM
    l2_bytes: int
    memory: int

    @property
    def key(self) -> str:
        """The name of files with its measurements: 'nvidia-h200'."""
        words = "".join(c if c.isalnum() else " " for c in self.name.lower()).split()
        return "-".join(words)

    def programs_per_sm(self, footprint: Footprint) -> int:
        """Count the programs with these needs that fit on one SM."""
        if self.registers == 0:
            return 1
        per_warp = _round_up(footprint.registers * self.warp_size, _REGISTERS_AT_ONCE)
        shared = _round_up(footprint.shared + _SHARED_RESERVED, _SHARED_AT_ONCE)
        # Each quarter of an SM has its own registers.
        with_registers = self.registers // _QUARTERS // max(per_warp, 1) * _QUARTERS
        return min(
            self.programs,
            min(self.warps, with_registers) // footprint.warps,
            self.shared // shared,
        )


def has_gpu() -> bool:
    """Ask torch without starting CUDA, after which a process can't be forked."""
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        return torch.cuda.is_available()
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def of(device: torch.device) -> Target:
    """Return what torch reports of this GPU."""
    return _of(torch.cuda.current_device() if device.index is None else device.index)


def key_of(device: torch.device) -> str:
    """Return the name under which configs measured on a device are stored."""
    return of(device).key if device.type == "cuda" else SIMULATOR


@functools.cache
def _of(index: int) -> Target:
    known = torch.cuda.get_device_properties(index)
    is_hip = torch.version.hip is not None
    threads = known.max_threads_per_multi_processor
    return Target(
        name=known.name,
        arch=known.gcnArchName.split(":")[0] if is_hip else f"sm_{known.major}{known.minor}",
        num_sms=known.multi_processor_count,
        warp_size=known.warp_size,
        registers=0 if is_hip else getattr(known, "regs_per_multiprocessor", _REGISTERS),
        shared=known.shared_memory_per_multiprocessor,
        warps=threads // known.warp_size,
        programs=_BLOCKS_PER_SM.get((known.major, known.minor), _FEWEST_BLOCKS),
        l2_bytes=known.L2_cache_size,
        memory=known.total_memory,
    )


def _round_up(number: int, unit: int) -> int:
    return (number + unit - 1) // unit * unit
