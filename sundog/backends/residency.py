"""Do the programs of many ranks that wait for each other all find a place on one GPU?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ..errors import NotResident
from ..target import Footprint, Target

__all__ = ["Kind", "check_resident"]


class Kind(NamedTuple):
    """What counts of a launch."""

    name: str
    programs: int
    footprint: Footprint | None  # None: it waits for nobody, and always ends


def check_resident(
    target: Target, kinds: Mapping[tuple[int, Any], Iterable[Kind]]
) -> NotResident | None:
    """`kinds`: what is on each rank's streams. Those on one run one after the other, so that the
    largest counts.

    A program finds no place only if every SM is full for it. An SM that is full holds at least as
    many programs as fit of one that takes the most of everything, so no more than that many per SM
    always find one.
    """
    most = Footprint(0, 0, 1)
    largest: list[tuple[int, Kind]] = []
    for (rank, _), every in kinds.items():
        waiting = [kind for kind in every if kind.footprint is not None]
        for kind in waiting:
            assert kind.footprint is not None
            most |= kind.footprint
        if waiting:
            largest.append((rank, max(waiting, key=lambda kind: kind.programs)))
    total = sum(kind.programs for _, kind in largest)
    fit = target.programs_per_sm(most)
    if total <= fit * target.num_sms:
        return None
    return NotResident(_refusal(target, largest, most, total, fit))


def _refusal(
    target: Target, largest: list[tuple[int, Kind]], most: Footprint, total: int, per_sm: int
) -> str:
    ranks = len({rank for rank, _ in largest})
    lines = [
        f"  rank {rank}: {kind.name}, {kind.programs} programs of {kind.footprint}"
        for rank, kind in sorted(largest, key=lambda each: each[0])
    ]
    return (
        f"{total} programs of {ranks} ranks wait for each other, and {target.name} holds "
        f"{per_sm * target.num_sms} of {most} at once ({per_sm} on each of {target.num_sms} SMs). "
        "They would hang, so none was started:\n"
        + "\n".join(lines)
        + f"\nLaunch at most {per_sm * target.num_sms // ranks} programs per rank "
        "(world.num_sms always fit), or use smaller tiles."
    )
