"""What the model expects where nothing was measured: it finds the machine, and returns times.

    time("all_gather.push", problem, config, machine)

A machine is found by the name of its GPU among the user's calibrated descriptions, which `sundog
calibrate` writes into SUNDOG_CACHE, and then among those of the package. It must fit how the ranks
are placed: sharing one GPU, or with a GPU each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import knobs
from ..hardware.description import Hardware, read
from .collective_times import COLLECTIVES
from .fused_times import FUSED
from .parts import Ranks, Time, total

MODELS = {**COLLECTIVES, **FUSED}


def time(
    op: str, problem: Any, config: Any, hardware: Hardware, num_sms: int = 0, late_s: float = 0.0
) -> Time:
    """Return the expected time of a call of an algorithm, in a graph, all ranks starting at once.

    `num_sms` is that of each rank, if not all that the machine gives it. One rank comes `late_s`
    late.
    """
    model = MODELS.get(op)
    if model is None:
        raise ValueError(f"{op} has no time model; those that have: {', '.join(MODELS)}")
    ranks = Ranks.on(hardware, problem.size, num_sms, late_s)
    return total(model(problem, config, ranks), late_s if ranks.size > 1 else 0.0)


# Machines of the package, by the beginning of a GPU's name in target.py.
_SHIPPED = {
    "nvidia-h200": ("h200-shared", "h200-pcie", "h200x8", "h200x8-2nodes"),
    "nvidia-h100": ("h100x8",),
    "amd-instinct-mi300x": ("mi300x8",),
}


def calibrated_path(target: str, kind: str) -> Path:
    """Return where this user keeps the description of a machine of this GPU and kind of link."""
    return Path(knobs.cache.get()).expanduser() / "hardware" / f"{target}-{kind}.json"


def hardware_for(
    target: str, size: int, num_sms: int, backend: str = "", spans: bool = False
) -> Hardware | None:
    """Find the machine on which `size` ranks of `num_sms` SMs run; None if it is not described.

    With `spans` it must also describe the network between such machines.
    """
    for hardware in _candidates(target):
        described = hardware.network is not None or not spans
        if described and _fits(hardware, size, num_sms, backend):
            return hardware.between_processes() if backend == "symm" else hardware
    return None


def _candidates(target: str) -> Iterator[Hardware]:
    for path in sorted(calibrated_path(target, "").parent.glob(f"{target}-*.json")):
        yield read(str(path))
    for begin, names in _SHIPPED.items():
        if target.startswith(begin):
            yield from map(read, names)


def _fits(hardware: Hardware, size: int, num_sms: int, backend: str) -> bool:
    is_share = size * num_sms <= hardware.gpu.num_sms
    if hardware.link.kind == "none":
        return is_share
    if hardware.link.kind == "host":  # each peer is a kernel of one program, which only waits
        return backend == "virtual" and not is_share
    most = hardware.most_ranks or 0
    return backend != "virtual" and not (is_share and size > 1) and size <= most


def expected_times(
    op: str, problem: Any, configs: dict[str, Any], hardware: Hardware, num_sms: int
) -> dict[str, Time]:
    """Return the time of each algorithm that has a model."""
    return {
        algo: time(f"{op}.{algo}", problem, config, hardware, num_sms)
        for algo, config in configs.items()
        if f"{op}.{algo}" in MODELS
    }
