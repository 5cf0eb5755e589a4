"""Describe what a run ran on: hardware and versions, with nulls for what is missing.

Works without a GPU and without torch.
"""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
from typing import Any

HARDWARE_FIELDS = (
    "kind",  # cuda, hip or cpu
    "name",
    "capability",  # "9.0" on NVIDIA, "gfx942" on AMD
    "num_sms",
    "memory_bytes",
    "sm_clock_mhz",  # now; max_* is what the board can do
    "max_sm_clock_mhz",
    "memory_clock_mhz",
    "max_memory_clock_mhz",
    "driver",
)
_PACKAGES = ("sundog", "torch", "triton", "helion")
_SMI_FIELDS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "driver_version")


def hardware(device: int | None = None) -> dict[str, Any]:
    """Describe the GPU, by its number or the current one; the CPU if there is none."""
    found: dict[str, Any] = dict.fromkeys(HARDWARE_FIELDS)
    try:
        import torch

        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(
                torch.cuda.current_device() if device is None else device
            )
            found.update(_gpu(properties, torch.version.hip is not None))
            return found
    except (ImportError, OSError, RuntimeError, AssertionError):
        pass  # no torch, or a driver that does not answer: describe the CPU
    found.update(kind="cpu", name=_cpu_name(), capability=platform.machine() or None)
    return found


def _gpu(properties: Any, hip: bool) -> dict[str, Any]:
    arch = str(getattr(properties, "gcnArchName", "")).partition(":")[0]
    found = {
        "kind": "hip" if hip else "cuda",
        "name": properties.name,
        "capability": arch if hip else f"{properties.major}.{properties.minor}",
        "num_sms": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
    }
    if not hip:
        found.update(_nvidia_smi(str(getattr(properties, "uuid", ""))))
    return found


def _nvidia_smi(uuid: str) -> dict[str, Any]:
    """Read clocks and driver, which torch does not know. By uuid: a mask renumbers devices."""
    command = ["nvidia-smi", f"--query-gpu={','.join(_SMI_FIELDS)}"]
    command += ["--format=csv,noheader,nounits"] + ([f"--id=GPU-{uuid}"] if uuid else [])
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return _parse_smi(done.stdout)


def _parse_smi(text: str) -> dict[str, Any]:
    first = text.strip().splitlines()[:1]
    values = [value.strip() for value in first[0].split(",")] if first else []
    if len(values) != len(_SMI_FIELDS):
        return {}
    clocks = [int(value) if value.isdigit() else None for value in values[:-1]]
    names = ("sm_clock_mhz", "max_sm_clock_mhz", "memory_clock_mhz", "max_memory_clock_mhz")
    return {**dict(zip(names, clocks, strict=True)), "driver": values[-1]}


def _cpu_name() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or None


def versions() -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "cuda": None, "hip": None}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            # A source tree that is not installed, usually sundog itself.
            found[package] = getattr(sys.modules.get(package), "__version__", None)
    try:
        import torch

        found.update(cuda=torch.version.cuda, hip=torch.version.hip)
    except (ImportError, OSError):
        pass
    return found
