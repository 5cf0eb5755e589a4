"""The time of an op on a machine: `time("all_gather.push", problem, config, machine)`."""

from __future__ import annotations

from typing import Any

from ..hardware.description import Hardware
from .collective_times import COLLECTIVES
from .fused_times import FUSED
from .parts import Ranks, Time, total

__all__ = ["MODELS", "time"]

MODELS = {**COLLECTIVES, **FUSED}


def time(
    op: str, problem: Any, config: Any, hardware: Hardware, num_sms: int = 0, late_s: float = 0.0
) -> Time:
    """Expect this of one call of an algorithm, all ranks starting at once, in a graph.

    `num_sms`: of each rank, if it does not have all that the machine gives it. `late_s`: by how
    much one rank comes late.
    """
    model = MODELS.get(op)
    if model is None:
        raise ValueError(f"{op} has no time model; those that have: {', '.join(MODELS)}")
    ranks = Ranks.on(hardware, problem.size, num_sms, late_s)
    return total(model(problem, config, ranks), late_s if ranks.size > 1 else 0.0)
